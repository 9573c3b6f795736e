"""What workers whose roles run side by side leave in their rings, and the events that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megakernel.columns import pack, unpack
from megakernel.device.device import Buffer
from megakernel.marks import events_of_marks
from megakernel.recording import Recorder
from megakernel.tasks.record import (
    NONE,
    OPCODE_END,
    RECORD,
    TRACE_MARKS,
    TRACE_PASS,
    TRACE_RING,
    TRACE_STEP,
    WAIT_TICKS,
    Role,
)
from tests.fake_device import FakeDevice, fake_program

EPOCH = 1_764_470_000_000_000_000  # the shared clock's: a double does not hold it to the nanosecond
STEP_NS = 600_000
RECORDS = 40
EVERY = STEP_NS // (RECORDS + 2)
FIRST_TICK = (1 << 33) - 2_850_000  # so that low halves go through zero in the second step


def steady(ns: float) -> int:
    return FIRST_TICK + round(ns * 1.9)


def bent(ns: float) -> int:
    """A clock that is 1 % slower in every other 30 us."""
    turns, rest = divmod(ns, 60_000)
    return FIRST_TICK + round((turns * 59_700 + min(rest, 30_000) + max(0.0, rest - 30_000) * 0.99) * 1.9)


def shared(ns: float) -> int:
    return (EPOCH + round(ns)) // 32 * 32


def queue() -> np.ndarray:
    out = np.zeros(RECORDS + 3, RECORD.dtype)
    out["opcode"] = OPCODE_END
    for i in range(RECORDS):
        out[i]["opcode"], out[i]["node"], out[i]["tile_begin"], out[i]["tile_count"] = 0, i // 2, i % 2 * 4, 4
    return out


def rings(ticks: Callable[[float], int], steps: int, cut: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Records of EVERY ns each. Even ones have loader and storer, and stream, of which every other had to wait for
    room; record 3 waited for counter 7; record 5 skips. `cut`: the last step ends inside record 10."""
    marks, passes = [], np.zeros((steps + 1, RECORDS + 4), TRACE_PASS.dtype)
    room = 0
    low = lambda ns: ticks(ns) & 0xFFFFFFFF  # noqa: E731
    for step in range(1, steps + 1):
        begin, last = step * STEP_NS, cut and step == steps
        passes[step % (steps + 1), 0] = step, step
        for i in range(11 if last else RECORDS):
            row, at, even = np.zeros((), TRACE_MARKS.dtype), begin + (i + 1) * EVERY, i % 2 == 0
            moments = {"ready": 2000, "data": 2500 if i % 3 == 0 else None, "done": 6000}
            moments |= {"seen": 1500, "sums": 5900, "out": 5950 if i == 8 else 6400} if even else {"out": 5500}
            if i == 5:
                moments = {"done": 100}
            if last and i == 10:
                moments = {"seen": 1500, "ready": 2000}
            for name, after in moments.items():
                row[name] = 0 if after is None else low(at + after)
            row["wait"] = (3000 // WAIT_TICKS) << 16 | 7 if i == 3 else 0
            row["record"], row["step"] = i, step
            read = at - 3 * EVERY  # control is ahead
            row["clock"], row["clock_ns"] = low(read), shared(read) & 0xFFFFFFFF
            marks.append(row)
            if even:
                room = low(at - 5000) if i % 4 == 0 else room
                passes[step % (steps + 1), 1 + i] = room, low(at - 3000)
        end, written = begin + STEP_NS - 500, begin + RECORDS * EVERY
        whole = np.zeros((), TRACE_STEP.dtype)
        whole["start"], whole["ready"], whole["end"] = ticks(begin), ticks(begin + 300), 0 if last else ticks(end)
        whole["clock"], whole["clock_ns"] = ticks(written), shared(written)
        if not last:
            whole["told"], whole["told_ns"] = low(end + 40), shared(end + 40) & 0xFFFFFFFF
        whole["rows"], whole["step"], whole["record"], whole["context"] = 1, step, NONE, 40 + step
        marks.append(whole)
    passes[0, 0], passes[0, 1] = (steps + 1, steps + 1), (low(begin), low(begin + 9))  # of a step that no worker begins
    whole_marks = np.frombuffer(b"".join(m.tobytes() for m in marks), TRACE_MARKS.dtype)
    return whole_marks, passes


@pytest.mark.parametrize("ticks", [steady, bent])
def test_every_moment_is_found_again(ticks: Callable[[float], int]) -> None:
    events, drift, lost = events_of_marks(6, queue(), *rings(ticks, 3))
    assert lost == 0
    assert (drift < 40) == (ticks is steady)
    allowed = 48 if ticks is steady else 100  # between two readings the rate changes
    assert (events["worker"] == 6).all() and set(events["step"].tolist()) == {1, 2, 3}

    def of(role: Role, record: int, step: int = 2) -> np.void:
        found = events[(events["role"] == role) & (events["record"] == record) & (events["step"] == step)]
        assert len(found) == 1
        return found[0]

    def near(moment: np.uint64, after: float, record: int, step: int = 2) -> bool:
        return abs(int(moment) - EPOCH - step * STEP_NS - (record + 1) * EVERY - after) <= allowed

    for step in (2, 3):  # before the first readings there is only the mean rate
        consumer = of(Role.CONSUMER, 6, step)
        assert near(consumer["start"], 100 - EVERY, 6, step), "when it was done with the record before"
        assert near(consumer["ready"], 2000, 6, step) and near(consumer["first_data"], 2500, 6, step)
        assert near(consumer["published"], 6000, 6, step) and consumer["end"] == 0
        loader, storer = of(Role.LOADER, 6, step), of(Role.STORER, 6, step)
        assert near(loader["ready"], 1500, 6, step) and near(loader["published"], 2000, 6, step)
        assert near(storer["ready"], 5900, 6, step) and near(storer["published"], 6400, 6, step)
        assert near(storer["start"], 6400 - 2 * EVERY, 6, step)
        producer = of(Role.PRODUCER, 6, step)
        assert near(producer["start"], -3000 - 2 * EVERY, 6, step) and near(producer["published"], -3000, 6, step)
        assert producer["ready"] == producer["start"], "it did not wait for room"
        assert near(of(Role.PRODUCER, 8, step)["ready"], -5000, 8, step), "it did"
        assert consumer["node"] == 3 and consumer["tile_begin"] == 0 and consumer["tile_count"] == 4
    assert near(of(Role.CONSUMER, 8)["published"], 5950, 8), "the storer had it before the consumers were done"
    odd = of(Role.CONSUMER, 3)
    assert near(odd["published"], 5500, 3), "who has no storer publishes itself, before it is done"
    assert odd["longest_wait_counter"] == 7 and abs(int(odd["longest_wait"]) - 3000 / 1.9) < 70
    assert of(Role.CONSUMER, 5)["ready"] == 0
    first = of(Role.CONSUMER, 0)
    assert abs(int(first["start"]) - EPOCH - 2 * STEP_NS - 300) <= allowed, "the first record is taken with the header"
    step_event = of(Role.CONTROL, NONE)
    assert step_event["tile_begin"] == 1 and step_event["tile_count"] == 42
    assert abs(int(step_event["published"]) - EPOCH - 3 * STEP_NS + 500) <= allowed
    roles, counts = np.unique(events["role"], return_counts=True)
    assert dict(zip(roles.tolist(), counts.tolist())) == {
        Role.CONSUMER: 3 * RECORDS, Role.PRODUCER: 60, Role.STORER: 60, Role.LOADER: 60, Role.CONTROL: 3,
    }  # fmt: skip


def test_a_step_that_a_fault_cut() -> None:
    events, *_ = events_of_marks(0, queue(), *rings(steady, 3, cut=True))
    last = events[events["step"] == 3]
    step = last[last["role"] == Role.CONTROL][0]
    assert step["published"] == step["longest_wait"] == 0 and step["ready"] > 0
    open_ones = last[(last["record"] == 10)]
    assert {(int(e["role"]), int(e["published"]) == 0) for e in open_ones} == {
        (Role.CONSUMER, True), (Role.LOADER, False), (Role.PRODUCER, False),
    }  # fmt: skip
    assert (events["published"][(events["step"] < 3)] > 0).all()


def test_nothing_recorded() -> None:
    empty = np.zeros(0, TRACE_MARKS.dtype), np.zeros((4, RECORDS + 4), TRACE_PASS.dtype)
    events, drift, lost = events_of_marks(0, queue(), *empty)
    assert len(events) == 0 and drift == 0.0 and lost == 0


def test_a_step_whose_row_a_later_one_has_is_lost_whole() -> None:
    marks, passes = rings(steady, 3)
    passes[1, 0] = 5, 5  # of four rows
    events, _, lost = events_of_marks(0, queue(), marks, passes)
    assert set(events["step"].tolist()) == {2, 3} and lost == RECORDS + 1


def test_what_an_older_step_left_in_a_row_is_of_no_step() -> None:
    marks, passes = rings(steady, 3)
    passes[2, 1 + 7] = 0, steady(STEP_NS // 2) & 0xFFFFFFFF  # record 7 streams nothing in step 2
    assert (events_of_marks(0, queue(), marks, passes)[0] == events_of_marks(0, queue(), *rings(steady, 3))[0]).all()


def test_rings_of_all_workers_side_by_side() -> None:
    """Where the kernel puts an entry (marks_at, passes_row of cuda_trace.cuh). The second worker's ring has turned."""
    workers, steps, before = 2, 3, 100
    manifest = replace(
        fake_program().manifest, backend="cuda", trace=True, workers=workers, queue_length=RECORDS + 3,
    )  # fmt: skip
    memory: dict[str, np.ndarray] = {}

    class Memory(FakeDevice):
        def download(self, buffer: Buffer, offset: int, size: int) -> np.ndarray:
            return memory["all"][offset : offset + size]

    recorder = Recorder(manifest, np.stack([queue()] * workers), Memory(), 1, steps)
    capacity, raw = recorder.capacity, np.zeros(recorder.buffer.bytes, np.uint8)
    row = RECORDS + 4
    marks_at = workers * TRACE_RING.size
    passes_at = marks_at + workers * capacity * TRACE_MARKS.size
    marks, passes = rings(steady, steps)
    for worker in range(workers):
        written = len(marks) + before * worker * capacity
        raw[worker * TRACE_RING.size :][: TRACE_RING.size].view(TRACE_RING.dtype)["written"] = written
        for i, entry in enumerate(marks):
            at = marks_at + (i * workers + worker) * TRACE_MARKS.size
            raw[at : at + TRACE_MARKS.size] = np.frombuffer(entry.tobytes(), np.uint8)
        for step in range(1, steps + 1):
            for record in range(row):
                at = passes_at + ((step % (capacity // row) * row + record) * workers + worker) * TRACE_PASS.size
                raw[at : at + TRACE_PASS.size] = np.frombuffer(passes[step, record].tobytes(), np.uint8)
    memory["all"] = raw
    recording = recorder.read()
    expected = events_of_marks(0, queue(), marks, passes)[0]
    assert len(expected) > 300 and recording.lost == (0, len(marks) + (before - 1) * capacity)
    for worker in range(workers):
        mine = recording.events[recording.events["worker"] == worker]
        assert (mine["published"] == expected["published"]).all() and (mine["record"] == expected["record"]).all()


@pytest.mark.parametrize(
    "values",
    [[], [0], [5, 5, 5], [1, 300, 2], [1 << 40, 0, (1 << 64) - 1], list(range(0, 90_000_000, 1_000_000))],
)
def test_a_packed_column_is_the_column(values: list[int]) -> None:
    column = np.array(values, np.uint64)
    assert (unpack(pack(column), column.dtype) == column).all() and len(unpack(pack(column), column.dtype)) == len(
        column
    )


@pytest.mark.parametrize("text", ["", "i3:AAAA", "i4", "i4:!!", "i4:AAAA", "i2:" + pack(np.arange(3))[3:-4]])
def test_a_damaged_column_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"column|reshape"):
        unpack(text, np.dtype(np.uint32))
