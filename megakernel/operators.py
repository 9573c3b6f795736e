"""The operators of a Graph: for each, which inputs and attributes fit and how many columns come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megakernel.errors import GraphError
from megakernel.rope import RopeSpec

Attrs = Mapping[str, Any]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class Shape:
    """What an operator sees of an input: a weight matrix `[rows, cols]`, a weight vector `[cols]`, an activation."""

    name: str
    kind: str
    rows: int | None
    cols: int

    def __str__(self) -> str:
        dims = [str(self.cols)] if self.rows is None else [str(self.rows), str(self.cols)]
        return f"{self.kind} {self.name!r} [{', '.join(dims if self.kind == 'weight' else ['rows', *dims])}]"


def _need(condition: bool, expected: str, *got: Shape) -> None:
    if not condition:
        raise GraphError(f"expected {expected}, got {'; '.join(map(str, got)) or 'nothing'}")


def _count(inputs: Sequence[Shape], low: int, high: int) -> None:
    _need(low <= len(inputs) <= high, f"{low} to {high} inputs" if low != high else f"{low} inputs", *inputs)


def _activations(*shapes: Shape) -> None:
    _need(all(s.kind in ("activation", "input") for s in shapes), "activations", *shapes)


def _vector(shape: Shape, size: int, role: str) -> None:
    _need(shape.kind == "weight" and shape.rows is None and shape.cols == size, f"{role} vector of {size}", shape)


def _positive(attrs: Attrs, *names: str) -> None:
    for name in names:
        value = attrs.get(name)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if not ok:
            raise GraphError(f"attribute {name}: expected a number above 0, got {value!r}")


def _embedding(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _count(inputs, 2, 3)
    tokens, table = inputs[:2]
    _need(tokens.kind == "token", "token ids first", tokens)
    _need(table.kind == "weight" and table.rows is not None, "a weight matrix as table", table)
    for positions in inputs[2:]:
        fits = positions.kind == "weight" and positions.rows is not None and positions.cols == table.cols
        _need(fits, f"a table of positions with {table.cols} columns", positions)
    _positive(attrs, "scale")
    return table.cols


def _rms_norm(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _count(inputs, 2, 2)
    x, gamma = inputs
    _activations(x)
    group = attrs.get("group")
    if group is not None:
        _positive(attrs, "group")
        _need(x.cols % group == 0, f"columns that are a multiple of group {group}", x)
    _vector(gamma, group or x.cols, "gamma")
    _positive(attrs, "eps")
    return x.cols


def _layer_norm(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _count(inputs, 2, 3)
    _activations(inputs[0])
    for weight in inputs[1:]:
        _vector(weight, inputs[0].cols, "norm")
    _positive(attrs, "eps")
    return inputs[0].cols


def _linear(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _count(inputs, 2, 3)
    x, weight = inputs[:2]
    _activations(x)
    _need(
        weight.kind == "weight" and weight.rows is not None and weight.cols == x.cols,
        f"a weight matrix of {x.cols} columns", x, weight,
    )  # fmt: skip
    assert weight.rows is not None
    if len(inputs) == 3:
        _vector(inputs[2], weight.rows, "bias")
    return weight.rows


def _rope(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _count(inputs, 1, 1)
    _activations(*inputs)
    _positive(attrs, "heads", "head_dim")
    heads, head_dim, spec = attrs["heads"], attrs["head_dim"], attrs.get("spec")
    if not isinstance(spec, RopeSpec) or spec.rotary_dim > head_dim:
        raise GraphError(f"attribute spec: expected a RopeSpec of at most {head_dim} elements, got {spec!r}")
    _need(inputs[0].cols == heads * head_dim, f"{heads} heads x {head_dim} = {heads * head_dim} columns", *inputs)
    return inputs[0].cols


def _attention(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _count(inputs, 3, 3)
    _activations(*inputs)
    _positive(attrs, "heads", "kv_heads", "head_dim", "scale")
    _positive(attrs, *(name for name in ("window", "softcap") if attrs.get(name) is not None))
    heads, kv_heads, head_dim = attrs["heads"], attrs["kv_heads"], attrs["head_dim"]
    if heads % kv_heads:
        raise GraphError(f"{heads} heads are not a multiple of {kv_heads} KV heads")
    q, k, v = inputs
    _need(q.cols == heads * head_dim, f"q of {heads} x {head_dim} columns", q)
    _need(k.cols == v.cols == kv_heads * head_dim, f"k and v of {kv_heads} x {head_dim} columns", k, v)
    return q.cols


def _same(count: int, *positive: str) -> Callable[[Sequence[Shape], Attrs], int]:
    def check(inputs: Sequence[Shape], attrs: Attrs) -> int:
        _count(inputs, count, count)
        _activations(*inputs)
        _need(len({s.cols for s in inputs}) == 1, "inputs with equal columns", *inputs)
        _positive(attrs, *positive)
        return inputs[0].cols

    return check


def _activated(count: int) -> Callable[[Sequence[Shape], Attrs], int]:
    def check(inputs: Sequence[Shape], attrs: Attrs) -> int:
        name = attrs.get("activation")
        if name not in ACTIVATIONS:
            raise GraphError(f"attribute activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
        return _same(count)(inputs, attrs)

    return check


def _all_reduce(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _positive(attrs, "ranks")
    return _same(1)(inputs, attrs)


def _all_gather(inputs: Sequence[Shape], attrs: Attrs) -> int:
    _positive(attrs, "ranks", "cols")
    _count(inputs, 1, 1)
    _activations(*inputs)
    cols, ranks = int(attrs["cols"]), int(attrs["ranks"])
    _need(
        inputs[0].cols < cols <= ranks * inputs[0].cols, f"a part of {cols} columns, {ranks} of which cover it", *inputs
    )
    return cols


OPERATORS: dict[str, Callable[[Sequence[Shape], Attrs], int]] = {
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "rope": _rope,
    "attention": _attention,
    "glu": _activated(2),
    "activation": _activated(1),
    "add": _same(2),
    "scale": _same(1, "factor"),
    "softcap": _same(1, "limit"),
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
}
"""Operator -> columns of its output. Raises GraphError when inputs or attributes do not fit."""
