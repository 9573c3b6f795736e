"""A transformer before tiling: tensors and operators with shapes, and a reference interpreter for them.

Activations are `[rows, cols]`, one row per token. Weights are `[n, k]` matrices (y = x W^T) or `[n]` vectors and have
the checkpoint's own tensor names; a part of a fused checkpoint tensor is a `WeightSlice` of its rows.
A graph of a model begins with token ids; one of another module may begin with an `input` of floats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from megakernel.errors import GraphError
from megakernel.operators import OPERATORS, Shape
from megakernel.rope import RopeSpec
from megakernel.tasks.task import all_operators

if TYPE_CHECKING:
    import torch

__all__ = ["Graph", "GraphBuilder", "ModelConfig", "Node", "RopeSpec", "Tensor", "WeightSlice"]

TOKENS = "tokens"
INPUT = "input"
LOGITS = "logits"

Kind = Literal["weight", "activation", "token", "input"]


@dataclass(frozen=True)
class WeightSlice:
    """Rows `[start, stop)` of the checkpoint tensor `tensor`.

    stride: when above 0, only the first `block` rows of every `stride` rows from `start` on (heads of a fused tensor).
    transposed: the tensor is stored as [k, n] and rows are those of its transpose.
    first_col, stop_col: only these columns of the rows; stop_col 0: all. A slice that names no tensor is zeros.
    """

    tensor: str
    start: int
    stop: int
    block: int = 0
    stride: int = 0
    transposed: bool = False
    first_col: int = 0
    stop_col: int = 0

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The rows as contiguous half-open ranges."""
        if not self.stride:
            return ((self.start, self.stop),)
        firsts = range(self.start, self.stop, self.stride)
        return tuple((at, min(at + self.block, self.stop)) for at in firsts)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(stop - start for start, stop in self.ranges())


@dataclass(frozen=True)
class Tensor:
    """A value of the graph.

    weight: matrix of `rows` x `cols`, or vector of `cols` elements when `rows` is None; `source` says which rows of
    which checkpoint tensor. activation: `cols` columns and as many rows as tokens. token: one id per row. input: floats
    from outside.
    """

    name: str
    kind: Kind
    cols: int
    rows: int | None = None
    source: WeightSlice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The fixed part: `(rows, cols)` of a matrix, else `(cols,)`."""
        return (self.cols,) if self.rows is None else (self.rows, self.cols)


@dataclass(frozen=True)
class Node:
    """One operator. `layer` is the decoder layer it belongs to, -1 before the first and after the last."""

    name: str
    op: str
    inputs: tuple[str, ...]
    output: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    layer: int = -1


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a model that the engine needs. `rope` is that of the full-attention layers, None without any.

    max_positions: the longest context, in tokens. tied: the head's matrix is the embedding table.
    """

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    tied: bool
    rope: RopeSpec | None = None


@dataclass(frozen=True)
class Graph:
    """An immutable model: tensors by name, nodes in order of execution, `output` the tensor named "logits".

    A graph whose output has another name gives rows, not tokens: those of `output` and of `more_outputs`.
    """

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    output: str = LOGITS
    more_outputs: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The floats from outside, in order of declaration."""
        return tuple(t for t in self.tensors.values() if t.kind == "input")

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output, *self.more_outputs)

    def tensor(self, name: str) -> Tensor:
        """Raises GraphError for an unknown name."""
        if name not in self.tensors:
            raise GraphError(f"the graph has no tensor {name!r}; it has {len(self.tensors)}, see str(graph)")
        return self.tensors[name]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights that nodes read, in order of first use. Slices of one checkpoint tensor are separate."""
        used = dict.fromkeys(name for node in self.nodes for name in node.inputs)
        return tuple(self.tensors[name] for name in used if self.tensors[name].kind == "weight")

    def producer(self, name: str) -> Node | None:
        """The node that makes a tensor; None for a weight or the tokens."""
        return self._producers.get(name)

    def consumers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a tensor."""
        return self._consumers.get(name, ())

    @cached_property
    def _producers(self) -> dict[str, Node]:
        return {node.output: node for node in self.nodes}

    @cached_property
    def _consumers(self) -> dict[str, tuple[Node, ...]]:
        found: dict[str, tuple[Node, ...]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name] = (*found.get(name, ()), node)
        return found

    def validate(self) -> Graph:
        """Itself, or GraphError: unknown tensor, wrong shape, a value used before it is made or made twice."""
        made = {t.name for t in self.tensors.values() if t.kind != "activation"}
        for node in self.nodes:
            for name in node.inputs:
                if name not in self.tensors:
                    raise GraphError(f"node {node.name} ({node.op}): unknown input tensor {name!r}")
                if name not in made:
                    raise GraphError(f"node {node.name} ({node.op}): input {name!r} is used before it is made")
            if node.output in made:
                raise GraphError(f"node {node.name} ({node.op}): output {node.output!r} is made twice")
            out = self.tensor(node.output)
            cols = output_cols(node, [self.tensors[name] for name in node.inputs])
            if out.kind != "activation" or out.cols != cols:
                got = f"{out.kind} {out.shape}"
                raise GraphError(f"node {node.name} ({node.op}): output {out.name!r}: expected ({cols},), got {got}")
            made.add(node.output)
        for name in self.outputs:
            if name not in made:
                raise GraphError(f"no node makes the output {name!r}")
        cols = self.tensors[self.output].cols
        if self.output == LOGITS and cols != self.config.vocab:
            raise GraphError(f"{self.output}: expected {self.config.vocab} columns (the vocabulary), got {cols}")
        return self

    def interpret(
        self,
        weights: Callable[[str], Any],
        tokens: Sequence[int] | torch.Tensor,
        keep: Literal["all"] | Iterable[str] = (LOGITS,),
    ) -> dict[str, torch.Tensor]:
        """Run one whole causal sequence in torch float32; the reference for everything.

        weights: checkpoint tensor name -> numpy array or torch tensor of any float dtype. keep: names of the
        activations to return, or "all". Raises MissingExtra when torch is not installed.
        """
        from megakernel.interpret import Interpreter

        return Interpreter(self, weights).step(tokens, keep)

    def to_json(self) -> str:
        """The graph as one JSON object: config, tensors and nodes."""
        return json.dumps(
            {
                "config": asdict(self.config),
                "tensors": [asdict(t) for t in self.tensors.values()],
                "nodes": [_plain_node(node) for node in self.nodes],
                "output": self.output,
                "more_outputs": self.more_outputs,
            }
        )

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"{c.architecture}: {c.layers} layers, hidden {c.hidden}, {c.heads} heads on {c.kv_heads} of {c.head_dim}, "
            f"vocab {c.vocab}, {len(self.nodes)} nodes"
        ]
        for node in self.nodes:
            attrs = "".join(f", {k}={v}" for k, v in node.attrs.items() if v is not None)
            shape = f"[rows, {self.tensors[node.output].cols}]"
            lines.append(f"  {node.output} {shape} = {node.op}({', '.join(node.inputs)}{attrs})")
        return "\n".join(lines)


def output_cols(node: Node, inputs: Sequence[Tensor]) -> int:
    """Columns of a node's output. Raises GraphError when its inputs or attributes do not fit its operator."""
    known = {**OPERATORS, **{name: operator.columns for name, operator in all_operators().items()}}
    if node.op not in known:
        raise GraphError(f"node {node.name}: unknown operator {node.op!r}; known: {', '.join(known)}")
    shapes = [Shape(t.name, t.kind, t.rows, t.cols) for t in inputs]
    try:
        return known[node.op](shapes, node.attrs)
    except GraphError as e:
        raise GraphError(f"node {node.name} ({node.op}): {e}") from None


def _plain_node(node: Node) -> dict[str, Any]:
    attrs = {
        key: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for key, value in node.attrs.items()
    }
    return {
        "name": node.name, "op": node.op, "inputs": node.inputs, "output": node.output, "attrs": attrs,
        "layer": node.layer,
    }  # fmt: skip


class GraphBuilder:
    """Makes a Graph. Every operator method checks its inputs at once and returns the name of its output.

    An output is named after its node: `name`, inside `layer(i)` "layers.i.name". Raises GraphError as `validate` does.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._tensors: dict[str, Tensor] = {TOKENS: Tensor(TOKENS, "token", 1)}
        self._nodes: list[Node] = []
        self._layer = -1

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Nodes made inside belong to decoder layer `index`."""
        self._layer = index
        try:
            yield
        finally:
            self._layer = -1

    def has(self, name: str) -> bool:
        """Whether a tensor of that name was declared or made."""
        return name in self._tensors

    def columns(self, name: str) -> int:
        """Raises GraphError for an unknown name."""
        return self._input(name).cols

    def tensor_kind(self, name: str) -> Kind:
        """Raises GraphError for an unknown name."""
        return self._input(name).kind

    def weight(self, name: str, n: int, k: int | None = None) -> str:
        """Declare a checkpoint tensor `[n, k]`, or a vector `[n]` when k is None. Declaring it again is allowed."""
        source = WeightSlice(name, 0, n)
        new = Tensor(name, "weight", n, None, source) if k is None else Tensor(name, "weight", k, n, source)
        return self._declare(new)

    def weight_slice(
        self, name: str, start: int, stop: int, *, block: int = 0, stride: int = 0, transposed: bool = False
    ) -> str:
        """Rows `[start, stop)` of a declared checkpoint tensor as a weight of its own.

        block, stride: only the first `block` rows of every `stride`. transposed: of a tensor stored as [k, n].
        """
        whole = self._input(name)
        n = whole.cols if whole.rows is None or transposed else whole.rows
        if whole.kind != "weight" or not 0 <= start < stop <= n or not 0 <= block <= stride:
            raise GraphError(f"rows [{start}, {stop}) of {name!r}: expected a part of a weight's {n} rows")
        source = WeightSlice(name, start, stop, block, stride, transposed and whole.rows is not None)
        label = f"{name}{'.T' if source.transposed else ''}[{start}:{stop}{f':{block}/{stride}' if stride else ''}]"
        if whole.rows is None:
            return self._declare(Tensor(label, "weight", source.count, None, source))
        return self._declare(Tensor(label, "weight", whole.rows if transposed else whole.cols, source.count, source))

    def input(self, cols: int, name: str = INPUT) -> str:
        """Floats `[rows, cols]` from outside, in place of token ids or beside them."""
        return self._declare(Tensor(name, "input", cols))

    def embedding(self, name: str, table: str, *, scale: float = 1.0, positions: str | None = None) -> str:
        """`table[token] * scale`, plus row `position` of the table `positions` if there is one."""
        return self._add(name, "embedding", (TOKENS, table, positions), scale=scale)

    def rms_norm(
        self, name: str, x: str, gamma: str, *, eps: float, offset: float = 0.0, group: int | None = None
    ) -> str:
        """`x / sqrt(mean(x^2) + eps) * (offset + gamma)`, over all columns or over each `group` of columns (a head)."""
        return self._add(name, "rms_norm", (x, gamma), eps=eps, offset=offset, group=group)

    def layer_norm(self, name: str, x: str, gamma: str, beta: str | None = None, *, eps: float) -> str:
        """`(x - mean) / sqrt(variance + eps) * gamma + beta`."""
        return self._add(name, "layer_norm", (x, gamma, beta), eps=eps)

    def linear(self, name: str, x: str, weight: str, bias: str | None = None) -> str:
        """`x W^T + bias`."""
        return self._add(name, "linear", (x, weight, bias))

    def rope(self, name: str, x: str, *, heads: int, head_dim: int, spec: RopeSpec) -> str:
        """Rotary embedding of `heads` heads of `head_dim` columns at each row's position."""
        return self._add(name, "rope", (x,), heads=heads, head_dim=head_dim, spec=spec)

    def attention(
        self, name: str, q: str, k: str, v: str, *, heads: int, kv_heads: int, head_dim: int, scale: float,
        window: int | None = None, softcap: float | None = None,
    ) -> str:  # fmt: skip
        """Causal attention: softmax(softcap(q k^T * scale)) v. Query head h reads KV head h // (heads / kv_heads).

        window: a row sees itself and the window - 1 positions before it. softcap: scores become c tanh(score / c).
        """
        return self._add(
            name, "attention", (q, k, v), heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=scale, window=window,
            softcap=softcap,
        )  # fmt: skip

    def glu(self, name: str, gate: str, up: str, *, activation: str) -> str:
        """`activation(gate) * up`; activation: "silu", "gelu", "gelu_tanh", "relu"."""
        return self._add(name, "glu", (gate, up), activation=activation)

    def activation(self, name: str, x: str, *, activation: str) -> str:
        """`activation(x)`, one of those of `glu`."""
        return self._add(name, "activation", (x,), activation=activation)

    def add(self, name: str, a: str, b: str) -> str:
        """`a + b`."""
        return self._add(name, "add", (a, b))

    def scale(self, name: str, x: str, factor: float) -> str:
        """`x * factor`."""
        return self._add(name, "scale", (x,), factor=factor)

    def softcap(self, name: str, x: str, limit: float) -> str:
        """`limit * tanh(x / limit)`."""
        return self._add(name, "softcap", (x,), limit=limit)

    def operator(self, name: str, op: str, *inputs: str, **attrs: Any) -> str:
        """The operator that a task declares for itself as `op`."""
        return self._add(name, op, inputs, **attrs)

    def finish(self, output: str = LOGITS, *more: str) -> Graph:
        """The graph, validated. A model's output is a node named "logits" outside every layer."""
        return Graph(self.config, MappingProxyType(dict(self._tensors)), tuple(self._nodes), output, more).validate()

    def _input(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise GraphError(f"unknown tensor {name!r}; declare a weight or make the value before using it")
        return self._tensors[name]

    def _declare(self, tensor: Tensor) -> str:
        old = self._tensors.setdefault(tensor.name, tensor)
        if old != tensor:
            got = f"{tensor.kind} {tensor.shape}"
            raise GraphError(f"tensor {tensor.name!r}: {old.kind} {old.shape} already, got {got}")
        return tensor.name

    def _add(self, name: str, op: str, inputs: tuple[str | None, ...], **attrs: Any) -> str:
        full = name if self._layer < 0 else f"layers.{self._layer}.{name}"
        names = tuple(i for i in inputs if i is not None)
        if full in self._tensors:
            raise GraphError(f"node {full} ({op}): a tensor of that name exists already")
        node = Node(full, op, names, full, MappingProxyType(attrs), self._layer)
        cols = output_cols(node, [self._input(i) for i in names])
        self._tensors[full] = Tensor(full, "activation", cols)
        self._nodes.append(node)
        return full
