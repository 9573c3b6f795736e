"""Policies, dependencies from regions, counters, tickets and records, on fake tasks."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakernel.architectures import shape_config
from megakernel.builder.build import make_plan
from megakernel.errors import RecordError, ScheduleError
from megakernel.scheduler import ticket
from megakernel.scheduler.assign import POLICIES, find_policies
from megakernel.scheduler.dependencies import edges, schedule
from megakernel.scheduler.encode import decode, encode
from megakernel.scheduler.hazards import Tiles, bits, requirements
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.scheduler.verify import verify
from megakernel.target import TARGETS, find_target
from megakernel.tasks.record import MAX_WAITS, OPCODE_END, OPCODE_TICKET, RECORD
from megakernel.tasks.task import Addresses, TaskNode
from tests.unit.test_scheduler_fakes import Access, Fake, decoder, node, random_memory, random_nodes, random_placement
from tests.unit.test_scheduler_machine import Model, meet, touch

CPU = TARGETS["cpu-avx2"]
AT = Addresses(lambda name: 0, lambda name: 256)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rank(nodes: list[TaskNode], queues: tuple[tuple[tuple[int, int, int], ...], ...]) -> None:
    """Queues follow the data flow and hold every tile once."""
    whole = [Tiles(i, 0, n.tiles) for i, n in enumerate(nodes)]
    before = [set(need) for need in requirements(nodes, whole)]
    for queue in queues:
        for at, (index, _, _) in enumerate(queue):
            assert not before[index] & {q[0] for q in queue[at + 1 :]}
    for index, n in enumerate(nodes):
        tiles = sorted(t for q in queues for i, first, count in q if i == index for t in range(first, first + count))
        assert tiles == list(range(n.tiles))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 132])
@pytest.mark.parametrize("target", ["cpu-avx2", "sm_90a"])
def test_policies_place_every_tile_once_in_order(policy: str, workers: int, target: str) -> None:
    nodes = decoder()
    placed = POLICIES[policy](nodes, TARGETS[target].with_workers(workers), 512)
    assert len(placed) == workers
    rank(nodes, placed)
    made = schedule(nodes, placed, policy)
    verify(made)
    assert made.policy == policy and made.workers == workers


def test_policies_are_found_by_their_signature() -> None:
    assert {"round_robin", "balanced", "critical_path"} <= set(POLICIES)
    assert find_policies() == POLICIES and all(not name.startswith("_") for name in POLICIES)


def test_round_robin_rotates_the_remainder() -> None:
    nodes = [node(f"n{i}", 5, [], [(f"t{i}", 0, 1, 1)]) for i in range(4)]
    placed = POLICIES["round_robin"](nodes, CPU.with_workers(4), 0)
    assert [sum(count for _, _, count in queue) for queue in placed] == [5, 5, 5, 5]


def test_balanced_pays_back_an_uneven_node() -> None:
    nodes = [node("big", 3, [], [("a", 0, 1, 1)], nbytes=10_000), node("even", 8, [], [("b", 0, 1, 1)], nbytes=10_000)]
    target = replace(TARGETS["sm_90a"], workers=2, shared_bytes=200_000)
    placed = POLICIES["balanced"](nodes, target, 0)
    load = [sum(count for _, _, count in queue) for queue in placed]
    assert abs(load[0] - load[1]) <= 1


def test_attention_is_placed_in_each_layer_as_in_the_one_before() -> None:
    """So that what a worker knows of its tile's pages holds for all layers; no worker has two tiles. Others rotate."""
    plan = make_plan(shape_config("llama-3.2-1b"), find_target("sm_90a"), max_context=512, max_slots=1)
    nodes = plan.schedule.nodes
    layers: dict[str, dict[int, list[tuple[int, int, int]]]] = {"attention": {}, "matmul": {}}
    for worker, queue in enumerate(plan.schedule.queues):
        for e in queue:
            if nodes[e.node].task.name in layers and nodes[e.node].layer >= 0:
                layers[nodes[e.node].task.name].setdefault(nodes[e.node].layer, []).append((worker, e.first, e.count))
    placed = {name: {tuple(rows) for rows in found.values()} for name, found in layers.items()}
    assert len(layers["attention"]) == 16 and len(placed["attention"]) == 1 and len(placed["matmul"]) > 1
    assert {count for rows in layers["attention"].values() for _, _, count in rows} == {1}


def test_critical_path_starts_with_the_long_branch() -> None:
    nodes = [
        node("short", 1, [], [("a", 0, 1, 1)], nbytes=10),
        node("long", 1, [], [("b", 0, 1, 1)], nbytes=10),
        node("after long", 1, [("b", 0, 0, 1)], [("c", 0, 1, 1)], nbytes=1_000_000),
        node("end", 1, [("a", 0, 0, 1), ("c", 0, 0, 1)], []),
    ]
    placed = POLICIES["critical_path"](nodes, CPU.with_workers(1), 0)
    assert [n for n, _, _ in placed[0]] == [1, 2, 0, 3]
    two = POLICIES["critical_path"](nodes, CPU.with_workers(2), 0)
    worker = next(w for w, q in enumerate(two) if 1 in {n for n, _, _ in q})
    assert 2 in {n for n, _, _ in two[worker]}  # a node of one tile goes where its input was made


@quick
@given(st.integers(0, 10**9), st.integers(1, 8), st.booleans())
def test_random_graphs_in_random_order(seed: int, workers: int, shared_memory: bool) -> None:
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    memory = random_memory(rng, nodes) if shared_memory else {}
    made = schedule(nodes, random_placement(rng, nodes, workers, memory), "random", alias=memory)
    verify(made, memory)
    for steps in (1, 2):
        assert Model(made, memory, steps).walk(rng) == ""
    again = schedule(nodes, POLICIES["critical_path"](nodes, CPU.with_workers(workers), 64), "critical_path")
    verify(again)
    assert Model(again, {}, 2).walk(rng) == ""


@quick
@given(st.integers(0, 10**9))
def test_requirements_lose_nothing(seed: int) -> None:
    """Every pair of conflicting tiles is ordered, directly or through others; nothing later is required."""
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    memory = random_memory(rng, nodes) if rng.random() < 0.5 else {}
    tiles = [Tiles(i, t, 1) for i, n in enumerate(nodes) for t in range(n.tiles)]
    members = [[k for k, t in enumerate(tiles) if t.node == i] for i in range(len(nodes))]
    reach: list[set[int]] = []
    for t, need in zip(tiles, requirements(nodes, tiles, memory)):
        direct = {members[n][b] for n, mask in need.items() for b in bits(mask)}
        assert all(tiles[d].node < t.node for d in direct)
        reach.append(direct.union(*(reach[d] for d in direct)))
    fake = Schedule(tuple(nodes), (), 0, "")
    touched = [touch(fake, Entry(t.node, t.first, 1)) for t in tiles]
    for b, (b_reads, b_writes) in enumerate(touched):
        for a, (a_reads, a_writes) in enumerate(touched[:b]):
            pairs = [(x, y) for x in a_writes for y in b_reads + b_writes] + [(x, y) for x in a_reads for y in b_writes]
            if tiles[a].node < tiles[b].node and any(meet(x, y, memory) for x, y in pairs):
                assert a in reach[b], (tiles[a], tiles[b])


def test_counters_have_exactly_the_producers_that_waiters_need() -> None:
    nodes = [
        node("make", 4, [], [("x", 0, 1, 1)]),
        node("left", 1, [("x", 0, 0, 2)], [("y", 0, 1, 1)]),
        node("right", 1, [("x", 2, 0, 2)], [("z", 0, 1, 1)]),
        node("end", 1, [("y", 0, 0, 1), ("z", 0, 0, 1)], []),
    ]
    placed = (((0, 0, 1), (1, 0, 1), (3, 0, 1)), ((0, 1, 1), (2, 0, 1)), ((0, 2, 1),), ((0, 3, 1),))
    made = schedule(nodes, placed, "hand")
    verify(made)
    left, right = made.queues[0][1], made.queues[1][1]
    assert [w.count for w in left.waits] == [2] and [w.count for w in right.waits] == [2]
    assert left.waits != right.waits
    assert [q[0].signal for q in made.queues][:2] == [left.waits[0].counter] * 2
    assert made.queues[0][2].signal is None  # nobody waits for the end


def test_what_queue_order_implies_needs_no_counter() -> None:
    made = schedule(decoder(), POLICIES["round_robin"](decoder(), CPU.with_workers(1), 0), "round_robin")
    assert made.counters == 0
    assert all(not e.waits and e.signal is None for e in made.queues[0])


def test_implied_waits_are_dropped() -> None:
    nodes = decoder(layers=3)
    made = schedule(nodes, POLICIES["round_robin"](nodes, CPU.with_workers(4), 0), "round_robin")
    assert max(len(e.waits) for q in made.queues for e in q) == 1
    every = edges(nodes, POLICIES["round_robin"](nodes, CPU.with_workers(4), 0))
    assert len(every) > 3 * sum(len(e.waits) for q in made.queues for e in q)
    assert all(e.producer != e.consumer for e in every)


def spread(producers: int, tiles: int) -> tuple[list[TaskNode], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """`producers` nodes of `tiles` tiles with readers that all want different tiles, and one that wants all."""
    nodes = [node(f"p{i}", tiles, [], [(f"t{i}", 0, 1, 1)]) for i in range(producers)]
    placed = [[(i, t, 1) for i in range(producers)] for t in range(tiles)]
    some: list[Access] = [(f"t{i}", 0, 1, 1) for i in range(producers)]
    nodes.append(node("each", tiles, some, [("each", 0, 1, 1)]))
    every: list[Access] = [(f"t{i}", 0, 0, tiles) for i in range(producers)]
    nodes.append(node("gather", 1, every, [("all", 0, 1, 1)]))
    nodes.append(node("end", 1, [("all", 0, 0, 1), ("each", 0, 0, tiles)], []))
    for t in range(tiles):
        placed.append([(producers, t, 1)])
    placed.append([(producers + 1, 0, 1), (producers + 2, 0, 1)])
    return nodes, tuple(tuple(q) for q in placed)


def test_many_counters_become_one_for_a_node() -> None:
    nodes, placed = spread(1, 8)
    made = schedule(nodes, placed, "hand")
    verify(made)
    assert max(len(e.waits) for q in made.queues for e in q) <= MAX_WAITS
    assert {q[0].signal for q in made.queues[:8]} == {made.queues[0][0].signal}
    fine = schedule(nodes, placed, "hand", max_waits=8)
    assert len({q[0].signal for q in fine.queues[:8]}) == 8


def test_waits_move_to_earlier_entries_when_one_record_cannot_hold_them() -> None:
    """Two readers with different halves of seven nodes; one entry before them on their worker has room."""
    nodes = [node(f"p{i}", 1, [], [(f"t{i}", 0, 1, 1)]) for i in range(7)]
    nodes += [node(f"r{i}", 1, [(f"t{i}", 0, 0, 1)], [(f"u{i}", 0, 1, 1)]) for i in range(7)]
    nodes.append(node("room", 1, [], [("v", 0, 1, 1)]))
    nodes.append(node("wide", 1, [(f"t{i}", 0, 0, 1) for i in range(7)], [("w", 0, 1, 1)]))
    nodes.append(node("end", 1, [("w", 0, 0, 1)], []))
    placed = tuple(((i, 0, 1),) for i in range(7)) + tuple(((7 + i, 0, 1),) for i in range(7))
    made = schedule(nodes, (*placed, ((14, 0, 1), (15, 0, 1), (16, 0, 1))), "hand")
    verify(made)
    assert [len(e.waits) for e in made.queues[-1][:2]] == [2, 5]
    with pytest.raises(ScheduleError, match=r"node wide, tiles \[0, 1\).*would wait for 7 counters"):
        schedule(nodes, (*placed, ((15, 0, 1), (16, 0, 1)), ((14, 0, 1),)), "hand")


def test_the_end_follows_entries_that_nobody_reads() -> None:
    nodes = [
        node("debug", 2, [], [("log", 0, 1, 1)]),
        node("work", 1, [], [("x", 0, 1, 1)]),
        node("end", 1, [("x", 0, 0, 1)], []),
    ]
    made = schedule(nodes, (((0, 0, 1),), ((0, 1, 1),), ((1, 0, 1), (2, 0, 1))), "hand")
    verify(made)
    assert [w.count for w in made.queues[2][1].waits] == [2]


def test_tensors_that_share_memory_are_kept_apart() -> None:
    nodes = [
        node("a", 2, [], [("x", 0, 1, 1)]),
        node("b", 2, [("x", 0, 1, 1)], [("y", 0, 1, 1)]),
        node("c", 1, [], [("z", 0, 2, 2)]),
        node("end", 1, [("z", 0, 0, 2), ("y", 0, 0, 2)], []),
    ]
    placed = (((0, 0, 1), (1, 0, 1)), ((0, 1, 1), (1, 1, 1)), ((2, 0, 1), (3, 0, 1)))
    memory = {"x": (0, 64), "z": (32, 64), "y": (128, 64)}
    loose = schedule(nodes, placed, "hand")
    verify(loose)
    with pytest.raises(ScheduleError, match="may still be in use"):
        verify(loose, memory)
    made = schedule(nodes, placed, "hand", alias=memory)
    verify(made, memory)
    assert made.queues[2][0].waits


def test_contradictions_are_named() -> None:
    nodes = [node("a", 1, [], [("x", 0, 1, 1)]), node("b", 1, [("x", 0, 0, 1)], [])]
    with pytest.raises(ScheduleError, match=r"queues contradict each other.*nodes a, b"):
        schedule(nodes, (((1, 0, 1), (0, 0, 1)),), "hand")
    with pytest.raises(ScheduleError, match="names node 5"):
        schedule(nodes, (((5, 0, 1),),), "hand")
    in_place = [node("a", 1, [], [("x", 0, 4, 4)]), node("b", 2, [("x", 0, 0, 4)], [("x", 0, 2, 2)])]
    with pytest.raises(ScheduleError, match=r"node b: entry 0 writes x.*give the output its own tensor"):
        schedule(in_place, (((0, 0, 1), (1, 0, 1)), ((1, 1, 1),)), "hand")
    twice = [node("b", 2, [], [("x", 0, 1, 2)])]
    with pytest.raises(ScheduleError, match="node b: entries 0 and 1 both write x at column 1"):
        schedule(twice, (((0, 0, 1),), ((0, 1, 1),)), "hand")


@quick
@given(st.integers(0, 10**9), st.integers(1, 4))
def test_records_hold_the_schedule(seed: int, workers: int) -> None:
    rng = random.Random(seed)
    nodes = random_nodes(rng)
    tickets = frozenset(i for i in range(len(nodes) - 1) if rng.random() < 0.3)
    made = schedule(nodes, random_placement(rng, nodes, workers), "random", ticketed=tickets)
    opcodes = {n.name: i for i, n in enumerate(nodes)}
    records = encode(made, lambda n: opcodes[n.name], AT)
    assert records.dtype == RECORD.dtype and records.shape[0] == workers
    assert (records["opcode"][range(workers), [len(q) for q in made.queues]] == OPCODE_END).all()
    assert decode(records, nodes, made.counters, "random") == made
    for w, queue in enumerate(made.queues):
        for i, e in enumerate(queue):
            got = Fake.fields.unpack(records[w, i]["payload"].tobytes()[: Fake.fields.size])
            if e.node not in tickets:
                assert records[w, i]["opcode"] == e.node and got["width"] == nodes[e.node].sizes["bytes"]
            else:
                assert records[w, i]["opcode"] == OPCODE_TICKET


def test_a_record_cannot_hold_more_waits_than_it_has() -> None:
    nodes = (node("a", 1, [], []),)
    many = tuple(Wait(i, 1) for i in range(MAX_WAITS + 1))
    with pytest.raises(RecordError, match=f"a record holds {MAX_WAITS}"):
        encode(Schedule(nodes, ((Entry(0, 0, 1, many),),), 9, ""), lambda n: 0, AT)
    with pytest.raises(RecordError, match="no end"):
        decode(encode(Schedule(nodes, ((Entry(0, 0, 1),),), 0, ""), lambda n: 0, AT)[:, :1], nodes, 0)


@quick
@given(st.integers(0, 10**9), st.integers(1, 3))
def test_tickets_are_safe_whoever_takes_them(seed: int, workers: int) -> None:
    rng = random.Random(seed)
    nodes = random_nodes(rng, most=5, most_tiles=3)
    tickets = frozenset(i for i in range(len(nodes) - 1) if rng.random() < 0.5)
    made = schedule(nodes, random_placement(rng, nodes, workers), "random", ticketed=tickets)
    verify(made)
    for _ in range(4):
        queues: list[list[Entry]] = [[] for _ in range(workers)]
        takers = {n: [w for w, q in enumerate(made.queues) if n in {e.node for e in q}] for n in tickets}
        taken = [(e, rng.choice(takers[e.node])) for e in made.shared]
        for w, queue in enumerate(made.queues):
            for e in queue:
                queues[w] += [s for s, who in taken if who == w and s.node == e.node] if e.node in tickets else []
                queues[w].append(e)
        dealt = Schedule(made.nodes, tuple(tuple(q) for q in queues), made.counters, "dealt")
        assert Model(dealt, {}, 2).walk(rng) == ""


def test_ticket_model_gives_each_entry_once_a_step() -> None:
    shared = tuple(Entry(0, i, 1) for i in range(5))
    queue = ticket.TicketQueue(shared, workers=3)
    for step in (1, 2, 3):
        running, got = [0, 1, 2], []
        rng = random.Random(step)
        while running:
            worker = rng.choice(running)
            entry = queue.take(step)
            if entry is None:
                running.remove(worker)
            else:
                got.append(entry)
        assert got == list(shared)
    assert queue.value == 3 * queue.pops


def test_ticket_counters_and_payload() -> None:
    nodes = [
        node("a", 3, [], [("x", 0, 1, 1)]),
        node("b", 2, [("x", 0, 0, 3)], [("y", 0, 1, 1)]),
        node("end", 1, [("y", 0, 0, 2)], []),
    ]
    placed = (((0, 0, 2), (1, 0, 1), (2, 0, 1)), ((0, 2, 1), (1, 1, 1)))
    made = schedule(nodes, placed, "hand", ticketed=frozenset({1}))
    verify(made)
    assert ticket.counter(made, 1) == made.counters - 1
    assert ticket.payload(made, 1, 10) == {"counter": made.counters - 1, "first": 10, "count": 2, "pops": 4}
    with pytest.raises(ScheduleError, match="node a is not ticketed"):
        ticket.counter(made, 0)
    broken = replace(made, queues=tuple(tuple(e for e in q if e.node != 1) for q in made.queues))
    with pytest.raises(ScheduleError, match="no worker takes its tickets"):
        verify(broken)


@pytest.mark.parametrize(
    ("shape", "rows", "shares"),
    [("llama-3.2-1b", 8, 1), ("llama-3.2-1b", 16, 2), ("llama-3.2-1b", 64, 4), ("qwen3-0.6b", 64, 8)],
)
def test_rows_of_a_head_are_added_by_several_workers(shape: str, rows: int, shares: int) -> None:
    """Of programs with more rows than a worker has warps; no worker has two shares."""
    plan = make_plan(shape_config(shape), TARGETS["sm_90a"], max_slots=rows, max_rows=rows, max_context=512)
    node = plan.schedule.nodes[9]
    assert node.task.name == "combine" and node.tiles == shares * shape_config(shape)["num_attention_heads"]
    placed = [e.count for queue in plan.schedule.queues for e in queue if e.node == 9]
    assert placed == [1] * node.tiles


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.2-1b"])
def test_workers_that_end_attention_get_less_of_what_reads_it(shape: str) -> None:
    """Where edges are by value. On an H200: 13 us of a step of Qwen3-0.6B at 32 tokens, 11 of Llama-3.2-1B at 4,096."""
    plan = make_plan(shape_config(shape), TARGETS["sm_90a"], max_slots=1, max_context=512)
    nodes = plan.schedule.nodes

    def tiles(index: int) -> list[int]:
        return [sum(e.count for e in queue if e.node == index) for queue in plan.schedule.queues]

    attention, combine, reader = range(8, 11)
    assert [nodes[i].task.name for i in (attention, combine, reader)] == ["attention", "combine", "matmul"]
    ends = np.cumsum(tiles(attention))
    first = {int(np.searchsorted(ends, tile, "right")) for tile in nodes[attention].task.first_tiles(nodes[attention])}
    assert len(first) == 8
    placed = tiles(reader)
    assert all(placed[w] == min(placed) for w in first if shape == "qwen3-0.6b") and sum(placed) == nodes[reader].tiles
    assert not {w for w, count in enumerate(tiles(combine)) if count} & first
    late = first | {w for w, count in enumerate(tiles(combine)) if count}
    assert {w for w, count in enumerate(placed) if count == min(placed)} <= late
