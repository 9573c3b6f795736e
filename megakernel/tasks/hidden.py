"""Hidden: rows of a tensor go out to the host, one for each row of the step.

hidden[slot[r], position[r], :] = input[r, :]       input [rows, cols] float32, hidden [max_slots, max_context, cols]

The host reads a row once it has the token event of that position or of a later one: every worker has left the step
before its events are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant, tile_columns


@dataclass(frozen=True)
class HiddenConfig(Variant):
    """No compile-time choice."""


class Hidden(Task):
    """Tile t copies columns `[t * tile_cols, (t + 1) * tile_cols)` of every row. It writes no workspace."""

    name = "hidden"
    body = "Hidden"
    config = "HiddenConfig"
    fields = Struct(
        "HiddenFields",
        (
            Field("input", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("cols", "u32"),
            Field("tile_cols", "u32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["input"], *tile_columns(node, first, count)),)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return ()

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        cols = count * node.sizes["tile_cols"]
        return Cost(other_bytes=8.0 * cols, flops=float(cols))

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        return {"input": at.tensor(node.tensors["input"]), **{key: node.sizes[key] for key in ("cols", "tile_cols")}}


def node(name: str, *, cols: int, input: str, tile_cols: int = 1024) -> TaskNode:
    """Copy of `cols` columns. Tensor `input`: f32 [rows, cols]. `tile_cols` columns make a tile."""
    width = min(cols, tile_cols)
    sizes = {"cols": cols, "tile_cols": width}
    return TaskNode(name, Hidden, HiddenConfig(), -(-cols // width), {"input": input}, {}, sizes)


@dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    tile_cols: int = 1024


def cases() -> tuple[Case, ...]:
    """Odd widths, one row and many, tiles that do not divide the columns."""
    return (Case(1, 5), Case(3, 577, 64), Case(16, 130, 128), Case(16, 64))
