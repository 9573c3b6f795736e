"""Recordings of devices whose timers differ: events as two GPUs leave them, made by hand, and what is made of them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megakernel.builder.build import Plan, assemble, make_plan, plan_source
from megakernel.builder.program import Program
from megakernel.flow import timeline_of
from megakernel.flow_ranks import counters_of, merged
from megakernel.recording import Recording
from megakernel.report.arrivals import arrivals
from megakernel.report.hops import hops
from megakernel.report.steps import steps_of
from megakernel.scheduler.exchanges import exchanges_of
from megakernel.target import find_target
from megakernel.tasks.record import NONE, TRACE_EVENT, Role, TraceFlag
from megakernel.timeline import PEER, Events, Timeline
from tests.unit.test_exchanges import CONFIG

WORKERS, RANKS, STEPS = 3, 3, 5
STEP_NS, HOP_NS = 1_000_000, 700
TIMERS = (0, 5_000_000_000, -40_000)  # what each device's shows more than that of the first
LATE = (0, 250, 90)  # when one device sends, another, the third; they take turns


@cache
def built() -> tuple[Plan, Program]:
    config = {**CONFIG, "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192}
    plan = make_plan(config, find_target("sm_90a").with_workers(WORKERS), tp=RANKS, max_context=512, max_slots=2)
    return plan, assemble(plan, plan_source(plan, trace=True), Path("no-binary"))


def late(rank: int, exchange: int) -> int:
    return LATE[(rank + exchange) % RANKS]


def events_of(rank: int, waits: bool = True) -> Events:
    """Node after node, 2,000 ns apart. A part is seen HOP_NS after it was published by who sent it last; who `waits`
    for nobody finds all parts there."""
    plan, program = built()
    m, nodes = program.manifest, plan.schedule.nodes
    ends = exchanges_of(nodes)[0]
    receivers, senders = (
        {n: e.exchange.number for e in ends for n in (getattr(e, k),)} for k in ("receiver", "sender")
    )
    rows = []
    for step in range(1, STEPS + 1):
        base = 10_000_000 + step * STEP_NS
        for worker, queue in enumerate(plan.schedule.queues):
            for record, e in enumerate(queue):
                at = base + (e.node + 1) * 2000 + (late(rank, senders[e.node]) if e.node in senders else 0)
                start, ready, done, on = at - 1500, 0, at, NONE
                if e.node in receivers:
                    number = receivers[e.node]
                    other = max((r for r in range(RANKS) if r != rank), key=lambda r, n=number: late(r, n))
                    sent = base + e.node * 2000 + late(other, number)  # by the node before this one
                    start, ready = sent - 100, (sent + HOP_NS if waits else 0)
                    done = sent + HOP_NS + 50
                    on = m.counter_count + number * RANKS + other if waits else NONE
                rows.append((worker, Role.CONSUMER, step, record, e.node, e.first, e.count, start, ready, done, on))
            rows.append((worker, Role.CONTROL, step, NONE, NONE, 1, 40, base, base + 9, base + 900_000, NONE))
    out = np.zeros(len(rows), TRACE_EVENT.dtype)
    names = ("worker", "role", "step", "record", "node", "tile_begin", "tile_count")
    for event, (*where, start, ready, done, on) in zip(out, rows):
        for name, value in zip(names, where, strict=True):
            event[name] = value
        event["longest_wait_counter"] = on
        for name, value in zip(("start", "ready", "end", "published"), (start, ready, done, done), strict=True):
            event[name] = value + TIMERS[rank] if value else 0
        if event["role"] == Role.CONTROL:
            event["first_data"], event["longest_wait"] = event["ready"], event["end"]
    return out


def timeline(waits: bool = True, backend: str = "cuda") -> Timeline:
    plan, program = built()
    m = replace(program.manifest, backend=backend)
    recordings = [Recording(events_of(r, waits), (0,) * WORKERS, 1, STEPS) for r in range(RANKS)]
    whole = merged(recordings, m)
    return timeline_of(whole, replace(program, manifest=m), plan, model="m", device="d", options={})


def test_times_of_all_devices_are_by_the_first_ones_timer() -> None:
    made = timeline()
    a = made.meta.alignment
    assert a.timer_offset_ns == TIMERS and a.timer_hop_ns == (0.0, HOP_NS, HOP_NS)
    assert a.offset_ns == tuple(-float(t) for t in TIMERS for _ in range(WORKERS))
    begins = made.worker_steps
    for step in range(1, STEPS + 1):
        assert len(set(begins["start"][begins["step"] == step].tolist())) == 1
    assert made.events["start"].min() == 1 and made.complete_steps == tuple(range(1, STEPS + 1))
    assert Timeline.from_json(made.to_json()).meta == made.meta


def test_hops_between_devices_are_a_kind_of_their_own() -> None:
    made = timeline()
    steps = steps_of(made)
    (found,) = (h for h in hops(made, [arrivals(made, s) for s in steps], steps) if h.kind == "peer")
    sums = sum(e.exchange.stamped for e in exchanges_of(built()[0].schedule.nodes)[0]) - 1  # logits are joined
    tiles = sum(n.tiles for n in built()[0].schedule.nodes if n.task.name == "receive")
    assert sums == 4 and found.waits >= STEPS * RANKS * sums and set(found.ns) == {HOP_NS}
    between = made.edges[made.edges["kind"] == PEER]
    whole = [e for e in between if e["consumer_count"] > 1]  # of the logits
    assert len(whole) == RANKS * (RANKS - 1) and len(between) < RANKS * (RANKS - 1) * tiles
    _, program = built()
    tasks = made.tasks[(made.tasks["worker"] < WORKERS) & (made.tasks["longest_wait_counter"] != NONE)]
    event = tasks[(tasks["flags"] & TraceFlag.BY_VALUE) == 0][0]
    assert program.manifest.counter_count <= event["longest_wait_counter"] < counters_of(program.manifest)
    assert re.fullmatch(r"counter \d+ of rank [12]: (layers\.0\..*\.part|logits\.push)", made.waited_for(event))


def test_who_waits_for_nobody_still_bounds_the_timers() -> None:
    """Then there is only the shortest time in which an element was there, a little longer than a hop."""
    a = timeline(waits=False).meta.alignment
    for found, true in zip(a.timer_offset_ns, TIMERS):
        assert abs(found - true) <= HOP_NS


def test_devices_that_read_one_clock_are_left_alone() -> None:
    a = timeline(backend="cpu").meta.alignment
    assert a.timer_offset_ns == () and a.timer_hop_ns == ()


@pytest.mark.parametrize("lost", ["sent", "received"])
def test_a_device_that_is_not_heard_of_is_left_as_it_is(lost: str) -> None:
    plan, program = built()
    ends = exchanges_of(plan.schedule.nodes)[0]
    gone = [e.sender if lost == "sent" else e.receiver for e in ends]
    recordings = []
    for rank in range(RANKS):
        events = events_of(rank)
        if rank == 1:
            events = events[~np.isin(events["node"], gone)]
        recordings.append(Recording(events, (0,) * WORKERS, 1, STEPS))
    made = timeline_of(merged(recordings, program.manifest), program, plan, model="m", device="d", options={})
    a = made.meta.alignment
    assert a.timer_offset_ns == (0.0, 0.0, TIMERS[2]) and a.timer_hop_ns == (0.0, None, HOP_NS)
