"""From what a kernel with separate roles writes to a timeline: events as the CUDA kernel leaves them, made by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megakernel.builder.build import Plan, assemble, make_plan, plan_source
from megakernel.builder.program import Program
from megakernel.clocks import worst_hop
from megakernel.errors import FaultReport, TimelineError
from megakernel.flow import _name_waits, edges_of, timeline_of
from megakernel.perfetto_file import arrows
from megakernel.recording import Recording, ring_capacity, rings_of
from megakernel.report.arrivals import arrivals
from megakernel.report.steps import steps_of
from megakernel.target import find_target
from megakernel.tasks.record import NONE, TRACE_EVENT, Role, TraceFlag
from megakernel.timeline import COUNTER, EDGE, VALUE, Edges, Events, Timeline, waiters
from tests.unit.test_cuda_build import CONFIG

WORKERS = 3
STEP_NS = 1_000_000
FAULT = FaultReport("value budget", "matmul", "logits", 0, 1, "consumer", NONE, 0, 0, 3)


@cache
def built() -> tuple[Plan, Program]:
    target = find_target("sm_90a").with_workers(WORKERS)
    plan = make_plan(CONFIG, target, max_context=1024, max_slots=2)
    return plan, assemble(plan, plan_source(plan, trace=True), Path("no-binary"))


def events_of(steps: int) -> Events:
    """Each step node after node, 1,000 ns apart; the producer far ahead, the storer after the consumers. Moments that
    the kernel does not mark are 0."""
    plan, _ = built()
    rows: list[tuple[int, Role, int, int, int, int, int, tuple[int, ...]]] = []
    for step in range(1, steps + 1):
        base = step * STEP_NS
        for worker, queue in enumerate(plan.schedule.queues):
            for record, e in enumerate(queue):
                task, at = plan.schedule.nodes[e.node].task.name, base + (e.node + 1) * 1000
                where = (step, record, e.node, e.first, e.count)
                marks = (
                    (at - 500, at, at + 100, 0, at + 300) if task == "matmul" else (at - 500, at, 0, at + 200, at + 300)
                )
                rows.append((worker, Role.CONSUMER, *where, marks))
                if task in ("matmul", "attention"):
                    ahead = at - 5000
                    rows.append((worker, Role.PRODUCER, *where, (ahead, ahead + 10, 0, 0, ahead + 20)))
                if task == "matmul":
                    rows.append((worker, Role.STORER, *where, (at, at + 290, 0, 0, at + 295)))
                    rows.append((worker, Role.LOADER, *where, (at - 500, at - 100, 0, 0, at - 20)))
            end = base + 900_000
            rows.append((worker, Role.CONTROL, step, NONE, NONE, 1, 40 + step, (base, base + 10, base + 10, end, end)))
    out = np.zeros(len(rows), TRACE_EVENT.dtype)
    for event, (worker, role, step, record, node, first, count, marks) in zip(out, rows):
        event["worker"], event["role"], event["step"], event["record"], event["node"] = worker, role, step, record, node
        event["tile_begin"], event["tile_count"], event["longest_wait_counter"] = first, count, NONE
        for name, mark in zip(("start", "ready", "first_data", "end", "published"), marks, strict=True):
            event[name] = mark
        if role == Role.CONTROL:
            event["longest_wait"] = marks[3]
    return out


def timeline(events: Events, fault: FaultReport | None = None) -> Timeline:
    plan, program = built()
    recording = Recording(events, (0,) * WORKERS, 1, 99, fault)
    return timeline_of(recording, program, plan, model="m", device="d", options={})


def test_every_role_and_step_is_there() -> None:
    made = timeline(events_of(3))
    assert made.complete_steps == (1, 2, 3) and made.meta.roles[0] == "producer"
    assert made.meta.context == 42 and made.meta.rows == 1 and made.meta.ring_bytes > 0
    assert made.meta.alignment.clock_hz == 1e9 and made.events["start"].min() == 1
    assert not (made.events["flags"] & TraceFlag.CUT).any()
    for before, after in (("start", "ready"), ("ready", "first_data"), ("first_data", "end"), ("end", "published")):
        assert (made.events[before] <= made.events[after]).all()
    matmul = made.tasks[(made.tasks["role"] == Role.CONSUMER) & (made.tasks["node"] == 1)][0]
    assert matmul["end"] == matmul["published"], "what is not marked is what comes after it"


def test_a_wait_for_values_names_the_node_that_writes_them() -> None:
    made = timeline(events_of(1))
    names = [n.name for n in made.nodes]
    down = made.tasks[(made.tasks["node"] == names.index("layers.0.mlp_residual"))]
    for event in down:
        if event["role"] == Role.LOADER:
            assert event["longest_wait"] == 400 and made.waited_for(event) == "values of layers.0.glu"
        else:
            assert made.waited_for(event) == "", "the others wait for their own worker"
    found = list(arrows(made))
    tasks = {made.nodes[int(made.events[a.sink]["node"])].task for a in found}
    assert "matmul" in tasks and len(tasks) > 1
    for arrow in found:
        sink = made.events[arrow.sink]
        matmul = made.nodes[int(sink["node"])].task == "matmul"
        assert sink["role"] == (Role.LOADER if matmul else Role.CONSUMER), "who brings the values waits for them"
    sources = {int(made.events[a.source]["node"]) for a in found if made.events[a.sink]["node"] == down[0]["node"]}
    assert sources == {names.index("layers.0.glu")}
    assert all(made.events[a.source]["role"] == Role.STORER for a in found if made.events[a.source]["node"] in sources)


def test_hops_are_from_the_last_role_that_publishes_to_the_one_that_waits() -> None:
    made = timeline(events_of(1))
    assert made.meta.alignment.worst_hop_ns == worst_hop(made.events, made.edges)
    assert made.meta.alignment.worst_hop_ns is not None and made.meta.alignment.worst_hop_ns >= 0


def test_a_record_that_skips_its_waits_is_no_hop() -> None:
    events = events_of(1)
    names = [n.name for n in built()[0].schedule.nodes]
    idle = (events["node"] == names.index("sample")) & (events["role"] == Role.CONSUMER)
    assert idle.any()
    events["ready"][idle] = 0  # it looked at nothing, as every row wants its largest logit only
    events["start"][idle] -= 5000  # and before the logits were there
    for name in ("end", "published"):
        events[name][idle] -= 4500
    made = timeline(events)
    event = made.tasks[(made.tasks["node"] == names.index("sample")) & (made.tasks["role"] == Role.CONSUMER)][0]
    assert event["flags"] & TraceFlag.SKIPPED and event["ready"] == event["published"], "no work"
    assert not waiters(made.tasks)[(made.tasks["flags"] & TraceFlag.SKIPPED) != 0].any()
    assert made.meta.alignment.worst_hop_ns is not None and made.meta.alignment.worst_hop_ns >= 0
    assert all(made.nodes[int(made.events[a.sink]["node"])].name != "sample" for a in arrows(made))


def test_the_end_of_a_step_waits_for_logits_or_for_samples() -> None:
    """Where every row wants its largest logit only, it looks at what the head's workers found, and not at the counter
    of `sample`, whose records may end later."""
    names = [n.name for n in built()[0].schedule.nodes]
    for counted in (False, True):
        events = events_of(1)
        end = (events["node"] == names.index("advance")) & (events["role"] == Role.CONSUMER)
        late = (events["node"] == names.index("sample")) & (events["role"] == Role.CONSUMER)
        for name in ("start", "ready", "end", "published"):
            events[name][end] += 2000
        for name in ("end", "published"):
            events[name][late] += 1000 if counted else 5000
        if counted:
            edges = edges_of(built()[0].schedule, by_value=True)
            counter = edges["counter"][edges["consumer"] == names.index("advance")].min()
            events["longest_wait"][end], events["longest_wait_counter"][end] = 400, counter
        made = timeline(events)
        event = made.tasks[(made.tasks["node"] == names.index("advance")) & (made.tasks["role"] == Role.CONSUMER)][0]
        said = made.waited_for(event)
        assert said.endswith("of sample") and "counter" in said if counted else said == "values of logits"
        hop = made.meta.alignment.worst_hop_ns
        assert hop is not None and hop >= 0, "what it did not look at is no hop"
        seen = arrivals(made, steps_of(made)[0])
        at = next(i for i, e in enumerate(seen.events) if e["node"] == event["node"] and e["role"] == event["role"])
        assert {names[int(made.edges["producer"][a.edge])] for a in seen.of[at]} == {"sample" if counted else "logits"}
        sources = [a.source for a in arrows(made) if made.events[a.sink] == event]
        assert {names[int(made.events[s]["node"])] for s in sources} == {"sample" if counted else "logits"}


def test_what_a_producer_ran_ahead_at_the_end_of_a_launch_counts_once() -> None:
    events = events_of(3)
    ahead = events[(events["role"] == Role.PRODUCER) & (events["step"] == 3)].copy()
    for name in ("start", "ready", "published"):
        ahead[name] -= 50_000  # of a launch that ended before step 3
    never = ahead.copy()
    never["step"] = 4  # and at the end of the last one
    made = timeline(np.concatenate([ahead, events, never]))
    assert made.steps == made.complete_steps == (1, 2, 3) and len(made.events) == len(events)
    kept = made.tasks[(made.tasks["role"] == Role.PRODUCER) & (made.tasks["step"] == 3)]
    assert (kept["start"] > 2 * STEP_NS - 20_000).all(), "the later of the two"


def test_events_that_a_fault_left_open() -> None:
    events = events_of(3)
    at_work = (
        (events["step"] == 3) & (events["worker"] == 1) & (events["node"] == 4) & (events["role"] == Role.CONSUMER)
    )
    assert at_work.sum() == 1
    late = (events["step"] == 3) & (events["start"] > events["start"][at_work][0]) & (events["role"] != Role.CONTROL)
    for name in ("ready", "first_data", "end", "published"):
        events[name][at_work] = 0
    open_steps = (events["step"] == 3) & (events["role"] == Role.CONTROL)
    for name in ("end", "published", "longest_wait"):
        events[name][open_steps] = 0
    made = timeline(events[~late], FAULT)
    cut = made.events[(made.events["flags"] & TraceFlag.CUT) != 0]
    assert len(cut) == 1 + WORKERS and set(cut["step"].tolist()) == {3} and (cut["published"] == 0).all()
    assert made.complete_steps == (1, 2) and made.meta.fault is not None and made.meta.fault.node == "logits"
    assert (cut["start"] <= cut["end"]).all()
    assert Timeline.from_json(made.to_json()).meta.fault == made.meta.fault


def test_a_plan_of_another_program_is_refused() -> None:
    plan, program = built()
    other = replace(program.manifest, nodes=program.manifest.nodes[:-1])
    empty = Recording(np.zeros(0, TRACE_EVENT.dtype), (0,) * WORKERS, 1, 2)
    with pytest.raises(TimelineError, match="was not built from this plan"):
        timeline_of(empty, replace(program, manifest=other), plan, model="m", device="d", options={})


def test_a_ring_holds_the_steps_asked_for_and_no_more_memory_than_there_is() -> None:
    m = built()[1].manifest
    for steps in (1, 3, 64):
        capacity = ring_capacity(m, steps)
        assert capacity >= m.queue_length * steps and capacity & (capacity - 1) == 0
    huge = ring_capacity(replace(m, workers=132), 10_000_000)
    assert huge & (huge - 1) == 0 and 132 * huge * sum(r.size for r in rings_of(m)) <= 1 << 30


def test_waits_for_relays_lead_to_who_signals_their_groups() -> None:
    """On a target whose workers are in groups a counter is signalled by relays; its edges name the producers."""
    target = find_target("gfx942").with_workers(64)
    schedule = make_plan(CONFIG, target, max_context=1024, max_slots=2).schedule
    assert schedule.relays
    edges = edges_of(schedule, target.value_edges)
    below = {r.to: {b.counter for b in schedule.relays if b.to == r.to} for r in schedule.relays}
    for queue in schedule.queues:
        for e in queue:
            for wait in e.waits:
                mine = edges[(edges["consumer"] == e.node) & (edges["counter"] == wait.counter)]
                counters = below.get(wait.counter, set()) | {wait.counter}
                makers = {x.node for q in schedule.queues for x in q if x.signal in counters}
                assert makers and set(mine["producer"].tolist()) == makers


def test_a_step_without_the_records_that_may_be_left_out_is_complete() -> None:
    """Attention writes rows of one piece itself; then `combine` has nothing to do, and its records are left out."""
    plan, _ = built()
    combine = [i for i, n in enumerate(plan.schedule.nodes) if n.task.idles]
    assert combine and {plan.schedule.nodes[i].task.name for i in combine} == {"combine"}
    events = events_of(3)
    left_out = (events["step"] == 2) & np.isin(events["node"], combine)
    made = timeline(events[~left_out])
    assert left_out.any() and made.complete_steps == (1, 2, 3)
    other = (events["step"] == 2) & (events["node"] == combine[0] - 1)
    assert timeline(events[~other]).complete_steps == (1, 3)


def test_who_reads_the_output_of_attention_waits_for_attention_too() -> None:
    plan, _ = built()
    nodes = plan.schedule.nodes
    at = next(i for i, n in enumerate(nodes) if n.task.name == "attention")
    assert [nodes[at + k].task.name for k in range(3)] == ["attention", "combine", "matmul"]
    edges = {(int(e["producer"]), int(e["consumer"])) for e in edges_of(plan.schedule, by_value=True)}
    assert {(at, at + 1), (at + 1, at + 2), (at, at + 2)} <= edges


def waits_of(count: int, nodes: int) -> tuple[Events, Edges]:
    """So many events of consumers, every other of which waited; four edges into each node, one of them a counter."""
    rng = np.random.default_rng(0)
    events, edges = np.zeros(count, TRACE_EVENT.dtype), np.zeros(4 * nodes, EDGE)
    events["role"], events["longest_wait_counter"], events["record"] = Role.CONSUMER, NONE, np.arange(count)
    events["node"], events["start"] = rng.integers(0, nodes + 3, count), 5
    events["ready"] = 5 + rng.integers(0, 2, count) * rng.integers(1, 1000, count)
    events["longest_wait"] = rng.integers(0, 2, count)
    edges["consumer"], edges["producer"] = np.arange(4 * nodes) // 4, rng.integers(0, nodes, 4 * nodes)
    edges["kind"] = np.where(np.arange(4 * nodes) % 4 == 0, COUNTER, VALUE)
    return events, edges


def test_a_wait_for_values_is_named_after_the_last_writer() -> None:
    events, edges = waits_of(400, 40)
    before = events.copy()
    _name_waits(events, edges)
    for was, event in zip(before, events):
        writers = edges["producer"][(edges["consumer"] == was["node"]) & (edges["kind"] == VALUE)]
        waited = len(writers) > 0 and was["longest_wait"] == 0 and was["ready"] > was["start"]
        assert event["longest_wait"] == (was["ready"] - was["start"] if waited else was["longest_wait"])
        assert event["longest_wait_counter"] == (writers.max() if waited else NONE)
        assert bool(event["flags"] & TraceFlag.BY_VALUE) == waited
    assert (events["flags"] != 0).any() and (events["flags"] == 0).any()
    _name_waits(events, edges[:0])


def test_naming_waits_takes_no_longer_for_more_nodes() -> None:
    """A model of 80 layers on two devices has thousands of nodes and millions of events."""

    def seconds(nodes: int) -> float:
        events, edges = waits_of(50_000, nodes)
        began = time.thread_time()
        _name_waits(events, edges)
        return time.thread_time() - began

    assert min(seconds(4096) for _ in range(3)) < 8 * min(seconds(64) for _ in range(3))
