"""What `verify` says of exchanges between devices: windows written over too early, deadlocks across devices, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megakernel.architectures import shape_config
from megakernel.builder.build import Plan, make_plan
from megakernel.builder.exchange import SentAfter
from megakernel.builder.fuse import FusedExchange, FusedMatmul
from megakernel.errors import LoweringError, ScheduleError
from megakernel.scheduler.assign import POLICIES
from megakernel.scheduler.by_value import drop_value_waits, loose_nodes
from megakernel.scheduler.dependencies import schedule
from megakernel.scheduler.exchanges import exchanges_of
from megakernel.scheduler.schedule import Schedule
from megakernel.scheduler.verify import verify
from megakernel.target import find_target
from megakernel.tasks.norm import Norm
from tests.gpu.machine import MODELS

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 263,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


def planned(tp: int = 2, workers: int = 3, **fields: Any) -> Plan:
    target = replace(find_target("cpu-generic").with_workers(workers), **fields)
    return make_plan(CONFIG, target, tp=tp, dtype="f32", max_slots=2, max_context=64, max_rows=16)


def moved(schedule: Schedule, place: Mapping[int, int]) -> Schedule:
    """The same with some exchanges' buffers elsewhere."""
    nodes = [
        replace(n, sizes={**n.sizes, "buffer": place.get(n.sizes["exchange"], n.sizes["buffer"])})
        if "exchange" in n.sizes else n
        for n in schedule.nodes
    ]  # fmt: skip
    return replace(schedule, nodes=tuple(nodes))


def buffers(schedule: Schedule) -> list[int]:
    return [n.sizes["buffer"] for n in schedule.nodes if n.task.sends(n)]


def test_buffers_in_turn_are_proven() -> None:
    made = planned().schedule
    at = buffers(made)
    assert len(at) == 5 and at[0] == at[2] and at[1] == at[3] and len(set(at)) == 3
    verify(made)


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (3, 4), (0, 4)])
def test_a_buffer_shared_by_neighbours_is_refused(pair: tuple[int, int]) -> None:
    """The last of a step and the first of the next are neighbours too."""
    made = planned().schedule
    with pytest.raises(ScheduleError, match="writes over the part of every peer's window"):
        verify(moved(made, {pair[1]: buffers(made)[pair[0]]}))


def test_one_buffer_for_all_is_refused_over_the_end_of_the_step_too() -> None:
    made = planned().schedule
    at = buffers(made)[0]
    with pytest.raises(ScheduleError, match="in the step before"):
        verify(moved(made, dict.fromkeys(range(5), at)))


def test_a_push_that_follows_its_receive_never_comes() -> None:
    """On one worker the part is sent after the peers' parts are waited for: every device waits for the others."""
    made = planned(workers=1).schedule
    queue = list(made.queues[0])
    push = next(i for i, e in enumerate(queue) if made.nodes[e.node].task.sends(made.nodes[e.node]))
    assert made.nodes[queue[push + 1].node].task.receives(made.nodes[queue[push + 1].node])
    queue[push], queue[push + 1] = queue[push + 1], queue[push]
    with pytest.raises(ScheduleError, match=r"deadlock.*a peer has not sent all of node"):
        verify(replace(made, queues=(tuple(queue),)))


def test_sender_and_receiver_must_agree() -> None:
    made = planned().schedule
    nodes = [
        replace(n, sizes={**n.sizes, "rows": 8}) if n.task.receives(n) and n.sizes["exchange"] == 1 else n
        for n in made.nodes
    ]
    with pytest.raises(ScheduleError, match=r"exchange 1: node .* does not receive what .* sends"):
        verify(replace(made, nodes=tuple(nodes)))
    nodes = [n for n in made.nodes if not (n.task.receives(n) and n.sizes["exchange"] == 1)]
    assert exchanges_of(nodes)[1] == ("exchange 1 has no receiver",)


def test_windows_hold_every_counter_and_buffer() -> None:
    for tp in (2, 4, 8):
        low = planned(tp).lowered
        ends = [e for n in low.nodes if (e := n.task.sends(n))]
        assert low.ranks == tp and max(e.stop for e in ends) <= low.window_bytes
        assert min(e.start for e in ends) >= 128 + len(ends) * tp * 128


# Heads that no such number of devices can share.
REFUSED = {("tiny-gemma2", 8), ("tiny-llama", 8), ("tiny-neox", 8)}


@pytest.mark.parametrize(
    "target, workers", [("sm_90a", 132), ("sm_90a", 7), ("sm_120a", 170), ("gfx942", 304), ("cpu-generic", 64)]
)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_is_safe_on_every_number_of_devices(name: str, target: str, workers: int) -> None:
    """Few workers prove too much: a worker that receives first sends later, whatever the numbers depend on."""
    machine = find_target(target).with_workers(workers)
    for tp in (2, 4, 8):
        if (name, tp) in REFUSED:
            with pytest.raises(LoweringError, match="expected a number of devices that divides the KV heads"):
                make_plan(MODELS[name], machine, tp=tp, max_context=1024, max_slots=4)
            continue
        made = make_plan(MODELS[name], machine, tp=tp, max_context=1024, max_slots=4)
        assert made.counted is not None and len(exchanges_of(made.counted.nodes)[0]) == len(buffers(made.counted))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_sends_before_it_waits_for_the_others(policy: str) -> None:
    for target in ("sm_90a", "cpu-generic"):
        make_plan(MODELS["tiny-qwen3"], find_target(target), tp=2, policy=policy, max_context=1024, max_slots=4)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_parallel_residuals_are_safe_in_every_order(policy: str) -> None:
    """Attention and MLP of a layer read the same input, so neither knows that the other's part has been read."""
    made = make_plan(MODELS["tiny-neox"], find_target("sm_90a"), tp=2, policy=policy, max_context=1024, max_slots=4)
    at = buffers(made.schedule)
    assert made.counted is not None and len(at) == 7 and len(set(at)) == 4
    with pytest.raises(ScheduleError, match=r"layers.\d.mlp_output.part writes over .* earlier in the step"):
        verify(moved(made.counted, {3: at[1]}), made.memory.at)


def test_what_a_rank_knows_when_it_sends() -> None:
    """x0 -> a, b -> x1 = sums of both -> c: c is sent after both were received, b is not sent after a was."""

    def product(name: str, source: str) -> FusedMatmul:
        return FusedMatmul(name, source, (), (), name, 0)

    def total(name: str, source: str, residual: str) -> FusedExchange:
        return FusedExchange(name, source, name, 0, 2, residual=residual)

    parallel = (product("a", "x0"), total("xa", "a", "x0"), product("b", "x0"), total("x1", "b", "xa"))
    known = SentAfter.of((*parallel, product("c", "x1"), total("x2", "c", "x1")))
    assert known.masks == (0b00, 0b00, 0b11)
    assert known.turns() == [0, 1, 2]  # when c is sent a peer may not have read a: nothing that it sent says so
    chain = [product("p0", "x0"), total("x1", "p0", "x0")]
    for i in range(1, 5):
        chain += [product(f"p{i}", f"x{i}"), total(f"x{i + 1}", f"p{i}", f"x{i}")]
    known = SentAfter.of(chain)
    assert known.masks == tuple((1 << i) - 1 for i in range(5)) and known.turns() == [0, 1, 0, 1, 2]


def test_who_reads_plainly_does_not_rely_on_waits_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few heads some workers have no product before the second norm, only attention, which may have nothing to wait
    for in a step. Their counters follow from one another; without those that values replace they do not. With norms
    that could not wait for values themselves."""
    monkeypatch.setattr(Norm, "awaits_values", False)
    target = find_target("sm_90a")
    made = make_plan(MODELS["tiny-neox"], target, tp=2, max_context=1024, max_slots=4)
    nodes = made.schedule.nodes
    norms = {i for i, n in enumerate(nodes) if n.name.endswith("mlp_norm")}
    assert len(norms) == 3 and not norms & loose_nodes(nodes)
    bare = [e for queue in made.schedule.queues for e in queue if e.node in norms and not e.waits]
    placed = tuple(tuple((e.node, e.first, e.count) for e in queue) for queue in made.schedule.queues)
    tight = schedule(nodes, placed, "balanced", alias=made.memory.at)
    verify(tight, made.memory.at)  # with all its counters it is right
    more = [e for queue in tight.queues for e in queue if e.node in norms and not e.waits]
    assert len(bare) < len(more)
    with pytest.raises(ScheduleError, match=r"node layers\.\d\.mlp_norm tiles .* reads plainly what node"):
        drop_value_waits(tight)


@pytest.mark.parametrize("rows", [17, 64])
def test_programs_with_room_for_many_rows_are_planned_for_several_gpus(rows: int) -> None:
    plan = make_plan(shape_config("llama-3.2-1b"), find_target("sm_90a"), max_context=128, max_rows=rows, tp=2)
    assert plan.limits.max_rows == rows and plan.lowered.ranks == 2
