"""From operators to fused operators: what becomes one task each, before any tiling.

A linear takes the norm before it as prologue and the bias, residual add or gated activation after it as epilogue;
the q, k and v linears of one attention become one; per-head norms and rotary embedding move into the attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megakernel.errors import LoweringError
from megakernel.graph import Graph, Node, RopeSpec, Tensor


@dataclass(frozen=True)
class Norm:
    """RMS norm: `x / sqrt(mean(x^2) + eps) * (offset + gamma)`; `gamma` is a weight's name."""

    gamma: str
    eps: float
    offset: float


@dataclass(frozen=True)
class FusedEmbedding:
    name: str
    table: str
    scale: float
    output: str
    layer: int


@dataclass(frozen=True)
class FusedMatmul:
    """`epilogue(norm(input) [weights one under the other]^T + biases)`.

    epilogue: "store", "residual" (adds tensor `residual`), "glu" (weights are gate and up; output has half the
    columns). scale and softcap apply to the result of a "store". sampled: only rows whose logits are wanted.
    """

    name: str
    input: str
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    output: str
    layer: int
    norm: Norm | None = None
    epilogue: str = "store"
    residual: str | None = None
    activation: str | None = None
    scale: float = 1.0
    softcap: float = 0.0
    sampled: bool = False


@dataclass(frozen=True)
class FusedAttention:
    name: str
    qkv: str
    output: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    rope: RopeSpec | None
    q_norm: Norm | None
    k_norm: Norm | None


Fused = FusedEmbedding | FusedMatmul | FusedAttention


def fuse(graph: Graph) -> tuple[Fused, ...]:
    """The fused operators in order of execution. Raises LoweringError naming a node that fits no task."""
    return _Fuser(graph).run()


@dataclass(frozen=True)
class _Head:
    """A q or k vector on its way to the attention: the linear it comes from, its per-head norm, its rotation."""

    linear: Node
    norm: Norm | None = None
    rope: RopeSpec | None = None


class _Fuser:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses: dict[str, int] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self.uses[name] = self.uses.get(name, 0) + 1
        self.norms: dict[str, tuple[str, Norm]] = {}  # output -> (input, norm), not yet placed
        self.linears: dict[str, Node] = {}  # outputs of linears not yet placed
        self.heads: dict[str, _Head] = {}
        self.made: set[str] = set()
        self.out: list[Fused] = []

    def run(self) -> tuple[Fused, ...]:
        for node in self.graph.nodes:
            step = getattr(self, f"_{node.op}", None)
            if step is None:
                raise LoweringError(f"node {node.name}: no task computes operator {node.op!r}")
            step(node)
        left = [*self.linears, *self.heads]
        if self.graph.output in self.linears:
            self._head(self.graph.output)
            left = [name for name in left if name != self.graph.output]
        if left or self.graph.output not in self.made:
            names = ", ".join(left) or self.graph.output
            raise LoweringError(f"no task computes {names}: it is not part of a pattern that is known")
        return tuple(self.out)

    def _emit(self, item: Fused) -> None:
        self.out.append(item)
        self.made.add(item.output)

    def _embedding(self, node: Node) -> None:
        self._emit(FusedEmbedding(node.name, node.inputs[1], float(node.attrs["scale"]), node.output, node.layer))

    def _rms_norm(self, node: Node) -> None:
        x, gamma = node.inputs
        norm = Norm(gamma, float(node.attrs["eps"]), float(node.attrs["offset"]))
        group = node.attrs["group"]
        if group is None:
            self.norms[node.output] = (x, norm)
        elif x in self.linears:
            self.heads[node.output] = _Head(self._single(x), norm=norm)
        else:
            raise LoweringError(f"node {node.name}: a per-head norm must follow a linear, got {x!r}")

    def _linear(self, node: Node) -> None:
        self.linears[node.output] = node

    def _rope(self, node: Node) -> None:
        x = node.inputs[0]
        head = self.heads.pop(x) if x in self.heads else _Head(self._single(x))
        self.heads[node.output] = replace(head, rope=node.attrs["spec"])

    def _attention(self, node: Node) -> None:
        q, k, v = (self.heads.pop(n) if n in self.heads else _Head(self._single(n)) for n in node.inputs)
        if v.norm or v.rope or q.rope != k.rope:
            raise LoweringError(f"node {node.name}: v is normed or rotated, or q and k are rotated differently")
        linears = (q.linear, k.linear, v.linear)
        if len({n.inputs[0] for n in linears}) != 1:
            raise LoweringError(f"node {node.name}: q, k and v come from different inputs")
        qkv = f"{node.name}.qkv"
        self._emit(self._matmul(qkv, linears, qkv, node.layer))
        a = node.attrs
        self._emit(
            FusedAttention(
                node.name, qkv, node.output, node.layer, a["heads"], a["kv_heads"], a["head_dim"], float(a["scale"]),
                a["window"], a["softcap"], q.rope, q.norm, k.norm,
            )
        )  # fmt: skip

    def _glu(self, node: Node) -> None:
        linears = tuple(self._single(n) for n in node.inputs)
        if linears[0].inputs[0] != linears[1].inputs[0]:
            raise LoweringError(f"node {node.name}: gate and up come from different inputs")
        item = self._matmul(node.name, linears, node.output, node.layer)
        self._emit(replace(item, epilogue="glu", activation=str(node.attrs["activation"])))

    def _add(self, node: Node) -> None:
        for value, residual in (node.inputs, node.inputs[::-1]):
            if value in self.linears and residual in self.made:
                item = self._matmul(node.name, (self._single(value),), node.output, node.layer)
                self._emit(replace(item, epilogue="residual", residual=residual))
                return
        raise LoweringError(f"node {node.name}: one side of an add must be a linear, the other a stored tensor")

    def _scale(self, node: Node) -> None:
        self._after_linear(node, scale=float(node.attrs["factor"]))

    def _softcap(self, node: Node) -> None:
        self._after_linear(node, softcap=float(node.attrs["limit"]))

    def _after_linear(self, node: Node, scale: float = 1.0, softcap: float = 0.0) -> None:
        x = node.inputs[0]
        if node.output != self.graph.output or x not in self.linears:
            raise LoweringError(f"node {node.name}: {node.op} is computed on the logits only, right after their linear")
        self._head(x, scale, softcap)

    def _head(self, name: str, scale: float = 1.0, softcap: float = 0.0) -> None:
        node = self._single(name) if self.uses.get(name) else self.linears.pop(name)
        item = self._matmul(node.name, (node,), self.graph.output, -1)
        self._emit(replace(item, sampled=True, scale=scale, softcap=softcap))

    def _single(self, name: str) -> Node:
        """The linear that makes `name`, taken out of the waiting ones; it must have no other reader."""
        if name not in self.linears:
            raise LoweringError(f"{name!r} should come from a linear and does not; no task computes this pattern")
        if self.uses[name] != 1:
            raise LoweringError(f"{name!r} is read by {self.uses[name]} nodes; a fused linear may have one reader")
        return self.linears.pop(name)

    def _matmul(self, name: str, linears: tuple[Node, ...], output: str, layer: int) -> FusedMatmul:
        source = linears[0].inputs[0]
        norm = None
        if source in self.norms:
            source, norm = self.norms[source]
        if source not in self.made:
            raise LoweringError(f"node {name}: its input {source!r} is not a stored tensor")
        biases = tuple(n.inputs[2] for n in linears if len(n.inputs) > 2)
        weights = tuple(n.inputs[1] for n in linears)
        if biases and len(biases) != len(weights):
            biases = tuple(n.inputs[2] if len(n.inputs) > 2 else "" for n in linears)
        return FusedMatmul(name, source, weights, biases, output, layer, norm)


def sources(graph: Graph, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The weight tensors of these names."""
    return tuple(graph.tensor(n) for n in names)


def weight_rows(graph: Graph, names: tuple[str, ...]) -> Mapping[str, int]:
    """Rows of each weight matrix, or elements of each vector."""
    return {n: (t.cols if t.rows is None else t.rows) for n in names for t in (graph.tensor(n),)}
