"""Everything that is said of one timeline, and the short form of it for programs."""

from __future__ import annotations

from collections import Counter
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
from megakernel.target import TARGETS
from megakernel.timeline import COUNTER, KINDS, Timeline

HELD_UP = 10  # times the target's hop: threads were not running when they were signalled
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
        return out | {"steps": 0, "notes": [str(e), *notes(timeline, None)]}
    b, per_step = a.breakdown, 1e3 * len(a.steps)
    return out | {
        "steps": len(a.steps),
        "step_us": a.step.length / 1e3,
        "floor_us": a.rates.floor_ns / 1e3,
        "gbps": a.rates.mean_gbps,
        "ceiling_gbps": a.rates.ceiling.gbps,
        "row_step_us": b.total / per_step,
        "operators_us": {s.name: _split(s.work, s.data, s.others, per_step) for s in b.operators},
        "layers_us": {s.name or "no layer": _split(s.work, s.data, s.others, per_step) for s in b.layers},
        "header_us": b.header / per_step,
        "idle_us": b.idle / per_step,
        "critical_path_us": {name: ns / 1e3 for name, ns in a.path_by.items()},
        "what_if_us": {w.what: w.length / 1e3 for w in a.what_if},
        "hops_us": {h.kind: _quantiles(h) for h in a.hops},
        "imbalance_us": {
            i.operator: {"workers": i.workers, "first": i.first / 1e3, "last": i.last / 1e3, "busiest": i.busiest}
            for i in a.imbalance
        },
        "slack_us": {s.node: {"least": s.least / 1e3, "median": s.median / 1e3, "most": s.most / 1e3} for s in a.slack},
        "lookahead": {
            "open_behind": sorted(Counter(a.lookahead.open_behind).items()),
            "lead_records": sorted(Counter(a.lookahead.lead_records).items()),
        },
        "roofline": {
            r.operator: {"intensity": r.intensity, "gbps": r.gbps, "gflops": r.gflops, "share": r.share}
            for r in a.roofline.operators
        },
        "prediction": asdict(a.prediction) | {"error": a.prediction.error} if a.prediction else None,
        "notes": notes(timeline, a),
    }


def notes(timeline: Timeline, a: Analysis | None) -> list[str]:
    """What a reader must know before believing the figures. `a` None: there is no complete step."""
    lost = [f"worker {w}: {n:,}" for w, n in enumerate(timeline.meta.overflow) if n]
    out = []
    if lost:
        out.append(
            f"Events were lost because a ring was full ({', '.join(lost[:8])}{', ...' if len(lost) > 8 else ''}). "
            "Steps with a missing event are left out of all figures."
        )
    if a is None:
        return out
    if a.graph.late:
        out.append(
            f"{a.graph.late} records of the typical step went on before what they waited for was published, by these "
            "clocks: their alignment is no better than that."
        )
    ceiling = a.rates.ceiling
    if 0 < ceiling.gbps < a.rates.mean_gbps:
        out.append(
            f"Reading was faster than the ceiling of {ceiling.gbps:,.0f} GB/s ({ceiling.source}): that figure is not "
            "this machine's, or weights were in a cache."
        )
    if a.step.rows > 1:
        out.append(
            f"The steps compute {a.step.rows} rows. Keys and values are counted as those of one sequence, as it is not "
            "recorded whose the rows are: attention may have read more than is said here."
        )
    return [*out, *_held_up(timeline, a), *([a.no_prediction] if a.no_prediction else [])]


def _held_up(timeline: Timeline, a: Analysis) -> list[str]:
    """Whether threads had to wait for a core: then hops are those of the operating system."""
    seen = next((h for h in a.hops if h.kind == KINDS[COUNTER] and h.ns), None)
    target = TARGETS.get(timeline.meta.target)
    if timeline.meta.backend != "cpu" or seen is None or target is None:
        return []
    usual = target.hop_us * 1e3
    if seen.median < HELD_UP * usual:
        return []
    return [
        f"A hop by counter took {seen.median / 1e3:,.1f} us at the median, where {usual / 1e3:g} us are usual: the "
        f"{timeline.meta.workers} workers did not have a core each all the time. Hops, waits and the simulated step "
        "are those of this load; record again with fewer workers or on a quiet machine."
    ]


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
