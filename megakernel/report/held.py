"""By how much reading was held back: a producer leaves the bus to values while others' values are asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megakernel.report.arrivals import Arrivals
from megakernel.report.rates import ceiling_of, stream_bytes
from megakernel.report.steps import ROLES
from megakernel.tasks.record import Role
from megakernel.timeline import Timeline

Longs = npt.NDArray[np.int64]


def held_back(timeline: Timeline, seen: Arrivals) -> list[int]:
    """Of each event the ns by which its bytes took longer than at the worker's share of the ceiling, as far as its
    worker asked for values meanwhile. 0 of all but producers, and of one that waited for room in the ring: how much of
    its record it had left is not known."""
    out = np.zeros(len(seen.rows), np.int64)
    role = np.array(seen.rows, np.int64) % ROLES
    worker = np.array(seen.rows, np.int64) // ROLES
    start, ready, end = (seen.events[c].astype(np.int64) for c in ("start", "ready", "published"))
    share = ceiling_of(timeline).gbps / timeline.meta.workers  # bytes a ns
    reading = (role == Role.PRODUCER) & (ready == start) & (share > 0)
    for number in np.unique(worker[reading]).tolist():
        mine = np.flatnonzero(reading & (worker == number))
        asks = np.flatnonzero((worker == number) & (role == Role.LOADER))
        asked = _within(start[asks], ready[asks], end[mine]) - _within(start[asks], ready[asks], start[mine])
        least = np.rint(stream_bytes(timeline, seen.events[mine]) / share).astype(np.int64)
        out[mine] = np.maximum(np.minimum(asked, end[mine] - start[mine] - least), 0)
    held: list[int] = out.tolist()
    return held


def _within(begins: Longs, ends: Longs, times: Longs) -> Longs:
    """How much of the intervals, which follow each other, lies before each time."""
    if not len(begins):
        return np.zeros(len(times), np.int64)
    whole = np.concatenate([[0], np.cumsum(ends - begins)])
    at = np.maximum(np.searchsorted(begins, times, side="right") - 1, 0)
    out: Longs = whole[at] + np.clip(times - begins[at], 0, ends[at] - begins[at])
    return out
