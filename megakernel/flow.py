"""What a recording means: its events on the schedule that ran. Recording, Program and Plan make a Timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.build import Plan
from megakernel.builder.program import Program
from megakernel.clocks import align, worst_hop
from megakernel.errors import DeviceFault, TimelineError
from megakernel.flow_ranks import edges_of_ranks, nodes_of_ranks, on_one_timer
from megakernel.recording import Recording
from megakernel.scheduler.by_value import values_of
from megakernel.scheduler.schedule import Entry, Schedule
from megakernel.tasks.record import NONE, Role, TraceFlag
from megakernel.tasks.task import Addresses, Region, TaskNode
from megakernel.timeline import (
    COUNTER,
    EDGE,
    TIMES,
    VALUE,
    Edges,
    Events,
    Meta,
    Timeline,
    TimelineFault,
    TimelineNode,
    waiters,
)

Span = tuple[int, int, int]  # node, first tile, tiles
ROLES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("worker",), "hip": ("worker",), "cuda": ("producer", "loader", "consumer", "storer"),
}  # fmt: skip


def timeline_of(
    recording: Recording, program: Program, plan: Plan, *, model: str, device: str, options: Mapping[str, Any]
) -> Timeline:
    """`model`, `device`, `options`: for the meta data. Of several ranks the recording is `merged`.

    Raises TimelineError when `plan` is not the program's."""
    _check_plan(program, plan)
    m = program.manifest
    raw = _last_runs(recording.events)
    workers = m.workers * m.ranks
    events, alignment = align(raw, workers, m.backend)
    if recording.drift_ns:
        alignment = replace(alignment, drift_ns=recording.drift_ns)
    edges = edges_of(plan.schedule, plan.target.value_edges)
    if m.ranks > 1:
        events, alignment = on_one_timer(events, alignment, plan.schedule.nodes, m)
        edges = edges_of_ranks(edges, plan.schedule.nodes, m)
    events = _completed(events, plan.schedule, edges)
    steps = events[events["role"] == Role.CONTROL]
    context = round(float(steps["tile_count"].mean())) if len(steps) else 0
    numbers = events["step"]
    meta = Meta(
        program=m.name, model=model, backend=m.backend, device=device, target=m.target, workers=workers,
        roles=ROLES[m.backend], ring_bytes=plan.target.shared_bytes if "producer" in ROLES[m.backend] else 0,
        alignment=replace(alignment, worst_hop_ns=worst_hop(events, edges)),
        first_step=int(numbers.min()) if len(numbers) else 0, last_step=int(numbers.max()) if len(numbers) else -1,
        context=context, rows=float(steps["tile_begin"].mean()) if len(steps) else 0.0, overflow=recording.lost,
        options=dict(options), fault=_fault_of(recording),
    )  # fmt: skip
    nodes = nodes_of(plan, context)
    return Timeline(events, meta, nodes if m.ranks == 1 else nodes_of_ranks(nodes, m.ranks), edges)


def _check_plan(program: Program, plan: Plan) -> None:
    mine = [(n.name, n.tiles) for n in program.manifest.nodes]
    if mine != [(n.name, n.tiles) for n in plan.schedule.nodes] or program.manifest.workers != plan.schedule.workers:
        raise TimelineError(
            f"program {program.manifest.name} was not built from this plan: its nodes differ; build the program again"
        )


def _fault_of(recording: Recording) -> TimelineFault | None:
    r = recording.fault
    if r is None:
        return None
    return TimelineFault(r.kind, r.node, r.task, r.tile, r.worker, r.role, r.step, str(DeviceFault(r)))


# ---------------------------------------------------------------------------------------------- events
def _last_runs(events: Events) -> Events:
    """Without the records that a role ran ahead at the end of a launch, for a step that the next launch ran again."""
    keys = ["worker", "role", "step", "record", "tile_begin"]
    order = np.lexsort((events["start"], *(events[k] for k in reversed(keys))))
    ordered = events[order]
    same = np.ones(len(ordered), bool)
    for k in keys:
        same[:-1] &= ordered[k][:-1] == ordered[k][1:]
    if len(same):
        same[-1] = False
    kept: Events = ordered[~same]
    steps = np.unique(kept["step"][kept["role"] == Role.CONTROL])
    out: Events = kept[np.isin(kept["step"], steps)]  # a step that no worker began is not in the recording
    return out


def _completed(events: Events, schedule: Schedule, edges: Edges) -> Events:
    """Sorted; moments that a role does not mark are those before them; cut events end where they were last seen."""
    cut = events["published"] == 0
    last = np.max([events[name] for name in TIMES], axis=0) if len(events) else np.zeros(0, np.uint64)
    events["flags"][cut] |= np.uint8(TraceFlag.CUT)
    skipped = (events["role"] == Role.CONSUMER) & (events["ready"] == 0) & ~cut
    events["flags"][skipped] |= np.uint8(TraceFlag.SKIPPED)
    events["ready"][skipped] = events["published"][skipped]  # it did no work
    events["end"][cut] = last[cut]
    unmarked = (events["end"] == 0) & ~cut
    events["end"][unmarked] = events["published"][unmarked]
    stop = np.where(cut, events["end"], events["published"])
    for before, name in (("start", "ready"), ("ready", "first_data")):
        missing = events[name] == 0
        events[name][missing] = np.where(cut, stop, events[before])[missing]
    for before, name in (("start", "ready"), ("ready", "first_data"), ("first_data", "end")):
        events[name] = np.maximum(events[name], events[before])
    events["published"][~cut] = np.maximum(events["published"], events["end"])[~cut]
    events["flags"][np.isin(events["node"], list(schedule.ticketed))] |= np.uint8(TraceFlag.TICKET)
    _name_waits(events, edges)
    steps = events["role"] == Role.CONTROL
    events["longest_wait"][steps] = (events["ready"] - events["start"])[steps]
    order = np.lexsort((events["start"], events["role"], events["worker"]))
    out: Events = events[order]
    return out


def _name_waits(events: Events, edges: Edges) -> None:
    """A wait for values is all the time until they were there, for the node that writes them: the last one of them."""
    by_value = edges[edges["kind"] == VALUE]
    if not len(by_value):
        return
    consumers, of_edge = np.unique(by_value["consumer"], return_inverse=True)
    last = np.zeros(len(consumers), by_value["producer"].dtype)
    np.maximum.at(last, of_edge, by_value["producer"])
    waited = events["longest_wait"] == 0
    waiting = np.flatnonzero(waiters(events) & waited & (events["ready"] > events["start"]))
    at = np.minimum(np.searchsorted(consumers, events["node"][waiting]), len(consumers) - 1)
    known = consumers[at] == events["node"][waiting]
    mine, at = waiting[known], at[known]
    events["longest_wait"][mine] = events["ready"][mine] - events["start"][mine]
    events["longest_wait_counter"][mine] = last[at]
    events["flags"][mine] |= np.uint8(TraceFlag.BY_VALUE)


# ---------------------------------------------------------------------------------------------- graph
def nodes_of(plan: Plan, context: int) -> tuple[TimelineNode, ...]:
    """Every node of the schedule with its work at `context` tokens."""
    weights = {w.name: w.offset for w in plan.lowered.weights}
    at = Addresses(weights.__getitem__, lambda t: plan.memory.at[t][0])
    out = []
    for node in plan.schedule.nodes:
        cost = node.task.cost(node, 0, node.tiles, context)
        values = {k: _number(v) for k, v in node.task.payload(node, at).items() if np.isscalar(v)}
        out.append(
            TimelineNode(
                node.name, _operator(node), node.task.name, node.layer, node.tiles, float(cost.stream_bytes),
                float(cost.other_bytes), float(cost.flops), values,
            )
        )  # fmt: skip
    return tuple(out)


def _operator(node: TaskNode) -> str:
    prefix = f"layers.{node.layer}."
    return node.name.removeprefix(prefix) if node.layer >= 0 else node.name


def _number(value: Any) -> int | float:
    return float(value) if isinstance(value, (float, np.floating)) else int(value)


def edges_of(schedule: Schedule, by_value: bool) -> Edges:
    """What each entry waits for: counters, and (`by_value`, as the target has it) values of other entries."""
    entries = [e for queue in schedule.queues for e in queue if e.count] + list(schedule.shared)
    links = [*_counter_links(schedule, entries), *(_value_links(schedule, entries) if by_value else ())]
    grouped: dict[tuple[Span, int, int, int], list[tuple[int, int]]] = {}  # producer, kind, counter, consumer -> tiles
    for producer, consumer, kind, counter in links:
        grouped.setdefault((producer, kind, counter, consumer[0]), []).append(consumer[1:])
    rows = [
        (*producer, node, first, count, kind, counter)
        for (producer, kind, counter, node), tiles in grouped.items()
        for first, count in _joined(tiles)
    ]
    out = np.array(sorted(rows), EDGE) if rows else np.zeros(0, EDGE)
    return out


def _counter_links(schedule: Schedule, entries: Iterable[Entry]) -> Iterable[tuple[Span, Span, int, int]]:
    """Who signals the counter of a group signals, by its relay, the counter above it too."""
    makers: dict[int, dict[int, list[tuple[int, int]]]] = {}
    above = {r.counter: r.to for r in schedule.relays}
    for e in entries:
        for counter in {e.signal, above.get(-1 if e.signal is None else e.signal)} - {None}:
            assert counter is not None
            makers.setdefault(counter, {}).setdefault(e.node, []).append((e.first, e.count))
    spans = {c: [(n, *t) for n, tiles in nodes.items() for t in _joined(tiles)] for c, nodes in makers.items()}
    for e in entries:
        for wait in e.waits:
            for span in spans.get(wait.counter, []):
                yield span, (e.node, e.first, e.count), COUNTER, wait.counter


def _value_links(schedule: Schedule, entries: list[Entry]) -> Iterable[tuple[Span, Span, int, int]]:
    """Of entries without waits that read values, and of those that may wait for some instead of counters."""
    nodes, values = schedule.nodes, values_of(schedule.nodes)
    wanted: list[tuple[Entry, tuple[Region, ...]]] = []
    for e in entries:
        node = nodes[e.node]
        instead = node.task.may_await(node, e.first, e.count)
        if instead:
            wanted.append((e, instead))
        elif not e.waits and node.task.awaits_values:
            wanted.append((e, tuple(r for r in node.task.reads(node, e.first, e.count) if r.tensor in values)))
    tensors = {r.tensor for _, regions in wanted for r in regions}
    written: dict[str, list[tuple[int, int, int, int, int]]] = {}  # tensor -> start, stop, node, first, count
    for e in entries if wanted else []:
        task = nodes[e.node].task
        for r in (*task.writes(nodes[e.node], e.first, e.count), *task.may_write(nodes[e.node], e.first, e.count)):
            if r.tensor in tensors:
                written.setdefault(r.tensor, []).append((r.start, r.stop, e.node, e.first, e.count))
    tables = {t: np.array(rows, np.int64) for t, rows in written.items()}
    found: dict[tuple[str, int, int], list[Span]] = {}  # many entries read the same region
    for e, regions in wanted:
        for r in regions:
            if r.tensor not in tables:
                continue
            key = (r.tensor, r.start, r.stop)
            if key not in found:
                found[key] = _writers(tables[r.tensor], r.start, r.stop)
            for span in found[key]:
                if span[0] != e.node:
                    yield span, (e.node, e.first, e.count), VALUE, NONE


def _writers(table: npt.NDArray[np.int64], start: int, stop: int) -> list[Span]:
    hit = table[(table[:, 0] < stop) & (table[:, 1] > start)]
    return [
        (int(node), *tiles)
        for node in np.unique(hit[:, 2])
        for tiles in _joined([(int(r[3]), int(r[4])) for r in hit[hit[:, 2] == node]])
    ]


def _joined(tiles: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, count) ranges, adjoining ones made one."""
    out: list[tuple[int, int]] = []
    for first, count in sorted(set(tiles)):
        if out and first <= sum(out[-1]):
            start = out[-1][0]
            out[-1] = (start, max(sum(out[-1]), first + count) - start)
        else:
            out.append((first, count))
    return out
