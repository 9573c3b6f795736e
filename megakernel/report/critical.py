"""The critical path of a recorded step, what the step would take if something were free, and the slack of each node."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megakernel.report.graph import HOPS, PUBLISHED, ROOT, Arc, Kind, StepGraph
from megakernel.timeline import Timeline

HELD = "reading held back"


@dataclass(frozen=True)
class Part:
    """A stretch of the critical path, ns from the begin of the step: what event `event` spent on `kind`."""

    event: int
    kind: Kind
    begin: int
    end: int


@dataclass(frozen=True)
class WhatIf:
    """How long the step would take (ns) if `what` took no time. kind: "operator", "hop" or "data"."""

    what: str
    kind: str
    length: int
    saved: int


@dataclass(frozen=True)
class NodeSlack:
    """By how much the records of a node could end later without a longer step, ns."""

    node: str
    least: int
    median: float
    most: int


def critical_path(graph: StepGraph) -> tuple[Part, ...]:
    """From the begin of the step to its last publication, without a gap: lengths add up to that of the step.

    Of several things that a point came after at the same time, the one that was over last is taken."""
    out: list[Part] = []
    at = graph.sink
    while at != ROOT:
        arc = max(
            (a for a in graph.arcs[at] if graph.time[a.source] + a.lag == graph.time[at]),
            key=lambda a: (graph.time[a.source], a.kind),
        )
        if graph.time[arc.source] != graph.time[at]:
            out.append(Part(arc.owner, arc.kind, graph.time[arc.source], graph.time[at]))
        at = arc.source
    return tuple(reversed(out))


def path_by(parts: tuple[Part, ...], name: Callable[[Part], str]) -> dict[str, int]:
    """Nanoseconds of the path by name, most first."""
    out: dict[str, int] = {}
    for part in parts:
        out[name(part)] = out.get(name(part), 0) + part.end - part.begin
    return dict(sorted(out.items(), key=lambda item: (-item[1], item[0])))


def path_names(timeline: Timeline, graph: StepGraph) -> Callable[[Part], str]:
    """What a part is called: its operator for work and data, the kind of hop for the rest."""
    operators = _operators(timeline, graph)
    named = {**{kind: hop_name(kind) for kind in HOPS}, Kind.HELD: HELD}
    return lambda part: named.get(part.kind) or operators[part.event]


def hop_name(kind: Kind) -> str:
    return {
        Kind.STEP: "step to step", Kind.BETWEEN: "record to record", Kind.COUNTER: "hop by counter",
        Kind.VALUE: "hop by value", Kind.INSIDE: "role to role", Kind.PEER: "hop to another device",
    }[kind]  # fmt: skip


def what_if(timeline: Timeline, graph: StepGraph) -> tuple[WhatIf, ...]:
    """Each operator, each kind of hop, and all waiting for data, free by itself; the most saved first."""
    operators = _operators(timeline, graph)
    whole = graph.step.length
    used = {a.kind for arcs in graph.arcs for a in arcs}
    cases: list[tuple[str, str, Callable[[Arc], bool]]] = [
        (name, "operator", _of_operator(operators, name)) for name in sorted(set(operators))
    ]
    cases += [(hop_name(kind), "hop", _of_kinds({kind})) for kind in HOPS if kind in used]
    cases.append(("all hops", "hop", _of_kinds(set(HOPS))))
    cases.append(("waiting for data", "data", _of_kinds({Kind.DATA})))
    found = [
        WhatIf(what, kind, length, whole - length) for what, kind, free in cases for length in [graph.length(free)]
    ]
    return tuple(sorted(found, key=lambda w: (-w.saved, w.what)))


def slack_by_node(timeline: Timeline, graph: StepGraph) -> tuple[NodeSlack, ...]:
    """In order of nodes."""
    found: dict[int, list[int]] = {}
    for node, slack in zip(graph.arrivals.events["node"].tolist(), graph.slack):
        found.setdefault(node, []).append(slack)
    return tuple(
        NodeSlack(timeline.nodes[n].name, min(s), statistics.median(s), max(s)) for n, s in sorted(found.items())
    )


def edge_of_hop(timeline: Timeline, graph: StepGraph, part: Part) -> Mapping[str, int] | None:
    """For a hop along an edge the event that published last and the edge, None for other parts."""
    if part.kind not in (Kind.COUNTER, Kind.VALUE, Kind.PEER):
        return None
    for arrival in graph.arrivals.of[part.event]:
        if graph.time[graph.point[arrival.last][PUBLISHED]] == part.begin:
            return {"event": arrival.last, "edge": arrival.edge}
    return None


def _operators(timeline: Timeline, graph: StepGraph) -> list[str]:
    """Of each event."""
    return [timeline.nodes[n].operator for n in graph.arrivals.events["node"].tolist()]


def _of_operator(operators: list[str], name: str) -> Callable[[Arc], bool]:
    return lambda arc: arc.kind in (Kind.DATA, Kind.WORK, Kind.HELD) and operators[arc.owner] == name


def _of_kinds(kinds: set[Kind]) -> Callable[[Arc], bool]:
    return lambda arc: arc.kind in kinds
