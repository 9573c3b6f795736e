"""The cost model: times that can be worked out by hand, and figures that must agree with each other."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import ScheduleError
from megakernel.scheduler.assign import POLICIES
from megakernel.scheduler.dependencies import schedule
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.scheduler.simulate import Calibration, Simulation, simulate
from megakernel.target import TARGETS, Target
from tests.unit.test_scheduler_fakes import decoder, node, random_nodes, random_placement

# 2 workers share 2 GB/s: 1,000 bytes a microsecond each.
PLAIN = replace(
    TARGETS["cpu-avx2"], workers=2, stream_gbps=2.0, worker_gflops=1e9, hop_us=0.5, task_us=0.25, shared_bytes=0
)


def two(target: Target = PLAIN, calibration: Calibration | None = None) -> Simulation:
    """Worker 0 makes x from 4,000 bytes; worker 1 has 2,000 bytes to read for a node that needs x."""
    nodes = (node("make", 1, [], [("x", 0, 1, 1)], nbytes=4000), node("end", 1, [("x", 0, 0, 1)], [], nbytes=2000))
    made = Schedule(nodes, ((Entry(0, 0, 1, (), 0),), (Entry(1, 0, 1, (Wait(0, 1),)),)), 1, "hand")
    return simulate(made, target, 0, calibration)


def test_a_chain_of_two_by_hand() -> None:
    r = two()
    assert [(s.start_us, s.end_us) for s in r.spans] == [(0.0, 4.25), (4.75, 7.0)]
    assert r.makespan_us == 7.0 and r.stream_bytes == 6000 and r.floor_us == 3.0
    assert r.busy_us == (4.25, 2.25) and r.idle_us == (2.75, 4.75)
    assert [s.node for s in r.critical_path] == ["make", "end"]
    assert r.efficiency == pytest.approx(3 / 7)


def test_a_ring_hides_the_bytes_of_a_waiting_worker() -> None:
    assert two(replace(PLAIN, shared_bytes=100_000)).makespan_us == pytest.approx(4.25 + 0.5 + 0.25)
    small = two(replace(PLAIN, shared_bytes=1000))
    assert small.makespan_us == pytest.approx(4.75 + (2000 - 850) / 1000 + 0.25)


def test_calibration_replaces_the_target() -> None:
    r = two(calibration=Calibration(stream_gbps=4.0, hop_us=1.0, task_us=0.0, task_scale={"fake": 2.0}))
    assert r.makespan_us == pytest.approx(4.0 + 1.0 + 2.0)
    assert two(calibration=Calibration(worker_gflops=1e-3)).makespan_us == pytest.approx(8000 + 4000 + 1.0)


def test_json_holds_all_figures() -> None:
    r = two()
    out = json.loads(r.to_json())
    assert out["makespan_us"] == 7.0 and len(out["spans"]) == 2 and out["critical_path"][0]["node"] == "make"
    assert out["efficiency"] == pytest.approx(3 / 7) and "spans" not in json.loads(r.to_json(spans=False))


def test_a_deadlock_is_an_error() -> None:
    nodes = (node("end", 1, [], []),)
    with pytest.raises(ScheduleError, match="worker 0 stops before entry 0"):
        simulate(Schedule(nodes, ((Entry(0, 0, 1, (Wait(0, 1),)),),), 1, "hand"), PLAIN, 0)


@pytest.mark.parametrize("target", ["cpu-avx2", "sm_90a", "gfx942"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_more_workers_help_and_the_floor_holds(target: str, policy: str) -> None:
    nodes = decoder(layers=2, hidden=256, nbytes=20_000)
    found = []
    for workers in (1, 4):
        t = replace(TARGETS[target].with_workers(workers), stream_gbps=10.0 * workers)
        r = simulate(schedule(nodes, POLICIES[policy](nodes, t, 64), policy), t, 64)
        assert r.makespan_us >= r.floor_us and all(i >= -1e-9 for i in r.idle_us)
        assert r.stream_bytes == sum(n.task.cost(n, 0, n.tiles, 64).stream_bytes for n in nodes)
        found.append(r.makespan_us)
    assert found[1] < found[0] / 2


def test_policies_beat_one_worker_that_does_it_all() -> None:
    nodes = decoder(layers=1, hidden=256, nbytes=20_000)
    alone = (tuple((i, 0, n.tiles) for i, n in enumerate(nodes)), (), (), ())
    target = PLAIN.with_workers(4)
    worst = simulate(schedule(nodes, alone, "alone"), target, 0).makespan_us
    for name, policy in POLICIES.items():
        assert simulate(schedule(nodes, policy(nodes, target, 0), name), target, 0).makespan_us < worst / 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 5), st.booleans())
def test_times_respect_queues_and_waits(seed: int, workers: int, tickets: bool) -> None:
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    ticketed = frozenset(i for i in range(len(nodes) - 1) if tickets and rng.random() < 0.4)
    made = schedule(nodes, random_placement(rng, nodes, workers), "random", ticketed=ticketed)
    r = simulate(made, replace(PLAIN, workers=workers, shared_bytes=rng.choice((0, 3000))), 0)
    index = {n.name: i for i, n in enumerate(nodes)}
    entries = {(e.node, e.first): e for q in (*made.queues, made.shared) for e in q if e.count}
    assert len(r.spans) == len(entries)
    ends: dict[int, list[tuple[float, int]]] = {}
    for s in r.spans:
        signal = entries[index[s.node], s.first].signal
        if signal is not None:
            ends.setdefault(signal, []).append((s.end_us, s.worker))
    for s in r.spans:
        for w in entries[index[s.node], s.first].waits:
            for end, worker in ends.get(w.counter, []):
                assert s.start_us >= end + (0.5 if worker != s.worker else 0.0) - 1e-9
    for worker in range(workers):
        mine = [s for s in r.spans if s.worker == worker]
        assert all(a.end_us <= b.start_us for a, b in pairwise(mine))
    for a, b in pairwise(r.critical_path):
        assert a.end_us <= b.start_us
    assert r.critical_path[-1].end_us == r.makespan_us
