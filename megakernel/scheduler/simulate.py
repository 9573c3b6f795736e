"""How long a step would take: a model of the machine good enough to compare schedules and to see what waits for what.

A counter takes its signals one after the other, `signal_us` each; a relay reaches the counter above it a hop later.
An entry takes max(its stream bytes / a worker's share of the bandwidth, its flops / a worker's rate) x task_scale +
task_us + overhead_us. A wait is over when the last producer is done, one hop later if that ran on another worker. A
step whose bytes all fit into the cache before the memory is read from there, since each step reads the same. On a
target with shared memory a worker streams ahead into a ring while it waits, as far as the ring and its queue allow.
Every worker begins step_us after the step before ended.

Of several devices one is run: they are alike, so its peers have sent an exchange when it has itself. That takes a
worker its share of link_gbps, and is seen link_us later.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import asdict, dataclass, field, replace

from megakernel.errors import ScheduleError
from megakernel.scheduler.calibration import Calibration
from megakernel.scheduler.exchanges import exchanges_of
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.target import Target

RING_SHARE = 0.85  # of shared memory; the rest holds activations and barriers


@dataclass(frozen=True)
class Span:
    """One entry in time, microseconds from the start of the step. `index` is its place in what the worker ran."""

    worker: int
    index: int
    node: str
    first: int
    count: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step. `floor_us` is the time to stream the step's bytes and do nothing else."""

    policy: str
    target: str
    context: int
    makespan_us: float
    floor_us: float
    stream_bytes: float
    busy_us: tuple[float, ...]
    idle_us: tuple[float, ...]
    spans: tuple[Span, ...]
    critical_path: tuple[Span, ...]

    @property
    def efficiency(self) -> float:
        """The floor as a fraction of the makespan."""
        return self.floor_us / self.makespan_us if self.makespan_us else 1.0

    def to_json(self, *, spans: bool = True) -> str:
        """All fields and `efficiency` as one JSON object; the list of spans may be left out."""
        fields = asdict(self) | {"efficiency": self.efficiency}
        if not spans:
            del fields["spans"]
        return json.dumps(fields)


def simulate(schedule: Schedule, target: Target, context: int, calibration: Calibration | None = None) -> Simulation:
    """Run the schedule for one row with `context` tokens cached. Raises ScheduleError when it deadlocks."""
    return _Run(schedule, target, context, calibration or Calibration()).run()


def share_of_hops(schedule: Schedule, target: Target, context: int, calibration: Calibration | None = None) -> float:
    """The part of a step that goes when every hop, also between devices, and every turn at a counter takes no time."""
    given = calibration or Calibration()
    whole = simulate(schedule, target, context, given).makespan_us
    linked = replace(target, link_us=0.0)
    without = simulate(schedule, linked, context, replace(given, hop_us=0.0, signal_us=0.0)).makespan_us
    return max(0.0, 1 - without / whole) if whole else 0.0


@dataclass
class _Seen:
    """A counter: when its signals arrived, and from whom."""

    signals: int = 0
    ends: list[float] = field(default_factory=list)
    last: tuple[float, int, int] = (0.0, -1, -1)  # end, worker, span
    other: tuple[float, int, int] = (0.0, -1, -1)  # the latest from any worker but the last one's

    def add(self, signal: tuple[float, int, int]) -> None:
        self.signals += 1
        self.ends.append(signal[0])
        if self.signals == 1 or signal[0] >= self.last[0]:
            if signal[1] != self.last[1]:
                self.other = self.last
            self.last = signal
        elif signal[1] != self.last[1] and signal[0] >= self.other[0]:
            self.other = signal

    def queueing(self, signal_us: float) -> float:
        """How long after the last signal was sent all have been taken, one after the other."""
        taken = 0.0
        for end in sorted(self.ends):
            taken = max(taken, end) + signal_us
        return taken - max(self.ends, default=0.0)

    def ready(self, worker: int, hop: float, signal_us: float) -> tuple[float, int]:
        """When that worker sees it complete, and because of which span."""
        late = self.queueing(signal_us) if signal_us else 0.0
        found = [
            (end + late + (hop if who != worker else 0.0), span)
            for end, who, span in (self.last, self.other)
            if who >= 0
        ]
        return max(found, default=(0.0, -1))


@dataclass
class _Worker:
    at: int = 0  # next entry of its queue
    free: float = 0.0
    ring: float = 0.0  # bytes streamed ahead
    ahead: float = 0.0  # bytes of its queue that are not streamed yet
    last: int = -1  # its latest span
    ran: int = 0
    busy: float = 0.0
    taken: Entry | None = None  # a shared entry it holds


class _Run:
    def __init__(self, schedule: Schedule, target: Target, context: int, calibration: Calibration) -> None:
        c = calibration
        self.schedule, self.target, self.context, self.figures = schedule, target, context, c
        self.workers = [
            _Worker(free=c.step_us, ahead=sum(self._bytes(e) for e in q if e.count)) for q in schedule.queues
        ]
        whole = sum(w.ahead for w in self.workers) + sum(map(self._bytes, schedule.shared))
        self.stream_gbps = _pick(c.stream_gbps, _stream_gbps(target, whole, schedule.workers))
        rate = self.stream_gbps / schedule.workers
        self.rate = min(rate, target.worker_gbps or rate) * 1e3  # of a worker, bytes a microsecond
        self.flops = _pick(c.worker_gflops, target.worker_gflops) * 1e3
        self.hop, self.task = _pick(c.hop_us, target.hop_us), _pick(c.task_us, target.task_us)
        self.signal_us = _pick(c.signal_us, target.signal_us)
        self.relays = {r.counter: r.to for r in schedule.relays}
        self.ring = target.shared_bytes * RING_SHARE
        self.needed: dict[int, int] = {}
        for e in [e for queue in schedule.queues for e in queue] + list(schedule.shared):
            if e.signal is not None:
                self.needed[e.signal] = self.needed.get(e.signal, 0) + 1
        for r in schedule.relays:
            self.needed[r.to] = self.needed.get(r.to, 0) + 1
        self.sent: dict[int, int] = {}  # node that sends an exchange -> a counter after the schedule's own
        self.received: dict[int, int] = {}  # node that receives it -> that counter
        for number, ends in enumerate(exchanges_of(schedule.nodes)[0]):
            self.sent[ends.sender] = self.received[ends.receiver] = schedule.counters + number
        for e in (e for queue in schedule.queues for e in queue if e.node in self.sent):
            self.needed[self.sent[e.node]] = self.needed.get(self.sent[e.node], 0) + 1
        self.link_us, self.link_rate = target.link_us, target.link_gbps / schedule.workers * 1e3
        self.counters = [_Seen() for _ in range(schedule.counters + len(self.sent))]
        self.waiting: dict[int, list[int]] = {}  # counter -> workers that sleep on it
        self.queue = {n: [e for e in schedule.shared if e.node == n] for n in schedule.ticketed}
        self.spans: list[Span] = []
        self.cause: list[int] = []  # per span the span that it began after, -1 for none
        self.stream = 0.0

    def run(self) -> Simulation:
        heap = [(0.0, w) for w in range(len(self.workers))]
        while heap:
            _, worker = heapq.heappop(heap)
            for other in self._advance(worker):
                heapq.heappush(heap, (self.workers[other].free, other))
        self._check_done()
        makespan = max((s.end_us for s in self.spans), default=0.0)
        busy = tuple(w.busy for w in self.workers)
        return Simulation(
            policy=self.schedule.policy,
            target=self.target.name,
            context=self.context,
            makespan_us=makespan,
            floor_us=self.stream / self.stream_gbps / 1e3,
            stream_bytes=self.stream,
            busy_us=busy,
            idle_us=tuple(makespan - b for b in busy),
            spans=tuple(self.spans),
            critical_path=self._critical(),
        )

    def _bytes(self, entry: Entry) -> float:
        node = self.schedule.nodes[entry.node]
        return node.task.cost(node, entry.first, entry.count, self.context).stream_bytes

    def _advance(self, index: int) -> list[int]:
        """Run the worker's next entry if it can; the workers that may go on because of it."""
        worker = self.workers[index]
        entry = worker.taken or self._next(worker, index)
        if entry is None:
            return []
        for wait in self._waits(entry):
            if self.counters[wait.counter].signals < self.needed.get(wait.counter, wait.count):
                self.waiting.setdefault(wait.counter, []).append(index)
                return []
        if entry.count:
            self._execute(index, worker, entry)
        elif self.queue[entry.node]:  # a ticket
            worker.taken = self.queue[entry.node].pop(0)
            return [index]
        else:
            worker.at += 1
        woken = [index]
        for counter in (entry.signal, self.sent.get(entry.node)):
            if counter is not None:
                woken += self._signal(counter, (worker.free, index, worker.last))
        return woken

    def _waits(self, entry: Entry) -> tuple[Wait, ...]:
        """Those of the entry, and that for the peers' part of an exchange."""
        received = self.received.get(entry.node)
        return entry.waits if received is None else (*entry.waits, Wait(received, 1))

    def _signal(self, counter: int, signal: tuple[float, int, int]) -> list[int]:
        """A signal that was sent then, by that worker after that span; the workers that may go on because of it."""
        seen = self.counters[counter]
        seen.add(signal)
        if seen.signals < self.needed[counter]:
            return []
        woken = self.waiting.pop(counter, [])
        if counter in self.relays:
            end, who, span = seen.last
            sent = end + seen.queueing(self.signal_us) + self.hop
            woken += self._signal(self.relays[counter], (sent, who, span))
        return woken

    def _next(self, worker: _Worker, index: int) -> Entry | None:
        queue = self.schedule.queues[index]
        return queue[worker.at] if worker.at < len(queue) else None

    def _execute(self, index: int, worker: _Worker, entry: Entry) -> None:
        node = self.schedule.nodes[entry.node]
        cost = node.task.cost(node, entry.first, entry.count, self.context)
        ready = [self.counters[w.counter].ready(index, self.hop, self.signal_us) for w in entry.waits]
        if entry.node in self.received:
            sent = self.counters[self.received[entry.node]].last
            ready.append((sent[0] + self.link_us, sent[2]))
        start, cause = max([(worker.free, worker.last), *ready])
        if worker.taken is not None:
            worker.ahead += cost.stream_bytes
        self._prefetch(worker, start - worker.free)
        missing = max(0.0, cost.stream_bytes - worker.ring)
        sending = cost.link_bytes / self.link_rate if cost.link_bytes else 0.0
        work = max(missing / self.rate, cost.flops / self.flops, sending) * self.figures.scale(node)
        busy = max(0.0, work + self.task + self.figures.overhead(node))
        worker.ring = max(0.0, worker.ring - cost.stream_bytes)
        worker.ahead -= missing
        self._prefetch(worker, busy - missing / self.rate)
        worker.free, worker.busy = start + busy, worker.busy + busy
        self.stream += cost.stream_bytes
        worker.last = len(self.spans)
        self.spans.append(Span(index, worker.ran, node.name, entry.first, entry.count, start, worker.free))
        self.cause.append(cause)
        worker.ran += 1
        if worker.taken is not None:
            worker.taken = None
        else:
            worker.at += 1

    def _prefetch(self, worker: _Worker, time_us: float) -> None:
        """Stream ahead for that long."""
        gain = max(0.0, min(time_us * self.rate, self.ring - worker.ring, worker.ahead))
        worker.ring += gain
        worker.ahead -= gain

    def _critical(self) -> tuple[Span, ...]:
        out: list[Span] = []
        at = max(range(len(self.spans)), key=lambda i: self.spans[i].end_us, default=-1)
        while at >= 0:
            out.append(self.spans[at])
            at = self.cause[at]
        return tuple(reversed(out))

    def _check_done(self) -> None:
        stuck = [
            f"worker {w} stops before entry {self.workers[w].at}"
            for w, queue in enumerate(self.schedule.queues)
            if self.workers[w].at < len(queue)
        ]
        if stuck:
            raise ScheduleError(("simulate: the schedule deadlocks", *stuck))


def _stream_gbps(target: Target, whole: float, workers: int) -> float:
    """Of the nearest memory that holds all that a step streams."""
    if whole <= target.l2_bytes and target.worker_gbps:
        return workers * target.worker_gbps
    return target.cache_gbps if whole <= target.cache_bytes and target.cache_gbps else target.stream_gbps


def _pick(measured: float | None, documented: float) -> float:
    return documented if measured is None else measured
