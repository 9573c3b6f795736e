"""Input: rows that the host wrote, one for each row of the step.

output[r, :] = inputs[slot[r], position[r], column : column + cols]       float32, inputs [slots, positions, width]

The host writes a sequence's rows before it admits the sequence to its slot, as it writes the tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant, tile_columns

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class InputConfig(Variant):
    """No compile-time choice."""


class Input(Task):
    """Tile t writes columns `[t * tile_cols, (t + 1) * tile_cols)` of every row."""

    name = "input"
    body = "Input"
    config = "InputConfig"
    fields = Struct(
        "InputFields",
        (
            Field("output", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("cols", "u32"),
            Field("tile_cols", "u32"),
            Field("width", "u32", doc="columns of a row of inputs"),
            Field("column", "u32", doc="where this tensor begins in such a row"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return ()

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["output"], *tile_columns(node, first, count)),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        low, high = tile_columns(node, first, count)
        return Cost(other_bytes=8.0 * (high - low))

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        return {
            "output": at.tensor(node.tensors["output"]),
            **{key: node.sizes[key] for key in ("cols", "tile_cols", "width", "column")},
        }


def node(name: str, *, cols: int, output: str, width: int, column: int, tile_cols: int = 1024) -> TaskNode:
    """`cols` columns from `column` on of the host's rows of `width` columns; tensor `output`: f32 [rows, cols]."""
    tile = min(cols, tile_cols)
    sizes = {"cols": cols, "tile_cols": tile, "width": width, "column": column}
    return TaskNode(name, Input, InputConfig(), -(-cols // tile), {"output": output}, {}, sizes)


def reference(inputs: Array, slots: Array, positions: Array, column: int, cols: int) -> Array:
    """[rows, cols] float32."""
    return np.asarray(inputs[slots, positions, column : column + cols], np.float32)


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
