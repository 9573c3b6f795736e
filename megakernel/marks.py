"""From the marks of workers whose roles run side by side (TraceMarks, TraceStep, TracePass) to an event of each role.

A mark is the low half of its worker's ticks; the step's own ticks, which are whole, are less than half a turn away. A
role takes its next record when it is done with the one before, so that moment is recorded once.

Workers tick at rates of their own that change within a step. So with each record comes a reading of the clock that all
workers share beside their ticks, and from reading to reading time runs straight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.tasks.record import NONE, OPCODE_END, TRACE_EVENT, TRACE_MARKS, TRACE_STEP, WAIT_TICKS, Role

Table = npt.NDArray[Any]  # structured
Ticks = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float64]
TIMES = ("start", "ready", "first_data", "end", "published")
HALF = 0xFFFF


@dataclass(frozen=True)
class Clock:
    """Readings of a worker, ascending: its ticks, and nanoseconds of the shared clock since `origin`. `drift_ns`: how
    far they are from a straight line."""

    ticks: Reals
    ns: Reals
    origin: int
    rate: float  # ns a tick
    drift_ns: float

    @staticmethod
    def of(steps: Table, records: Table) -> Clock:
        """`steps`: at least one, ascending."""
        origin, first = int(steps["clock_ns"].min()), int(steps["clock"].min())
        at, told = steps[np.searchsorted(steps["step"], records["step"])], steps[steps["end"] != 0]
        of = np.concatenate([at, told])
        clock = np.concatenate([records["clock"], told["told"]])
        clock_ns = np.concatenate([records["clock_ns"], told["told_ns"]])
        ticks = np.concatenate([steps["clock"], _whole(clock, of["clock"])])
        ns = np.concatenate([steps["clock_ns"], of["clock_ns"] + _apart(clock_ns, of["clock_ns"])])
        order = np.argsort(ticks, kind="stable")
        x = (ticks[order].astype(np.int64) - first).astype(np.float64)
        y = (ns[order].astype(np.int64) - origin).astype(np.float64)
        apart, took = x[-1] - x[0], y[-1] - y[0]
        rate = float(took / apart) if apart > 0 and took > 0 else 1.0
        return Clock(x + first, y, origin, rate, float(np.abs(y - y[0] - (x - x[0]) * rate).max()))

    def at(self, ticks: Ticks) -> Ticks:
        """Nanoseconds of the shared clock; 0 stays 0. Outside of the readings at the mean rate."""
        x = ticks.astype(np.float64)
        beside = np.clip(x, self.ticks[0], self.ticks[-1])
        ns = np.interp(beside, self.ticks, self.ns) + (x - beside) * self.rate
        out: Ticks = np.where(ticks == 0, 0, self.origin + np.rint(ns).astype(np.int64)).astype(np.uint64)
        return out


def events_of_marks(worker: int, queue: Table, marks: Table, passes: Table) -> tuple[Table, float, int]:
    """Events of one worker as TRACE_EVENT, in nanoseconds of the shared clock, and the drift of its own. `queue`: its
    records; `marks`: as its ring holds them, oldest first; `passes` [steps, 1 + records]: of its producer. What belongs
    to no step that the worker has begun is left out; and what belongs to one whose row another step has, which is how
    many marks the last value says."""
    kept = ~_overtaken(marks["step"], passes)
    lost = int(len(marks) - kept.sum())
    # As bytes: a structure's copy may leave its padding out.
    raw = np.ascontiguousarray(marks).view(np.uint8).reshape(len(marks), TRACE_STEP.size)[kept]
    marks = raw.reshape(-1).view(TRACE_MARKS.dtype)
    is_step = marks["record"] == NONE
    steps = raw[is_step].reshape(-1).view(TRACE_STEP.dtype)
    steps = steps[np.argsort(steps["step"], kind="stable")]
    if not len(steps):
        return _empty(0, Role.CONTROL), 0.0, lost
    ends = queue["opcode"] == OPCODE_END
    count = int(np.argmax(ends)) if ends.any() else len(queue)
    records = marks[~is_step & np.isin(marks["step"], steps["step"])]
    records = records[np.lexsort((records["record"], records["step"]))]
    clock = Clock.of(steps, records)
    records = records[records["record"] < count]
    out = np.concatenate([*_roles(queue, records, steps), _producer(queue[:count], passes, steps)])
    for name in TIMES:
        out[name] = clock.at(out[name])
    out["longest_wait"] = np.rint(out["longest_wait"] * clock.rate)
    out = np.concatenate([_steps(steps, clock), out])
    out["worker"] = worker
    return out, clock.drift_ns, lost


def _steps(steps: Table, clock: Clock) -> Table:
    out = _empty(len(steps), Role.CONTROL)
    out["record"] = out["node"] = NONE
    out["tile_begin"], out["tile_count"], out["step"] = steps["rows"], steps["context"], steps["step"]
    out["start"], out["ready"], end = (clock.at(steps[n]) for n in ("start", "ready", "end"))
    out["first_data"], out["end"], out["published"], out["longest_wait"] = out["ready"], end, end, end
    return out


def _roles(queue: Table, records: Table, steps: Table) -> tuple[Table, Table, Table]:
    """Consumers, storer and loader of every record."""
    at = np.searchsorted(steps["step"], records["step"])
    base, begin = steps["clock"][at], steps["ready"][at]
    ready, data, done, seen, sums, out = (
        _whole(records[n], base) for n in ("ready", "data", "done", "seen", "sums", "out")
    )
    stored, loaded = sums != 0, seen != 0
    length = (records["wait"].astype(np.uint64) >> np.uint64(16)) * np.uint64(WAIT_TICKS) + np.uint64(WAIT_TICKS // 2)
    length[records["wait"] == 0] = 0  # else it looked, and of what a unit cannot tell half a one is the mean
    counter = np.where(records["wait"] & HALF == HALF, NONE, records["wait"] & HALF)

    consumers = _of_records(queue, records, Role.CONSUMER)
    consumers["start"] = _before(done, begin)
    consumers["ready"], consumers["first_data"] = ready, data
    # What a storer publishes it has been handed before, if only a moment before they were done.
    consumers["published"] = np.where((out != 0) & (done != 0), np.where(stored, np.minimum(done, out), out), done)

    storer = _of_records(queue, records, Role.STORER)
    storer["ready"], storer["published"] = sums, np.where(done != 0, out, 0)
    storer["start"] = _before(np.where(stored, out, 0), begin)

    loader = _of_records(queue, records, Role.LOADER)
    lent = np.where(ready != 0, np.maximum(ready, seen), 0)
    loader["ready"], loader["published"] = seen, lent
    loader["start"] = _before(np.where(loaded, lent, 0), begin)
    for table, mine in ((consumers, ~loaded), (loader, loaded)):
        waited = mine & (length != 0)
        table["longest_wait"][waited], table["longest_wait_counter"][waited] = length[waited], counter[waited]
    return consumers, storer[stored], loader[loaded]


def _overtaken(steps: npt.NDArray[np.uint32], passes: Table) -> npt.NDArray[np.bool_]:
    """Whether the place of each step's row has a later one."""
    if not len(passes):
        return np.zeros(len(steps), np.bool_)
    there = passes["room"][steps % np.uint32(len(passes)), 0]
    out: npt.NDArray[np.bool_] = (there - steps).view(np.int32) > 0
    return out


def _producer(queue: Table, passes: Table, steps: Table) -> Table:
    """It waits for nothing but room in the ring: until it last got some that was not there when it came."""
    number, again = passes["room"][:, 0], passes["done"][:, 0]
    rows = passes[(number == again) & np.isin(number, steps["step"]) & (number != 0)]
    rows = rows[np.argsort(rows["done"][:, 0], kind="stable")]
    place, record = np.nonzero(rows["done"][:, 1 : len(queue) + 1])
    at = np.searchsorted(steps["step"], rows["done"][place, 0])
    done, room = (_whole(rows[n][place, record + 1], steps["clock"][at]) for n in ("done", "room"))
    # It is a step ahead at most; what is older is of a step whose place this one has, and in which it copied it.
    begin = steps["start"] - (steps["clock"] - steps["start"])
    begin[1:] = steps["start"][:-1]
    fresh = done >= begin[at]
    out = _empty(int(fresh.sum()), Role.PRODUCER)
    done, room, record, at = done[fresh], room[fresh], record[fresh], at[fresh]
    out["record"], out["step"] = record, steps["step"][at]
    for name in ("node", "tile_begin", "tile_count"):
        out[name] = queue[name][record]
    out["start"][1:] = done[:-1]
    out["start"][:1] = np.minimum(done[:1], steps["start"][at[:1]])
    # The first of a step may be the first of a launch, before which there was nothing.
    first = np.flatnonzero(np.diff(at, prepend=-1))
    out["start"][first] = np.minimum(np.maximum(out["start"][first], steps["start"][at[first]]), done[first])
    out["ready"] = np.where((room > out["start"]) & (room <= done), room, out["start"])
    out["published"] = done
    return out


# ---------------------------------------------------------------------------------------------- columns
def _empty(count: int, role: Role) -> Table:
    out = np.zeros(count, TRACE_EVENT.dtype)
    out["role"], out["longest_wait_counter"] = role, NONE
    return out


def _of_records(queue: Table, marks: Table, role: Role) -> Table:
    out = _empty(len(marks), role)
    entry = queue[marks["record"]]
    out["record"], out["step"] = marks["record"], marks["step"]
    for name in ("node", "tile_begin", "tile_count"):
        out[name] = entry[name]
    return out


def _whole(low: npt.NDArray[np.uint32], base: Ticks) -> Ticks:
    """Ticks with these low halves next to `base`; 0 stays 0."""
    out: Ticks = np.where(low == 0, 0, base + _apart(low, base))
    return out


def _apart(low: npt.NDArray[np.uint32], base: Ticks) -> Ticks:
    """By how much what has this low half is after `base`, modulo 2**64."""
    near: npt.NDArray[np.int32] = (low - base.astype(np.uint32)).view(np.int32)
    return near.astype(np.int64).view(np.uint64)


def _before(moment: Ticks, begin: Ticks) -> Ticks:
    """For each record the last such moment before it, or when its step began."""
    if not len(moment):
        return begin
    out: Ticks = np.maximum(np.concatenate([begin[:1], np.maximum.accumulate(moment)[:-1]]), begin)
    return out
