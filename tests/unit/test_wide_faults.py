"""Waits that only steps of many rows have say what is waited for, like those of the schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakernel.builder.build import assemble, make_plan, plan_source
from megakernel.builder.program import Program
from megakernel.errors import DeviceFault
from megakernel.faults import decode_fault, producers_of
from megakernel.target import find_target
from megakernel.tasks.record import FAULT, NONE, OPCODE_END, FaultKind, Role
from tests.gpu.machine import MODELS


def program_of(rows: int) -> Program:
    plan = make_plan(
        MODELS["tiny-llama"], find_target("sm_90a"), max_rows=rows, max_slots=4, max_context=512, dtype="bf16"
    )
    return assemble(plan, plan_source(plan), Path())


def counter_of(program: Program, name: str, which: int) -> int:
    """As `packed_counter` (0) and `sums_counter` (1) of cuda_wide_order.cuh."""
    names = [n.name for n in program.manifest.nodes]
    return program.manifest.counter_count - 1 - 2 * names.index(name) - which


@pytest.mark.parametrize(
    ("node", "which", "said", "maker"),
    [
        ("layers.1.attention.qkv", 0, "the packed input of layers.1.attention.qkv", "layers.1.attention.qkv"),
        ("layers.1.attention", 0, "keys and values that layers.1.attention stores", "layers.1.attention"),
        ("layers.1.attention_residual", 0, "the packed input of layers.1.attention_res", "layers.1.attention.combine"),
        ("layers.1.mlp_residual", 1, "layers.1.mlp_residual's sums of shares", "layers.1.mlp_residual"),
    ],
)
def test_a_wait_in_a_wide_step_says_for_what(node: str, which: int, said: str, maker: str) -> None:
    program = program_of(64)
    counter = counter_of(program, node, which)
    names = [n.name for n in program.manifest.nodes]
    raw = {name: 0 for name in FAULT.dtype.names or ()} | {
        "kind": int(FaultKind.WAIT_BUDGET), "role": int(Role.PRODUCER), "node": names.index(node), "opcode": 1,
        "tile": 3, "worker": 7, "step": 5, "counter": counter, "value": 40, "target": 48,
    }  # fmt: skip
    report = decode_fault(raw, program)
    assert report.node == node and said in report.detail
    made = [r for row in program.records for r in row if names[int(r["node"])] == maker and r["opcode"] != OPCODE_END]
    assert len(report.producers) == len(made) > 1
    assert all(text.startswith(f"{maker} tiles ") for text in report.producers)
    text = str(DeviceFault(report))
    assert f"node {node}, tile 3, worker 7 (producer), step 5, counter {counter}: value 40, target 48" in text
    assert f"should have been signalled by {maker} tiles" in text


def test_counters_of_the_schedule_are_as_they_were() -> None:
    wide, narrow = program_of(64), program_of(16)
    schedule = wide.manifest.counter_count - 2 * len(wide.manifest.nodes)
    assert narrow.manifest.counter_count == schedule
    waited = {int(w["counter"]) for row in wide.records for r in row for w in r["waits"][: int(r["wait_count"])]}
    assert waited and max(waited) < schedule
    for counter in waited:
        assert producers_of(wide, counter) == producers_of(narrow, counter)
    assert producers_of(wide, NONE) == ()
