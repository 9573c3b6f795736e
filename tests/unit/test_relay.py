"""Hierarchical counters in the scheduler: which edges are relayed, and that schedules with relays are still proven."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import RecordError, ScheduleError, TargetError
from megakernel.scheduler.assign import balanced
from megakernel.scheduler.by_value import drop_value_waits
from megakernel.scheduler.dependencies import schedule
from megakernel.scheduler.encode import decode, encode
from megakernel.scheduler.relay import add_relays, group_of, pays
from megakernel.scheduler.schedule import Entry, Relay, Schedule, Wait
from megakernel.scheduler.simulate import simulate
from megakernel.scheduler.verify import verify
from megakernel.target import TARGETS
from megakernel.tasks.task import Addresses
from tests.unit.test_scheduler_fakes import decoder, node, random_memory, random_nodes, random_placement
from tests.unit.test_scheduler_machine import Model

GROUPED = replace(
    TARGETS["cpu-avx2"], workers=6, groups=2, signal_us=1.0, hop_us=0.5, task_us=0.25, stream_gbps=6.0,
    worker_gflops=1e9,
)  # fmt: skip


def relayed_everywhere(plain: Schedule, groups: int = 2) -> Schedule:
    return add_relays(plain, replace(GROUPED, workers=plain.workers, groups=groups), lambda _signals, _target: True)


def six_to_one() -> Schedule:
    """Six workers make x, worker 0 needs all of it."""
    nodes = (node("make", 6, [], [("x", 0, 1, 1)], nbytes=1000), node("end", 1, [("x", 0, 0, 6)], []))
    last = Entry(1, 0, 1, (Wait(0, 6),))
    queues = tuple((Entry(0, w, 1, (), 0), *((last,) if w == 0 else ())) for w in range(6))
    return Schedule(nodes, queues, 1, "hand")


# ------------------------------------------------------------------------------------------ which edges
@pytest.mark.parametrize(("workers", "groups"), [(304, 8), (256, 8), (7, 3), (4, 4), (5, 1)])
def test_groups_are_contiguous_and_near_equal(workers: int, groups: int) -> None:
    of = [group_of(w, workers, groups) for w in range(workers)]
    assert of == sorted(of) and set(of) == set(range(groups))
    sizes = [of.count(g) for g in range(groups)]
    assert max(sizes) - min(sizes) <= 1


def test_an_edge_is_relayed_where_turns_cost_more_than_a_hop() -> None:
    big = replace(GROUPED, workers=304, groups=8, signal_us=8.0 / 304, hop_us=1.0)
    assert pays([38] * 8, big)  # 8 us against 2.2
    assert pays([13] * 8, big)
    assert not pays([5] * 8, big)  # 1.05 us against 1.34
    assert not pays([304, 0, 0, 0, 0, 0, 0, 0], big), "one group alone"
    assert not pays([38] * 8, replace(big, groups=1))
    assert not pays([38] * 8, replace(big, signal_us=0.0))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_targets_of_one_group_keep_their_schedules(name: str) -> None:
    target = TARGETS[name].with_workers(16)
    nodes = decoder()
    plain = schedule(nodes, balanced(nodes, target, 0), "balanced")
    made = add_relays(plain, target)
    assert (made is plain) or target.groups > 1
    if target.groups == 1:
        assert (encode(made, lambda _n: 0, ADDRESSES)["members"] == 0).all()


def test_cuda_targets_have_one_group_and_more_are_refused() -> None:
    for target in TARGETS.values():
        if target.backend == "cuda":
            assert target.groups == 1
            with pytest.raises(TargetError, match="one group"):
                replace(target, groups=2)


def test_six_to_one_by_hand() -> None:
    made = add_relays(six_to_one(), GROUPED)
    assert made.counters == 3 and made.relays == (Relay(1, 3, 0), Relay(2, 3, 0))
    assert [q[0].signal for q in made.queues] == [1, 1, 1, 2, 2, 2]
    assert made.queues[0][1].waits == (Wait(0, 2),)
    verify(made)


# ------------------------------------------------------------------------------------------ proof
ADDRESSES = Addresses(lambda _weight: 0, lambda _tensor: 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 4), st.integers(2, 4), st.booleans())
def test_relayed_schedules_verify_and_survive_encoding(seed: int, workers: int, groups: int, tickets: bool) -> None:
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    ticketed = frozenset(i for i in range(len(nodes) - 1) if tickets and rng.random() < 0.4)
    plain = schedule(nodes, random_placement(rng, nodes, workers), "random", ticketed=ticketed)
    made = relayed_everywhere(plain, groups)
    verify(made)
    back = decode(encode(made, lambda _n: 3, ADDRESSES), nodes, made.counters, "random")
    assert back == made
    assert len(simulate(made, replace(GROUPED, workers=workers, groups=groups), 0).spans) > 0


def test_every_interleaving_of_relayed_schedules_is_harmless() -> None:
    rng = random.Random(11)
    relayed = 0
    for _ in range(60):
        nodes = random_nodes(rng, most=4, most_tiles=3)
        memory = random_memory(rng, nodes) if rng.random() < 0.5 else {}
        plain = schedule(nodes, random_placement(rng, nodes, 3, memory), "random", alias=memory)
        made = relayed_everywhere(plain)
        verify(made, memory)
        relayed += bool(made.relays)
        assert Model(made, memory, 1).explore() == ""
        assert Model(made, memory, 3).walk(rng) == ""
    assert relayed > 20


@pytest.mark.parametrize("kind", ["early", "late", "missing", "elsewhere", "chain", "signal"])
def test_damaged_relays_are_refused_or_harmless(kind: str) -> None:
    rng = random.Random(f"relay {kind}")
    refused = 0
    for _ in range(400):
        nodes = random_nodes(rng, most=4, most_tiles=3)
        made = relayed_everywhere(schedule(nodes, random_placement(rng, nodes, 3), "random"))
        if not made.relays:
            continue
        bad = damaged(rng, made, kind)
        if bad == made:
            continue
        try:
            verify(bad)
        except ScheduleError:
            refused += 1
            continue
        assert Model(bad, {}, 2).explore() == "", f"verify accepted a relay that is {kind}: {bad}"
    assert refused > 30


def damaged(rng: random.Random, s: Schedule, kind: str) -> Schedule:
    at = rng.randrange(len(s.relays))
    r = s.relays[at]
    rest = s.relays[:at] + s.relays[at + 1 :]
    if kind == "early":
        return replace(s, relays=(*rest, replace(r, count=r.count - 1)))
    if kind == "late":
        return replace(s, relays=(*rest, replace(r, count=r.count + 1)))
    if kind == "missing":
        return replace(s, relays=rest)
    if kind == "elsewhere":
        return replace(s, relays=(*rest, replace(r, to=rng.randrange(s.counters))))
    if kind == "chain":
        return replace(s, relays=(*s.relays, Relay(r.to, 1, rng.randrange(s.counters))))
    queues = [list(q) for q in s.queues]
    places = [(w, i) for w, q in enumerate(queues) for i, e in enumerate(q) if e.signal == r.counter]
    w, i = rng.choice(places)
    queues[w][i] = replace(queues[w][i], signal=None)
    return replace(s, queues=tuple(map(tuple, queues)))


def test_a_deadlock_names_both_levels() -> None:
    made = add_relays(six_to_one(), GROUPED)
    queues = list(made.queues)
    queues[5] = (Entry(0, 5, 1, (Wait(0, 2),), 2),)  # waits for what waits for it
    with pytest.raises(ScheduleError) as caught:
        verify(replace(made, queues=tuple(queues)))
    assert "counter 0 has 1 of 2 (counter 2 of a group has 2 of 3)" in str(caught.value)


def test_thresholds_at_both_levels() -> None:
    made = add_relays(six_to_one(), GROUPED)
    with pytest.raises(ScheduleError, match=r"relay of counter 1 to counter 0 is sent after 4 signals.*gets 3"):
        verify(replace(made, relays=(Relay(1, 4, 0), made.relays[1])))
    queues = list(made.queues)
    queues[0] = (queues[0][0], replace(queues[0][1], waits=(Wait(0, 3),)))
    with pytest.raises(ScheduleError, match="waits for 3 signals of counter 0, which gets 2"):
        verify(replace(made, queues=tuple(queues)))


# ------------------------------------------------------------------------------------------ cost, values, records
def test_simulated_times_of_a_flat_and_a_relayed_counter() -> None:
    """1,000 bytes a microsecond for each worker: all six signal at 1.25 us."""
    flat = simulate(six_to_one(), GROUPED, 0)
    assert flat.spans[-1].start_us == pytest.approx(1.25 + 6 * 1.0 + 0.5)
    relayed = simulate(add_relays(six_to_one(), GROUPED), GROUPED, 0)
    assert relayed.spans[-1].start_us == pytest.approx(1.25 + 3 * 1.0 + 0.5 + 2 * 1.0 + 0.5)
    free = simulate(six_to_one(), replace(GROUPED, signal_us=0.0), 0)
    assert free.spans[-1].start_us == pytest.approx(1.25 + 0.5)


def test_dropped_waits_take_their_relays_with_them() -> None:
    made = add_relays(six_to_one(), GROUPED)
    kept = drop_value_waits(made)  # fake tasks do not wait for values
    assert kept == made
    nobody = replace(made, queues=tuple(tuple(replace(e, waits=()) for e in q) for q in made.queues))
    with pytest.raises(ScheduleError, match=r"node end tiles .* reads plainly what node make writes"):
        drop_value_waits(nobody)
    quiet = drop_value_waits(replace(nobody, nodes=(made.nodes[0], node("end", 1, [], []))))
    assert quiet.relays == () and all(e.signal is None for q in quiet.queues for e in q)


def test_a_record_holds_relays_of_16_bits() -> None:
    made = add_relays(six_to_one(), GROUPED)
    records = encode(made, lambda _n: 0, ADDRESSES)
    assert records["members"][:, 0].tolist() == [3] * 6 and (np.unique(records["relay"]) == 0).all()
    far = replace(made, relays=tuple(replace(r, to=70_000) for r in made.relays))
    with pytest.raises(RecordError, match="65535"):
        encode(far, lambda _n: 0, ADDRESSES)
