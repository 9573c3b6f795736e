"""Makes the graph of a recorded step: which point in time came after which, and with what lag."""

from __future__ import annotations

import bisect
import statistics
from dataclasses import dataclass, field

from megakernel.errors import TimelineError
from megakernel.report.arrivals import WAITING_ROLES, Arrivals, Source, arrivals
from megakernel.report.graph import DATA, END, PUBLISHED, READY, ROOT, START, Arc, Kind, StepGraph
from megakernel.report.held import held_back
from megakernel.report.steps import ROLES, Step
from megakernel.tasks.record import Role
from megakernel.timeline import COUNTER, PEER, TIMES, VALUE, Timeline

UPSTREAM = {Role.CONSUMER: (Role.PRODUCER, Role.LOADER), Role.STORER: (Role.CONSUMER,)}  # within one record
KIND_OF_EDGE = {COUNTER: Kind.COUNTER, VALUE: Kind.VALUE, PEER: Kind.PEER}
FEW = 4  # rows of a source that are joined arc by arc


def graph_of(timeline: Timeline, step: Step) -> StepGraph:
    """The graph of a complete step. Raises TimelineError when its times contradict its edges."""
    seen = arrivals(timeline, step)
    return _Builder(timeline, seen).build()


@dataclass
class _Builder:
    timeline: Timeline
    seen: Arrivals
    time: list[int] = field(default_factory=lambda: [0])
    arcs: list[list[Arc]] = field(default_factory=lambda: [[]])
    late: int = 0
    joins: dict[int, _Join] = field(default_factory=dict)
    workers: dict[int, tuple[list[int], list[tuple[int, int]]]] = field(default_factory=dict)

    def build(self) -> StepGraph:
        begin = self.seen.step.begin
        columns = [self.seen.events[c].tolist() for c in TIMES]
        for event in range(len(self.seen.rows)):
            self.time += [columns[k][event] - begin for k in range(5)]
            self.arcs += [[] for _ in range(5)]
        self.partners = self._partners()
        self.hop, self.check = self._usual()
        self.held = held_back(self.timeline, self.seen)
        for event in range(len(self.seen.rows)):
            self._start(event)
            self._ready(event)
            self._data_and_end(event)
        return self._sorted()

    # ------------------------------------------------------------------------------------------ one event
    def _at(self, event: int, point: int) -> int:
        return 1 + 5 * event + point

    def _time(self, event: int, point: int) -> int:
        return self.time[self._at(event, point)]

    def _arc(self, to: int, source: int, lag: int, kind: Kind, owner: int) -> None:
        self.arcs[to].append(Arc(source, lag, kind, owner))

    def _start(self, event: int) -> None:
        follows = event > 0 and self.seen.rows[event - 1] == self.seen.rows[event]
        source = self._at(event - 1, PUBLISHED) if follows else ROOT
        to = self._at(event, START)
        kind = Kind.BETWEEN if follows else Kind.STEP
        self._arc(to, source, self.time[to] - self.time[source], kind, event)

    def _ready(self, event: int) -> None:
        """The latest of start and what it waits for. What came earlier keeps the lag that is usual for it."""
        to, wait = self._at(event, READY), self._time(event, READY) - self._time(event, START)
        found = self.seen.of[event]
        cause = self._cause(event, wait)
        self._arc(to, self._at(event, START), wait if cause is None else min(wait, self.check), Kind.BETWEEN, event)
        if cause is not None and cause[0] >= 0:
            self._arc(to, cause[0], self.time[to] - self.time[cause[0]], cause[1], event)
        for place, a in enumerate(found):
            kind, gap = self._kind(a.edge), self.time[to] - (a.time - self.seen.step.begin)
            if gap < 0:
                self._late(event, a.source, kind, a.time - self.seen.step.begin)
            else:
                lag = gap if cause is not None and place == 0 else min(gap, self.hop[kind])
                for source in self._join(a.source).before(self.seen.rows[event]):
                    self._arc(to, source, lag, kind, event)

    def _cause(self, event: int, wait: int) -> tuple[int, Kind] | None:
        """What a wait was for: None for nothing that is known, point -1 for the latest publication along its edges,
        else the point, and its kind."""
        found = self.seen.of[event]
        if wait <= 0:
            return None
        if not found:
            inside = self._inside(event)
            return None if inside is None else (inside, Kind.INSIDE)
        kind, published = self._kind(found[0].edge), found[0].time - self.seen.step.begin
        if published + self.hop[kind] <= self._time(event, START):
            return None
        if kind == Kind.VALUE and published > self._time(event, READY):  # it needed the first values only
            points = [self._at(found[0].last, k) for k in (START, READY, DATA, END)]
            begun = [p for p in points if self.time[p] < self._time(event, READY)]
            return (begun[-1], kind) if begun else None
        return -1, kind

    def _late(self, event: int, source: int, kind: Kind, published: int) -> None:
        """An event that went on before all of it was published: by value it may, element by element, but not to end."""
        point = END if kind == Kind.VALUE else READY
        to = self._at(event, point)
        if published > self.time[to]:
            self.late += 1
        for p in self._join(source).before(self.seen.rows[event]):
            self._arc(to, p, self.time[to] - published, Kind.WORK if point == END else kind, event)

    def _data_and_end(self, event: int) -> None:
        data, end, published = (self._at(event, k) for k in (DATA, END, PUBLISHED))
        partners = [p for p in self.partners[event] if self.seen.rows[p] % ROLES in self._upstream(event)]
        first = max((self._time(p, DATA) for p in partners), default=0)
        handed = bool(partners) and self._time(event, READY) < first <= self.time[data]
        self._arc(
            data, self._at(event, READY), 0 if handed else self.time[data] - self._time(event, READY), Kind.DATA, event
        )
        self._work(event, data, end)
        for p in partners:
            if self._time(p, DATA) <= self.time[data]:
                self._arc(data, self._at(p, DATA), self.time[data] - first if handed else 0, Kind.INSIDE, event)
            if self._time(p, END) <= self.time[end]:
                self._arc(end, self._at(p, END), self.time[end] - self._time(p, END), Kind.WORK, event)
        self._arc(published, end, self.time[published] - self.time[end], Kind.WORK, event)

    def _work(self, event: int, data: int, end: int) -> None:
        took, held = self.time[end] - self.time[data], self.held[event]
        if held:  # a point between, so that each part has its own arc
            self.time.append(self.time[end] - held)
            self.arcs.append([Arc(data, took - held, Kind.WORK, event)])
            self._arc(end, len(self.time) - 1, held, Kind.HELD, event)
        else:
            self._arc(end, data, took, Kind.WORK, event)

    # ------------------------------------------------------------------------------------------ helpers
    def _kind(self, edge: int) -> Kind:
        return KIND_OF_EDGE[int(self.timeline.edges["kind"][edge])]

    def _upstream(self, event: int) -> tuple[Role, ...]:
        return UPSTREAM.get(Role(self.seen.rows[event] % ROLES), ())

    def _partners(self) -> list[list[int]]:
        """For each event the events of the same record on the same worker."""
        records = self.seen.events["record"].tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for event, row in enumerate(self.seen.rows):
            groups.setdefault((row // ROLES, records[event]), []).append(event)
        return [groups[row // ROLES, records[event]] for event, row in enumerate(self.seen.rows)]

    def _usual(self) -> tuple[dict[Kind, int], int]:
        """Of each kind the median time from published to seen where that was waited for, and the median time that it
        takes to find that there is nothing to wait for."""
        hops: dict[Kind, list[int]] = {kind: [] for kind in KIND_OF_EDGE.values()}
        begin = self.seen.step.begin
        checks = []
        for event, found in enumerate(self.seen.of):
            start, ready = self._time(event, START), self._time(event, READY)
            if found and start < found[0].time - begin <= ready:
                hops[self._kind(found[0].edge)].append(ready - (found[0].time - begin))
        usual = {kind: round(statistics.median(values)) if values else 0 for kind, values in hops.items()}
        for event, found in enumerate(self.seen.of):
            start, ready = self._time(event, START), self._time(event, READY)
            if found and found[0].time - begin + usual[self._kind(found[0].edge)] <= start:
                checks.append(ready - start)
        return usual, round(statistics.median(checks)) if checks else 0

    def _inside(self, event: int) -> int | None:
        """The point of another role of the same worker that a wait was for: the record's own upstream role, else the
        record that the roles behind were at; of a producer, that the consumers were at."""
        row, ready = self.seen.rows[event], self._time(event, READY)
        upstream = self._upstream(event)
        if row % ROLES in WAITING_ROLES:
            upstream = tuple(role for role in upstream if role == Role.LOADER)
        mine = [p for p in self.partners[event] if self.seen.rows[p] % ROLES in upstream]
        if row % ROLES in WAITING_ROLES and not mine:
            return None
        if mine:
            points = [self._at(e, k) for e in mine for k in (START, DATA, PUBLISHED)]
            return max((p for p in points if self.time[p] < ready), key=lambda p: (self.time[p], p), default=None)
        times, found = self._of_worker(row // ROLES)
        room = row % ROLES == Role.PRODUCER  # which consumers give back
        for place in range(bisect.bisect_left(times, ready) - 1, -1, -1):
            other = found[place][1]
            if other != row and (not room or other % ROLES == Role.CONSUMER):
                return found[place][0]
        return None

    def _of_worker(self, worker: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Times, and (point, row), of all points of a worker in order of time."""
        if worker not in self.workers:
            found = sorted(
                (self._time(e, k), self._at(e, k), r)
                for e, r in enumerate(self.seen.rows) if r // ROLES == worker for k in (START, DATA, PUBLISHED)
            )  # fmt: skip
            self.workers[worker] = [t for t, _, _ in found], [(p, r) for _, p, r in found]
        return self.workers[worker]

    def _join(self, source: int) -> _Join:
        if source not in self.joins:
            self.joins[source] = _Join(self, self.seen.sources[source])
        return self.joins[source]

    def new_point(self, sources: list[int]) -> int:
        """A point at the latest of others."""
        self.time.append(max(self.time[s] for s in sources))
        self.arcs.append([Arc(s, 0, Kind.JOIN, -1) for s in sources])
        return len(self.time) - 1

    def published_point(self, event: int) -> int:
        return self._at(event, PUBLISHED)

    def _sorted(self) -> StepGraph:
        """Points renumbered so that sources come first."""
        after: list[list[int]] = [[] for _ in self.arcs]
        missing = [len(arcs) for arcs in self.arcs]
        for p, arcs in enumerate(self.arcs):
            for arc in arcs:
                after[arc.source].append(p)
        order, number = [ROOT], [-1] * len(self.arcs)
        for at in order:  # grows as it is walked
            for p in after[at]:
                missing[p] -= 1
                if not missing[p]:
                    order.append(p)
        if len(order) < len(self.arcs):
            raise TimelineError(
                f"step {self.seen.step.number}: {len(self.arcs) - len(order)} points in time wait for each other; "
                "its edges are not those of the schedule that ran. Record it again"
            )
        for place, p in enumerate(order):
            number[p] = place
        count = len(self.seen.rows)
        point = tuple(tuple(number[self._at(e, k)] for k in range(5)) for e in range(count))
        event = [-1] * len(order)
        for e, points in enumerate(point):
            for p in points:
                event[p] = e
        sorted_arcs = tuple(tuple(Arc(number[a.source], a.lag, a.kind, a.owner) for a in self.arcs[p]) for p in order)
        time = tuple(self.time[p] for p in order)
        sink = max((p[PUBLISHED] for p in point), key=lambda p: (time[p], -p), default=ROOT)
        return StepGraph(self.seen, time, sorted_arcs, point, tuple(event), sink, self.late)


class _Join:
    """The latest publication of a source's rows but one, as points of a graph. Many rows are joined in chains from both
    ends, so that leaving out any of them takes two arcs."""

    def __init__(self, graph: _Builder, source: Source) -> None:
        self._rows = source.rows
        self._points = [graph.published_point(e) for e in source.events]
        self._from_left: list[int] = []
        self._from_right: list[int] = []
        if len(self._points) > FEW:
            self._from_left = self._chain(graph, self._points)
            self._from_right = self._chain(graph, self._points[::-1])[::-1]

    @staticmethod
    def _chain(graph: _Builder, points: list[int]) -> list[int]:
        out = [points[0]]
        for p in points[1:]:
            out.append(graph.new_point([out[-1], p]))
        return out

    def before(self, own: int) -> list[int]:
        """Points whose latest is that of all rows but `own`."""
        if not self._from_left:
            return [p for row, p in zip(self._rows, self._points) if row != own]
        if own not in self._rows:
            return [self._from_left[-1]]
        at = self._rows.index(own)
        return [*self._from_left[:at][-1:], *self._from_right[at + 1 :][:1]]
