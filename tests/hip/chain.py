"""A few matmuls in one queue on emulated workgroups: the whole driver with its ring, in a kernel that compiles fast."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megakernel.builder.layout import pack, weight_layout
from megakernel.tasks import matmul
from megakernel.tasks.record import MAX_WAITS, OPCODE_TICKET, RECORD, TICKET
from megakernel.tasks.task import Addresses, DType, TaskNode
from tests.hip.emulated import EmulatedHip, Seen
from tests.tasks import harness

Floats = npt.NDArray[np.float32]
ROWS, SAMPLED = 5, (3, 0)
# Output columns, input columns. The second has units of several stages' worth, the others are short.
SHAPES = ((544, 64), (48, 544), (80, 48), (96, 80))
TICKET_COUNTER = 40


@dataclass(frozen=True)
class Result:
    outputs: tuple[Floats, ...]  # of each matmul
    expected: tuple[Floats, ...]
    seen: Seen

    def worst(self) -> float:
        """Largest relative error; NaN when a value is not a number."""
        pairs = [(o, e) for o, e in zip(self.outputs, self.expected) if e.size]
        return max((float(np.linalg.norm(o - e) / np.linalg.norm(e)) for o, e in pairs), key=lambda v: (v != v, v))


def nodes_of(device: EmulatedHip, dtype: DType) -> list[TaskNode]:
    out = []
    for i, (n, k) in enumerate(SHAPES):
        layout = weight_layout(device.target, dtype, n, k)
        out.append(
            matmul.node(
                f"m{i}", n=n, k=k, input=f"x{i}", output=f"x{i + 1}", weight=f"w{i}", dtype=dtype, tile_n=16,
                k_unit=layout.k_unit, units=layout.k_padded // layout.k_unit, sampled=i == len(SHAPES) - 1,
            )
        )  # fmt: skip
    return out


@lru_cache(maxsize=8)
def weights_of(dtype: DType) -> tuple[Floats, ...]:
    rng = np.random.default_rng(5)
    return tuple(harness.rounded(rng.standard_normal((n, k)) / k**0.5, dtype) for n, k in SHAPES)


def run(
    monkeypatch: pytest.MonkeyPatch, target: str, dtype: DType = DType.F32, missing: str = "none",
    sampled: tuple[int, ...] = SAMPLED, ticket: bool = False, stuck: bool = False,
) -> Result:  # fmt: skip
    """One worker. `missing`: see EmulatedHip. `ticket`: the second matmul's tiles are in the shared list.

    `stuck`: every record waits for a signal that nobody gives, so that the launch ends in a fault with a full ring."""
    device = EmulatedHip(target, 1, missing)
    monkeypatch.setattr(harness, "device", lambda: device)
    nodes, weights = nodes_of(device, dtype), weights_of(dtype)
    machine = harness.Machine(harness.build(nodes), nodes)
    try:
        device.seen()
        x = np.random.default_rng(6).standard_normal((ROWS, SHAPES[0][1])).astype(np.float32)
        packed = {f"w{i}": pack(weight_layout(device.target, dtype, *w.shape), w) for i, w in enumerate(weights)}
        tensors = {"x0": x, **{f"x{i + 1}": harness.blank(ROWS, n) for i, (n, _k) in enumerate(SHAPES)}}
        at = Addresses(
            machine.segment("weights", packed).__getitem__, machine.segment("workspace", tensors).__getitem__
        )
        waits = {"wait_count": 1, "waits": [(3, 1)] + [(0, 0)] * (MAX_WAITS - 1)} if stuck else {}
        machine.queues([[(node, 0, node.tiles) for node in nodes]], at, **waits)
        if ticket:
            _share(machine, 1)
        rows = harness.Rows(tuple((0, 0, i, 0) for i in range(ROWS)), sampled)
        if stuck:
            with pytest.raises(AssertionError, match="fault"):
                machine.run_step(rows, spin_budget_ns=20_000_000)
            return Result((), (), device.seen())
        machine.run_step(rows)
        whole = machine.view("workspace", np.uint8)
        outputs = []
        for i, (n, _k) in enumerate(SHAPES):
            start = at.tensor(f"x{i + 1}")
            outputs.append(whole[start : start + ROWS * n * 4].view(np.float32).reshape(ROWS, n).copy())
        expected = []
        for i, w in enumerate(weights):
            x = matmul.reference(x[list(sampled)] if i == len(weights) - 1 else x, w)
            expected.append(x)
        outputs[-1] = outputs[-1][: len(sampled)]
        return Result(tuple(outputs), tuple(expected), device.seen())
    finally:
        machine.close()


def _share(machine: Any, index: int) -> None:
    """The record at `index` of the only queue becomes a ticket for two shared records of half its tiles each."""
    table = machine.view("queues", RECORD.dtype).copy()
    shared = np.repeat(table[index : index + 1], 2)
    half = int(shared[0]["tile_count"]) // 2
    shared["tile_begin"], shared["tile_count"] = (0, half), (half, int(shared[0]["tile_count"]) - half)
    table[index]["opcode"] = OPCODE_TICKET
    ticket = TICKET.pack({"counter": TICKET_COUNTER, "first": len(table), "count": 2, "pops": 3})
    table[index]["payload"][: len(ticket)] = np.frombuffer(ticket, np.uint8)
    machine.put("queues", np.concatenate([table, shared]).view(np.uint8))
