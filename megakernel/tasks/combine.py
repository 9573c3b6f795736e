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

from megakernel.tasks.attention import NO_WINDOW, head_columns
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CombineConfig(Variant):
    head_dim: int = 64
    heads: int = 1
    piece_tokens: int = 256
    gives: bool = False  # in steps of several rows it publishes its output packed, too, for the product that reads it
    half: bool = False  # in float16, not bfloat16


class Combine(Task):
    """Tile h is q head h of every row."""

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
        group, size = node.sizes["group"], head_columns(node.sizes)
        low, high = first // group * group, -(-(first + count) // group) * group
        return (Region(node.tensors["partials"], low * size, high * size),)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        d = node.sizes["head_dim"]
        return (Region(node.tensors["output"], first * d, (first + count) * d),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        assert isinstance(node.variant, CombineConfig)
        pieces = -(-(min(context, node.sizes["window"]) + 1) // node.variant.piece_tokens)
        elements = float(count * pieces * (node.sizes["head_dim"] + 2))
        return Cost(0.0, 4.0 * elements, 3.0 * elements)

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
    max_pieces: int, window: int | None = None, layer: int = -1, direct: bool = False,
) -> TaskNode:  # fmt: skip
    """Combine after an attention with the same sizes. Tensor `output`: f32 [rows, heads * head_dim]. `direct`: the
    attention has the same output and writes the rows of one piece itself."""
    sizes = {
        "head_dim": head_dim, "group": heads // kv_heads, "max_pieces": max_pieces, "window": window or NO_WINDOW,
        "direct": int(direct),
    }  # fmt: skip
    return TaskNode(
        name, Combine, CombineConfig(head_dim, heads, piece_tokens), heads, {"partials": partials, "output": output},
        {}, sizes, {}, layer,
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


def cases() -> tuple[Case, ...]:
    """One piece, exactly full pieces, one more, a window that skips the first pieces."""
    return (
        Case((0,), 3, 1, 16),
        Case((63, 64, 127, 128), 4, 2, 24),
        Case((300,), 9, 3, 64),
        Case((300, 10, 130), 2, 2, 8, window=100),
    )
