"""A program loaded on a device: its memory, its arguments, its launches and its faults. It knows no requests.

One thread uses a Runtime. While a launch runs, only `post`, `events`, `wait`, `running`, `set_bias` (of a slot
that is gated), `set_prompt` and `set_pages` (of a slot that the kernel does not hold), `page`, `set_page` and
`copy_page` (of pages that no slot of the kernel writes) may be called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from megakernel.builder.program import Manifest, Program, check_abi
from megakernel.builder.weights import Progress, Read, pack_weights
from megakernel.device.device import Buffer, Device, Executable
from megakernel.errors import CapacityError, DeviceFault, FaultReport, MegakernelError, ProgramError, TimelineError
from megakernel.faults import decode_fault
from megakernel.recording import Recorder, Recording
from megakernel.target import Target, find_target
from megakernel.tasks.record import (
    ARGS,
    COMMAND,
    COUNTER_STRIDE,
    FAULT,
    LAUNCH,
    LINK,
    MAILBOX,
    MAILBOX_ENTRIES,
    MAX_RANKS,
    NONE,
    RING_ENTRIES,
    SLOT,
    TOKEN_RING,
    WINDOW,
    ExitReason,
    FaultKind,
    row_capacity,
    step_header,
)  # fmt: skip

POISON = 0xFF  # workspace bytes before the first step: NaN in every float format
CONFIGURED = ("step_budget_ns", "first_chunk", "chaos_seed", "drop_signal")
MAX_RING_EVENTS_PER_SLOT_STEP = 2  # a token and a cancel
NUMPY_TYPES: Mapping[str, Any] = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "u32": np.uint32, "u8": np.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class LaunchReport:
    """How a launch ended. `step`, `steps_run` and `tokens_out` count since load or reset, in the kernel's own words."""

    step: int
    exit: ExitReason
    steps_run: int
    tokens_out: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on the device by use."""

    weights: int
    kv: int
    workspace: int
    control: int
    window: int = 0  # that peers write

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace + self.control + self.window


def memory_of(manifest: Manifest, kv_pages: int) -> MemoryReport:
    """What a program needs with `kv_pages` pages in each layer; needs no device."""
    return MemoryReport(
        weights=manifest.weights_bytes,
        kv=manifest.kv_layers * kv_pages * manifest.kv_heads * manifest.kv_unit_bytes,
        workspace=manifest.workspace_bytes * manifest.workspace_copies,
        control=sum(size for _, size, _ in _control_buffers(manifest)),
        window=manifest.window_bytes,
    )


def _control_buffers(m: Manifest) -> tuple[tuple[str, int, bool], ...]:
    """Name in KernelArgs, bytes, whether the host touches it while the kernel runs."""
    rows = m.max_slots * m.max_context * 4
    floats = (("inputs", m.input_cols), ("hidden", m.hidden_cols), ("outputs", m.output_cols))
    return (
        ("queues", m.workers * m.queue_length * 128, False),
        ("counters", max(1, m.counter_count) * COUNTER_STRIDE * 8, False),
        ("headers", 2 * step_header(row_capacity(m.max_rows)).size, False),
        ("launch", LAUNCH.size + (LINK.size if m.ranks > 1 else 0), False),
        ("slots", m.max_slots * SLOT.size, False),
        ("page_table", m.max_slots * m.pages_per_slot * 4, False),
        ("tokens", m.max_slots * m.max_context * 4, True),
        ("seen", m.max_slots * m.vocab * 2, False),
        ("bias", m.max_slots * m.vocab * 4, True),
        ("mailbox", MAILBOX.size, True),
        ("ring", TOKEN_RING.size, True),
        ("fault", FAULT.size, True),
        *((name, rows * cols, True) for name, cols in floats if cols),
    )  # fmt: skip


class Runtime:
    """Everything is allocated, packed and zeroed when the constructor returns; `close` frees it."""

    def __init__(
        self,
        program: Program,
        device: Device,
        read: Read,
        *,
        kv_pages: int | None = None,
        spin_budget_ns: int = 10_000_000_000,
        progress: Progress | None = None,
        shared: bool = False,
    ) -> None:
        """A program of several ranks is `connect`ed before its first launch; `shared`: to other processes.

        `read` gives checkpoint tensors; `kv_pages` defaults to every slot's full context.

        Raises CapacityError when memory is short, ProgramError when the device is not the program's, CheckpointError
        when a weight is bad."""
        check_abi(program.manifest)
        self.program = program
        self.manifest = m = program.manifest
        self.device = device
        self.kv_pages = kv_pages if kv_pages is not None else m.max_slots * m.pages_per_slot
        self.spin_budget_ns = spin_budget_ns
        self.step_budget_ns = 0  # of steps with decode and prompt rows; 0: none
        self.first_chunk = m.max_rows  # prompt rows of the first such step
        self.chaos_seed = 0
        self.drop_signal = NONE  # counter whose next signal a chaos build loses
        self._recorder: Recorder | None = None
        self._recorded: Recording | None = None  # one that a reset ended
        self._buffers: dict[str, Buffer] = {}
        self._window: Buffer | None = None
        self._peers: list[Buffer] = []  # windows of all ranks, where they were opened by handles
        self._link = b""
        self._executable: Executable | None = None
        self._step = self._seen = self._posted = 0
        self.target = _target_of(program, device)
        try:
            self._allocate()
            if m.ranks > 1:
                self._window = device.allocate_window(m.window_bytes, shared)
            write = self._buffers["weights"]
            pack_weights(m, self.target, read, lambda at, data: device.upload(write, at, data), progress)
            device.upload(self._buffers["queues"], 0, np.ascontiguousarray(program.records).view(np.uint8).reshape(-1))
            self._clear(fresh=True)
            self._executable = device.load(program.binary, self.target, m.abi_hash)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------ memory
    def memory(self) -> MemoryReport:
        return memory_of(self.manifest, self.kv_pages)

    def _allocate(self) -> None:
        need = self.memory()
        plan = [("weights", need.weights, False), ("kv", need.kv, False), ("workspace", need.workspace, False)]
        for name, size, shared in (*plan, *_control_buffers(self.manifest)):
            try:
                self._buffers[name] = self.device.allocate(max(size, 256), host_visible=shared)
            except CapacityError as e:
                raise CapacityError(
                    f"program {self.manifest.name} does not fit device {self.device.name} (at {name}, {size:,} bytes: "
                    f"{e}); it needs weights {need.weights:,}, KV {need.kv:,}, workspace {need.workspace:,}, control "
                    f"{need.control:,} bytes; lower max_context, max_slots or kv_pages"
                ) from e

    def reset(self) -> None:
        """The state of a fresh load, weights kept: no slot active, counters zero, workspace poisoned, KV zero.

        Steps count from one again, so a recording ends here."""
        if self._recorder is not None:
            self._recorded = self._end_recording(self._recorder)
        self._clear(fresh=False)

    def _clear(self, fresh: bool) -> None:
        self.device.fill(self._buffers["workspace"], POISON)
        for name in ("kv", *(n for n, _, _ in _control_buffers(self.manifest) if n != "queues")):
            if not (fresh and self._buffers[name].zeroed):
                self.device.fill(self._buffers[name], 0)
        if self._window is not None:
            self.device.fill(self._window, 0)
        if self._link:
            self.device.upload(self._buffers["launch"], LAUNCH.size, np.frombuffer(self._link, np.uint8))
        self._step = self._seen = self._posted = 0

    # ------------------------------------------------------------------------------------------ peers
    @property
    def window(self) -> Buffer:
        """The memory that peers write, of a program of several ranks."""
        assert self._window is not None
        return self._window

    def connect(self, windows: Sequence[int]) -> None:
        """Tell the kernel where this device sees the window of each rank. Before the first launch."""
        padded = [*windows, *([0] * (MAX_RANKS - len(windows)))]
        m = self.manifest
        self._link = LINK.pack(
            {"window": padded, "rank": m.rank, "best": m.best_offset, "part_cols": m.part_vocab,
             "exchanges": len(m.exchanges)}
        )  # fmt: skip
        self.device.upload(self._buffers["launch"], LAUNCH.size, np.frombuffer(self._link, np.uint8))

    def window_handle(self) -> bytes:
        """What another process opens this device's window by."""
        return self.device.window_handle(self.window)

    def open_windows(self, handles: Sequence[bytes]) -> None:
        """`connect` to the windows of other processes, by rank; that of the own rank is not looked at."""
        m = self.manifest
        for rank, handle in enumerate(handles):
            own = rank == m.rank
            self._peers.append(self.window if own else self.device.open_window(handle, m.window_bytes))
        self.connect([b.address for b in self._peers])

    def clear_buffers(self) -> None:
        """Zero what peers have written into this device's window, but not its counters. Between launches of all."""
        m, whole = self.manifest, self.window
        first = WINDOW.size + len(m.exchanges) * m.ranks * COUNTER_STRIDE * 8
        host = None if whole.host is None else whole.host[first:]
        self.device.fill(Buffer(whole.address + first, whole.bytes - first, host, whole.owner), 0)

    def seal_window(self) -> None:
        """Every peer has opened it."""
        self.device.seal_window(self.window)

    def configure(self, values: Mapping[str, int]) -> None:
        """Set what every launch is given: `step_budget_ns`, `first_chunk`, `chaos_seed`, `drop_signal`."""
        for name, value in values.items():
            assert name in CONFIGURED, name
            setattr(self, name, value)

    @property
    def configuration(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in CONFIGURED}

    @property
    def kv_heads(self) -> int:
        """KV heads of a page as `page` gives it."""
        return self.manifest.kv_heads

    def outcome(self, timeout_s: float = 3600.0) -> LaunchReport | FaultReport:
        """As `finish`; a fault is returned."""
        try:
            return self.finish(timeout_s)
        except DeviceFault as fault:
            return fault.report

    def abort(self) -> None:
        """Make a running launch end without a report of its own: a peer has failed."""
        offset = dict(zip((f.name for f in LAUNCH.fields), LAUNCH.offsets))["abort"]
        self.device.upload(self._buffers["launch"], offset, np.ones(1, np.uint32))

    def ended(self) -> bool:
        """Whether a launch that should run has stopped by a fault."""
        return not self._exe.running() and int(self._shared("fault", FAULT.dtype)["kind"][0]) != FaultKind.NONE

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """A copy of a workspace tensor, [rows, cols]. Meaningful between launches, until its buffer is reused."""
        m = self.manifest
        t = m.tensor(name)
        kind = np.dtype(NUMPY_TYPES[t.dtype])
        at = t.offset + self._step % m.workspace_copies * m.workspace_bytes  # the copy of the last step
        raw = self.device.download(self._buffers["workspace"], at, t.rows * t.cols * kind.itemsize)
        return np.frombuffer(raw.tobytes(), kind).reshape(t.rows, t.cols)

    def buffer(self, name: str) -> Buffer:
        """A buffer by its name in KernelArgs, for tests and tools."""
        return self._buffers[name]

    # ------------------------------------------------------------------------------------------ launches
    def max_steps(self, wanted: int) -> int:
        """At most `wanted`, and so few that one launch cannot overflow the token ring."""
        return max(1, min(wanted, RING_ENTRIES // (MAX_RING_EVENTS_PER_SLOT_STEP * self.manifest.max_slots)))

    def launch(self, steps: int) -> None:
        """Start a launch of at most `steps` steps and return at once."""
        m, at = self.manifest, {name: b.address for name, b in self._buffers.items()}
        if m.ranks > 1 and not self._link:
            raise ProgramError(
                f"program {m.name} is of rank {m.rank} of {m.ranks} and was not told of the others; open the model "
                f"with tp={m.ranks}"
            )
        self._exe.launch(
            ARGS.pack(
                {
                    **at,
                    "kv_layer_stride": self.kv_pages * m.kv_heads * m.kv_unit_bytes,
                    "workspace_stride": m.workspace_bytes if m.workspace_copies > 1 else 0,
                    "step_limit": self._step + self.max_steps(steps),
                    "spin_budget_ns": self.spin_budget_ns,
                    "workers": m.workers,
                    "queue_length": m.queue_length,
                    "counter_count": m.counter_count,
                    "max_slots": m.max_slots,
                    "max_context": m.max_context,
                    "pages_per_slot": m.pages_per_slot,
                    "max_rows": m.max_rows,
                    "vocab": m.vocab,
                    "chaos_seed": self.chaos_seed,
                    "drop_signal": self.drop_signal,
                    "first_chunk": self.first_chunk,
                    "step_budget_ns": self.step_budget_ns,
                    **(self._recorder.args() if self._recorder else {}),
                }
            )
        )

    def running(self) -> bool:
        return self._exe.running()

    @property
    def check_s(self) -> float | None:
        """How often `check` is to be called between launches; None: never."""
        return None

    def check(self) -> None:
        """Raises RankLost when one of several devices is gone."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is an event that `events` has not given yet, or the launch ended."""
        return self._exe.wait_event(self._seen, timeout_s)

    def finish(self, timeout_s: float = 3600.0) -> LaunchReport:
        """Wait for the end of the launch. Raises DeviceFault when the kernel stopped itself; `reset` before more."""
        if not self._exe.join(timeout_s):
            raise MegakernelError(
                f"the kernel of {self.manifest.name} did not end within {timeout_s:g} s of its bounded launch; "
                "its own time limits should have ended it; close the process"
            )
        raw = self.device.download(self._buffers["launch"], 0, LAUNCH.size).tobytes()
        state = LAUNCH.unpack(raw)
        self._step = int(state["step"])
        fault = self._fault()
        if fault is not None:
            if self._recorder is not None:
                self._recorder.fault = fault
            raise DeviceFault(fault)
        reason = ExitReason(int(state["exit"]))
        return LaunchReport(self._step, reason, int(state["steps_run"]), int(state["tokens_out"]))

    # ------------------------------------------------------------------------------------------ the timeline
    def start_recording(self, steps: int | None = None, skip: int = 0) -> None:
        """Record `steps` steps (None: until it is stopped) of the next launches, after `skip` steps. Between launches.

        Raises TimelineError when the program was built without the timeline or already records."""
        if self._recorder is not None or self._recorded is not None:
            raise TimelineError("a recording runs already; stop it before another is started")
        if skip < 0:
            raise TimelineError(f"a recording that skips {skip} steps: expected 0 or more")
        self._recorder = Recorder(self.manifest, self.program.records, self.device, self._step + 1 + skip, steps)

    def stop_recording(self) -> Recording:
        """What was recorded, also when a fault or a reset ended it. Between launches. Raises TimelineError."""
        found, self._recorded = self._recorded, None
        if self._recorder is not None:
            found = self._end_recording(self._recorder)
        if found is None:
            raise TimelineError("nothing is recorded; start a recording first")
        return found

    def drop_recording(self) -> None:
        """End a recording without a look at it. Between launches."""
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = self._recorded = None

    def _end_recording(self, recorder: Recorder) -> Recording:
        self._recorder = None
        try:
            return recorder.read()
        finally:
            recorder.close()

    # ------------------------------------------------------------------------------------------ host and kernel
    def post(self, command: Mapping[str, Any]) -> bool:
        """Put a Command into the mailbox; False when it is full."""
        box = self._shared("mailbox", MAILBOX.dtype)
        if self._posted - int(box["taken"][0]) >= MAILBOX_ENTRIES:
            return False
        entry = np.frombuffer(COMMAND.pack(command), COMMAND.dtype)
        box["entry"][0, self._posted % MAILBOX_ENTRIES] = entry[0]
        self._posted += 1
        box["posted"][0] = self._posted  # after the entry: an aligned 8-byte store
        self._exe.notify()
        return True

    def pending(self) -> int:
        """Commands that the kernel has not taken yet."""
        return self._posted - int(self._shared("mailbox", MAILBOX.dtype)["taken"][0])

    def events(self) -> npt.NDArray[Any]:
        """Every TokenEvent since the last call, oldest first: a copy, of TOKEN_EVENT.dtype."""
        ring = self._shared("ring", TOKEN_RING.dtype)
        written = int(ring["written"][0])
        if written - self._seen > RING_ENTRIES:
            raise MegakernelError(
                f"the token ring overflowed: {written - self._seen} events unread, it holds {RING_ENTRIES}; "
                "a launch had too many steps"
            )
        index = np.arange(self._seen, written) % RING_ENTRIES
        self._seen = written
        found: npt.NDArray[Any] = ring["entry"][0][index]
        return found

    def set_prompt(self, slot: int, ids: Sequence[int]) -> None:
        """Write a free slot's prompt into the token buffer."""
        data = np.asarray(ids, np.int32)
        self.device.upload(self._buffers["tokens"], slot * self.manifest.max_context * 4, data)

    def set_inputs(self, slot: int, positions: Sequence[int], rows: npt.NDArray[np.float32]) -> None:
        """Write a free slot's embeddings, those of ids below 0 in its prompt, [len(positions), cols]."""
        self._rows("inputs", self.manifest.input_cols)[slot, list(positions)] = rows

    def hidden(self, slot: int, first: int, stop: int) -> npt.NDArray[np.float32]:
        """A copy of what the head read at positions [first, stop) of a slot, of steps whose events were told."""
        found: npt.NDArray[np.float32] = self._rows("hidden", self.manifest.hidden_cols)[slot, first:stop].copy()
        return found

    def _rows(self, name: str, cols: int) -> npt.NDArray[np.float32]:
        m = self.manifest
        host = self._buffers[name].host
        assert host is not None, f"device {self.device.name} gave no host view of {name}"
        shape = (m.max_slots, m.max_context, cols)
        rows: npt.NDArray[np.float32] = host[: 4 * m.max_slots * m.max_context * cols].view(np.float32).reshape(shape)
        return rows

    def set_rows(self, slot: int, rows: npt.NDArray[np.float32]) -> None:
        """Write a free slot's input rows from its first position on, float32 [positions, input_cols]."""
        self.set_inputs(slot, range(len(rows)), rows)

    def rows(self, slot: int, count: int) -> npt.NDArray[np.float32]:
        """A slot's first output rows, float32 [count, output_cols]: a copy; between launches."""
        found: npt.NDArray[np.float32] = self._rows("outputs", self.manifest.output_cols)[slot, :count].copy()
        return found

    def set_bias(self, slot: int, bias: npt.NDArray[np.float32]) -> None:
        """Write what is added to the logits of a slot that the kernel does not sample now, float32 [vocab]."""
        self.device.upload(self._buffers["bias"], slot * bias.nbytes, bias)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Write a free slot's row of the page table."""
        row = np.zeros(self.manifest.pages_per_slot, np.uint32)
        row[: len(pages)] = pages
        self.device.upload(self._buffers["page_table"], slot * row.nbytes, row)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of the KV pool in all layers to one that no slot of the kernel uses."""
        m, pool = self.manifest, self._buffers["kv"]
        size = m.kv_heads * m.kv_unit_bytes
        for layer in range(m.kv_layers if source != target else 0):
            first = layer * self.kv_pages
            self.device.copy(pool, (first + source) * size, (first + target) * size, size)

    def page(self, layer: int, page: int) -> npt.NDArray[Any]:
        """A copy of a page of one layer, uint8 [kv_heads, kv_unit_bytes]."""
        m = self.manifest
        size = m.kv_heads * m.kv_unit_bytes
        raw = self.device.download(self._buffers["kv"], (layer * self.kv_pages + page) * size, size)
        return raw.reshape(m.kv_heads, m.kv_unit_bytes)

    def set_page(self, layer: int, page: int, data: npt.NDArray[Any]) -> None:
        """Replace a page, as `page` gives it, that no slot of the kernel uses."""
        self.device.upload(self._buffers["kv"], (layer * self.kv_pages + page) * data.nbytes, data)

    def slot_state(self, slot: int) -> dict[str, Any]:
        """The kernel's own SlotState; between launches."""
        return SLOT.unpack(self.device.download(self._buffers["slots"], slot * SLOT.size, SLOT.size).tobytes())

    def force_token(self, slot: int, token: int) -> None:
        """Replace the token that a slot continues with; between launches."""
        offset = dict(zip((f.name for f in SLOT.fields), SLOT.offsets))["last_token"]
        self.device.upload(self._buffers["slots"], slot * SLOT.size + offset, np.array([token], np.int32))

    def facts(self) -> Mapping[str, Any]:
        """What the backend observed of the last launch; between launches."""
        return self._exe.facts()

    # ------------------------------------------------------------------------------------------ faults
    def _fault(self) -> FaultReport | None:
        raw = self._shared("fault", FAULT.dtype)[0]
        if int(raw["kind"]) == FaultKind.NONE:
            return None
        words = self.device.download(self._buffers["counters"], 0, self._buffers["counters"].bytes).view(np.uint64)
        counters = words[::COUNTER_STRIDE][: self.manifest.counter_count]
        return decode_fault({name: int(raw[name]) for name in FAULT.dtype.names or ()}, self.program, counters)

    def close(self) -> None:
        """End the workers and free the memory. Idempotent."""
        if self._executable is not None:
            self._executable.close()
            self._executable = None
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        for buffer in self._buffers.values():
            self.device.free(buffer)
        self._buffers = {}
        if self._window is not None:
            for buffer in self._peers:
                if buffer is not self._window:
                    self.device.free(buffer)
            self.device.free(self._window)
            self._window, self._peers = None, []

    @property
    def _exe(self) -> Executable:
        if self._executable is None:
            raise MegakernelError(f"program {self.manifest.name} is closed")
        return self._executable

    def _shared(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        host = self._buffers[name].host
        assert host is not None, f"device {self.device.name} gave no host view of {name}"
        return host[: dtype.itemsize].view(dtype)


def _target_of(program: Program, device: Device) -> Target:
    """The program's target with its number of workers. Raises ProgramError when the device is of another backend."""
    m, own = program.manifest, device.target
    if m.backend != own.backend:
        raise ProgramError(
            f"program {m.name} was built for {m.target} ({m.backend}); device {device.name} is {own.name} "
            f"({own.backend}); build it for this device"
        )
    return (own if own.name == m.target else find_target(m.target)).with_workers(m.workers)
