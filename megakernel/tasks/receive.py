"""Receive: what all ranks have sent of an exchange, put together in rank order; the same bits on every rank.

    sum:   output[r, c] = residual[r, c] + scale * (part[0, r, c] + part[1, r, c] + ...)
    join:  output[r, j] = part[k, r, j - first(k)],  first(k) = k * cols, of the last rank out_cols - cols

With `stamped` each element is waited for by itself (see push.py); else all that the peers send. part[k] is rank k's
[rows, cols] float32: its buffer in this device's window, or for the own rank the tensor that is pushed to the others.
The sum begins with part 0 and adds one rank after the other. In a join the last rank's columns may overlap those
before; they are equal there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.tasks.push import EXCHANGE_SIZES, exchange_of
from megakernel.tasks.record import NONE
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Exchange, Region, Task, TaskNode, Variant, tile_columns

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ReceiveConfig(Variant):
    """`join`: columns side by side, of the rows whose logits are wanted; else a sum."""

    join: bool = False
    residual: bool = False
    stamped: bool = False


class Receive(Task):
    """Tile t makes columns `[t * tile_cols, (t + 1) * tile_cols)` of the output."""

    name = "receive"
    awaits_values = True
    body = "Receive"
    config = "ReceiveConfig"
    fields = Struct(
        "ReceiveFields",
        (
            Field("buffer", "u64", doc="offset in the window: [ranks][rows][part_cols] elements"),
            Field("input", "u32", doc="offset in the workspace: f32 [rows][part_cols], this rank's part"),
            Field("output", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("residual", "u32", doc="offset in the workspace: f32 [rows][cols], or kNone"),
            Field("exchange", "u32", doc="its number"),
            Field("exchanges", "u32", doc="of a step"),
            Field("sent_tiles", "u32", doc="tiles that each rank sends in a step"),
            Field("rows", "u32", doc="rows that the buffer has room for"),
            Field("part_cols", "u32", doc="columns of a rank's part"),
            Field("cols", "u32", doc="columns of the output"),
            Field("tile_cols", "u32"),
            Field("scale", "f32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        columns = tile_columns(node, first, count)
        if node.sizes["part_cols"] < node.sizes["cols"]:  # the rank is known only where it runs
            return (Region(node.tensors["input"], 0, node.sizes["part_cols"]),)
        return tuple(Region(node.tensors[t], *columns) for t in ("input", "residual") if t in node.tensors)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["output"], *tile_columns(node, first, count)),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        low, high = tile_columns(node, first, count)
        parts = 1 if node.sizes["part_cols"] < node.sizes["cols"] else node.sizes["ranks"]
        return Cost(other_bytes=4.0 * (high - low) * (parts + 2), flops=float((high - low) * parts))

    @staticmethod
    def by_value(node: TaskNode) -> bool:
        assert isinstance(node.variant, ReceiveConfig)
        return node.variant.stamped and not node.variant.join

    @staticmethod
    def receives(node: TaskNode) -> Exchange | None:
        sizes = {**node.sizes, "cols": node.sizes["part_cols"]}
        return exchange_of(TaskNode(node.name, node.task, node.variant, node.tiles, {}, {}, sizes))

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        t = node.tensors
        sizes = ("buffer", "exchange", "exchanges", "sent_tiles", "rows", "part_cols", "cols", "tile_cols")
        return {
            "input": at.tensor(t["input"]), "output": at.tensor(t["output"]),
            "residual": at.tensor(t["residual"]) if "residual" in t else NONE,
            **{key: node.sizes[key] for key in sizes}, "scale": node.scalars["scale"],
        }  # fmt: skip


def node(
    name: str, *, sent: TaskNode, cols: int, output: str, tile_cols: int, residual: str | None = None,
    scale: float = 1.0, layer: int = -1,
) -> TaskNode:  # fmt: skip
    """The other end of `sent`, a push or a product that sends by itself. Tensor `output` f32 [rows, cols]: a sum when
    `cols` are those of a part, else a join; `residual` f32 [rows, cols], of a sum."""
    width = min(cols, tile_cols)
    s = {key: sent.sizes[key] for key in EXCHANGE_SIZES}
    tensors = {"input": sent.tensors["output" if "output" in sent.tensors else "input"], "output": output}
    sizes = {
        **s, "cols": cols, "part_cols": s["cols"], "tile_cols": width, "sent_tiles": sent.tiles,
    }  # fmt: skip
    stamped = exchange_of(sent).stamped
    return TaskNode(
        name, Receive, ReceiveConfig(cols != s["cols"], residual is not None, stamped), -(-cols // width),
        tensors if residual is None else {**tensors, "residual": residual}, {}, sizes, {"scale": scale}, layer,
    )  # fmt: skip


def reference(parts: Array, cols: int, residual: Array | None = None, scale: float = 1.0) -> Array:
    """parts [ranks, rows, part_cols] float32, added in float32 and in order. [rows, cols] float32."""
    if cols != parts.shape[2]:
        width, out = parts.shape[2], np.empty((parts.shape[1], cols), np.float32)
        for k, part in enumerate(parts):
            first = min(k * width, cols - width)
            out[:, first : first + width] = part
        return out
    total = np.array(parts[0], np.float32)
    for part in parts[1:]:
        total = total + part
    total = total * np.float32(scale)
    return np.asarray(total if residual is None else total + residual, np.float32)
