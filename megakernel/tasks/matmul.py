"""Matmul with fused prologue and epilogue: one pass over the weights for all rows of the step.

    x = input, or with a norm   x[r, :] = input[r, :] / sqrt(mean(input[r, :]^2) + eps) * gamma
    y[r, j] = scale * (sum over c of x[r, c] * weight[j, c] + bias[j])
    store:     output = y, or softcap * tanh(y / softcap)
    residual:  output = residual + y
    activate:  output = act(y)
    glu:       output[r, i] = act(gate[r, i]) * up[r, i]; rows of the weights alternate, half a tile of gate, half of up
    send:      output = y, and every element also goes to the window of every peer, stamped as those of a push

Activations are float32 [rows, cols], sums are float32 in an order that k alone decides (on a processor chains of 128
columns, added in order); weights are converted to float32 exactly. With `sampled`, row s of the output is row
`sample_row[s]` of the step.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import LoweringError
from megakernel.tasks.push import exchange_of
from megakernel.tasks.record import NONE, NONE64
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import WEIGHT_TYPES, Addresses, Cost, DType, Exchange, Region, Task, TaskNode, Variant

Array = npt.NDArray[Any]


class Epilogue(enum.Enum):
    STORE = 0
    RESIDUAL = 1
    GLU = 2
    ACTIVATE = 3
    SEND = 4


class Activation(enum.Enum):
    """Of the gate, or of the output. GELU_TANH is the tanh approximation, GELU the exact one."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3


@dataclass(frozen=True)
class MatmulConfig(Variant):
    dtype: DType = DType.F32  # of the weights
    tile_n: int = 32  # rows of the weights in one tile
    norm: bool = False
    epilogue: Epilogue = Epilogue.STORE
    activation: Activation = Activation.SILU
    bias: bool = False
    sampled: bool = False
    softcap: bool = False
    rounds: int = 0  # in which one row of the input is brought, 2,048 columns each; 0: not known
    even: bool = False  # units have 1,024 columns: all who share one have as many
    gives: bool = False  # in steps of several rows its output is published packed, too, for the product that reads it
    given: bool = False  # and its input comes so
    dealt: bool = False  # in steps of many rows a worker multiplies a share of many tiles, see builder/dealing.py
    gives_wide: int = 0  # in such steps it gives the next node its output packed: chunks of that one's units
    given_wide: bool = False  # and so its input comes


class Matmul(Task):
    """Tile t is rows `[t * tile_n, (t + 1) * tile_n)` of the packed weights; with glu it makes tile_n / 2 columns."""

    name = "matmul"
    awaits_values = True
    body = "Matmul"
    config = "MatmulConfig"
    fields = Struct(
        "MatmulFields",
        (
            Field("weight", "u64", doc="offset in the weights"),
            Field("bias", "u64", doc="f32 [tiles * tile_n], offset in the weights, or kNone64"),
            Field(
                "gamma",
                "u64",
                doc="f32 [k], offset in the weights, or kNone64; or the buffer it "
                "sends to; or without a norm that of the product it gives its output to, f32 [n]",
            ),
            Field("input", "u32", doc="offset in the workspace: f32 [rows][k]"),
            Field("output", "u32", doc="offset in the workspace: f32 [rows][n]"),
            Field("residual", "u32", doc="offset in the workspace: f32 [rows][n], or kNone; or the exchange it sends"),
            Field("n", "u32", doc="columns of the output"),
            Field("k", "u32", doc="columns of the input"),
            Field("k_unit", "u32", doc="columns of one unit of the packed weights"),
            Field("units", "u32", doc="units of a tile; k padded with zeros is k_unit * units"),
            Field("eps", "f32"),
            Field("scale", "f32"),
            Field("softcap", "f32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        out = [Region(node.tensors["input"], 0, node.sizes["k"])]
        if "residual" in node.tensors:
            out.append(Region(node.tensors["residual"], *_columns(node, first, count)))
        return tuple(out)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["output"], *_columns(node, first, count)),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        assert isinstance(node.variant, MatmulConfig)
        elements = float(count * node.variant.tile_n * node.sizes["k_unit"] * node.sizes["units"])
        other = 4.0 * (node.sizes["k"] + count * node.variant.tile_n)
        low, high = _columns(node, first, count)
        sent = (high - low) * (node.sizes["ranks"] - 1) * node.sizes["element"] if _sends(node) else 0
        return Cost(elements * node.variant.dtype.bytes, other, 2.0 * elements, link_bytes=float(sent))

    @staticmethod
    def by_value(node: TaskNode) -> bool:
        assert isinstance(node.variant, MatmulConfig)
        return not node.variant.sampled

    @staticmethod
    def sends(node: TaskNode) -> Exchange | None:
        return exchange_of(node) if _sends(node) else None

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        w, t = node.weights, node.tensors
        if _sends(node):
            gamma, residual = node.sizes["buffer"], node.sizes["exchange"]
        else:
            gamma = at.weight(w["gamma"]) if "gamma" in w else NONE64
            residual = at.tensor(t["residual"]) if "residual" in t else NONE
        return {
            "weight": at.weight(w["weight"]),
            "bias": at.weight(w["bias"]) if "bias" in w else NONE64,
            "gamma": gamma,
            "input": at.tensor(t["input"]),
            "output": at.tensor(t["output"]),
            "residual": residual,
            **{key: node.sizes[key] for key in ("n", "k", "k_unit", "units")},
            **{key: node.scalars[key] for key in ("eps", "scale", "softcap")},
        }


def _sends(node: TaskNode) -> bool:
    assert isinstance(node.variant, MatmulConfig)
    return node.variant.epilogue is Epilogue.SEND


def _columns(node: TaskNode, first: int, count: int) -> tuple[int, int]:
    width, n = node.sizes["tile_out"], node.sizes["n"]
    return min(n, first * width), min(n, (first + count) * width)


def node(
    name: str, *, n: int, k: int, input: str, output: str, weight: str, dtype: DType, tile_n: int,
    k_unit: int | None = None, units: int = 1, gamma: str | None = None, eps: float = 0.0, residual: str | None = None,
    bias: str | None = None, glu: Activation | str | None = None, sampled: bool = False, scale: float = 1.0,
    softcap: float = 0.0, activation: Activation | str | None = None, sends: Mapping[str, int] | None = None,
    layer: int = -1, rounds: int = 0, even: bool = False,
) -> TaskNode:  # fmt: skip
    """A matmul with `n` output columns and `k` input columns.

    Weight `weight`: packed by the target's layout in tiles of `tile_n` rows, each tile `units` units of `k_unit`
    columns (default: one unit, k rounded up to even); with `glu` it holds 2 n rows, gate and up interleaved by half
    tiles. `gamma` f32 [k] switches the norm on; `bias` f32 in packed row order, padded to whole tiles. Tensors are
    f32: `input` [rows, k], `output` and `residual` [rows, n]. `residual`, `glu` and `activation` (of the output)
    exclude each other. `sends`: the `exchange_sizes` of a plain store without a norm. `rounds` and `even`: see
    MatmulConfig. Raises LoweringError.
    """
    if glu is not None and (residual is not None or tile_n % 2):
        raise LoweringError(f"matmul {name}: glu takes no residual and an even tile_n, got {residual!r}, {tile_n}")
    if softcap and (glu is not None or residual is not None or activation is not None):
        raise LoweringError(f"matmul {name}: softcap needs a plain store")
    if activation is not None and (glu is not None or residual is not None):
        raise LoweringError(f"matmul {name}: an activation of the output takes no glu and no residual")
    if sends is not None and (gamma or glu or residual or activation or softcap or sampled or sends["cols"] != n):
        raise LoweringError(f"matmul {name}: only a plain store of all rows, without a norm, goes to the peers")
    epilogue = Epilogue.GLU if glu is not None else Epilogue.RESIDUAL if residual is not None else Epilogue.STORE
    epilogue = Epilogue.SEND if sends is not None else epilogue
    epilogue = Epilogue.ACTIVATE if activation is not None else epilogue
    wanted = glu if glu is not None else activation
    kind = Activation.SILU if wanted is None else _activation(name, wanted)
    tile_out = tile_n // 2 if glu is not None else tile_n
    variant = MatmulConfig(
        dtype, tile_n, gamma is not None, epilogue, kind, bias is not None, sampled, softcap != 0.0, rounds, even
    )  # fmt: skip
    optional = (("gamma", gamma), ("bias", bias))
    return TaskNode(
        name, Matmul, variant, -(-n // tile_out),
        {"input": input, "output": output, **({} if residual is None else {"residual": residual})},
        {"weight": weight, **{key: value for key, value in optional if value is not None}},
        {"n": n, "k": k, "k_unit": k_unit or k + k % 2, "units": units, "tile_out": tile_out, **(sends or {})},
        {"eps": eps, "scale": scale, "softcap": softcap}, layer,
    )  # fmt: skip


def _activation(name: str, text: Activation | str) -> Activation:
    if isinstance(text, Activation):
        return text
    known = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH, "gelu_pytorch_tanh": Activation.GELU_TANH,
             "gelu": Activation.GELU, "relu": Activation.RELU}  # fmt: skip
    if text not in known:
        raise LoweringError(f"matmul {name}: no activation {text!r}; known: {', '.join(known)}")
    return known[text]


def activate(kind: Activation, x: Array) -> Array:
    """The activation of a gate, in x's own precision."""
    if kind is Activation.SILU:
        return np.asarray(x / (1 + np.exp(-x)))
    if kind is Activation.RELU:
        return np.maximum(x, 0)
    if kind is Activation.GELU_TANH:
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    from math import erf

    return np.asarray(0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2.0))))


def reference(
    x: Array, weight: Array, *, gamma: Array | None = None, eps: float = 0.0, bias: Array | None = None,
    residual: Array | None = None, up: Array | None = None, up_bias: Array | None = None,
    activation: Activation = Activation.SILU, scale: float = 1.0, softcap: float = 0.0, activated: bool = False,
) -> Array:  # fmt: skip
    """The formulas above with sums in float64; `weight` is the gate when `up` is given. [rows, n] float32.

    activated: `activation` is of the output.
    """
    x = np.asarray(x, np.float64)
    if gamma is not None:
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * np.asarray(gamma, np.float64)

    def linear(w: Array, b: Array | None) -> Array:
        y = x @ np.asarray(w, np.float64).T
        return np.asarray(scale * (y if b is None else y + np.asarray(b, np.float64)))

    y = linear(weight, bias)
    if up is not None:
        y = activate(activation, y) * linear(up, up_bias)
    if activated:
        y = activate(activation, y)
    if softcap:
        y = softcap * np.tanh(y / softcap)
    return np.asarray(y if residual is None else y + residual, np.float32)


@dataclass(frozen=True)
class Case:
    rows: int
    n: int
    k: int
    dtype: DType = DType.F32
    norm: bool = False
    residual: bool = False
    bias: bool = False
    glu: Activation | None = None
    activation: Activation | None = None  # of the output
    sampled: bool = False
    softcap: float = 0.0
    scale: float = 1.0


def cases() -> tuple[Case, ...]:
    """Every prologue and epilogue, every dtype, odd sizes, every row count that a kernel may block differently."""
    every = tuple(Case(rows, 70, 33, d) for rows in (1, 2, 3, 4, 5, 7, 8, 11, 16) for d in WEIGHT_TYPES)
    more = (
        Case(1, 1, 1),
        Case(1, 32, 64, DType.BF16, norm=True),
        Case(5, 96, 577, DType.BF16, norm=True, bias=True),
        Case(16, 576, 1536, DType.BF16, residual=True),
        Case(3, 64, 31, DType.F32, residual=True, bias=True, scale=0.5),
        Case(2, 40, 64, DType.F32, norm=True, glu=Activation.SILU),
        Case(9, 1536, 576, DType.BF16, norm=True, glu=Activation.SILU, bias=True),
        Case(4, 17, 48, DType.F16, glu=Activation.GELU_TANH),
        Case(4, 17, 48, DType.F32, glu=Activation.GELU),
        Case(3, 70, 33, DType.F32, glu=Activation.RELU),
        Case(3, 70, 33, DType.F32, bias=True, activation=Activation.GELU_TANH),
        Case(9, 96, 64, DType.BF16, activation=Activation.RELU),
        Case(16, 301, 66, DType.F32, norm=True, sampled=True),
        Case(8, 301, 66, DType.F16, sampled=True, softcap=3.0, scale=2.0),
    )
    return every + more
