"""The one declaration of every structure, limit and code that host and device share.

Python declares; `c_header()` writes the C header that the device compilers read, with a `static_assert` on
every offset; `abi_hash()` names the whole set and is checked when a program is loaded. Nothing here is ever
typed a second time in C.
"""

from __future__ import annotations

import enum
import hashlib
from functools import lru_cache

from megakernel.errors import RecordError
from megakernel.tasks.struct import Field, Struct

# ---------------------------------------------------------------------------------------------- limits
MAX_WAITS = 5  # counters that one record can wait for
TILE_ROWS = 16  # rows (tokens of any slots) that every program has room for in a step
MAX_ROWS = 512  # most rows that a program may have room for
MAX_STOPS = 8  # stop tokens of one slot
MAX_TOP = 20  # log-probabilities reported beside a token
MAILBOX_ENTRIES = 64
RING_ENTRIES = 8192
TRACE_RINGS = 4  # of each worker: one for each role that records
WAIT_TICKS = 64  # unit of TraceMarks.wait
COUNTER_STRIDE = 16  # uint64_t between two counters: each has its own 128 bytes
MAX_RANKS = 8  # devices that run one model together
BEST_BYTES = 32  # of a window, for the largest logit that a worker of a rank found of a sampled row
NONE = 0xFFFFFFFF  # no counter, no offset
NONE64 = 0xFFFFFFFFFFFFFFFF

LIMITS: dict[str, int] = {
    "kMaxWaits": MAX_WAITS,
    "kMaxRows": TILE_ROWS,
    "kMaxStops": MAX_STOPS,
    "kMaxTop": MAX_TOP,
    "kMailboxEntries": MAILBOX_ENTRIES,
    "kRingEntries": RING_ENTRIES,
    "kCounterStride": COUNTER_STRIDE,
    "kTraceRings": TRACE_RINGS,
    "kWaitTicks": WAIT_TICKS,
    "kMaxRanks": MAX_RANKS,
    "kBestBytes": BEST_BYTES,
}


# ---------------------------------------------------------------------------------------------- codes
class FaultKind(enum.IntEnum):
    NONE = 0
    WAIT_BUDGET = 1  # a wait for a counter ran past its budget
    ROLL_CALL = 2  # not every worker answered at start
    NAN_LOGITS = 3  # a logit is not a number
    BAD_RECORD = 4  # an opcode or index out of range
    HEADER_BUDGET = 5  # the step header did not come
    VALUE_BUDGET = 6  # an element that carries its own validity did not come
    RING_BUDGET = 7  # a stage of the ring inside a worker did not come
    PEER_BUDGET = 8  # another device's part of an exchange, or rank 0's decision, did not come


class Role(enum.IntEnum):
    WORKER = 0  # all roles in turn on one thread
    PRODUCER = 1
    LOADER = 2
    CONSUMER = 3
    STORER = 4
    CONTROL = 5


class CommandKind(enum.IntEnum):
    NONE = 0
    ADMIT = 1  # put `state` into a free slot; its tokens are already in the token buffer
    CANCEL = 2  # retire the slot if it still holds `request`
    OPEN = 3  # move the slot's gate to that of `state` if it still holds `request`; its row of `bias` is new


class SlotStatus(enum.IntEnum):
    FREE = 0
    ACTIVE = 1


class EventKind(enum.IntEnum):
    TOKEN = 1  # one token; may carry a finish reason
    RETIRED = 2  # the slot was cancelled; no token


class Finish(enum.IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3


class ExitReason(enum.IntEnum):
    RUNNING = 0
    STEPS = 1  # the launch's step limit
    IDLE = 2  # no active slot
    FAULT = 3


class TraceFlag(enum.IntEnum):
    """Bits of TraceEvent.flags."""

    BY_VALUE = 1  # the longest wait was for an element's value; its counter is the node that writes it
    TICKET = 2  # the record came from the shared list
    CUT = 4  # the launch ended inside this event: a fault. Set by the host, where `published` is 0
    SKIPPED = 8  # it went on without a look at what it depends on, as it had nothing to do. Set by the host


ENUMS: tuple[type[enum.IntEnum], ...] = (
    FaultKind, Role, CommandKind, SlotStatus, EventKind, Finish, ExitReason, TraceFlag,
)  # fmt: skip

# ---------------------------------------------------------------------------------------------- structures
WAIT = Struct(
    "Wait",
    (
        Field("counter", "u32"),
        Field("count", "u32", doc="signals a step; the value waited for is count * step"),
    ),
    doc="Wait until counters[counter] >= count * step.",
)

RECORD_PAYLOAD = 64
RECORD = Struct(
    "Record",
    (
        Field("opcode", "u16", doc="index into the program's list of task variants"),
        Field("wait_count", "u16"),
        Field("node", "u32", doc="index of the lowered node, for faults and the timeline"),
        Field("tile_begin", "u32", doc="first tile of this record"),
        Field("tile_count", "u32"),
        Field("signal", "u32", doc="counter that gets +1 when all tiles are published; kNone for none"),
        Field("waits", WAIT, MAX_WAITS),
        Field("members", "u16", doc="signals a step that complete the counter `signal` of a group; 0: it has no relay"),
        Field("relay", "u16", doc="counter that gets +1 when the counter of the group is complete"),
        Field("payload", "u8", RECORD_PAYLOAD, doc="the task's own fields"),
    ),
    pad_to=128,
    doc="One entry of a worker's queue: a contiguous range of tiles of one node.",
)

TICKET = Struct(
    "Ticket",
    (
        Field("counter", "u32", doc="counter that hands out tickets; never waited for"),
        Field("first", "u32", doc="first shared record, an index into the whole queues array"),
        Field("count", "u32", doc="shared records of the node"),
        Field("pops", "u32", doc="tickets taken in one step: count + 1 failing one of each worker"),
    ),
    doc="Payload of a record with opcode kTicket: take shared records until there are none left.",
)

ROW = Struct(
    "Row",
    (
        Field("token", "i32"),
        Field("slot", "u32"),
        Field("position", "u32"),
        Field("sample", "u32", doc="index among the sampled rows, kNone when no token is wanted of this row"),
        Field("first", "u32", doc="first position of this row's slot in this step: older keys are in pages"),
    ),
    doc="One token that this step computes.",
)


def row_capacity(max_rows: int) -> int:
    """Rows that the structures of a program with `max_rows` have room for: few sizes, so that kernels are shared."""
    return max(TILE_ROWS, 1 << (max_rows - 1).bit_length())


@lru_cache(maxsize=8)
def step_header(capacity: int) -> Struct:
    """StepHeader of a program with room for that many rows."""
    fields = (
        Field("step", "u64", doc="1, 2, ...; the factor of every wait"),
        Field("rows", "u32"),
        Field("sampled", "u32", doc="rows whose logits are wanted"),
        Field("exit", "u32", doc="ExitReason; not RUNNING means leave the kernel instead of running this step"),
        Field("sample_row", "u32", capacity, doc="row of each sampled row"),
        Field("row", ROW, capacity),
        Field(
            "widens",
            "u32",
            doc="what the next step may have: 0 one row, 1 several, 2 more than the device's narrow "
            "steps. Of devices whose rings depend on it",
        ),
        Field(
            "widened",
            "u32",
            doc="what this one was announced to have; 3: one row, and the last was announced to have several",
        ),
        Field("wide_rows", "u64", doc="rows of wide steps so far, this one included"),
        Field("wide_sampled", "u64", doc="sampled rows so far of wide steps with several of them"),
    )
    size = Struct("StepHeader", fields).size
    return Struct("StepHeader", fields, pad_to=-(-size // 512) * 512, doc=_STEP_DOC)


_STEP_DOC = "What a step computes. Two of them alternate by step parity."
STEP = step_header(TILE_ROWS)

SAMPLING = Struct(
    "Sampling",
    (
        Field("temperature", "f32", doc="0 is greedy"),
        Field("top_p", "f32"),
        Field("min_p", "f32"),
        Field("repetition_penalty", "f32"),
        Field("presence_penalty", "f32"),
        Field("frequency_penalty", "f32"),
        Field("top_k", "u32", doc="0 is off"),
        Field("top_logprobs", "u32", doc="how many alternatives to report, 0 to kMaxTop"),
        Field("logprobs", "u32", doc="1 when the token's own log-probability is wanted"),
        Field("seed_low", "u32"),
        Field("seed_high", "u32"),
        Field("biased", "u32", doc="1: the slot's row of `bias` is added to its logits"),
    ),
    doc="How one slot samples.",
)

SLOT = Struct(
    "SlotState",
    (
        Field("status", "u32"),
        Field("request", "u32", doc="the engine's number of the request"),
        Field("position", "u32", doc="next position to compute"),
        Field("prompt_length", "u32"),
        Field("limit", "u32", doc="most tokens of prompt and output together"),
        Field("last_token", "i32", doc="the token at `position` when it is past the prompt"),
        Field("stop_count", "u32"),
        Field("stop", "i32", MAX_STOPS),
        Field("sampling", SAMPLING),
        Field("gate", "u32", doc="0: none; else the last position that may be sampled before the next OPEN"),
    ),
    pad_to=128,
    doc="One sequence as the kernel sees it.",
)

COMMAND = Struct(
    "Command",
    (
        Field("kind", "u32"),
        Field("slot", "u32"),
        Field("request", "u32"),
        Field("reserved", "u32"),
        Field("state", SLOT),
    ),
    doc="One mailbox entry, host to kernel.",
)

MAILBOX = Struct(
    "Mailbox",
    (
        Field("posted", "u64", doc="entries the host has written; release"),
        Field("pad0", "u64", 15),
        Field("taken", "u64", doc="entries the kernel has taken"),
        Field("pad1", "u64", 15),
        Field("entry", COMMAND, MAILBOX_ENTRIES),
    ),
    doc="Host-visible command ring.",
)

TOKEN_EVENT = Struct(
    "TokenEvent",
    (
        Field("kind", "u32"),
        Field("slot", "u32"),
        Field("request", "u32"),
        Field("token", "i32"),
        Field("position", "u32"),
        Field("finish", "u32"),
        Field("logprob", "f32"),
        Field("top_count", "u32"),
        Field("step", "u64"),
        Field("time_ns", "u64", doc="device clock when it was written"),
        Field("top_token", "i32", MAX_TOP),
        Field("top_logprob", "f32", MAX_TOP),
    ),
    doc="One token on its way out.",
)

TOKEN_RING = Struct(
    "TokenRing",
    (
        Field("written", "u64", doc="events the kernel has written; release, system scope"),
        Field("pad0", "u64", 15),
        Field("entry", TOKEN_EVENT, RING_ENTRIES),
    ),
    doc="Host-visible ring of tokens. A launch's step limit keeps it from overflowing.",
)

FAULT = Struct(
    "FaultRecord",
    (
        Field("kind", "u32", doc="FaultKind; written last, release"),
        Field("claimed", "u32", doc="the first worker to fault sets it"),
        Field("worker", "u32"),
        Field("role", "u32"),
        Field("record", "u32", doc="index in the worker's queue"),
        Field("opcode", "u32"),
        Field("node", "u32"),
        Field("tile", "u32"),
        Field("counter", "u32"),
        Field("pad", "u32"),
        Field("value", "u64"),
        Field("target", "u64"),
        Field("step", "u64"),
    ),
    doc="Host-visible; the first fault of a launch.",
)

LAUNCH = Struct(
    "LaunchState",
    (
        Field("step", "u64", doc="last step begun; carries over between launches"),
        Field("published", "u64", doc="number of headers published; header of step s is valid when >= s"),
        Field("abort", "u32", doc="set by the first fault; every wait looks at it"),
        Field("exit", "u32", doc="ExitReason of the last launch"),
        Field("arrived", "u32", doc="roll-call"),
        Field("pad", "u32"),
        Field("ring_written", "u64"),
        Field("mailbox_taken", "u64"),
        Field("steps_run", "u64", doc="steps completed since load"),
        Field("tokens_out", "u64"),
        Field("finished", "u64", doc="workers that ended a step, summed over steps: makes each step a full barrier"),
        Field("began_ns", "u64", doc="device clock when this step's header was made; kept when steps have a budget"),
        Field("chunk", "u32", doc="prompt rows that a step with decode rows may carry; 0: not yet known"),
    ),
    pad_to=128,
    doc="Control words in device memory.",
)

SAMPLE_RESULT = Struct(
    "SampleResult",
    (
        Field("token", "i32"),
        Field("logprob", "f32", doc="natural log of the probability before penalties, temperature and filters"),
        Field("top_count", "u32"),
        Field("pad", "u32"),
        Field("top_token", "i32", MAX_TOP),
        Field("top_logprob", "f32", MAX_TOP),
    ),
    doc="What `sample` hands to `advance` for one sampled row, in the workspace.",
)

TRACE_EVENT = Struct(
    "TraceEvent",
    (
        Field("worker", "u16"),
        Field("role", "u8", doc="Role; kControl: a whole step of the worker"),
        Field("flags", "u8", doc="TraceFlag"),
        Field("record", "u32", doc="index in the worker's queue, kNone for a step"),
        Field("node", "u32", doc="kNone for a step"),
        Field("tile_begin", "u32", doc="of a step: its rows"),
        Field("tile_count", "u32", doc="of a step: its longest context"),
        Field("step", "u32", doc="low 32 bits of the kernel's own number"),
        Field("start", "u64", doc="ticks: the role took the record, or began to wait for the step's header"),
        Field("ready", "u64", doc="ticks: what it waits for was there"),
        Field("first_data", "u64", doc="ticks: its first data was at hand. Of a step: clock_ns at `ready`"),
        Field("end", "u64", doc="ticks: the work was done"),
        Field("published", "u64", doc="ticks: from here on others may see it; 0 when the event is cut"),
        Field("longest_wait", "u64", doc="ticks of the longest single wait. Of a step: clock_ns at `end`"),
        Field("longest_wait_counter", "u32", doc="what it waited for, a counter or (by value) a node; kNone: nothing"),
    ),
    pad_to=80,
    doc="One record as one role of a worker ran it, or one step of a worker.",
)

TRACE_MARKS = Struct(
    "TraceMarks",
    (
        Field("ready", "u32", doc="consumers: what they wait for was there; 0: they had nothing to wait for"),
        Field("data", "u32", doc="consumers: their first stages were held; 0: before `ready`, or nobody looked"),
        Field("done", "u32", doc="consumers: they were done with the record; 0 when it is cut"),
        Field("seen", "u32", doc="loaders: what others publish was there; 0: they brought nothing"),
        Field("sums", "u32", doc="storer: the first sums were there; 0: it had none"),
        Field("out", "u32", doc="storer, else consumers: the moment before others could see the last of it"),
        Field(
            "wait", "u32", doc="longest wait for a counter: its length in kWaitTicks, and in the low half the counter"
        ),
        Field("step", "u32", doc="low 32 bits of the kernel's own number"),
        Field("clock", "u32", doc="when control had handed on the record"),
        Field("clock_ns", "u32", doc="low half of clock_ns at `clock`"),
        Field("record", "u32", doc="index in the worker's queue"),
    ),
    pad_to=64,
    doc="One record as the roles of a worker left it that run side by side: low halves of ticks, of a role's lanes the "
    "last. The host makes an event of each role.",
)

TRACE_STEP = Struct(
    "TraceStep",
    (
        Field("start", "u64", doc="ticks: control began to wait for the step's header"),
        Field("ready", "u64", doc="ticks: the header was there"),
        Field("end", "u64", doc="ticks: all of the worker's records were done; 0 when it is cut"),
        Field("rows", "u32"),
        Field("step", "u32"),
        Field("clock", "u64", doc="ticks when this was written"),
        Field("record", "u32", doc="kNone"),
        Field("context", "u32", doc="the longest"),
        Field("clock_ns", "u64", doc="clock_ns at `clock`"),
        Field("told", "u32", doc="low half of ticks when others had been told of `end`"),
        Field("told_ns", "u32", doc="low half of clock_ns at `told`"),
    ),
    pad_to=64,
    doc="One step of such a worker, among its TraceMarks.",
)

TRACE_PASS = Struct(
    "TracePass",
    (
        Field("room", "u32", doc="when it last got a stage that was not free at once, perhaps for a record before"),
        Field("done", "u32", doc="its last copy was on its way; 0: it copied nothing"),
    ),
    doc="One record as the producer of such a worker ran it. Those of a step are a row, in the order of the queue, "
    "behind an entry that holds the step twice.",
)

TRACE_RING = Struct(
    "TraceRing",
    (
        Field("written", "u64", doc="events since recording began; the newest `trace_capacity` are there"),
        Field("pad", "u64", 15),
    ),
    doc="Before the events of each worker and role.",
)

ARGS = Struct(
    "KernelArgs",
    (
        Field("weights", "u64", doc="address"),
        Field("workspace", "u64", doc="address"),
        Field("kv", "u64", doc="address"),
        Field("queues", "u64", doc="address of Record[workers][queue_length]"),
        Field("counters", "u64", doc="address of uint64_t[counter_count * kCounterStride]"),
        Field("headers", "u64", doc="address of StepHeader[2]"),
        Field("launch", "u64", doc="address of LaunchState"),
        Field("slots", "u64", doc="address of SlotState[max_slots]"),
        Field("page_table", "u64", doc="address of uint32_t[max_slots][pages_per_slot]"),
        Field("tokens", "u64", doc="address of int32_t[max_slots][max_context], host-visible"),
        Field("seen", "u64", doc="address of uint16_t[max_slots][vocab]: bit 15 in the prompt, low bits count output"),
        Field("bias", "u64", doc="address of float[max_slots][vocab], host-visible; read for biased slots only"),
        Field("mailbox", "u64", doc="address of Mailbox, host-visible"),
        Field("ring", "u64", doc="address of TokenRing, host-visible"),
        Field("fault", "u64", doc="address of FaultRecord, host-visible"),
        Field("trace", "u64", doc="address of what a recording writes, see megakernel/recording.py; 0: off"),
        Field("kv_layer_stride", "u64", doc="bytes between layers of the KV pool"),
        Field(
            "workspace_stride", "u64", doc="bytes from the workspace of even steps to that of odd ones; 0: one for all"
        ),
        Field("step_limit", "u64", doc="leave when this many steps were begun since load"),
        Field("spin_budget_ns", "u64"),
        Field("workers", "u32"),
        Field("queue_length", "u32", doc="records of each worker's queue, padded with opcode kEnd"),
        Field("counter_count", "u32"),
        Field("max_slots", "u32"),
        Field("max_context", "u32"),
        Field("pages_per_slot", "u32"),
        Field("max_rows", "u32", doc="rows that a step may carry, at most kMaxRows"),
        Field("vocab", "u32"),
        Field("chaos_seed", "u32", doc="seed of random delays; used only by a build with chaos on"),
        Field("drop_signal", "u32", doc="counter whose next signal is lost; used only by a build with chaos on"),
        Field("inputs", "u64", doc="address of float[max_slots][max_context][cols], host-visible: rows of ids below 0"),
        Field("hidden", "u64", doc="address of float[max_slots][max_context][cols], host-visible; written by `hidden`"),
        Field("outputs", "u64", doc="address of float[max_slots][max_context][...], host-visible; 0: tokens only"),
        Field("trace_capacity", "u32", doc="events of each ring"),
        Field("first_chunk", "u32", doc="prompt rows of the first step that carries decode rows too"),
        Field("trace_first", "u64", doc="first step that is recorded"),
        Field("trace_last", "u64", doc="last step that is recorded"),
        Field("step_budget_ns", "u64", doc="longest that a step with decode and prompt rows should take; 0: any time"),
    ),
    pad_to=256,
    doc="Everything the kernel is given. Addresses are the device's.",
)

WINDOW = Struct(
    "Window",
    (
        Field("turn", "u64", doc="decisions that rank 0 has made; release, system scope"),
        Field("posted", "u64", doc="of the last decision: commands that every rank has taken when it makes the header"),
        Field("chunk", "u32", doc="of the last decision: prompt rows that a step with decode rows may carry"),
    ),
    pad_to=128,
    doc="Start of a device's window, which its peers write: then a counter for each exchange and sender, then buffers.",
)

LINK = Struct(
    "Link",
    (
        Field("window", "u64", MAX_RANKS, doc="address of each rank's window, as this device sees it"),
        Field("turn", "u64", doc="decisions that this device has made or followed"),
        Field(
            "best",
            "u64",
            doc="offset in every window: [ranks][max_rows][workers] of kBestBytes, for devices that use it",
        ),
        Field("rank", "u32"),
        Field("part_cols", "u32", doc="columns of each rank's part of the logits"),
        Field("exchanges", "u32", doc="of a step"),
    ),
    pad_to=128,
    doc="What a device knows of its peers; behind LaunchState, in programs of more than one rank.",
)

STRUCTS: tuple[Struct, ...] = (
    WAIT, RECORD, TICKET, ROW, STEP, SAMPLING, SLOT, COMMAND, MAILBOX, TOKEN_EVENT, TOKEN_RING, FAULT, LAUNCH,
    SAMPLE_RESULT, TRACE_EVENT, TRACE_MARKS, TRACE_STEP, TRACE_PASS, TRACE_RING, ARGS, WINDOW, LINK,
)  # fmt: skip

OPCODE_END = 0xFFFF  # pads a queue
OPCODE_TICKET = 0xFFFE  # take records from the shared list; the payload is a Ticket


def c_header(task_fields: tuple[Struct, ...], capacity: int = TILE_ROWS, ranks: int = 1) -> str:
    """The whole shared header as C++ text, namespace `megakernel::abi`. `task_fields`: the payload of each task;
    `capacity`: rows that a step has room for; `ranks`: devices that run the program together."""
    parts = [
        "// Generated from megakernel/tasks/record.py. Do not edit.",
        "#pragma once",
        "#ifndef MEGAKERNEL_NO_STDINT",
        "#include <stdint.h>",
        "#endif",
        "namespace megakernel::abi {",
        f"constexpr uint64_t kAbiHash = 0x{abi_hash(task_fields, capacity):016x}ull;",
        f"constexpr uint32_t kNone = 0x{NONE:x}u;",
        f"constexpr uint64_t kNone64 = 0x{NONE64:x}ull;",
        f"constexpr uint16_t kEnd = 0x{OPCODE_END:x};",
        f"constexpr uint16_t kTicket = 0x{OPCODE_TICKET:x};",
        *(f"constexpr uint32_t {name} = {value};" for name, value in _limits(capacity).items()),
        f"constexpr uint32_t kRanks = {ranks};",
    ]
    for e in ENUMS:
        body = ", ".join(f"k{_camel(m.name)} = {int(m)}" for m in e)
        parts.append(f"enum class {e.__name__} : uint32_t {{ {body} }};")
    parts += [s.c_source() for s in _structs(capacity)]
    for s in task_fields:
        if s.size > RECORD_PAYLOAD:
            raise RecordError(f"fields {s.name} take {s.size} bytes; a record has {RECORD_PAYLOAD}")
        parts.append(s.c_source())
    parts.append("}  // namespace megakernel::abi")
    return "\n".join(parts) + "\n"


def abi_hash(task_fields: tuple[Struct, ...], capacity: int = TILE_ROWS) -> int:
    """64 bits over every declaration; equal on both sides or the program is refused."""
    return _abi_hash(task_fields, capacity)


@lru_cache(maxsize=32)
def _abi_hash(task_fields: tuple[Struct, ...], capacity: int) -> int:
    text = [repr(sorted(_limits(capacity).items())), repr((OPCODE_END, OPCODE_TICKET))]
    text += [repr([(m.name, int(m)) for m in e]) for e in ENUMS]
    text += [s.c_source() for s in (*_structs(capacity), *task_fields)]
    return int.from_bytes(hashlib.sha256("\n".join(text).encode()).digest()[:8], "little")


def _limits(capacity: int) -> dict[str, int]:
    return {**LIMITS, "kMaxRows": capacity}


def _structs(capacity: int) -> tuple[Struct, ...]:
    return tuple(step_header(capacity) if s is STEP else s for s in STRUCTS)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
