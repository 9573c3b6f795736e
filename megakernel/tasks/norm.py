"""Norm: a norm whose result is stored, with an optional scale and residual add.

    n[r, j] = rms:    x[r, j] / sqrt(mean(x^2) + eps) * gamma[j]
              layer:  (x[r, j] - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * gamma[j] + beta[j]
              none:   x[r, j]
    output[r, j] = residual[r, j] + scale * n[r, j]

Columns `[0, split)` and `[split, normed)` are normed each by itself (the queries and the keys of a row of qkv), those
from `normed` on pass through; a plain norm has split = normed = cols. Everything is float32; sums run over a whole part
in one fixed order, whichever tile needs them. A matmul's own prologue does the same without a store: this task is for
norms behind a matmul, layer norms, and norms over queries and keys that span heads.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import LoweringError
from megakernel.tasks.record import NONE, NONE64
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant, tile_columns

Array = npt.NDArray[Any]


class Norming(enum.Enum):
    NONE = 0
    RMS = 1
    LAYER = 2


@dataclass(frozen=True)
class NormConfig(Variant):
    norming: Norming = Norming.RMS
    beta: bool = False
    residual: bool = False


class Norm(Task):
    """Tile t writes columns `[t * tile_cols, (t + 1) * tile_cols)` of every row."""

    name = "norm"
    awaits_values = True
    body = "Norm"
    config = "NormConfig"
    fields = Struct(
        "NormFields",
        (
            Field("gamma", "u64", doc="f32 [normed], offset in the weights, or kNone64"),
            Field("beta", "u64", doc="f32 [normed], offset in the weights, or kNone64"),
            Field("input", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("output", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("residual", "u32", doc="offset in the workspace: f32 [rows][cols], or kNone"),
            Field("cols", "u32"),
            Field("split", "u32", doc="end of the first normed part"),
            Field("normed", "u32", doc="end of the second normed part"),
            Field("tile_cols", "u32"),
            Field("eps", "f32"),
            Field("scale", "f32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Whole rows, since every column of a part decides its sums."""
        assert isinstance(node.variant, NormConfig)
        alone = node.variant.norming is Norming.NONE
        out = [Region(node.tensors["input"], *(tile_columns(node, first, count) if alone else (0, node.sizes["cols"])))]
        if "residual" in node.tensors:
            out.append(Region(node.tensors["residual"], *tile_columns(node, first, count)))
        return tuple(out)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["output"], *tile_columns(node, first, count)),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        low, high = tile_columns(node, first, count)
        return Cost(0.0, 4.0 * (node.sizes["cols"] + 3.0 * (high - low)), 3.0 * node.sizes["cols"])

    @staticmethod
    def by_value(node: TaskNode) -> bool:
        return True

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        w, t = node.weights, node.tensors
        return {
            "gamma": at.weight(w["gamma"]) if "gamma" in w else NONE64,
            "beta": at.weight(w["beta"]) if "beta" in w else NONE64,
            "input": at.tensor(t["input"]),
            "output": at.tensor(t["output"]),
            "residual": at.tensor(t["residual"]) if "residual" in t else NONE,
            **{key: node.sizes[key] for key in ("cols", "split", "normed", "tile_cols")},
            **{key: node.scalars[key] for key in ("eps", "scale")},
        }


def node(
    name: str, *, cols: int, input: str, output: str, norming: Norming, gamma: str | None = None,
    beta: str | None = None, eps: float = 0.0, scale: float = 1.0, residual: str | None = None,
    parts: tuple[int, int] | None = None, tile_cols: int = 256, layer: int = -1,
) -> TaskNode:  # fmt: skip
    """Norm of `cols` columns. `gamma` and `beta`: f32 of all normed columns. `parts`: columns of the two normed parts.

    Tensors are f32 [rows, cols]; `tile_cols` columns make a tile. Raises LoweringError for parts that do not fit.
    """
    first, second = parts or (cols, 0)
    if first < 1 or second < 0 or first + second > cols or (norming is Norming.NONE) != (gamma is None):
        raise LoweringError(
            f"norm {name}: parts {first} and {second} of {cols} columns, gamma {gamma!r}, {norming.name}"
        )
    width = min(cols, tile_cols)
    optional = (("gamma", gamma), ("beta", beta))
    return TaskNode(
        name, Norm, NormConfig(norming, beta is not None, residual is not None), -(-cols // width),
        {"input": input, "output": output, **({} if residual is None else {"residual": residual})},
        {key: value for key, value in optional if value is not None},
        {"cols": cols, "split": first, "normed": first + second, "tile_cols": width},
        {"eps": eps, "scale": scale}, layer,
    )  # fmt: skip


def reference(
    x: Array, norming: Norming, *, gamma: Array | None = None, beta: Array | None = None, eps: float = 0.0,
    scale: float = 1.0, residual: Array | None = None, parts: tuple[int, int] | None = None,
) -> Array:  # fmt: skip
    """The formulas above in float64. [rows, cols] float32."""
    x = np.asarray(x, np.float64)
    out = x.copy()
    split, normed = parts[0] if parts else x.shape[1], sum(parts) if parts else x.shape[1]
    for low, high in ((0, split), (split, normed)):
        if low == high or norming is Norming.NONE:
            continue
        assert gamma is not None
        v = x[:, low:high]
        if norming is Norming.LAYER:
            v = v - v.mean(1, keepdims=True)
        v = v / np.sqrt((v * v).mean(1, keepdims=True) + eps) * np.asarray(gamma, np.float64)[low:high]
        out[:, low:high] = v if beta is None else v + np.asarray(beta, np.float64)[low:high]
    out *= scale
    return np.asarray(out if residual is None else out + residual, np.float32)


@dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    norming: Norming = Norming.RMS
    beta: bool = False
    residual: bool = False
    scale: float = 1.0
    parts: tuple[int, int] | None = None
    tile_cols: int = 256


def cases() -> tuple[Case, ...]:
    """Every kind, odd widths, tiles that do not divide the columns, parts that end inside a tile."""
    return (
        Case(1, 5),
        Case(3, 577, tile_cols=64),
        Case(16, 96, residual=True),
        Case(2, 640, residual=True, scale=0.25, tile_cols=100),
        Case(4, 131, Norming.LAYER, tile_cols=48),
        Case(16, 576, Norming.LAYER, beta=True),
        Case(1, 70, Norming.LAYER, beta=True, residual=True),
        Case(5, 33, Norming.NONE, residual=True, scale=3.0, tile_cols=8),
        Case(2, 48, Norming.NONE, scale=0.5),
        Case(3, 230, parts=(100, 50), tile_cols=32),
        Case(16, 96, parts=(48, 24), tile_cols=40),
    )
