"""What each exported operator means for rows: the graph's nodes, or values that a later operator completes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megakernel.capture.heads import heads_of, seen_of, window_of
from megakernel.capture.source import source_line, title
from megakernel.capture.values import (
    Base,
    Constant,
    Factor,
    NotSupported,
    Scores,
    Tensor,
    Tokens,
    View,
    row_columns,
    uniform,
    whole,
)  # fmt: skip
from megakernel.graph import GraphBuilder

Value = Any  # View, Constant, Factor, Scores, Tokens, a number, or a tuple of them


class Operators:
    """Methods `_op_x` for operators `aten.x` of which an argument depends on the inputs. They raise NotSupported."""

    def __init__(self, builder: GraphBuilder, lead: torch.Size) -> None:
        self.b = builder
        self.lead = lead
        self.rows = lead.numel()
        self.node: torch.fx.Node | None = None  # the operator at work
        self.weights: dict[str, Tensor] = {}
        self.sources: dict[str, str] = {}
        self.sequence = False
        self.vocab = 1

    # ------------------------------------------------------------------------------------------ names
    def _name(self) -> str:
        """An unused name of a graph node made for the present operator, whose source is noted."""
        assert self.node is not None
        base, count = str(self.node.name), 0
        name = base
        while self.b.has(name):
            count += 1
            name = f"{base}.{count}"
        self.sources[name] = f"operator {title(self.node)} at {source_line(self.node)}"
        return name

    @contextmanager
    def _at(self, node: torch.fx.Node | None) -> Iterator[None]:
        """Graph nodes made inside are of that operator."""
        now, self.node = self.node, node
        try:
            yield
        finally:
            self.node = now

    def _base(
        self, cols: int, make: Callable[[int, int], str], kind: str = "", parts: Mapping[str, Any] | None = None
    ) -> Base:
        """Of the present operator, whenever it is made."""
        origin = self.node

        def run(low: int, high: int) -> str:
            with self._at(origin):
                return make(low, high)

        return Base(cols, run, kind, dict(parts or {}), origin)

    def _weight(self, constant: Constant | Tensor, shape: tuple[int, ...]) -> str:
        data = constant.data if isinstance(constant, Constant) else constant
        name = constant.name if isinstance(constant, Constant) else None
        if tuple(data.shape) != shape:
            data, name = data.expand(shape) if data.dim() else data.reshape(1).expand(shape), None
        if name is None or (name in self.weights and self.weights[name] is not data):
            name = f"constant.{len(self.weights)}"
        self.weights[name] = data
        return self.b.weight(name, *shape)

    @staticmethod
    def _whole_only(name: str, low: int, high: int, cols: int) -> str:
        if (low, high) != (0, cols):
            raise NotSupported(f"columns {low} to {high} of {cols}: only a linear's output may be taken apart")
        return name

    def _made(self, name: str, cols: int, lead: torch.Size) -> View:
        return whole(self._base(cols, lambda low, high: self._whole_only(name, low, high, cols)), lead)

    def _rows(self, view: Value) -> str:
        """The graph tensor of a value that is rows."""
        if not isinstance(view, View):
            raise NotSupported(f"expected rows, got {_describe(view)}")
        columns = row_columns(view, self.rows)
        if columns is None:
            raise NotSupported("its elements are not whole rows in order")
        coefficient = view.terms[0][1]
        factor = uniform(coefficient)
        if factor == 1.0:
            return view.base.columns(*columns)
        by_column = coefficient.reshape(self.rows, -1)
        if factor is None and torch.equal(by_column, by_column[:1].expand_as(by_column)):
            return self._scaled_columns(view.base, columns, by_column[0].clone())
        if factor is None or not factor > 0:
            raise NotSupported("rows times a tensor that is no vector of their columns, or a number not above 0")
        part = view.base.columns(*columns)
        return view.base.once(*columns, str(factor).encode(), lambda: self.b.scale(self._name(), part, factor))

    def _scaled_columns(self, base: Base, columns: tuple[int, int], factors: Tensor) -> str:
        """Columns times a vector: the weight of a norm, or rows of a linear's weights."""
        with self._at(base.origin):
            return base.once(*columns, factors.numpy().tobytes(), partial(self._scaled, base, columns, factors))

    def _scaled(self, base: Base, columns: tuple[int, int], factors: Tensor) -> str:
        low, high = columns
        if base.kind == "norm" and base.parts["gamma"] is None:
            group = base.parts["group"]
            gamma = factors[:group]
            if low % group == 0 and high % group == 0 and torch.equal(factors, gamma.repeat((high - low) // group)):
                return self._norm_with(base, columns, gamma)
        if base.kind == "linear":
            weight, bias = base.parts["weight"].data, base.parts["bias"]
            scaled = None if bias is None else bias.data[low:high] * factors
            return self._linear_columns(
                base.parts["x"],
                Constant(weight[low:high] * factors[:, None]),
                None if scaled is None else Constant(scaled),
            )
        raise NotSupported("columns times a vector, which only a norm or a linear can take up")

    # ------------------------------------------------------------------------------------------ linear
    def _op_linear(self, x: View, weight: Constant, bias: Constant | None = None) -> View:
        if not isinstance(weight, Constant) or not isinstance(x, View):
            raise NotSupported("a product of two values that both depend on the inputs")
        name, n = self._rows(x), int(weight.data.shape[0])
        parts = {"x": name, "weight": weight, "bias": bias}
        base = self._base(n, lambda low, high: self._linear_part(parts, low, high, n), "linear", parts)
        return whole(base, torch.Size(x.shape[:-1]))

    def _linear_part(self, parts: Mapping[str, Any], low: int, high: int, n: int) -> str:
        def part(constant: Constant | None) -> Constant | None:
            return constant if constant is None or (low, high) == (0, n) else Constant(constant.data[low:high])

        weight = part(parts["weight"])
        assert weight is not None
        return self._linear_columns(parts["x"], weight, part(parts["bias"]))

    def _linear_columns(self, x: str, weight: Constant, bias: Constant | None) -> str:
        n, k = (int(s) for s in weight.data.shape)
        named = None if bias is None else self._weight(bias, (n,))
        return self.b.linear(self._name(), x, self._weight(weight, (n, k)), named)

    def _op_matmul(self, a: Value, b: Value) -> Value:
        if isinstance(b, Constant):
            if b.data.dim() != 2:
                raise NotSupported(f"a product with a constant of {b.data.dim()} dimensions; expected a matrix")
            return self._op_linear(a, Constant(b.data.T))
        if isinstance(a, Scores):
            if not a.softmax:
                raise NotSupported("a product of scores without a softmax")
            return self._attention(a, b)
        if isinstance(a, View) and isinstance(b, View):
            return Scores(a, b.map(lambda data: data.transpose(-1, -2)))
        raise NotSupported(f"a product of {_describe(a)} and {_describe(b)}")

    _op_mm = _op_bmm = _op_matmul

    def _op_addmm(self, bias: Constant, a: Value, b: Value) -> Value:
        if not isinstance(b, Constant) or not isinstance(bias, Constant):
            raise NotSupported("a product of two values that both depend on the inputs")
        return self._op_linear(a, Constant(b.data.T), bias)

    def _op_embedding(self, table: Constant, ids: Value, *_: Any) -> View:
        if not isinstance(ids, Tokens):
            raise NotSupported("a table indexed by something other than the token ids")
        self.vocab = max(self.vocab, int(table.data.shape[0]))
        cols = int(table.data.shape[1])
        parts: dict[str, Any] = {"table": table}
        base = self._base(cols, lambda low, high: self._embedded(parts, None, low, high), "embedding", parts)
        return whole(base, ids.lead)

    def _embedded(self, parts: Mapping[str, Any], positions: Tensor | None, low: int, high: int) -> str:
        table = parts["table"]
        name = self._weight(table, tuple(table.data.shape))
        places = None if positions is None else self._weight(positions, tuple(positions.shape))
        out = self.b.embedding(self._name(), name, positions=places)
        return self._whole_only(out, low, high, int(table.data.shape[1]))

    # ------------------------------------------------------------------------------------------ sums and products
    def _op_add(self, a: Value, b: Value, alpha: float = 1) -> Value:
        if alpha != 1:
            raise NotSupported(f"alpha = {alpha}")
        if isinstance(b, (View, Scores, Factor)) and not isinstance(a, (View, Scores, Factor)):
            a, b = b, a
        if isinstance(a, Factor) and isinstance(b, (int, float)) and a.stage == "mean":
            return replace(a, eps=a.eps + float(b))
        if isinstance(a, Scores) and isinstance(b, Constant):
            return self._masked(a, seen_of(b.data))
        if not isinstance(a, View):
            raise NotSupported(f"a sum of {_describe(a)} and {_describe(b)}")
        if isinstance(b, Constant):
            return self._plus_constant(a, b)
        if not isinstance(b, View):
            raise NotSupported(f"a sum of rows and {_describe(b)}")
        if a.base is b.base and a.shape == b.shape:
            return a.plus(b)
        left, right = self._rows(a), self._rows(b)
        return self._made(self.b.add(self._name(), left, right), int(a.shape[-1]), torch.Size(a.shape[:-1]))

    def _op_sub(self, a: Value, b: Value, alpha: float = 1) -> Value:
        if isinstance(a, View) and isinstance(b, View) and a.base is b.base:
            return self._op_add(a, b.times(-1.0), alpha)
        raise NotSupported("a difference of two values")

    def _plus_constant(self, view: View, constant: Constant) -> View:
        base, columns = view.base, row_columns(view, self.rows)
        bare = columns == (0, base.cols) and uniform(view.terms[0][1]) == 1.0
        lead = torch.Size(view.shape[:-1])
        if bare and base.kind == "linear" and base.parts["bias"] is None and constant.data.numel() == base.cols:
            return self._op_linear_again(base, Constant(constant.data.reshape(-1), constant.name), lead)
        if bare and base.kind == "embedding" and constant.rows_of is not None:
            table = constant.rows_of
            return whole(self._base(base.cols, lambda low, high: self._embedded(base.parts, table, low, high)), lead)
        raise NotSupported("a constant added to rows, other than a linear's bias or a table of positions")

    def _op_linear_again(self, base: Base, bias: Constant, lead: torch.Size) -> View:
        parts, n = {**base.parts, "bias": bias}, base.cols
        return whole(self._base(n, lambda low, high: self._linear_part(parts, low, high, n), "linear", parts), lead)

    def _op_mul(self, a: Value, b: Value) -> Value:
        if isinstance(b, (View, Scores)) and not isinstance(a, (View, Scores)):
            a, b = b, a
        if isinstance(a, View) and isinstance(b, Factor):
            return self._normed(a, b, "factor")
        if isinstance(a, View) and isinstance(b, View):
            return self._product(a, b)
        factor = b.data if isinstance(b, Constant) else b
        if isinstance(a, View) and isinstance(factor, (int, float, Tensor)):
            return a.times(factor)
        if isinstance(a, Scores) and (number := _number(factor)) is not None:
            return _scaled(a, number)
        raise NotSupported(f"a product of {_describe(a)} and {_describe(b)}")

    def _op_div(self, a: Value, b: Value) -> Value:
        if isinstance(a, View) and isinstance(b, Factor):
            return self._normed(a, b, "root")
        if isinstance(a, (View, Scores)) and isinstance(b, Constant):
            return self._op_mul(a, Constant(1.0 / b.data))
        if isinstance(a, (View, Scores)) and isinstance(b, (int, float)):
            return self._op_mul(a, 1.0 / b)
        raise NotSupported(f"a quotient of {_describe(a)} and {_describe(b)}")

    def _op_neg(self, a: View) -> View:
        return a.times(-1.0)

    def _op_cat(self, parts: Sequence[Value], dim: int = 0) -> View:
        return _joined(parts, lambda tensors: torch.cat(tensors, dim))

    def _op_stack(self, parts: Sequence[Value], dim: int = 0) -> View:
        return _joined(parts, lambda tensors: torch.stack(tensors, dim))

    # ------------------------------------------------------------------------------------------ activations
    def _activated(self, x: Value, activation: str) -> View:
        if not isinstance(x, View):
            raise NotSupported(f"an activation of {_describe(x)}")
        parts = {"of": x, "activation": activation}
        cols, lead = int(x.shape[-1]), torch.Size(x.shape[:-1])

        def make(low: int, high: int) -> str:
            name = self.b.activation(self._name(), self._rows(x), activation=activation)
            return self._whole_only(name, low, high, cols)

        return whole(self._base(cols, make, "activation", parts), lead)

    def _op_silu(self, x: Value) -> View:
        return self._activated(x, "silu")

    def _op_relu(self, x: Value) -> View:
        return self._activated(x, "relu")

    def _op_gelu(self, x: Value, approximate: str = "none") -> View:
        return self._activated(x, "gelu_tanh" if approximate == "tanh" else "gelu")

    def _op_sigmoid(self, x: Value) -> View:
        return self._activated(x, "sigmoid")

    def _product(self, a: View, b: View) -> Value:
        """x x, x sigmoid(x), or activation(gate) up."""
        if a.base is b.base and _same(a, b):
            return Factor(a, "square")
        for gate, up in ((a, b), (b, a)):
            parts = gate.base.parts
            if gate.base.kind != "activation" or uniform(gate.terms[0][1]) != 1.0:
                continue
            if parts["activation"] == "sigmoid" and parts["of"].base is up.base and _same(parts["of"], up):
                return self._activated(up, "silu")
            if parts["activation"] == "sigmoid" or row_columns(gate, self.rows) is None:
                continue
            names = self._rows(parts["of"]), self._rows(up)
            made = self.b.glu(self._name(), *names, activation=parts["activation"])
            return self._made(made, int(a.shape[-1]), torch.Size(a.shape[:-1]))
        raise NotSupported("a product of two values, other than activation(gate) * up")

    # ------------------------------------------------------------------------------------------ norms
    def _op_pow(self, x: Value, exponent: float) -> Value:
        if isinstance(x, View) and exponent == 2:
            return Factor(x, "square")
        if isinstance(x, Factor) and exponent in (-0.5, 0.5):
            return self._op_rsqrt(x) if exponent < 0 else self._op_sqrt(x)
        raise NotSupported(f"a power of {exponent} outside a norm")

    def _op_square(self, x: Value) -> Value:
        return self._op_pow(x, 2)

    def _op_mean(self, x: Value, dims: Sequence[int] | None = None, keepdim: bool = False, **_: Any) -> Factor:
        if not isinstance(x, Factor) or x.stage != "square" or not keepdim:
            raise NotSupported("a mean of something other than the squares of an RMS norm, dimension kept")
        if [d % len(x.of.shape) for d in dims or ()] != [len(x.of.shape) - 1]:
            raise NotSupported(f"a mean over dimensions {dims}; expected the last")
        return replace(x, stage="mean")

    def _op_rsqrt(self, x: Value) -> Factor:
        return self._rooted(x, "factor")

    def _op_sqrt(self, x: Value) -> Factor:
        return self._rooted(x, "root")

    @staticmethod
    def _rooted(x: Value, stage: str) -> Factor:
        if not isinstance(x, Factor) or x.stage != "mean":
            raise NotSupported("a root of something other than the mean square of a norm")
        return replace(x, stage=stage)

    def _normed(self, x: View, factor: Factor, stage: str) -> View:
        if factor.stage != stage or factor.of.base is not x.base or not _same(factor.of, x):
            raise NotSupported("values divided by the root of another value's mean square")
        return self._norm(x, int(x.shape[-1]), factor.eps, None)

    def _op_rms_norm(
        self, x: View, shape: Sequence[int], weight: Constant | None = None, eps: float | None = None
    ) -> View:
        if len(shape) != 1:
            raise NotSupported(f"a norm over dimensions {list(shape)}; expected one")
        normed = self._norm(x, int(shape[0]), torch.finfo(torch.float32).eps if eps is None else eps, None)
        return normed if weight is None else normed.times(weight.data)

    def _norm(self, x: View, group: int, eps: float, gamma: Tensor | None) -> View:
        """RMS norm over the last dimension, which is all columns of the rows or those of one head."""
        term = x.single()
        if term is None or uniform(term[1]) != 1.0:
            raise NotSupported("a norm of values that were scaled or rotated before")
        index, cols = term[0], x.base.cols
        low, high = int((index % cols).min()), int((index % cols).max()) + 1
        heads = index.reshape(-1, group)
        if index.numel() != self.rows * (high - low) or bool((heads != heads[:, :1] + torch.arange(group)).any()):
            raise NotSupported("a norm over elements that are not whole heads or whole rows")
        source, n = x.base.columns(low, high), high - low
        parts: dict[str, Any] = {"x": source, "group": group, "gamma": gamma, "eps": eps, "cols": n}
        base = self._base(n, lambda a, b: self._norm_with(base, (a, b), torch.ones(group)), "norm", parts)
        return View(base, ((index // cols * n + index % cols - low, torch.ones(index.shape)),))

    def _norm_with(self, base: Base, columns: tuple[int, int], gamma: Tensor) -> str:
        p = base.parts
        group = None if p["group"] == p["cols"] else p["group"]
        weight = self._weight(gamma, (p["group"],))
        name = self.b.rms_norm(self._name(), p["x"], weight, eps=p["eps"], group=group)
        return self._whole_only(name, *columns, p["cols"])

    def _op_layer_norm(
        self, x: View, shape: Sequence[int], weight: Constant | None = None, bias: Constant | None = None,
        eps: float = 1e-5, *_: Any,
    ) -> View:  # fmt: skip
        if list(shape) != [x.shape[-1]]:
            raise NotSupported(f"a layer norm over dimensions {list(shape)}; expected the last")
        n = int(shape[0])
        gamma = self._weight(weight or torch.ones(n), (n,))
        beta = None if bias is None else self._weight(bias, (n,))
        name = self.b.layer_norm(self._name(), self._rows(x), gamma, beta, eps=eps)
        return self._made(name, n, torch.Size(x.shape[:-1]))

    # ------------------------------------------------------------------------------------------ attention
    def _masked(self, scores: Scores, seen: Tensor) -> Scores:
        if scores.softmax:
            raise NotSupported("a mask after the softmax")
        return replace(scores, seen=seen if scores.seen is None else scores.seen & seen)

    def _op_masked_fill(self, scores: Value, mask: Constant, value: Any) -> Scores:
        number = _number(value.data if isinstance(value, Constant) else value)
        if not isinstance(scores, Scores) or not isinstance(mask, Constant) or number is None or number > -1e4:
            raise NotSupported("a mask of something other than attention scores")
        return self._masked(scores, ~mask.data)

    def _op_where(self, mask: Value, scores: Value, value: Value) -> Scores:
        number = _number(value.data if isinstance(value, Constant) else value)
        if not isinstance(scores, Scores) or not isinstance(mask, Constant) or number is None or number > -1e4:
            raise NotSupported("a choice between values other than attention scores and a large negative number")
        return self._masked(scores, mask.data)

    def _op_tanh(self, scores: Value) -> Scores:
        if not isinstance(scores, Scores) or scores.tanh or scores.seen is not None:
            raise NotSupported("tanh of something other than attention scores")
        return replace(scores, tanh=True)

    def _op_softmax(self, scores: Value, dim: int = -1, *_: Any, **__: Any) -> Scores:
        if not isinstance(scores, Scores) or dim not in (-1, len(scores.q.shape) - 1):
            raise NotSupported("a softmax of something other than attention scores over the last dimension")
        return replace(scores, softmax=True)

    _op__softmax = _op_softmax

    def _op_scaled_dot_product_attention(
        self, q: View, k: View, v: View, mask: Constant | None = None, dropout: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> View:  # fmt: skip
        length = int(q.shape[-2])
        seen = torch.ones(length, length).tril().bool() if is_causal else None
        if isinstance(mask, Constant):
            seen = seen_of(mask.data)
        if dropout or (mask is not None and not isinstance(mask, Constant)):
            raise NotSupported("dropout, or a mask that depends on the inputs")
        if enable_gqa and k.shape[-3] != q.shape[-3]:
            k, v = (t.map(lambda d: d.repeat_interleave(int(q.shape[-3] // k.shape[-3]), -3)) for t in (k, v))
        factor = float(q.shape[-1]) ** -0.5 if scale is None else scale
        return self._attention(Scores(q, k, factor, seen=seen, softmax=True), v)

    def _attention(self, scores: Scores, v: Value) -> View:
        length = int(self.lead[-1]) if self.lead else 1
        if length < 2:
            raise NotSupported("give an example of at least 2 rows: the mask and the rotation are read off it")
        if scores.tanh and scores.cap is None:
            raise NotSupported("tanh of attention scores that is not multiplied by its cap")
        if not isinstance(v, View):
            raise NotSupported(f"attention over {_describe(v)}")
        self.sequence = True
        q, k, w = (heads_of(t, length) for t in (scores.q, scores.k, v))
        heads, kv_heads = q.heads * q.repeat, k.heads
        if q.repeat != 1 or w.scale != 1.0 or w.rope or (k.heads, k.repeat) != (w.heads, w.repeat) or q.dim != w.dim:
            raise NotSupported("queries that repeat, values that are rotated or scaled, or keys unlike values")
        if heads != k.heads * k.repeat:
            raise NotSupported(f"{heads} query heads on {k.heads} key heads that stand {k.repeat} times")
        names = []
        for label, view, found in (("q", scores.q, q), ("k", scores.k, k), ("v", v, w)):
            columns = (found.low, found.high)
            name = view.base.columns(*columns) if found.gamma is None else ""
            if found.gamma is not None:
                name = self._scaled_columns(view.base, columns, found.gamma.repeat(found.heads))
            if found.rope is not None:
                name = self.b.rope(
                    f"{self._name()}.{label}", name, heads=found.heads, head_dim=found.dim, spec=found.rope
                )
            names.append(name)
        name = self.b.attention(
            self._name(), *names, heads=heads, kv_heads=kv_heads, head_dim=q.dim,
            scale=scores.scale * q.scale * k.scale, window=window_of(scores.seen, length), softcap=scores.cap,
        )  # fmt: skip
        base = self._base(heads * q.dim, lambda low, high: self._whole_only(name, low, high, heads * q.dim))
        lead = self.lead[:-1]
        return whole(base, self.lead).map(lambda d: d.reshape(*lead, length, heads, q.dim).transpose(-2, -3))


# ---------------------------------------------------------------------------------------------- parts
def _describe(value: Value) -> str:
    words = {Scores: "attention scores", Factor: "the mean square of a norm", Constant: "a constant", View: "rows"}
    return words.get(type(value), type(value).__name__)


def _joined(parts: Sequence[Value], join: Callable[[list[Tensor]], Tensor]) -> View:
    views = [p for p in parts if isinstance(p, View)]
    if len(views) != len(parts) or len({id(v.base) for v in views}) != 1:
        raise NotSupported("joining values of different origins")
    most = max(len(v.terms) for v in views)
    padded = [(*v.terms, *((v.terms[0][0], torch.zeros(v.shape)),) * (most - len(v.terms))) for v in views]
    terms = tuple((join([p[n][0] for p in padded]), join([p[n][1] for p in padded])) for n in range(most))
    return View(views[0].base, terms)


def _same(a: View, b: View) -> bool:
    return len(a.terms) == len(b.terms) and all(
        torch.equal(x, y) and torch.equal(p, q) for (x, p), (y, q) in zip(a.terms, b.terms)
    )


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _scaled(scores: Scores, factor: float) -> Scores:
    """Scores times a number; behind a tanh it is the cap, whose reciprocal was in the scale."""
    if scores.softmax or scores.seen is not None or scores.cap is not None or not factor > 0:
        raise NotSupported("attention scores scaled after their mask or softmax, or by a number not above 0")
    if scores.tanh:
        return replace(scores, cap=factor, scale=scores.scale * factor)
    return replace(scores, scale=scores.scale * factor)
