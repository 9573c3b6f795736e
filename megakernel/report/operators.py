"""Each operator by itself: how evenly its workers finish, and how near it comes to what the machine can do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megakernel.report.rates import reading_time, streaming
from megakernel.report.steps import Step, finish
from megakernel.target import TARGETS
from megakernel.tasks.record import Role, TraceFlag
from megakernel.timeline import Events, Timeline


@dataclass(frozen=True)
class Imbalance:
    """Of an operator: medians over its nodes and steps, ns. `first`, `last`: when the first and the last worker was
    done, from when the first could begin (was ready). `busiest`: the longest work over the mean of the workers."""

    operator: str
    samples: int
    workers: float
    first: float
    last: float
    busiest: float

    @property
    def spread(self) -> float:
        return self.last - self.first


@dataclass(frozen=True)
class Roof:
    """What an operator reaches while it runs. `intensity`: operations per byte of weights and KV; `gbps`, `gflops`: if
    all workers went on as those that ran it did; `share`: of the time of all rows."""

    operator: str
    intensity: float
    gbps: float
    gflops: float
    share: float


@dataclass(frozen=True)
class Roofline:
    """`ceiling_gflops` of all workers; 0: unknown."""

    operators: tuple[Roof, ...]
    ceiling_gflops: float


def imbalance(timeline: Timeline, steps: Sequence[Step]) -> tuple[Imbalance, ...]:
    """Operators in order of their nodes; those that only one worker runs are left out."""
    events = _of(timeline.tasks, steps)
    events = events[(events["role"] != Role.PRODUCER) & ((events["flags"] & TraceFlag.SKIPPED) == 0)]
    found: dict[str, list[tuple[int, int, int, float]]] = {}
    order = np.lexsort((events["node"], events["step"]))
    events = events[order]
    borders = np.flatnonzero(np.diff(events["step"].astype(np.int64) * (len(timeline.nodes) + 1) + events["node"])) + 1
    for group in np.split(events, borders):
        workers = np.unique(group["worker"])
        if len(workers) < 2:
            continue
        done, begin = finish(group), int(group["ready"].min())
        last = np.array([done[group["worker"] == w].max() for w in workers])
        work = np.array([(done - group["ready"].astype(np.int64))[group["worker"] == w].sum() for w in workers])
        ratio = float(work.max() / work.mean()) if work.sum() else 1.0
        name = timeline.nodes[int(group["node"][0])].operator
        found.setdefault(name, []).append((len(workers), int(last.min()) - begin, int(last.max()) - begin, ratio))
    return tuple(
        Imbalance(name, len(rows), *(statistics.median(column) for column in zip(*rows)))
        for name, rows in found.items()
    )


def roofline(timeline: Timeline, steps: Sequence[Step]) -> Roofline:
    """Operators that read or compute anything, the one with most time first. Operations are those of all rows of a
    step; keys and values count as those of one sequence, since a timeline does not say whose the rows are."""
    events = _of(streaming(timeline), steps)
    rows_of_step = max([1, *(s.rows for s in steps)])
    meta, target = timeline.meta, TARGETS.get(timeline.meta.target)
    begin, end = reading_time(events)
    spent = np.maximum(end, finish(events)) - begin
    sums: dict[str, list[float]] = {}
    count = len(timeline.nodes)
    ns = np.bincount(events["node"], spent, count) if len(events) else np.zeros(count)
    tiles = np.bincount(events["node"], events["tile_count"], count) if len(events) else np.zeros(count)
    for node, time, ran in zip(timeline.nodes, ns.tolist(), tiles.tolist()):
        share = len(steps) if ran else 0  # once a step; of tiles with nothing to do there may be no event
        total = sums.setdefault(node.operator, [0.0, 0.0, 0.0])
        for i, value in enumerate((time, node.stream_bytes * share, node.flops * share * rows_of_step)):
            total[i] += value
    whole = sum(s.length for s in steps) * meta.workers or 1
    rows = [
        Roof(name, flops / nbytes if nbytes else 0.0, nbytes / time * meta.workers, flops / time * meta.workers,
             time / whole)
        for name, (time, nbytes, flops) in sums.items()
        if time and (nbytes or flops)
    ]  # fmt: skip
    ceiling = target.worker_gflops * meta.workers if target else 0.0
    return Roofline(tuple(sorted(rows, key=lambda r: (-r.share, r.operator))), ceiling)


def _of(events: Events, steps: Sequence[Step]) -> Events:
    kept: Events = events[np.isin(events["step"], [s.number for s in steps])]
    return kept
