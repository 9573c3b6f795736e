"""The recorded graph of one step: points in time and what each of them came after, so that the step can be computed
again with some of it free.

Every record has five points: start, ready, first data, end, published. Every arc says "not before its source + lag",
with the lag that was recorded; a point is the latest of its arcs. With all lags kept, the recorded times come out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megakernel.report.arrivals import Arrivals
from megakernel.report.steps import Step

START, READY, DATA, END, PUBLISHED = range(5)
ROOT = 0


class Kind(enum.IntEnum):
    """What the time of an arc is."""

    JOIN = 0  # none: several arcs become one
    STEP = 1  # from the end of the step before to a worker's first record
    BETWEEN = 2  # from one record to the next on one row
    COUNTER = 3  # from published to seen, by a counter
    VALUE = 4  # the same, by the elements' values
    INSIDE = 5  # from one role to another within a worker
    DATA = 6  # from ready to first data
    WORK = 7  # from first data to published
    PEER = 8  # from published to seen on another device
    HELD = 9  # the part of reading by which it was slower while values were asked for


HOPS = (Kind.STEP, Kind.BETWEEN, Kind.COUNTER, Kind.VALUE, Kind.INSIDE, Kind.PEER)


@dataclass(frozen=True)
class Arc:
    """`owner`: the event whose time it is, -1 for none."""

    source: int
    lag: int
    kind: Kind
    owner: int


@dataclass(frozen=True)
class StepGraph:
    """`arcs[p]`: what point p came after; points are in an order in which sources come first. `point[i][k]`: the number
    of the k-th point of event i; `event[p]`: the reverse, -1 for points of no event. `late`: edges along which an event
    went on before the publication, as far as clocks can tell: at most the error of their alignment."""

    arrivals: Arrivals
    time: tuple[int, ...]  # ns from the begin of the step
    arcs: tuple[tuple[Arc, ...], ...]
    point: tuple[tuple[int, ...], ...]
    event: tuple[int, ...]
    sink: int
    late: int

    @property
    def step(self) -> Step:
        return self.arrivals.step

    def replay(self, free: Callable[[Arc], bool] = lambda _arc: False) -> list[int]:
        """The time of every point when these arcs take no time. Nothing free: the recorded times."""
        time = [0] * len(self.arcs)
        for p, arcs in enumerate(self.arcs):
            best = 0 if p == ROOT else None
            for arc in arcs:
                at = time[arc.source] + (min(arc.lag, 0) if free(arc) else arc.lag)
                if best is None or at > best:
                    best = at
            assert best is not None  # every point has an arc
            time[p] = best
        return time

    def length(self, free: Callable[[Arc], bool]) -> int:
        """How long the step takes when these arcs take no time."""
        time = self.replay(free)
        return max((time[p[PUBLISHED]] for p in self.point), default=0)

    @cached_property
    def slack(self) -> tuple[int, ...]:
        """For each event by how much it could be published later without making the step longer, ns."""
        latest = [self.time[self.sink]] * len(self.arcs)
        for p in range(len(self.arcs) - 1, -1, -1):
            for arc in self.arcs[p]:
                latest[arc.source] = min(latest[arc.source], latest[p] - arc.lag)
        return tuple(latest[p[PUBLISHED]] - self.time[p[PUBLISHED]] for p in self.point)
