"""Fits the figures of `simulate` to a timeline, and says how near its prediction comes.

Everything is a median over steps, so that a step which something else disturbed does not move it. Of a node the slowest
worker counts: the others wait for it. An operator that reads or computes gets a factor on that time, one that does
neither a time by itself.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megakernel.errors import TimelineError
from megakernel.report.arrivals import arrivals
from megakernel.report.hops import HEADER, hops
from megakernel.report.rates import stream_bytes, streaming
from megakernel.report.rebuild import schedule_of
from megakernel.report.steps import Step, alike, finish, row_of, steps_of, typical
from megakernel.scheduler.calibration import Calibration
from megakernel.scheduler.simulate import Simulation, simulate
from megakernel.target import Target, find_target
from megakernel.tasks.record import Role
from megakernel.timeline import KINDS, PEER, Events, Timeline

HOP_STEPS = 16  # steps whose edges are looked at
ROUNDS = 4  # of simulating and fitting, where it streams ahead
LEAST_STEPS = 4  # to fit to some and compare with others

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OperatorTimes:
    """Microseconds of one step: of each node the slowest worker's, with the time between two records."""

    operator: str
    measured_us: float
    predicted_us: float

    @property
    def difference_us(self) -> float:
        return self.predicted_us - self.measured_us


@dataclass(frozen=True)
class Prediction:
    """A step of the timeline as measured (median of the steps that nothing was fitted to) and as simulated: with
    figures fitted to the other steps, and with those of the target. `operators`: the one that differs most first."""

    target: str
    steps: int
    measured_us: float
    predicted_us: float
    target_us: float
    operators: tuple[OperatorTimes, ...]

    @property
    def error(self) -> float:
        """Of the prediction, as a fraction of the measured step."""
        return self.predicted_us / self.measured_us - 1 if self.measured_us else 0.0


def calibrate(timeline: Timeline, steps: Sequence[Step] | None = None) -> Calibration:
    """The figures that this timeline shows. Raises TimelineError when it has no complete step."""
    chosen = tuple(steps if steps is not None else alike(steps_of(timeline)))
    typical(chosen)  # there is one
    target = _target(timeline)
    events = _working(timeline, chosen)
    gbps = _stream_gbps(timeline, chosen)
    task_us = _median(_between(events)) / 1e3
    rate, flops = (
        (gbps or target.stream_gbps) / target.workers,
        max(target.worker_gflops, _best_gflops(timeline, events)),
    )
    work = np.maximum(stream_bytes(timeline, events) / rate, _flops(timeline, events) / flops)
    spent, worked = _slowest(timeline, events, chosen, _spent(events)), _slowest(timeline, events, chosen, work)
    scale: dict[str, float] = {}
    overhead: dict[str, float] = {}
    for names in ([n.task for n in timeline.nodes], [n.operator for n in timeline.nodes]):
        for name in dict.fromkeys(names):
            mine = np.array(names) == name
            took, ideal = float(np.median(spent[:, mine].sum(1))), float(np.median(worked[:, mine].sum(1)))
            if ideal > took / 10:
                scale[name] = took / ideal
            else:
                scale[name], overhead[name] = 0.0, took / int(mine.sum()) / 1e3
    near = sorted(chosen, key=lambda s: abs(s.length - typical(chosen).length))[:HOP_STEPS]
    seen = hops(timeline, [arrivals(timeline, s) for s in near], chosen)
    found = [h for h in seen if h.ns and h.kind not in (HEADER, KINDS[PEER])]
    hop = max(found, key=lambda h: len(h.ns)).median if found else None  # of the kind that most wait by
    made = Calibration(
        target=target.name, stream_gbps=gbps, worker_gflops=flops, hop_us=None if hop is None else max(0.0, hop) / 1e3,
        signal_us=0.0,  # turns at a counter are part of the hops
        task_us=max(0.0, task_us), step_us=_step_us(events, chosen), task_scale=scale, overhead_us=overhead,
        source=f"{timeline.meta.program} on {timeline.meta.device}, {len(chosen)} steps"
        + (f" of {chosen[0].rows} rows" if chosen[0].rows > 1 else ""),
    )  # fmt: skip
    return made if timeline.meta.roles == ("worker",) else _streamed_ahead(timeline, chosen, made)


def _streamed_ahead(timeline: Timeline, steps: Sequence[Step], figures: Calibration) -> Calibration:
    """Where a producer streams ahead, an entry's time is not that of its bytes: some are there when it begins. How many
    `simulate` knows; what its entries lack then to the measured ones is their overhead."""
    target, schedule = _target(timeline), schedule_of(timeline, typical(steps))
    measured = _measured(timeline, steps)
    count = Counter(n.operator for n in timeline.nodes)
    for _ in range(ROUNDS):
        said = _predicted(timeline, simulate(schedule, target, timeline.meta.context, figures))
        overhead = {
            name: figures.overhead_us.get(name, 0.0) + (us - said.get(name, 0.0)) / count[name]
            for name, us in measured.items()
        }
        figures = replace(figures, overhead_us={**figures.overhead_us, **overhead})
    return figures


def _predicted(timeline: Timeline, said: Simulation) -> dict[str, float]:
    """Of each operator its nodes' longest spans together, microseconds."""
    slowest: dict[str, float] = {}  # node -> its longest span
    for span in said.spans:
        slowest[span.node] = max(span.end_us - span.start_us, slowest.get(span.node, 0.0))
    out: dict[str, float] = {}
    for node in timeline.nodes:
        out[node.operator] = out.get(node.operator, 0.0) + slowest.get(node.name, 0.0)
    return out


def predict(timeline: Timeline, given: Calibration | None = None) -> Prediction:
    """How near `simulate` comes to this timeline: with `given` figures, or with those fitted to every other step.

    Raises TimelineError when there are too few steps for that."""
    steps = alike(steps_of(timeline))
    if given is None and len(steps) < LEAST_STEPS:
        raise TimelineError(
            f"the timeline has {len(steps)} complete steps of one kind; a prediction needs at least {LEAST_STEPS}, one "
            "half to fit to and one to compare with: record more steps"
        )
    shown = steps if given else steps[1::2]
    figures = given or calibrate(timeline, steps[::2])
    target, made = _target(timeline), schedule_of(timeline, typical(shown))
    figures.check_target(target.name)
    said = simulate(made, target, timeline.meta.context, figures)
    bare = simulate(made, target, timeline.meta.context)
    predicted = _predicted(timeline, said)
    measured = _measured(timeline, shown)
    rows = [OperatorTimes(name, us, predicted.get(name, 0.0)) for name, us in measured.items()]
    return Prediction(
        target.name, len(shown), statistics.median(s.length for s in shown) / 1e3, said.makespan_us, bare.makespan_us,
        tuple(sorted(rows, key=lambda r: (-abs(r.difference_us), r.operator))),
    )  # fmt: skip


def _measured(timeline: Timeline, steps: Sequence[Step]) -> dict[str, float]:
    """Of each operator the median over steps of its nodes' slowest records together, microseconds."""
    events = _working(timeline, steps)
    spent = _slowest(timeline, events, steps, _spent(events) + _median(_between(events)))
    names = [n.operator for n in timeline.nodes]
    return {name: float(np.median(spent[:, np.array(names) == name].sum(1))) / 1e3 for name in dict.fromkeys(names)}


def _slowest(timeline: Timeline, events: Events, steps: Sequence[Step], values: Floats) -> Floats:
    """[steps, nodes]: the largest value of any worker; several records of a node on one worker are added up."""
    workers, nodes = timeline.meta.workers, len(timeline.nodes)
    place = np.searchsorted([s.number for s in steps], events["step"])
    sums = np.zeros((len(steps), nodes, workers))
    np.add.at(sums, (place, events["node"], events["worker"]), values)
    out: Floats = sums.max(2)
    return out


def _target(timeline: Timeline) -> Target:
    return find_target(timeline.meta.target).with_workers(timeline.meta.workers)


def _working(timeline: Timeline, steps: Sequence[Step]) -> Events:
    """One event for each record and step, in order of row and start: of several roles the consumer's, from when the
    loader has seen what it waits for until the last of them has published."""
    events = timeline.tasks
    events = events[np.isin(events["step"], [s.number for s in steps])]
    if timeline.meta.roles != ("worker",):
        events = events[events["role"] != Role.PRODUCER]
        keys = [events[c] for c in ("tile_begin", "record", "step", "worker")]
        order = np.lexsort([finish(events), *keys])
        events = events[order]
        same = np.logical_and.reduce([np.diff(k[order].astype(np.int64)) == 0 for k in keys])
        group = np.concatenate(([0], np.cumsum(~same)))
        last = np.zeros(int(group[-1]) + 1 if len(events) else 0, np.int64)
        np.maximum.at(last, group, finish(events))
        loaders, consumers = events["role"] == Role.LOADER, events["role"] == Role.CONSUMER
        seen = np.full(len(last), np.iinfo(np.uint64).max, np.uint64)
        np.minimum.at(seen, group[loaders], events["ready"][loaders])
        events, group = events[consumers].copy(), group[consumers]
        events["published"], events["ready"] = last[group], np.minimum(seen[group], events["ready"])
    kept: Events = events[np.lexsort((events["start"], row_of(events)))]
    return kept


def _spent(events: Events) -> Floats:
    return (finish(events) - events["ready"].astype(np.int64)).astype(np.float64)


def _between(events: Events) -> Floats:
    """From one record to the next of a row, ns."""
    row, done = row_of(events), finish(events)
    follows = (np.diff(row) == 0) & (np.diff(events["step"].astype(np.int64)) == 0)
    gap: Floats = (events["start"][1:].astype(np.int64) - done[:-1])[follows].astype(np.float64)
    return gap


def _stream_gbps(timeline: Timeline, steps: Sequence[Step]) -> float | None:
    """If all workers read all the time as they do while they run what reads most."""
    events = streaming(timeline)
    events = events[np.isin(events["step"], [s.number for s in steps])]
    nbytes, spent = stream_bytes(timeline, events), _spent(events)
    by_node = np.bincount(events["node"], nbytes, len(timeline.nodes))
    operators = np.array([n.operator for n in timeline.nodes])
    most = max(set(operators.tolist()), key=lambda o: (by_node[operators == o].sum(), o))
    mine = np.isin(events["node"], np.flatnonzero(operators == most)) & (spent > 0)
    if not mine.any() or not by_node.any():
        return None
    return _median(nbytes[mine] / spent[mine]) * timeline.meta.workers


def _best_gflops(timeline: Timeline, events: Events) -> float:
    spent, flops = _spent(events), _flops(timeline, events)
    rates = [
        _median(flops[mine] / np.maximum(spent[mine], 1.0))
        for node in range(len(timeline.nodes))
        for mine in [events["node"] == node]
        if mine.any()
    ]
    return max(rates, default=0.0)


def _flops(timeline: Timeline, events: Events) -> Floats:
    per_tile = np.array([n.flops / max(1, n.tiles) for n in timeline.nodes])
    out: Floats = per_tile[events["node"]] * events["tile_count"]
    return out


def _step_us(events: Events, steps: Sequence[Step]) -> float:
    """From the end of a step until a worker begins its first record of the next."""
    begin = {s.number: s.begin for s in steps}
    key = row_of(events) * (1 << 32) + events["step"]
    _, first = np.unique(key, return_index=True)
    late = [int(events["start"][i]) - begin[int(events["step"][i])] for i in first]
    return max(0.0, float(np.median(late))) / 1e3 if late else 0.0


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else 0.0
