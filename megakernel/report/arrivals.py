"""What the records of one step waited for: along each edge, which publication came last, and from whom."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megakernel.report.steps import ROLES, Step, finish, row_of
from megakernel.tasks.record import Role, TraceFlag
from megakernel.timeline import KINDS, Events, Timeline, looked_along, publishers, waiters

WAITING_ROLES = (Role.WORKER, Role.LOADER, Role.CONSUMER)  # that wait along edges, see `waiters`


@dataclass(frozen=True)
class Source:
    """All publications that an edge is about. `rows`: ascending rows that publish, and of each its last event."""

    rows: tuple[int, ...]
    events: tuple[int, ...]
    times: tuple[int, ...]

    def latest(self, own: int) -> int | None:
        """The event of another row than `own` that published last, None when there is no other."""
        return next((self.events[i] for i in self._last_two if self.rows[i] != own), None)

    @cached_property
    def _last_two(self) -> list[int]:
        return sorted(range(len(self.rows)), key=lambda i: (-self.times[i], i))[:2]


@dataclass(frozen=True)
class Arrival:
    """One edge as one event saw it. `last` published last at `time`, on another row."""

    edge: int  # index into Timeline.edges
    source: int  # index into Arrivals.sources
    last: int
    time: int


@dataclass(frozen=True)
class Arrivals:
    """`events`: the records of the step, sorted by row and start. `of[i]`: what event i waited for, latest first."""

    step: Step
    events: Events
    rows: tuple[int, ...]
    published: tuple[int, ...]
    sources: tuple[Source, ...]
    of: tuple[tuple[Arrival, ...], ...]


def arrivals(timeline: Timeline, step: Step) -> Arrivals:
    """Of a complete step."""
    events = timeline.tasks[timeline.tasks["step"] == step.number]
    events = events[(events["flags"] & TraceFlag.CUT) == 0]
    events = events[np.lexsort((events["start"], row_of(events)))]
    rows = row_of(events).tolist()
    published = finish(events).tolist()
    index = _Index(events, rows, published, publishers(events).tolist())
    waits = waiters(events)
    waiting = [(waits & looked_along(events, kind)).tolist() for kind in range(len(KINDS))]
    found: list[list[Arrival]] = [[] for _ in rows]
    sources: list[Source] = []
    known: dict[tuple[int, int, int], int] = {}
    columns = ("producer", "producer_first", "producer_count", "consumer", "consumer_first", "consumer_count", "kind")
    for number, edge in enumerate(zip(*(timeline.edges[c].tolist() for c in columns))):
        made, used, looks = edge[:3], edge[3:6], waiting[edge[6]]
        if made not in known:
            known[made] = len(sources)
            sources.append(index.source(*made))
        source = sources[known[made]]
        for event in index.overlapping(*used):
            if looks[event]:
                last = source.latest(rows[event])
                if last is not None:
                    found[event].append(Arrival(number, known[made], last, published[last]))
    ordered = tuple(tuple(sorted(f, key=lambda a: -a.time)) for f in found)
    return Arrivals(step, events, tuple(rows), tuple(published), tuple(sources), ordered)


@dataclass
class _Index:
    """Events by node and tile."""

    events: Events
    rows: Sequence[int]
    published: Sequence[int]
    speaks: Sequence[bool]  # is what others wait for
    nodes: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)  # node -> (first, stop, event)
    widest: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = (self.events[c].tolist() for c in ("node", "tile_begin", "tile_count"))
        for event, (node, first, count) in enumerate(zip(*columns)):
            self.nodes.setdefault(node, []).append((first, first + count, event))
            self.widest[node] = max(count, self.widest.get(node, 0))
        for found in self.nodes.values():
            found.sort()

    def overlapping(self, node: int, first: int, count: int) -> list[int]:
        found = self.nodes.get(node, [])
        begin = bisect.bisect_left(found, (first - self.widest.get(node, 0), 0, 0))
        end = bisect.bisect_left(found, (first + count, 0, 0))
        return [event for start, stop, event in found[begin:end] if stop > first and start < first + count]

    def source(self, node: int, first: int, count: int) -> Source:
        """The publishing event of each row."""
        by_record: dict[tuple[int, int], int] = {}  # worker and record -> event
        records = self.events["record"]
        for event in self.overlapping(node, first, count):
            if self.speaks[event]:
                key = (self.rows[event] // ROLES, int(records[event]))
                if key not in by_record or self.published[event] > self.published[by_record[key]]:
                    by_record[key] = event
        by_row: dict[int, int] = {}
        for event in by_record.values():
            row = self.rows[event]
            if row not in by_row or self.published[event] > self.published[by_row[row]]:
                by_row[row] = event
        rows = tuple(sorted(by_row))
        return Source(rows, tuple(by_row[r] for r in rows), tuple(self.published[by_row[r]] for r in rows))
