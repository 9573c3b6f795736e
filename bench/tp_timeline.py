"""What the exchanges between devices took in a recorded timeline: from a product to the sum on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megakernel.profile import operator_rows, step_us
from megakernel.report.arrivals import arrivals
from megakernel.report.hops import hops
from megakernel.report.steps import steps_of
from megakernel.timeline import Timeline

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def exchanges_of_steps(timeline: Timeline) -> dict[str, Any]:
    """Offsets and hops between the devices, and the medians over all exchanges of all complete steps of: the last tile
    of the product to the last push (`pushed`), from there to the last sum (`received`), both as the device that ends
    last sees them; and from a device's last product to its peers' last product (`apart`)."""
    a, steps = timeline.meta.alignment, steps_of(timeline)
    near = steps[:1]
    found = hops(timeline, [arrivals(timeline, s) for s in near], steps)
    return {
        "step_us": step_us(timeline), "complete_steps": len(timeline.complete_steps),
        "lost": sum(timeline.meta.overflow),
        "timer_offset_ns": a.timer_offset_ns, "timer_hop_ns": a.timer_hop_ns, "shortest_hop_ns": a.worst_hop_ns,
        "hops_ns": {h.kind: [h.quantile(q) for q in QUANTILES] for h in found if h.ns},
        "hop_waits": {h.kind: [len(h.ns), h.waits] for h in found},
        "us_of_an_exchange": _phases(timeline),
        "operators": [r for r in operator_rows(timeline) if r["work_us"] + r["wait_us"] + r["data_us"] > 0.05],
    }  # fmt: skip


def _phases(timeline: Timeline) -> dict[str, dict[str, float]]:
    """By the operator that sums: medians in microseconds."""
    tasks = timeline.tasks[np.isin(timeline.tasks["step"], timeline.complete_steps)]
    ends: dict[tuple[int, int], int] = {}  # step, node -> when its last tile was published
    for step, node, at in zip(tasks["step"].tolist(), tasks["node"].tolist(), tasks["published"].tolist()):
        ends[step, node] = max(ends.get((step, node), 0), at)
    count = max(1, timeline.meta.workers and _nodes_of_a_rank(timeline))
    ranks = len(timeline.nodes) // count
    spans: dict[str, list[tuple[float, ...]]] = {}
    for node in range(count):
        if timeline.nodes[node].task != "receive":
            continue
        push = node - 1  # as they are lowered; a product may send by itself
        product = push - 1 if timeline.nodes[push].task == "push" else push
        for step in timeline.complete_steps:
            made, sent, got = (_ends(ends, step, n, count, ranks) for n in (product, push, node))
            spans.setdefault(timeline.nodes[node].operator, []).append(
                (max(sent) - max(made), max(got) - max(sent), max(got) - max(made), max(made) - min(made))
            )
    names = ("pushed", "received", "both", "apart")
    return {
        operator: {name: float(np.median([row[i] for row in rows])) / 1e3 for i, name in enumerate(names)}
        for operator, rows in spans.items()
    }


def _nodes_of_a_rank(timeline: Timeline) -> int:
    return sum(n.name.startswith("rank 0: ") for n in timeline.nodes)


def _ends(ends: dict[tuple[int, int], int], step: int, node: int, count: int, ranks: int) -> Sequence[int]:
    return [ends[step, node + r * count] for r in range(ranks)]
