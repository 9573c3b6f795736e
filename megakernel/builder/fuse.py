"""From operators to fused operators: what becomes one task each, before any tiling.

A linear takes the RMS norm before it as prologue and the bias, scale, residual add, activation or gated activation
after it as epilogue; the q, k and v linears of one attention become one; per-head norms and rotary embedding move into
the attention. What is left stands alone: norms behind a linear (with the residual add that follows), layer norms, norms
over all heads of q and k, and adds of two stored tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megakernel.errors import LoweringError
from megakernel.graph import LOGITS, Graph, Node, RopeSpec
from megakernel.tasks.task import all_operators


@dataclass(frozen=True)
class Norm:
    """RMS norm `x / sqrt(mean(x^2) + eps) * (offset + gamma)`, or layer norm with `beta`; weights by name."""

    gamma: str
    eps: float
    offset: float = 0.0
    kind: Literal["rms", "layer"] = "rms"
    beta: str | None = None


@dataclass(frozen=True)
class FusedEmbedding:
    name: str
    table: str
    scale: float
    output: str
    layer: int
    positions: str | None = None


@dataclass(frozen=True)
class FusedMatmul:
    """`epilogue(norm(input) [weights one under the other]^T + biases)`.

    epilogue: "store", "residual" (adds tensor `residual`), "activate" (`activation` of the result), "glu" (weights are
    gate and up; output has half the columns). scale and softcap apply to the result before all of these, softcap to
    that of a "store". sampled: only rows whose logits are wanted.
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
class FusedNorm:
    """`residual + scale * norm(input)`; parts of the columns are normed one by one, the rest passes through.

    norms: one for each part, none at all for a plain scale or add. widths: columns of the parts, () for all.
    """

    name: str
    input: str
    output: str
    layer: int
    norms: tuple[Norm, ...]
    widths: tuple[int, ...] = ()
    residual: str | None = None
    scale: float = 1.0


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


@dataclass(frozen=True)
class FusedExchange:
    """`residual + scale * sum of every rank's input`; with `join` their inputs side by side, for the sampled rows."""

    name: str
    input: str
    output: str
    layer: int
    ranks: int
    join: bool = False
    residual: str | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class FusedOperator:
    """An operator that a task declares for itself."""

    name: str
    op: str
    inputs: tuple[str, ...]
    output: str
    layer: int
    attrs: Mapping[str, Any]


Fused = FusedEmbedding | FusedMatmul | FusedNorm | FusedAttention | FusedExchange | FusedOperator


def fuse(graph: Graph) -> tuple[Fused, ...]:
    """The fused operators in order of execution. Raises LoweringError naming a node that fits no task."""
    return _Fuser(graph).run()


@dataclass(frozen=True)
class _Head:
    """A q or k vector on its way to the attention: the linear it comes from, its norm, its rotation.

    whole: the norm is over all heads together.
    """

    linear: Node
    norm: Norm | None = None
    whole: bool = False
    rope: RopeSpec | None = None


class _Fuser:
    """Values wait until a reader decides what computes them: `linears`, `norms`, `scales`, `sums` (over ranks) and
    `heads` by their name."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses: dict[str, int] = dict.fromkeys(graph.outputs, 1)
        for node in graph.nodes:
            for name in node.inputs:
                self.uses[name] = self.uses.get(name, 0) + 1
        self.norms: dict[str, tuple[Node, Norm]] = {}
        self.linears: dict[str, Node] = {}
        self.scales: dict[str, Node] = {}
        self.sums: dict[str, Node] = {}
        self.heads: dict[str, _Head] = {}
        self.made: set[str] = {t.name for t in graph.inputs}
        self.out: list[Fused] = []
        maker = graph.producer(LOGITS) if graph.output == LOGITS else None
        self.logits = (
            maker.inputs[0] if maker and maker.op == "all_gather" else LOGITS
        )  # what the head's product is called

    def run(self) -> tuple[Fused, ...]:
        for node in self.graph.nodes:
            step = self._operator if node.op in all_operators() else getattr(self, f"_{node.op}", None)
            if step is None:
                raise LoweringError(f"node {node.name}: no task computes operator {node.op!r}")
            step(node)
        output = self.graph.output
        if output == LOGITS and output not in self.made:
            self._head(output)
        for name in self.graph.outputs:
            self._store(name)
        left = [*self.linears, *self.heads, *self.sums]
        if left:
            raise LoweringError(f"no task computes {', '.join(left)}: it is not part of a pattern that is known")
        return tuple(self.out)

    def _emit(self, item: Fused) -> None:
        self.out.append(item)
        self.made.add(item.output)

    # ------------------------------------------------------------------------------------------ operators
    def _embedding(self, node: Node) -> None:
        positions = node.inputs[2] if len(node.inputs) > 2 else None
        scale = float(node.attrs["scale"])
        self._emit(FusedEmbedding(node.name, node.inputs[1], scale, node.output, node.layer, positions))

    def _rms_norm(self, node: Node) -> None:
        x, gamma = node.inputs
        norm = Norm(gamma, float(node.attrs["eps"]), float(node.attrs["offset"]))
        group = node.attrs["group"]
        if group is not None and x in self.linears:
            self.heads[node.output] = _Head(self._single(x, node), norm=norm)
        elif group is None or group == self.graph.tensor(x).cols:
            self.norms[node.output] = (node, norm)
        else:
            raise LoweringError(f"node {node.name}: a per-head norm must follow a linear, got {x!r}")

    def _layer_norm(self, node: Node) -> None:
        beta = node.inputs[2] if len(node.inputs) > 2 else None
        norm = Norm(node.inputs[1], float(node.attrs["eps"]), kind="layer", beta=beta)
        self.norms[node.output] = (node, norm)

    def _linear(self, node: Node) -> None:
        self.linears[node.output] = node

    def _scale(self, node: Node) -> None:
        if self.graph.output == LOGITS and node.output == self.logits:
            self._head(node.inputs[0], scale=float(node.attrs["factor"]))
        else:
            self.scales[node.output] = node

    def _softcap(self, node: Node) -> None:
        if self.graph.output != LOGITS or node.output != self.logits:
            raise LoweringError(f"node {node.name}: softcap is computed on the logits only, right after their linear")
        self._head(node.inputs[0], softcap=float(node.attrs["limit"]))

    def _all_reduce(self, node: Node) -> None:
        self.sums[node.output] = node

    def _all_gather(self, node: Node) -> None:
        if node.output != LOGITS:
            raise LoweringError(f"node {node.name}: only the logits are joined from the ranks")
        if node.inputs[0] not in self.made:
            self._head(node.inputs[0])
        ranks = int(node.attrs["ranks"])
        self._emit(FusedExchange(node.name, node.inputs[0], node.output, node.layer, ranks, join=True))

    def _rope(self, node: Node) -> None:
        self.heads[node.output] = replace(self._head_of(node.inputs[0], node), rope=node.attrs["spec"])

    def _attention(self, node: Node) -> None:
        q, k, v = (self._head_of(n, node) for n in node.inputs)
        if v.norm or v.rope or q.rope != k.rope:
            raise LoweringError(f"node {node.name}: v is normed or rotated, or q and k are rotated differently")
        linears = (q.linear, k.linear, v.linear)
        if len({n.inputs[0] for n in linears}) != 1:
            raise LoweringError(f"node {node.name}: q, k and v come from different inputs")
        qkv = f"{node.name}.qkv"
        a = node.attrs
        if q.whole or k.whole:
            self._emit(self._matmul(f"{node.name}.projected", linears, f"{node.name}.projected", node.layer))
            self._norm_heads(node, q, k, qkv)
        else:
            self._emit(self._matmul(qkv, linears, qkv, node.layer))
        self._emit(
            FusedAttention(
                node.name, qkv, node.output, node.layer, a["heads"], a["kv_heads"], a["head_dim"], float(a["scale"]),
                a["window"], a["softcap"], q.rope, None if q.whole else q.norm, None if k.whole else k.norm,
            )
        )  # fmt: skip

    def _norm_heads(self, node: Node, q: _Head, k: _Head, qkv: str) -> None:
        """A norm over all q heads and one over all k heads."""
        if not (q.whole and k.whole) or q.norm is None or k.norm is None or q.norm.eps != k.norm.eps:
            raise LoweringError(f"node {node.name}: q and k must both be normed over all heads, with one eps")
        widths = tuple(self.graph.tensor(h.linear.output).cols for h in (q, k))
        self._emit(FusedNorm(f"{node.name}.norm", f"{node.name}.projected", qkv, node.layer, (q.norm, k.norm), widths))

    def _glu(self, node: Node) -> None:
        linears = tuple(self._single(n, node) for n in node.inputs)
        if linears[0].inputs[0] != linears[1].inputs[0]:
            raise LoweringError(f"node {node.name}: gate and up come from different inputs")
        item = self._matmul(node.name, linears, node.output, node.layer)
        self._emit(replace(item, epilogue="glu", activation=str(node.attrs["activation"])))

    def _activation(self, node: Node) -> None:
        item = self._matmul(node.name, (self._single(node.inputs[0], node),), node.output, node.layer)
        self._emit(replace(item, epilogue="activate", activation=str(node.attrs["activation"])))

    def _operator(self, node: Node) -> None:
        for name in node.inputs:
            if self.graph.tensor(name).kind == "activation":
                self._store(name)
        self._emit(FusedOperator(node.name, node.op, node.inputs, node.output, node.layer, node.attrs))

    def _add(self, node: Node) -> None:
        """The side that waits for its computation takes the other as its residual; the later one if both wait."""
        pairs = (node.inputs[::-1], node.inputs)
        for value, residual in pairs:
            if self._waits(value) and value != residual:
                self._store(residual)
                self._finish(value, node, residual)
                return
        for name in node.inputs:
            self._store(name)
        self._emit(FusedNorm(node.name, node.inputs[1], node.output, node.layer, (), residual=node.inputs[0]))

    # ------------------------------------------------------------------------------------------ waiting values
    def _waits(self, name: str) -> bool:
        """Whether a single reader may still decide what becomes of the value."""
        if name in self.made or self.uses[name] != 1:
            return False
        if name in self.scales:
            return self._waits(self.scales[name].inputs[0]) or self.scales[name].inputs[0] in self.made
        return name in self.linears or name in self.norms or name in self.sums

    def _store(self, name: str) -> None:
        """Compute a value that still waits, into a tensor of its own."""
        if name in self.made:
            return
        waiting = (self.linears, self.norms, self.scales, self.sums)
        if name in self.heads or not any(name in values for values in waiting):
            raise LoweringError(f"{name!r} is used outside an attention, or nothing makes it; no task computes that")
        node = self.graph.producer(name)
        assert node is not None
        self._finish(name, node, None)

    def _finish(self, name: str, target: Node, residual: str | None) -> None:
        """Emit the value `name` plus `residual` as the output of `target`."""
        scale, base = 1.0, name
        if name in self.scales:
            scale, base = float(self.scales[name].attrs["factor"]), self.scales[name].inputs[0]
            if not self._waits(base):
                self._store(base)
        if base in self.linears and (base == name or self.uses[base] == 1):
            item = self._matmul(target.name, (self.linears.pop(base),), target.output, target.layer)
            epilogue = "store" if residual is None else "residual"
            self._emit(replace(item, epilogue=epilogue, residual=residual, scale=scale))
            return
        if base in self.sums and (base == name or self.uses[base] == 1):
            part = self.sums.pop(base)
            self._store(part.inputs[0])
            ranks = int(part.attrs["ranks"])
            self._emit(
                FusedExchange(
                    target.name, part.inputs[0], target.output, target.layer, ranks, residual=residual, scale=scale
                )
            )
            return
        norms: tuple[Norm, ...] = ()
        if base in self.norms and base not in self.made:
            node, norm = self.norms[base]
            base, norms = node.inputs[0], (norm,)
            self._store(base)
        self._emit(FusedNorm(target.name, base, target.output, target.layer, norms, residual=residual, scale=scale))

    def _head(self, name: str, scale: float = 1.0, softcap: float = 0.0) -> None:
        """The logits: their linear, for the sampled rows only."""
        if name not in self.linears or self.uses[name] != 1:
            raise LoweringError(f"the logits come from {name!r}, which is no linear of its own")
        node = self.linears.pop(name)
        item = self._matmul(node.name, (node,), self.logits, -1)
        self._emit(replace(item, sampled=True, scale=scale, softcap=softcap))

    def _head_of(self, name: str, reader: Node) -> _Head:
        """What the attention knows of a q, k or v."""
        if name in self.heads:
            return self.heads.pop(name)
        if name in self.norms and self.norms[name][0].inputs[0] in self.linears and self.uses[name] == 1:
            node, norm = self.norms.pop(name)
            if norm.kind == "rms":
                return _Head(self._single(node.inputs[0], reader), norm=norm, whole=True)
        return _Head(self._single(name, reader))

    def _single(self, name: str, reader: Node) -> Node:
        """The linear that makes `name`, taken out of the waiting ones; it must have no other reader."""
        if name not in self.linears:
            raise LoweringError(
                f"node {reader.name}: {name!r} should come from a linear and does not; no task computes this pattern"
            )
        if self.uses[name] != 1:
            raise LoweringError(
                f"node {reader.name}: {name!r} is read by {self.uses[name]} nodes; a fused linear may have one reader"
            )
        return self.linears.pop(name)

    def _matmul(self, name: str, linears: tuple[Node, ...], output: str, layer: int) -> FusedMatmul:
        source = linears[0].inputs[0]
        norm = None
        if source in self.norms and source not in self.made and self.norms[source][1].kind == "rms":
            node, norm = self.norms[source]
            source = node.inputs[0]
        self._store(source)
        biases = tuple(n.inputs[2] if len(n.inputs) > 2 else "" for n in linears)
        weights = tuple(n.inputs[1] for n in linears)
        return FusedMatmul(name, source, weights, biases if any(biases) else (), output, layer, norm)
