"""Everything that is said of one timeline, and the short form of it for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megakernel.errors import MegakernelError, TimelineError
from megakernel.report.arrivals import arrivals
from megakernel.report.breakdown import Breakdown, breakdown
from megakernel.report.critical import (
    NodeSlack,
    Part,
    WhatIf,
    critical_path,
    path_by,
    path_names,
    slack_by_node,
    what_if,
)
from megakernel.report.fit import Prediction, predict
from megakernel.report.graph import StepGraph
from megakernel.report.graph_build import graph_of
from megakernel.report.hops import HopSamples, hops
from megakernel.report.lookahead import Lookahead, lookahead
from megakernel.report.operators import Imbalance, Roofline, imbalance, roofline
from megakernel.report.rates import Rates, ceiling_of, rates
from megakernel.report.steps import Step, alike, steps_of, typical
from megakernel.timeline import Timeline

HOP_STEPS = 8  # whose edges are looked at: those nearest to the typical step


@dataclass(frozen=True)
class Analysis:
    """`steps`: the complete ones of one kind; `step`: the typical one, which graph, path, what-if, slack, rates and
    look-ahead are of. `prediction` None: `no_prediction` says why."""

    steps: tuple[Step, ...]
    step: Step
    breakdown: Breakdown
    rates: Rates
    graph: StepGraph
    path: tuple[Part, ...]
    path_by: dict[str, int]
    what_if: tuple[WhatIf, ...]
    slack: tuple[NodeSlack, ...]
    hops: tuple[HopSamples, ...]
    hop_steps: int
    imbalance: tuple[Imbalance, ...]
    roofline: Roofline
    lookahead: Lookahead
    prediction: Prediction | None
    no_prediction: str


def analyse(timeline: Timeline, *, ceiling_gbps: float | None = None) -> Analysis:
    """`ceiling_gbps`: measured read rate, None for that of the target. Raises TimelineError without a complete step."""
    steps = alike(steps_of(timeline))
    step = typical(steps)
    graph = graph_of(timeline, step)
    path = critical_path(graph)
    near = sorted(steps, key=lambda s: abs(s.length - step.length))[:HOP_STEPS]
    prediction, why = _prediction(timeline)
    return Analysis(
        steps=steps, step=step, breakdown=breakdown(timeline, steps),
        rates=rates(timeline, step, ceiling_of(timeline, ceiling_gbps)), graph=graph, path=path,
        path_by=path_by(path, path_names(timeline, graph)), what_if=what_if(timeline, graph),
        slack=slack_by_node(timeline, graph), hops=hops(timeline, [arrivals(timeline, s) for s in near], steps),
        hop_steps=len(near), imbalance=imbalance(timeline, steps), roofline=roofline(timeline, steps),
        lookahead=lookahead(timeline, graph.arrivals), prediction=prediction, no_prediction=why,
    )  # fmt: skip


def _prediction(timeline: Timeline) -> tuple[Prediction | None, str]:
    try:
        return predict(timeline), ""
    except MegakernelError as e:  # too few steps, an unknown target: the rest can still be said, and why this cannot
        return None, str(e)


def summary(timeline: Timeline, *, ceiling_gbps: float | None = None) -> dict[str, Any]:
    """The figures of a report as JSON values, times in microseconds; fewer of them without a complete step."""
    fault = timeline.meta.fault
    out: dict[str, Any] = {
        "program": timeline.meta.program, "device": timeline.meta.device, "target": timeline.meta.target,
        "workers": timeline.meta.workers, "events": len(timeline.events), "overflow": sum(timeline.meta.overflow),
        "fault": asdict(fault) if fault else None,
    }  # fmt: skip
    try:
        a = analyse(timeline, ceiling_gbps=ceiling_gbps)
    except TimelineError as e:
        return out | {"steps": 0, "note": str(e)}
    b, per_step = a.breakdown, 1e3 * len(a.steps)
    return out | {
        "steps": len(a.steps),
        "step_us": a.step.length / 1e3,
        "floor_us": a.rates.floor_ns / 1e3,
        "gbps": a.rates.mean_gbps,
        "ceiling_gbps": a.rates.ceiling.gbps,
        "row_step_us": b.total / per_step,
        "operators_us": {s.name: _split(s.work, s.data, s.others, per_step) for s in b.operators},
        "header_us": b.header / per_step,
        "idle_us": b.idle / per_step,
        "critical_path_us": {name: ns / 1e3 for name, ns in a.path_by.items()},
        "what_if_us": {w.what: w.length / 1e3 for w in a.what_if},
        "hops_us": {h.kind: _quantiles(h) for h in a.hops},
        "prediction": asdict(a.prediction) | {"error": a.prediction.error} if a.prediction else None,
    }


def _split(work: int, data: int, others: int, per_step: float) -> dict[str, float]:
    return {"work": work / per_step, "data": data / per_step, "others": others / per_step}


def _quantiles(h: HopSamples) -> dict[str, float]:
    return {"median": h.median / 1e3, "p90": h.quantile(0.9) / 1e3, "p99": h.quantile(0.99) / 1e3}


def shown_steps(timeline: Timeline, step: Step | None, most_events: int) -> Sequence[int]:
    """Numbers of following steps that a picture has room for: around `step`, or the last ones when there is none."""
    numbers = timeline.steps
    counts = {n: int((timeline.events["step"] == n).sum()) for n in numbers}
    if not numbers:
        return ()
    fault = timeline.meta.fault is not None
    at = len(numbers) - 1 if step is None or fault else numbers.index(step.number)
    low = high = at
    room = most_events - counts[numbers[at]]
    while True:
        grown = False
        for side in (low - 1, high + 1):
            if 0 <= side < len(numbers) and counts[numbers[side]] <= room:
                room -= counts[numbers[side]]
                low, high, grown = min(low, side), max(high, side), True
        if not grown:
            return numbers[low : high + 1]
