"""Matmul on the CPU device against its reference."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from megakernel.builder.layout import interleave_rows, pack, weight_layout
from megakernel.tasks import matmul
from megakernel.tasks.matmul import Case
from megakernel.tasks.task import TaskNode

from .harness import Array, Rows, blank, build, device, rounded, run_node

TILE = 32


def node_of(case: Case) -> TaskNode:
    return matmul.node(
        "m", n=case.n, k=case.k, input="x", output="y", weight="w", dtype=case.dtype, tile_n=TILE,
        gamma="gamma" if case.norm else None, eps=1e-5, residual="r" if case.residual else None,
        bias="b" if case.bias else None, glu=case.glu, sampled=case.sampled, scale=case.scale, softcap=case.softcap,
        activation=case.activation,
    )  # fmt: skip


@lru_cache(maxsize=1)
def kernel() -> tuple[Path, tuple[TaskNode, ...]]:
    nodes = tuple(node_of(c) for c in matmul.cases())
    return build(nodes), nodes


class Inputs:
    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
        self.x = rng.standard_normal((16 if case.sampled else case.rows, case.k)).astype(np.float32)
        self.gamma = (1 + 0.2 * rng.standard_normal(case.k)).astype(np.float32)
        self.residual = rng.standard_normal((case.rows, case.n)).astype(np.float32)
        self.parts = [rounded(rng.standard_normal((case.n, case.k)) / case.k**0.5, case.dtype) for _ in range(2)]
        self.biases = [rng.standard_normal(case.n).astype(np.float32) for _ in range(2)]
        self.sampled = tuple(int(i) for i in rng.permutation(16)[: case.rows]) if case.sampled else ()


def packed(case: Case, inputs: Inputs) -> tuple[Array, Array]:
    """Weights and bias as the kernel reads them."""
    rows, bias = inputs.parts[0], inputs.biases[0]
    if case.glu is not None:
        rows = interleave_rows(*inputs.parts, TILE)
        bias = interleave_rows(inputs.biases[0][:, None], inputs.biases[1][:, None], TILE)[:, 0]
    bias = np.concatenate([bias, np.zeros(-len(bias) % TILE, np.float32)])
    return pack(weight_layout(device().target, case.dtype, rows.shape[0], case.k), rows), bias


def run(case: Case, inputs: Inputs, workers: int = 1) -> Array:
    weight, bias = packed(case, inputs)
    binary, nodes = kernel()
    count = inputs.x.shape[0]
    rows = Rows(tuple((0, 0, i, 0) for i in range(count)), inputs.sampled)
    out = run_node(
        binary, nodes, node_of(case), rows, workers=workers,
        weights={"w": weight, "b": bias, "gamma": inputs.gamma},
        tensors={"x": inputs.x, "y": blank(case.rows, case.n), "r": inputs.residual},
    )  # fmt: skip
    return out["y"]


def expected(case: Case, inputs: Inputs) -> Array:
    x = inputs.x[list(inputs.sampled)] if case.sampled else inputs.x
    return matmul.reference(
        x, inputs.parts[0].astype(np.float32), gamma=inputs.gamma if case.norm else None, eps=1e-5,
        bias=inputs.biases[0] if case.bias else None, residual=inputs.residual if case.residual else None,
        up=inputs.parts[1].astype(np.float32) if case.glu is not None else None,
        up_bias=inputs.biases[1] if case.bias else None,
        activation=case.glu or case.activation or matmul.Activation.SILU,
        scale=case.scale, softcap=case.softcap, activated=case.activation is not None,
    )  # fmt: skip


@pytest.mark.parametrize("case", matmul.cases(), ids=str)
def test_values(case: Case) -> None:
    inputs = Inputs(case)
    want = expected(case, inputs)
    got = run(case, inputs)
    assert np.abs(got - want).max() <= 3e-6 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("case", [c for c in matmul.cases() if c.rows > 2 and not c.sampled], ids=str)
def test_a_row_is_the_same_alone(case: Case) -> None:
    inputs = Inputs(case)
    whole = run(case, inputs)
    for r in (0, case.rows - 1):
        inputs_alone = Inputs(case)
        inputs_alone.x, inputs_alone.residual = inputs.x[r : r + 1], inputs.residual[r : r + 1]
        alone = run(replace(case, rows=1), inputs_alone)
        assert alone.tobytes() == whole[r : r + 1].tobytes()


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_row_is_the_same_on_any_workers(workers: int) -> None:
    case = matmul.cases()[-3]
    inputs = Inputs(case)
    assert run(case, inputs, workers).tobytes() == run(case, inputs).tobytes()


def test_not_a_number_goes_through() -> None:
    """A NaN must reach the logits, where it is reported."""
    for case in matmul.cases()[-6:-2]:
        inputs = Inputs(case)
        inputs.x[:, 0] = np.nan
        assert np.isnan(run(case, inputs)).all()


def test_the_gate_can_go_red() -> None:
    case = next(c for c in matmul.cases() if c.norm and c.n > 90)
    inputs = Inputs(case)
    got = run(case, inputs)
    inputs.gamma[3] *= 1.01
    assert np.abs(got - expected(case, inputs)).max() > 1e-4
