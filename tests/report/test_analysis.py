"""What the analysis says of timelines whose answers are known: simulated steps, and small ones made by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import TimelineError
from megakernel.report.breakdown import breakdown
from megakernel.report.critical import critical_path, path_by, path_names, slack_by_node, what_if
from megakernel.report.graph import PUBLISHED, Kind
from megakernel.report.graph_build import graph_of
from megakernel.report.steps import alike, steps_of, typical
from megakernel.scheduler.assign import POLICIES
from megakernel.scheduler.calibration import Calibration
from megakernel.scheduler.dependencies import schedule
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.scheduler.simulate import simulate
from megakernel.target import TARGETS, Target
from megakernel.tasks.record import Role
from megakernel.timeline import TIMES, Timeline
from tests.fake_timeline import FIRST_STEP, IDLE_NS, timeline_of
from tests.unit.test_scheduler_fakes import decoder, node, random_nodes, random_placement

# 2 workers share 2 GB/s: 1,000 bytes a microsecond each.
PLAIN = replace(
    TARGETS["cpu-avx2"], workers=2, stream_gbps=2.0, worker_gflops=1e9, hop_us=0.5, task_us=0.25, shared_bytes=0
)


def chain() -> Schedule:
    """Worker 0 makes x from 4,000 bytes; worker 1 has 2,000 bytes to read for a node that needs x."""
    nodes = (node("make", 1, [], [("x", 0, 1, 1)], nbytes=4000), node("end", 1, [("x", 0, 0, 1)], [], nbytes=2000))
    return Schedule(nodes, ((Entry(0, 0, 1, (), 0),), (Entry(1, 0, 1, (Wait(0, 1),)),)), 1, "hand")


def layers(target: Target, policy: str = "balanced") -> Schedule:
    nodes = decoder(layers=2, hidden=64, nbytes=4000)
    return schedule(nodes, POLICIES[policy](nodes, target, 0), policy)


def random_timeline(seed: int, workers: int, **options: Any) -> tuple[Timeline, Schedule, Target]:
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    target = replace(PLAIN, workers=workers)
    made = schedule(nodes, random_placement(rng, nodes, workers), "random")
    return timeline_of(made, target, **options), made, target


# ---------------------------------------------------------------------------------------------- steps
def test_steps_follow_each_other() -> None:
    found = steps_of(timeline_of(chain(), PLAIN, calibration=lambda _s: Calibration(step_us=1.0)))
    assert [(s.number, s.begin, s.length) for s in found] == [
        (FIRST_STEP + i, IDLE_NS + 8000 * i, 8000) for i in range(3)
    ]
    assert all(a.end == b.begin for a, b in pairwise(found))


def test_time_between_launches_belongs_to_no_step() -> None:
    line = timeline_of(chain(), PLAIN)
    events = line.events.copy()
    for column in TIMES:
        events[column] += np.where(events["step"] > FIRST_STEP, 1_000_000, 0).astype("u8")
    assert [s.length for s in steps_of(replace(line, events=events))] == [7000, 7000, 7000]


def test_the_typical_step_is_the_one_in_the_middle() -> None:
    scale = {FIRST_STEP: 3.0, FIRST_STEP + 1: 1.0, FIRST_STEP + 2: 2.0}
    line = timeline_of(chain(), PLAIN, calibration=lambda s: Calibration(task_scale={"fake": scale[s]}))
    assert typical(steps_of(line)).number == FIRST_STEP + 2


def test_prompts_and_decoding_are_kept_apart() -> None:
    line = timeline_of(chain(), PLAIN, steps=4)
    events = line.events.copy()
    events["tile_begin"][(events["role"] == Role.CONTROL) & (events["step"] == FIRST_STEP)] = 16
    assert [s.number for s in alike(steps_of(replace(line, events=events)))] == [FIRST_STEP + i for i in (1, 2, 3)]


def test_a_timeline_without_a_whole_step_says_so() -> None:
    line = timeline_of(chain(), PLAIN)
    with pytest.raises(TimelineError, match="no complete step"):
        typical(steps_of(replace(line, events=line.events[:0])))


# ---------------------------------------------------------------------------------------------- where time goes
def test_the_breakdown_of_a_chain_by_hand() -> None:
    line = timeline_of(chain(), PLAIN, data_share=0.2)
    b = breakdown(line, steps_of(line))
    assert (b.steps, b.length, b.rows, b.total) == (3, 21_000, 2, 42_000)
    found = {s.name: (s.work, s.data, s.others) for s in b.operators}
    assert found == {"make": (3 * 3400, 3 * 850, 0), "end": (3 * 1800, 3 * 450, 3 * 4750)}
    assert b.header == 0 and b.idle == 3 * (7000 - 4250)
    assert [(s.name, s.total) for s in b.by_row] == [("worker 0", 3 * 4250), ("worker 1", 3 * 7000)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 5), st.floats(0, 1))
def test_every_nanosecond_is_counted_once(seed: int, workers: int, share: float) -> None:
    line, _, _ = random_timeline(seed, workers, data_share=share, calibration=lambda s: Calibration(step_us=s / 3))
    rng = np.random.default_rng(seed)
    events = line.events.copy()  # records that overlap, and some that go on after their step
    for column in TIMES:
        events[column] += rng.integers(0, 900, len(events)).astype("u8")
    for left, right in pairwise(TIMES):
        events[right] = np.maximum(events[left], events[right])
    for made in (line, replace(line, events=events)):
        b = breakdown(made, steps_of(made))
        assert b.total == b.rows * sum(s.length for s in steps_of(made))
        for shares in (b.operators, b.layers):
            assert sum(s.total for s in shares) + b.header + b.idle == b.total
        assert b.idle >= 0 and all(s.total <= b.length for s in b.by_row)
        assert sum(s.total for s in b.by_row) + b.idle == b.total
    assert breakdown(line, steps_of(line)).operators  # something was there to be counted


# ---------------------------------------------------------------------------------------------- the critical path
def test_the_path_of_a_chain_by_hand() -> None:
    line = timeline_of(chain(), PLAIN)
    g = graph_of(line, steps_of(line)[1])
    parts = critical_path(g)
    assert path_by(parts, path_names(line, g)) == {
        "make": 4250, "end": 2250, "hop by counter": 500,
    }  # fmt: skip
    assert {w.what: w.length for w in what_if(line, g)} == {
        "make": 2750, "end": 4750, "hop by counter": 6500, "all hops": 6500, "step to step": 7000,
        "record to record": 7000, "waiting for data": 7000,
    }  # fmt: skip
    assert g.slack == (0, 0) and [s.node for s in slack_by_node(line, g)] == ["make", "end"]


def test_slack_is_what_a_record_may_be_late() -> None:
    """Two workers make halves of x, one four times as long as the other."""
    nodes = (
        node("long", 1, [], [("x", 0, 1, 1)], nbytes=4000), node("short", 1, [], [("y", 0, 1, 1)], nbytes=1000),
        node("end", 1, [("x", 0, 0, 1), ("y", 0, 0, 1)], [], nbytes=2000),
    )  # fmt: skip
    queues = ((Entry(0, 0, 1, (), 0),), (Entry(1, 0, 1, (), 1),), (Entry(2, 0, 1, (Wait(0, 1), Wait(1, 1))),))
    target = replace(PLAIN, workers=3, stream_gbps=3.0)
    line = timeline_of(Schedule(nodes, queues, 2, "hand"), target)
    g = graph_of(line, steps_of(line)[0])
    assert {s.node: s.least for s in slack_by_node(line, g)} == {"long": 0, "short": 3000, "end": 0}
    assert {w.what: w.saved for w in what_if(line, g)}["long"] == 3000  # then `short` is what `end` waits for


@pytest.mark.parametrize("workers", [4, 9])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_path_and_what_if_of_a_decoder_are_those_of_the_simulation(policy: str, workers: int) -> None:
    target = replace(PLAIN, workers=workers, stream_gbps=4.0)
    made = layers(target, policy)
    line = timeline_of(made, target, calibration=lambda _s: Calibration(step_us=2.0))
    g = graph_of(line, steps_of(line)[1])
    said = simulate(made, target, 0, Calibration(step_us=2.0))
    names = [n.name for n in made.nodes]
    nodes = g.arrivals.events["node"].tolist()
    on_path = [p for p in critical_path(g) if p.kind == Kind.WORK]
    assert [(names[nodes[p.event]], p.begin, p.end) for p in on_path] == [
        (s.node, round(s.start_us * 1e3), round(s.end_us * 1e3)) for s in said.critical_path
    ]  # of workers that take equally long any may be on it
    found = {w.what: w.length / 1e3 for w in what_if(line, g)}
    free = {"hop by counter": Calibration(step_us=2.0, hop_us=0.0), "step to step": Calibration()}
    for name in names:
        free[name] = Calibration(step_us=2.0, task_scale={name: 0.0}, overhead_us={name: -target.task_us})
    for what, figures in free.items():
        assert found[what] == pytest.approx(simulate(made, target, 0, figures).makespan_us, abs=0.05), what


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 7), st.integers(0, 3000))
def test_a_graph_gives_back_the_recorded_times(seed: int, workers: int, noise: int) -> None:
    """Also where times are so noisy that some records went on before what they waited for."""
    line, _, _ = random_timeline(seed, workers, data_share=0.3)
    rng = np.random.default_rng(seed)
    events = line.events.copy()
    tasks = events["role"] == Role.WORKER
    for column in TIMES[1:]:
        events[column][tasks] += rng.integers(0, noise + 1, tasks.sum()).astype("u8")
    for left, right in pairwise(TIMES):
        events[right] = np.maximum(events[left], events[right])
    made = replace(line, events=events)
    for step in steps_of(made):
        g = graph_of(made, step)
        assert tuple(g.replay()) == g.time and g.length(lambda _a: False) == step.length
        parts = critical_path(g)
        assert sum(p.end - p.begin for p in parts) == step.length
        assert all(a.end == b.begin for a, b in pairwise(parts)) and (not parts or parts[0].begin == 0)
        assert all(w.length <= step.length for w in what_if(made, g))
        last = {p.event for p in parts}
        assert all(g.slack[e] >= 0 for e in range(len(g.slack)))
        assert any(g.slack[e] == 0 for e in last) and g.slack[_sink(g)] == 0
    assert noise or not g.late


def _sink(g: Any) -> int:
    return next(e for e, p in enumerate(g.point) if p[PUBLISHED] == g.sink)


def test_edges_in_a_circle_are_an_error() -> None:
    line = timeline_of(chain(), PLAIN)
    back = line.edges.copy()
    for a, b in (("producer", "consumer"), ("producer_first", "consumer_first")):
        back[a], back[b] = line.edges[b], line.edges[a]
    with pytest.raises(TimelineError, match="wait for each other"):
        graph_of(replace(line, edges=np.concatenate([line.edges, back])), steps_of(line)[0])
