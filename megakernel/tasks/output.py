"""Output: rows of the step to where the host reads them, for graphs whose results are rows and not tokens.

outputs[slot[r], position[r], column : column + cols] = input[r, :]       float32, outputs [slots, positions, width]

The first tile also gives every sampled row the token 0, so that `advance` reports the end of a sequence and the host
knows that its rows are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.tasks.record import NONE, SAMPLE_RESULT
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant, tile_columns

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OutputConfig(Variant):
    """No compile-time choice."""


class Output(Task):
    """Tile t reads columns `[t * tile_cols, (t + 1) * tile_cols)` of every row."""

    name = "output"
    body = "Output"
    config = "OutputConfig"
    fields = Struct(
        "OutputFields",
        (
            Field("input", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("result", "u32", doc="offset in the workspace: SampleResult[kMaxRows], or kNone"),
            Field("cols", "u32"),
            Field("tile_cols", "u32"),
            Field("width", "u32", doc="columns of a row of outputs"),
            Field("column", "u32", doc="where this tensor begins in such a row"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["input"], *tile_columns(node, first, count)),)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """The host's rows are no tensor: it reads them when the sequence has ended, which follows every tile."""
        whole = first == 0 and "result" in node.tensors
        return (Region(node.tensors["result"], 0, SAMPLE_RESULT.size),) if whole else ()

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        low, high = tile_columns(node, first, count)
        return Cost(other_bytes=8.0 * (high - low))

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        result = node.tensors.get("result")
        return {
            "input": at.tensor(node.tensors["input"]),
            "result": NONE if result is None else at.tensor(result),
            **{key: node.sizes[key] for key in ("cols", "tile_cols", "width", "column")},
        }


def node(
    name: str, *, cols: int, input: str, width: int, column: int, result: str | None = None, tile_cols: int = 1024,
    layer: int = -1,
) -> TaskNode:  # fmt: skip
    """Tensor `input`, f32 [rows, cols], to columns from `column` on of the host's rows of `width` columns.

    One output of a graph has the tensor `result`, u8 [max_rows, SAMPLE_RESULT.size]."""
    tile = min(cols, tile_cols)
    sizes = {"cols": cols, "tile_cols": tile, "width": width, "column": column}
    tensors = {"input": input, **({} if result is None else {"result": result})}
    return TaskNode(name, Output, OutputConfig(), -(-cols // tile), tensors, {}, sizes, {}, layer)


def reference(x: Array, slots: Array, positions: Array, outputs: Array, column: int) -> Array:
    """`outputs` [slots, positions, width] after the step."""
    out = np.array(outputs, np.float32)
    out[slots, positions, column : column + x.shape[1]] = x
    return out


@dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    width: int
    column: int = 0
    tile_cols: int = 1024


def cases() -> tuple[Case, ...]:
    """One column, odd widths, a part of a row, tiles that do not divide the columns."""
    return Case(1, 1, 1), Case(3, 77, 77), Case(16, 130, 200, 33, 64), Case(5, 64, 65, 1)
