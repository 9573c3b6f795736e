"""Input and output of rows on the CPU device against their references."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from megakernel.tasks import input, output
from megakernel.tasks.record import SAMPLE_RESULT
from megakernel.tasks.task import TaskNode

from .harness import Array, Rows, blank, build, run_node

SLOTS, CONTEXT = 4, 512  # of the harness


def input_of(case: input.Case) -> TaskNode:
    return input.node("i", cols=case.cols, output="y", width=case.width, column=case.column, tile_cols=case.tile_cols)


def output_of(case: output.Case) -> TaskNode:
    return output.node(
        "o", cols=case.cols, input="x", width=case.width, column=case.column, result="result", tile_cols=case.tile_cols
    )


@lru_cache(maxsize=1)
def kernel() -> tuple[Path, tuple[TaskNode, ...]]:
    nodes = (input_of(input.cases()[0]), output_of(output.cases()[0]))
    return build(nodes), nodes


def step(rows: int) -> tuple[Rows, Array, Array]:
    rng = np.random.default_rng(rows)
    slots, positions = rng.integers(0, SLOTS, rows), rng.permutation(CONTEXT)[:rows]
    sampled = tuple(range(0, rows, 3))
    return Rows(tuple((0, int(s), int(p), 0) for s, p in zip(slots, positions)), sampled), slots, positions


@pytest.mark.parametrize("case", input.cases(), ids=str)
def test_input(case: input.Case) -> None:
    rows, slots, positions = step(case.rows)
    inputs = np.random.default_rng(1).standard_normal((SLOTS, CONTEXT, case.width)).astype(np.float32)
    binary, nodes = kernel()
    out = run_node(
        binary, nodes, input_of(case), rows, workers=2, weights={}, tensors={"y": blank(case.rows, case.cols)},
        extra={"inputs": inputs},
    )  # fmt: skip
    assert out["y"].tobytes() == input.reference(inputs, slots, positions, case.column, case.cols).tobytes()


@pytest.mark.parametrize("case", output.cases(), ids=str)
def test_output(case: output.Case) -> None:
    """Nothing beside its own columns of its own rows changes."""
    rows, slots, positions = step(case.rows)
    x = np.random.default_rng(2).standard_normal((case.rows, case.cols)).astype(np.float32)
    outputs = blank(SLOTS, CONTEXT, case.width)
    binary, nodes = kernel()
    out = run_node(
        binary, nodes, output_of(case), rows, workers=2, weights={},
        tensors={"x": x, "result": np.full(16 * SAMPLE_RESULT.size, 0xFF, np.uint8)}, extra={"outputs": outputs},
    )  # fmt: skip
    assert out["outputs"].tobytes() == output.reference(x, slots, positions, outputs, case.column).tobytes()
    results = out["result"].view(SAMPLE_RESULT.dtype)
    assert not results["token"][: len(rows.sampled)].any() and not results["top_count"][: len(rows.sampled)].any()
