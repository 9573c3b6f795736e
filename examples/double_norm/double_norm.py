"""Double norm: a residual plus what two RMS norms, one after the other, make of a value.

    n[r, j] = x[r, j] / sqrt(mean over c of x[r, c]^2 + eps) * first[j]
    output[r, j] = residual[r, j] + n[r, j] / sqrt(mean over c of n[r, c]^2 + eps) * second[j]

Everything is float32 [rows, cols]; the sums run over a whole row in the worker's fixed order. Without it the builder
makes two tasks, and the second waits for every tile of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import GraphError
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Operator, Place, Region, Task, TaskNode, Variant, tile_columns

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DoubleNormConfig(Variant):
    """No compile-time choice."""


class DoubleNorm(Task):
    """Tile t writes columns `[t * tile_cols, (t + 1) * tile_cols)` of every row."""

    name = "double_norm"
    body = "DoubleNorm"
    config = "DoubleNormConfig"
    fields = Struct(
        "DoubleNormFields",
        (
            Field("first", "u64", doc="f32 [cols], offset in the weights"),
            Field("second", "u64", doc="f32 [cols], offset in the weights"),
            Field("input", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("residual", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("output", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("cols", "u32"),
            Field("tile_cols", "u32"),
            Field("eps", "f32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Whole rows of the input, since every column decides the sums."""
        whole = Region(node.tensors["input"], 0, node.sizes["cols"])
        return (whole, Region(node.tensors["residual"], *tile_columns(node, first, count)))

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["output"], *tile_columns(node, first, count)),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        low, high = tile_columns(node, first, count)
        return Cost(0.0, 4.0 * (2.0 * node.sizes["cols"] + 4.0 * (high - low)), 6.0 * node.sizes["cols"])

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        return {
            **{role: at.weight(node.weights[role]) for role in ("first", "second")},
            **{role: at.tensor(node.tensors[role]) for role in ("input", "residual", "output")},
            **{key: node.sizes[key] for key in ("cols", "tile_cols")},
            "eps": node.scalars["eps"],
        }


def node(
    name: str, *, cols: int, input: str, residual: str, output: str, first: str, second: str, eps: float,
    tile_cols: int = 256,
) -> TaskNode:  # fmt: skip
    """Weights `first` and `second`: f32 [cols]; tensors f32 [rows, cols]; `tile_cols` columns make a tile."""
    width = min(cols, tile_cols)
    return TaskNode(
        name, DoubleNorm, DoubleNormConfig(), -(-cols // width),
        {"input": input, "residual": residual, "output": output}, {"first": first, "second": second},
        {"cols": cols, "tile_cols": width}, {"eps": eps},
    )  # fmt: skip


def reference(x: Array, residual: Array, first: Array, second: Array, eps: float) -> Array:
    """The formula in float64. [rows, cols] float32."""
    out = np.asarray(x, np.float64)
    for gamma in (first, second):
        out = out / np.sqrt((out * out).mean(1, keepdims=True) + eps) * np.asarray(gamma, np.float64)
    return np.asarray(out + residual, np.float32)


@dataclass(frozen=True)
class Case:
    rows: int
    cols: int
    tile_cols: int = 256


def cases() -> tuple[Case, ...]:
    """One column, odd widths, tiles that do not divide the columns, every row of a step."""
    return Case(1, 1), Case(3, 77, 32), Case(16, 577, 100), Case(2, 256)


# ---------------------------------------------------------------------------------------------- in a graph
def columns(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> int:
    """Inputs x, residual, first and second, as many columns each; attribute eps above 0."""
    if len(inputs) != 4 or len({i.cols for i in inputs}) != 1:
        raise GraphError(f"expected x, residual and two vectors of as many columns, got {'; '.join(map(str, inputs))}")
    if not attrs.get("eps", 0) > 0:
        raise GraphError(f"attribute eps: expected a number above 0, got {attrs.get('eps')!r}")
    return int(inputs[0].cols)


def interpret(torch: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, residual, *gammas = inputs
    for gamma in gammas:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + attrs["eps"]) * gamma
    return residual + x


def lower(name: str, inputs: Sequence[str], output: str, attrs: Mapping[str, Any], place: Place) -> TaskNode:
    x, residual, first, second = inputs
    cols = place.cols(x)
    return node(
        name, cols=cols, input=x, residual=residual, output=place.tensor(output, cols),
        first=place.vector(f"{name}.first", first), second=place.vector(f"{name}.second", second),
        eps=float(attrs["eps"]), tile_cols=place.tile(cols),
    )  # fmt: skip


def demo(b: Any, cols: int, fused: bool) -> str:
    """A chain of eight, as a model of eight layers would have it."""
    x: str = b.input(cols)
    for i in range(8):
        first, second = (b.weight(f"{i}.{name}", cols) for name in ("first", "second"))
        if fused:
            x = b.operator(f"{i}.out", "double_norm", x, x, first, second, eps=1e-5)
        else:
            once = b.rms_norm(f"{i}.once", x, first, eps=1e-5)
            x = b.add(f"{i}.out", x, b.rms_norm(f"{i}.twice", once, second, eps=1e-5))
    return x


OPERATOR = Operator("double_norm", columns, interpret, lower, demo)
