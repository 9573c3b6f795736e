"""Combine: the pieces of every row and q head, in piece order, into the output of attention.

Rows of one piece may have been written by attention already, see `output` there.

M = max over pieces of m[j],  output[r, h, :] = sum_j exp(m[j] - M) acc[j] / sum_j exp(m[j] - M) l[j]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import LoweringError
from megakernel.tasks.attention import NO_WINDOW, head_columns
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CombineConfig(Variant):
    head_dim: int = 64
    heads: int = 1
    shares: int = 1  # tiles of a head
    piece_tokens: int = 256
    gives: bool = False  # in steps of several rows it publishes its output packed, too, for the product that reads it
    half: bool = False  # in float16, not bfloat16
    gives_wide: int = 0  # as of a product, see MatmulConfig


class Combine(Task):
    """Tile h * shares + s is q head h of rows s, s + shares, ...

    Who writes what within a head depends on the rows of the step: its columns are shared out in name only. Readers take
    whole heads."""

    name = "combine"
    awaits_values = True
    idles = True  # when attention has written every row
    body = "Combine"
    config = "CombineConfig"
    fields = Struct(
        "CombineFields",
        (
            Field("partials", "u32", doc="offset in the workspace: f32 [rows][heads][max_pieces][head_dim + 2]"),
            Field("output", "u32", doc="offset in the workspace: f32 [rows][heads * head_dim]"),
            Field("max_pieces", "u32"),
            Field("window", "u32"),
            Field("direct", "u32", doc="1: attention has written the rows of one piece"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Whole KV heads: within one, who writes which item depends on the step."""
        size, tiles = head_columns(node.sizes), node.sizes["group"] * node.sizes["shares"]
        low, high = first // tiles * node.sizes["group"], -(-(first + count) // tiles) * node.sizes["group"]
        return (Region(node.tensors["partials"], low * size, high * size),)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        d = node.sizes["head_dim"] // node.sizes["shares"]
        return (Region(node.tensors["output"], first * d, (first + count) * d),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        assert isinstance(node.variant, CombineConfig)
        pieces = -(-(min(context, node.sizes["window"]) + 1) // node.variant.piece_tokens)
        elements = float(count * pieces * (node.sizes["head_dim"] + 2)) / node.sizes["shares"]
        return Cost(0.0, 4.0 * elements, 3.0 * elements)

    @staticmethod
    def first_tiles(node: TaskNode) -> tuple[int, ...]:
        """Those of row 0, where there are others."""
        shares = node.sizes["shares"]
        return tuple(range(0, node.tiles, shares)) if shares > 1 else ()

    @staticmethod
    def by_value(node: TaskNode) -> bool:
        return True

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        return {
            "partials": at.tensor(node.tensors["partials"]),
            "output": at.tensor(node.tensors["output"]),
            "max_pieces": node.sizes["max_pieces"],
            "window": node.sizes["window"],
            "direct": node.sizes["direct"],
        }


def node(
    name: str, *, heads: int, kv_heads: int, head_dim: int, partials: str, output: str, piece_tokens: int,
    max_pieces: int, window: int | None = None, layer: int = -1, direct: bool = False, shares: int = 1,
) -> TaskNode:  # fmt: skip
    """Combine after an attention with the same sizes. Tensor `output`: f32 [rows, heads * head_dim]. `direct`: the
    attention has the same output and writes the rows of one piece itself. `shares`: tiles of a head."""
    if shares < 1 or head_dim % shares:
        raise LoweringError(f"combine {name}: {shares} shares of a head, whose head_dim {head_dim} is no multiple")
    sizes = {
        "head_dim": head_dim, "group": heads // kv_heads, "max_pieces": max_pieces, "window": window or NO_WINDOW,
        "direct": int(direct), "shares": shares,
    }  # fmt: skip
    return TaskNode(
        name, Combine, CombineConfig(head_dim, heads, shares, piece_tokens), heads * shares,
        {"partials": partials, "output": output}, {}, sizes, {}, layer,
    )  # fmt: skip


def reference(partials: Array) -> Array:
    """partials [pieces, head_dim + 2] of one row and head. [head_dim] float32."""
    p = np.asarray(partials, np.float64)
    acc, m, total = p[:, :-2], p[:, -2], p[:, -1]
    w = np.exp(m - m.max())
    return np.asarray((w[:, None] * acc).sum(0) / (w * total).sum(), np.float32)


@dataclass(frozen=True)
class Case:
    positions: tuple[int, ...]  # one for each row
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    piece_tokens: int = 64
    shares: int = 1


def cases() -> tuple[Case, ...]:
    """One piece, exactly full pieces, one more, a window that skips the first pieces; more shares than rows, fewer."""
    return (
        Case((0,), 3, 1, 16),
        Case((63, 64, 127, 128), 4, 2, 24),
        Case((300,), 9, 3, 64),
        Case((300, 10, 130), 2, 2, 8, window=100),
        Case((300, 10, 130), 3, 1, 16, shares=4),
        Case((63, 64, 300, 128, 5), 4, 2, 24, shares=2),
    )
