"""A schedule as the records that workers read, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import RecordError
from megakernel.scheduler.schedule import Entry, Relay, Schedule, Wait
from megakernel.scheduler.ticket import payload as ticket_payload
from megakernel.tasks.record import MAX_WAITS, NONE, OPCODE_END, OPCODE_TICKET, RECORD, RECORD_PAYLOAD, TICKET
from megakernel.tasks.task import Addresses, TaskNode

Records = npt.NDArray[Any]
LARGEST_U16 = 0xFFFF


def encode(schedule: Schedule, opcode_of: Callable[[TaskNode], int], addresses: Addresses) -> Records:
    """Records [workers, queue_length] of RECORD.dtype; each queue is padded with at least one kEnd record.

    Entries of the shared list follow the kEnd of worker 0, where no queue is read.
    """
    shared_at = len(schedule.queues[0]) + 1
    length = max([len(q) + 1 for q in schedule.queues] + [shared_at + len(schedule.shared)])
    out = np.zeros((schedule.workers, length), RECORD.dtype)
    out["opcode"], out["signal"] = OPCODE_END, NONE
    payloads = [_payload(n, addresses) for n in schedule.nodes]
    opcodes = [opcode_of(n) for n in schedule.nodes]
    relays = {r.counter: r for r in schedule.relays}
    for worker, queue in enumerate(schedule.queues):
        _fill(out[worker, : len(queue)], queue, opcodes, payloads, relays)
        for index, entry in enumerate(queue):
            if entry.node in schedule.ticketed:
                out[worker, index]["opcode"] = OPCODE_TICKET
                _put(out[worker, index], TICKET.pack(ticket_payload(schedule, entry.node, shared_at)))
    _fill(out[0, shared_at : shared_at + len(schedule.shared)], schedule.shared, opcodes, payloads, relays)
    return out


def decode(records: Records, nodes: Sequence[TaskNode], counters: int, policy: str = "") -> Schedule:
    """The schedule that `encode` was given. Raises RecordError when a queue has no end."""
    queues: list[tuple[Entry, ...]] = []
    spans: dict[int, tuple[int, int]] = {}  # ticketed node -> its records
    for worker, row in enumerate(records):
        ends = np.flatnonzero(row["opcode"] == OPCODE_END)
        if not len(ends):
            raise RecordError(f"the queue of worker {worker} has {len(row)} records and no end")
        for record in row[: ends[0]]:
            if record["opcode"] == OPCODE_TICKET:
                got = TICKET.unpack(record["payload"].tobytes()[: TICKET.size])
                spans[int(record["node"])] = int(got["first"]), int(got["count"])
        queues.append(tuple(_entry(r) for r in row[: ends[0]]))
    flat = records.reshape(-1)
    shared = tuple(_entry(r) for node in sorted(spans) for r in flat[spans[node][0] : sum(spans[node])])
    relays = {(int(r["signal"]), int(r["members"]), int(r["relay"])) for r in flat[flat["members"] > 0]}
    made = tuple(Relay(*r) for r in sorted(relays))
    return Schedule(tuple(nodes), tuple(queues), counters, policy, frozenset(spans), shared, made)


def _payload(node: TaskNode, addresses: Addresses) -> bytes:
    data = node.task.fields.pack(node.task.payload(node, addresses))
    if len(data) > RECORD_PAYLOAD:
        raise RecordError(f"node {node.name}: its fields take {len(data)} bytes; a record has {RECORD_PAYLOAD}")
    return data.ljust(RECORD_PAYLOAD, b"\0")


def _fill(
    rows: Records, entries: Sequence[Entry], opcodes: Sequence[int], payloads: Sequence[bytes],
    relays: Mapping[int, Relay],
) -> None:  # fmt: skip
    if not entries:
        return
    for e in entries:
        if len(e.waits) > MAX_WAITS:
            raise RecordError(
                f"an entry of node {e.node} waits for {len(e.waits)} counters; a record holds {MAX_WAITS}"
            )
    rows["opcode"] = [opcodes[e.node] for e in entries]
    rows["wait_count"] = [len(e.waits) for e in entries]
    rows["node"] = [e.node for e in entries]
    rows["tile_begin"] = [e.first for e in entries]
    rows["tile_count"] = [e.count for e in entries]
    rows["signal"] = [NONE if e.signal is None else e.signal for e in entries]
    of = [None if e.signal is None else relays.get(e.signal) for e in entries]
    if any(r is not None and max(r.count, r.to) > LARGEST_U16 for r in of):
        raise RecordError(f"a record holds relays to counters up to {LARGEST_U16} of as many signals")
    rows["members"] = [r.count if r else 0 for r in of]
    rows["relay"] = [r.to if r else 0 for r in of]
    fill = [Wait(0, 0)] * MAX_WAITS
    waits = [((*e.waits, *fill)[:MAX_WAITS]) for e in entries]
    rows["waits"]["counter"] = [[w.counter for w in row] for row in waits]
    rows["waits"]["count"] = [[w.count for w in row] for row in waits]
    joined = b"".join(payloads[e.node] for e in entries)
    rows["payload"] = np.frombuffer(joined, np.uint8).reshape(len(entries), RECORD_PAYLOAD)


def _put(record: Any, data: bytes) -> None:
    record["payload"] = np.frombuffer(data.ljust(RECORD_PAYLOAD, b"\0"), np.uint8)


def _entry(record: Any) -> Entry:
    waits = tuple(Wait(int(w["counter"]), int(w["count"])) for w in record["waits"][: int(record["wait_count"])])
    node, first, count, signal = (int(record[f]) for f in ("node", "tile_begin", "tile_count", "signal"))
    return Entry(node, first, count, waits, None if signal == NONE else signal)
