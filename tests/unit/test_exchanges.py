"""What `verify` says of exchanges between devices: windows written over too early, deadlocks across devices, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megakernel.builder.build import Plan, make_plan
from megakernel.errors import ScheduleError
from megakernel.scheduler.exchanges import exchanges_of
from megakernel.scheduler.schedule import Schedule
from megakernel.scheduler.verify import verify
from megakernel.target import find_target

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
