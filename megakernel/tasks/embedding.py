"""Embedding: rows of a table, one for each row of the step.

output[r, :] = scale * table[token[r], :]          output [rows, cols] float32, table [vocab, cols] row-major
             + positions[position[r], :]           if there is such a table [positions, cols]

With `inputs`, a token below 0 stands for a row that the host wrote: inputs[slot[r], position[r], :], float32 and not
scaled, takes the place of scale * table[token[r], :].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.tasks.record import NONE64
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, DType, Region, Task, TaskNode, Variant, tile_columns

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EmbeddingConfig(Variant):
    dtype: DType = DType.F32  # of the tables
    positions: bool = False
    inputs: bool = False  # whether a token may stand for a row of the host
    gives: bool = False  # in steps of several rows it publishes its output packed, too, for the product that reads it


class Embedding(Task):
    """Tile t writes columns `[t * tile_cols, (t + 1) * tile_cols)` of every row."""

    name = "embedding"
    awaits_values = True
    body = "Embedding"
    config = "EmbeddingConfig"
    fields = Struct(
        "EmbeddingFields",
        (
            Field("table", "u64", doc="offset in the weights"),
            Field("positions", "u64", doc="offset in the weights, or kNone64"),
            Field(
                "gamma",
                "u64",
                doc="of the norm of the product it gives its output to: offset in the weights, or kNone64",
            ),
            Field("output", "u32", doc="offset in the workspace"),
            Field("cols", "u32"),
            Field("tile_cols", "u32"),
            Field("scale", "f32"),
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
        cols = count * node.sizes["tile_cols"]
        assert isinstance(node.variant, EmbeddingConfig)
        read = node.variant.dtype.bytes * (2.0 if node.variant.positions else 1.0)
        return Cost(other_bytes=cols * (read + 4.0), flops=float(cols))

    @staticmethod
    def by_value(node: TaskNode) -> bool:
        return True

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        return {
            "table": at.weight(node.weights["table"]),
            "positions": at.weight(node.weights["positions"]) if "positions" in node.weights else NONE64,
            "gamma": at.weight(node.weights["gamma"]) if "gamma" in node.weights else NONE64,
            "output": at.tensor(node.tensors["output"]),
            "cols": node.sizes["cols"],
            "tile_cols": node.sizes["tile_cols"],
            "scale": node.scalars["scale"],
        }


def node(
    name: str, *, cols: int, table: str, output: str, dtype: DType, scale: float = 1.0, tile_cols: int = 1024,
    positions: str | None = None, inputs: bool = False, layer: int = -1,
) -> TaskNode:  # fmt: skip
    """Embedding of `cols` columns. Weights `table` [vocab, cols] and `positions` [positions, cols], row-major in
    `dtype`; tensor `output`: f32 [rows, cols]. `tile_cols` columns make a tile."""
    width = min(cols, tile_cols)
    return TaskNode(
        name, Embedding, EmbeddingConfig(dtype, positions is not None, inputs), -(-cols // width), {"output": output},
        {"table": table, **({} if positions is None else {"positions": positions})},
        {"cols": cols, "tile_cols": width}, {"scale": scale}, layer,
    )  # fmt: skip


def reference(
    table: Array, tokens: Array, scale: float, added: Array | None = None, given: Array | None = None
) -> Array:
    """`added`: the rows of `positions`; `given`: those of the host, for tokens below 0. [rows, cols] float32."""
    out = np.asarray(table, np.float32)[tokens] * np.float32(scale)
    if given is not None:
        out[tokens < 0] = np.asarray(given, np.float32)[tokens < 0]
    return np.asarray(out if added is None else out + np.asarray(added, np.float32))


@dataclass(frozen=True)
class Case:
    rows: int
    vocab: int
    cols: int
    dtype: DType = DType.F32
    scale: float = 1.0
    tile_cols: int = 1024
    positions: bool = False
    inputs: bool = False


def cases() -> tuple[Case, ...]:
    """Odd widths, one row and many, tiles that do not divide the columns."""
    return (
        Case(1, 7, 5),
        Case(3, 300, 577, DType.BF16, 2.5, 64),
        Case(16, 65, 576, DType.F16),
        Case(16, 17, 130, DType.F32, 0.125, 128),
        Case(5, 31, 77, DType.F32, positions=True, tile_cols=32),
        Case(16, 31, 64, DType.BF16, 2.0, positions=True),
        Case(7, 31, 77, DType.F32, 3.0, tile_cols=32, inputs=True),
        Case(16, 31, 64, DType.BF16, 2.0, positions=True, inputs=True),
    )
