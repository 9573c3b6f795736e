"""Steps of a timeline as intervals of time, and the rows of its picture.

A step ends when its last record is published and begins where the one before ended. Where that one is not there, or
the kernel was launched in between, it begins when the first worker began to wait for its header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.errors import TimelineError
from megakernel.tasks.record import Role
from megakernel.timeline import TIMES, Events, Timeline

ROLES = 8  # more than there are; a row is worker * ROLES + role


@dataclass(frozen=True)
class Step:
    """A step in which nothing is missing, begin and end in ns. `rows` computed, longest `context`; 0 if unknown."""

    number: int
    begin: int
    end: int
    rows: int = 0
    context: int = 0

    @property
    def length(self) -> int:
        return self.end - self.begin


def steps_of(timeline: Timeline) -> tuple[Step, ...]:
    """Every complete step, ascending. Intervals do not overlap."""
    ends: dict[int, int] = {}
    begins: dict[int, int] = {}
    shape: dict[int, tuple[int, int]] = {}
    tasks, whole = timeline.tasks, timeline.worker_steps
    for number, end, start in zip(tasks["step"].tolist(), finish(tasks).tolist(), tasks["start"].tolist()):
        ends[number] = max(end, ends.get(number, 0))
        begins[number] = min(start, begins.get(number, start))
    for e in whole:
        number = int(e["step"])
        begins[number] = min(int(e["start"]), begins.get(number, int(e["start"])))
        shape[number] = (int(e["tile_begin"]), int(e["tile_count"]))
    return tuple(
        Step(n, max(begins[n], ends.get(n - 1, 0)), ends[n], *shape.get(n, (0, 0)))
        for n in timeline.complete_steps
        if n in ends
    )


def alike(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Those that compute the commonest number of rows: prompts and decoding are not averaged."""
    if not steps:
        return ()
    rows = Counter(s.rows for s in steps).most_common(1)[0][0]
    return tuple(s for s in steps if s.rows == rows)


def typical(steps: Sequence[Step]) -> Step:
    """The step of median length, the earlier of two. Raises TimelineError when there is none."""
    if not steps:
        raise TimelineError("this timeline has no complete step, so nothing can be said of one; record more steps")
    ordered = sorted(steps, key=lambda s: (s.length, s.number))
    return ordered[(len(ordered) - 1) // 2]


def finish(events: Events) -> npt.NDArray[np.int64]:
    """When each event was over; for one that was cut, the last time it has."""
    last: npt.NDArray[np.int64] = np.maximum.reduce([events[c].astype(np.int64) for c in TIMES])
    return last


def row_of(events: Events) -> npt.NDArray[np.int64]:
    """One number for each worker and role."""
    row: npt.NDArray[np.int64] = events["worker"].astype(np.int64) * ROLES + events["role"]
    return row


def row_names(timeline: Timeline) -> dict[int, str]:
    """Every worker and role that ran a record, in order: "worker 3" or "worker 3 consumer"."""
    rows = np.unique(row_of(timeline.tasks)).tolist()
    alone = {Role.WORKER}
    return {
        r: f"worker {r // ROLES}" + ("" if r % ROLES in alone else f" {Role(r % ROLES).name.lower()}") for r in rows
    }
