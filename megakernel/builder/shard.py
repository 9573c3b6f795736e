"""One rank's graph of a model that several devices run together.

Every attention keeps whole heads on a rank and every MLP whole columns of gate and up, so the linear behind them has
its columns there too: each rank multiplies its own, and an all_reduce adds the ranks' parts in rank order. The head is
split by vocabulary; an all_gather joins the logits. Embedding, norms and what else has few weights is on every rank.
All ranks' graphs have the same nodes and shapes, only their weights are other slices. Of KV heads fewer than ranks each
is on several. An attention whose q and k are normed over all heads together is on every rank, whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megakernel.errors import LoweringError
from megakernel.graph import LOGITS, Graph, Node, Tensor, WeightSlice, output_cols
from megakernel.tasks.record import MAX_RANKS

VOCAB_MULTIPLE = 64  # of a rank's part of the vocabulary, where it is long enough


@dataclass(frozen=True)
class Span:
    """Rows of a weight or columns of an activation, [first, stop)."""

    first: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.first


def shard(graph: Graph, rank: int, ranks: int) -> Graph:
    """The graph of `rank`; the graph itself for one rank. Raises LoweringError when the model does not divide so."""
    check_ranks(ranks)
    if ranks == 1:
        return graph
    if graph.output != LOGITS:
        raise LoweringError(
            f"tp {ranks}: only a model that ends in logits runs on several devices, got {graph.output!r}"
        )
    try:
        return _Sharder(graph, rank, ranks).run()
    except LoweringError as e:
        fits = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if _divides(graph, n))
        raise LoweringError(f"{e}; possible are {fits}") from None


def _divides(graph: Graph, ranks: int) -> bool:
    try:
        return ranks == 1 or bool(_Sharder(graph, 0, ranks).run().nodes)
    except LoweringError:
        return False


def check_ranks(ranks: object) -> None:
    """Raises LoweringError for a number of devices that no program can have."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise LoweringError(f"tp: expected an integer from 1 to {MAX_RANKS}, got {ranks!r}")


@dataclass
class _Sharder:
    graph: Graph
    rank: int
    ranks: int
    rows: dict[str, Span] = field(default_factory=dict)  # linears that give these columns only
    cols: dict[str, Span] = field(default_factory=dict)  # linears that take these columns only
    attrs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.op == "attention":
                self._attention(node)
            elif node.op in ("glu", "activation"):
                self._mlp(node)
        head = self._head()
        self.tensors = {n: t for n, t in self.graph.tensors.items() if t.kind != "activation"}
        for node in self.graph.nodes:
            self._emit(node, head)
        used = {name for node in self.nodes for name in (*node.inputs, node.output)}
        kept = {n: t for n, t in self.tensors.items() if t.kind != "weight" or n in used}
        return replace(self.graph, tensors=MappingProxyType(kept), nodes=tuple(self.nodes)).validate()

    # ------------------------------------------------------------------------------------------ what is split
    def _attention(self, node: Node) -> None:
        heads, kv_heads, dim = (int(node.attrs[k]) for k in ("heads", "kv_heads", "head_dim"))
        chains = [self._chain(name) for name in node.inputs]
        after = self._only_linear(node.output)
        if any(chain is None for chain in chains) or after is None:
            return
        own, kv = self._heads(node, heads, kv_heads)
        spans = (own, kv, kv)
        for chain, span in zip(chains, spans):
            assert chain is not None
            for made in chain:
                if made.op == "linear":
                    self.rows[made.name] = Span(span.first * dim, span.stop * dim)
                elif made.op == "rope":
                    self.attrs[made.name] = {**made.attrs, "heads": span.count}
        self.attrs[node.name] = {**node.attrs, "heads": own.count, "kv_heads": kv.count}
        self.cols[after.name] = Span(own.first * dim, own.stop * dim)

    def _heads(self, node: Node, heads: int, kv_heads: int) -> tuple[Span, Span]:
        """The rank's q heads and KV heads."""
        n, r = self.ranks, self.rank
        if kv_heads % n == 0:
            own, kv = heads // n, kv_heads // n
            return Span(r * own, (r + 1) * own), Span(r * kv, (r + 1) * kv)
        if n % kv_heads == 0 and heads % n == 0:
            own, at = heads // n, r // (n // kv_heads)
            return Span(r * own, (r + 1) * own), Span(at, at + 1)
        raise LoweringError(
            f"tp {n}: node {node.name} has {heads} heads on {kv_heads} KV heads; expected a number of devices that "
            "divides the KV heads, or one that they divide and that divides the heads"
        )

    def _mlp(self, node: Node) -> None:
        before = [self.graph.producer(name) for name in node.inputs]
        after = self._only_linear(node.output)
        if after is None or any(b is None or b.op != "linear" for b in before):
            return
        cols = self.graph.tensor(node.output).cols
        if cols % self.ranks:
            raise LoweringError(
                f"tp {self.ranks}: node {node.name} has {cols} columns; expected a number of devices that divides them"
            )
        own = cols // self.ranks
        span = Span(self.rank * own, (self.rank + 1) * own)
        for linear in before:
            assert linear is not None
            self.rows[linear.name] = span
        self.cols[after.name] = span

    def _head(self) -> set[str]:
        """The nodes from the head's linear to the logits."""
        node = self.graph.producer(LOGITS)
        chain: set[str] = set()
        while node is not None and node.op in ("scale", "softcap"):
            chain.add(node.name)
            node = self.graph.producer(node.inputs[0])
        if node is None or node.op != "linear":
            raise LoweringError(f"tp {self.ranks}: the logits should come from a linear")
        vocab = self.graph.tensor(node.output).cols
        if vocab < 2 * self.ranks:
            raise LoweringError(f"tp {self.ranks}: a vocabulary of {vocab} is too small for so many devices")
        even = -(-vocab // self.ranks)
        wide = -(-even // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        part = wide if wide * (self.ranks - 1) < vocab else even
        first = min(self.rank * part, vocab - part)
        self.rows[node.name] = Span(first, first + part)
        return {*chain, node.name}

    def _chain(self, name: str) -> list[Node] | None:
        """The nodes from a linear to a q, k or v; None when its heads cannot be told apart."""
        out: list[Node] = []
        while True:
            node = self.graph.producer(name)
            if node is None or len(self.graph.consumers(name)) != 1:
                return None
            if node.op == "rms_norm" and node.attrs["group"] is None:
                return None
            if node.op not in ("rope", "rms_norm", "linear"):
                return None
            out.append(node)
            if node.op == "linear":
                return out
            name = node.inputs[0]

    def _only_linear(self, name: str) -> Node | None:
        readers = self.graph.consumers(name)
        return readers[0] if len(readers) == 1 and readers[0].op == "linear" else None

    # ------------------------------------------------------------------------------------------ the new graph
    def _emit(self, node: Node, head: set[str]) -> None:
        inputs = node.inputs
        if node.name in self.rows:
            inputs = (inputs[0], *(self._rows_of(w, self.rows[node.name]) for w in inputs[1:]))
        elif node.name in self.cols:
            inputs = (inputs[0], self._cols_of(inputs[1], self.cols[node.name]), *map(self._once, inputs[2:]))
        name = f"{node.name}.part" if node.name in self.cols or node.name == LOGITS else node.name
        made = Node(
            name, node.op, inputs, name, MappingProxyType(dict(self.attrs.get(node.name, node.attrs))), node.layer
        )
        self._add(made, self._columns(made))
        if node.name in self.cols:
            self._add(self._over_ranks(node, name, "all_reduce"), self.graph.tensor(node.output).cols)
        elif node.name == LOGITS and node.name in head:
            cols = self.graph.tensor(LOGITS).cols
            self._add(self._over_ranks(node, name, "all_gather", cols=cols), cols)

    def _over_ranks(self, node: Node, part: str, op: str, **attrs: Any) -> Node:
        return Node(node.name, op, (part,), node.output, MappingProxyType({"ranks": self.ranks, **attrs}), node.layer)

    def _columns(self, node: Node) -> int:
        return output_cols(node, [self.tensors[name] for name in node.inputs])

    def _add(self, node: Node, cols: int) -> None:
        self.tensors[node.output] = Tensor(node.output, "activation", cols)
        self.nodes.append(node)

    def _rows_of(self, name: str, span: Span) -> str:
        whole = self.graph.tensor(name)
        source = _rows(_source(whole), span)
        cols, rows = (span.count, None) if whole.rows is None else (whole.cols, span.count)
        return self._weight(Tensor(f"{name}@{self.rank}", "weight", cols, rows, source))

    def _cols_of(self, name: str, span: Span) -> str:
        whole = self.graph.tensor(name)
        source = replace(_source(whole), first_col=span.first, stop_col=span.stop)
        return self._weight(Tensor(f"{name}@{self.rank}", "weight", span.count, whole.rows, source))

    def _once(self, name: str) -> str:
        """A bias that rank 0 adds; the others have zeros."""
        if self.rank == 0:
            return name
        cols = self.graph.tensor(name).cols
        return self._weight(Tensor(f"{name}@zeros", "weight", cols, None, WeightSlice("", 0, cols)))

    def _weight(self, tensor: Tensor) -> str:
        self.tensors[tensor.name] = tensor
        return tensor.name


def _source(tensor: Tensor) -> WeightSlice:
    if tensor.source is None:
        raise LoweringError(f"{tensor.name} is not a weight of the checkpoint")
    return tensor.source


def _rows(source: WeightSlice, span: Span) -> WeightSlice:
    """Rows `span` of those that a slice has."""
    if not source.stride:
        return replace(source, start=source.start + span.first, stop=source.start + span.stop)
    if span.first % source.block or span.stop % source.block:
        raise LoweringError(f"{source.tensor}: rows {span.first} to {span.stop} split a head of {source.block} rows")
    first, last = span.first // source.block, span.stop // source.block - 1
    start = source.start + first * source.stride
    return replace(source, start=start, stop=source.start + last * source.stride + source.block)
