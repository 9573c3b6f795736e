"""Norm, embedding and the way out of hidden states on the CPU device against their references."""

from __future__ import annotations

import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from megakernel.tasks import embedding, hidden, norm
from megakernel.tasks.norm import Case, Norming
from megakernel.tasks.task import TaskNode

from .harness import Array, Rows, blank, build, rounded, run_node

EPS = 1e-5


def node_of(case: Case) -> TaskNode:
    normed = case.norming is not Norming.NONE
    return norm.node(
        "n", cols=case.cols, input="x", output="y", norming=case.norming, gamma="gamma" if normed else None,
        beta="beta" if case.beta else None, eps=EPS, scale=case.scale, residual="r" if case.residual else None,
        parts=case.parts, tile_cols=case.tile_cols,
    )  # fmt: skip


def embedding_of(case: embedding.Case) -> TaskNode:
    return embedding.node(
        "e", cols=case.cols, table="table", output="y", dtype=case.dtype, scale=case.scale, tile_cols=case.tile_cols,
        positions="positions" if case.positions else None, inputs=case.inputs,
    )  # fmt: skip


def hidden_of(case: hidden.Case) -> TaskNode:
    return hidden.node("h", cols=case.cols, input="x", tile_cols=case.tile_cols)


@lru_cache(maxsize=1)
def kernel() -> tuple[Path, tuple[TaskNode, ...]]:
    copies = (hidden_of(c) for c in hidden.cases())
    nodes = (*(node_of(c) for c in norm.cases()), *(embedding_of(c) for c in embedding.cases()), *copies)
    return build(nodes), nodes


class Inputs:
    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
        self.x = (rng.standard_normal((case.rows, case.cols)) + 3.0).astype(np.float32)
        self.gamma, self.beta = (rng.standard_normal(case.cols).astype(np.float32) for _ in range(2))
        self.residual = rng.standard_normal((case.rows, case.cols)).astype(np.float32)


def run(case: Case, inputs: Inputs, workers: int = 1) -> Array:
    binary, nodes = kernel()
    rows = Rows(tuple((0, 0, i, 0) for i in range(len(inputs.x))))
    out = run_node(
        binary, nodes, node_of(case), rows, workers=workers, weights={"gamma": inputs.gamma, "beta": inputs.beta},
        tensors={"x": inputs.x, "y": blank(*inputs.x.shape), "r": inputs.residual[: len(inputs.x)]},
    )  # fmt: skip
    return out["y"]


def expected(case: Case, inputs: Inputs) -> Array:
    return norm.reference(
        inputs.x, case.norming, gamma=inputs.gamma, beta=inputs.beta if case.beta else None, eps=EPS, scale=case.scale,
        residual=inputs.residual if case.residual else None, parts=case.parts,
    )  # fmt: skip


@pytest.mark.parametrize("case", norm.cases(), ids=str)
def test_values(case: Case) -> None:
    inputs = Inputs(case)
    want = expected(case, inputs)
    assert np.abs(run(case, inputs) - want).max() <= 4e-6 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("case", [c for c in norm.cases() if c.cols > c.tile_cols or c.rows > 2], ids=str)
def test_a_row_is_the_same_alone_and_on_any_workers(case: Case) -> None:
    inputs = Inputs(case)
    whole = run(case, inputs)
    assert run(case, inputs, 3).tobytes() == whole.tobytes()
    inputs.x, inputs.residual = inputs.x[:1], inputs.residual[:1]
    assert run(case, inputs).tobytes() == whole[:1].tobytes()


def test_the_gate_can_go_red() -> None:
    case = norm.cases()[3]
    inputs = Inputs(case)
    got = run(case, inputs)
    inputs.gamma[7] *= 1.01
    assert np.abs(got - expected(case, inputs)).max() > 1e-4


@pytest.mark.parametrize("case", embedding.cases(), ids=str)
def test_embedding(case: embedding.Case) -> None:
    rng = np.random.default_rng(case.cols)
    table = rounded(rng.standard_normal((case.vocab, case.cols)), case.dtype)
    positions = rounded(rng.standard_normal((64, case.cols)), case.dtype)
    tokens, places = rng.integers(0, case.vocab, case.rows), rng.permutation(64)[: case.rows]
    given = rng.standard_normal((4, 64, case.cols)).astype(np.float32)  # [max_slots, max_context, cols]
    if case.inputs:
        tokens[1::2] = -1 - tokens[1::2]
    binary, nodes = kernel()
    out = run_node(
        binary, nodes, embedding_of(case), Rows(tuple((int(t), 2, int(p), 0) for t, p in zip(tokens, places))),
        workers=2, extra={"inputs": given}, settings={"max_context": 64},
        weights={"table": table, "positions": positions}, tensors={"y": blank(case.rows, case.cols)},
    )  # fmt: skip
    want = embedding.reference(
        table, tokens, case.scale, positions[places] if case.positions else None,
        given[2, places] if case.inputs else None,
    )  # fmt: skip
    assert np.abs(out["y"] - want).max() <= 1e-6


@pytest.mark.parametrize("case", hidden.cases(), ids=str)
def test_rows_go_out_to_their_slot_and_position(case: hidden.Case) -> None:
    rng = np.random.default_rng(case.cols)
    x = rng.standard_normal((case.rows, case.cols)).astype(np.float32)
    slots, places = rng.integers(0, 4, case.rows), rng.permutation(64)[: case.rows]
    want = np.full((4, 64, case.cols), np.nan, np.float32)
    binary, nodes = kernel()
    out = run_node(
        binary, nodes, hidden_of(case), Rows(tuple((0, int(s), int(p), 0) for s, p in zip(slots, places))), workers=2,
        weights={"none": x}, tensors={"x": x}, extra={"hidden": want.copy()}, settings={"max_context": 64},
    )  # fmt: skip
    want[slots, places] = x
    assert out["hidden"].tobytes() == want.tobytes()
