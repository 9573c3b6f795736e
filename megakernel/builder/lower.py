"""From fused operators to tasks: sizes, variants, packed weights and workspace tensors for one target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megakernel.builder.dealing import deal_products
from megakernel.builder.exchange import Exchanges
from megakernel.builder.fuse import (
    FusedAttention,
    FusedEmbedding,
    FusedExchange,
    FusedMatmul,
    FusedNorm,
    FusedOperator,
    Norm,
    fuse,
)
from megakernel.builder.giving import give_inputs, give_wide, given_bytes
from megakernel.builder.heads import HeadOrder, head_orders
from megakernel.builder.layout import weight_layout
from megakernel.builder.memory import TensorSize
from megakernel.builder.program import PackedWeight, WeightPart
from megakernel.errors import LoweringError
from megakernel.graph import LOGITS, Graph, RopeSpec, Tensor
from megakernel.target import Target
from megakernel.tasks import (
    advance,
    attention,
    combine,
    embedding,
    hidden,
    input,
    matmul,
    norm,
    output,
    push,
    receive,
    sample,
)
from megakernel.tasks.push import FLOAT_BYTES, STAMPED_BYTES, exchange_sizes
from megakernel.tasks.record import SAMPLE_RESULT, TILE_ROWS, row_capacity
from megakernel.tasks.task import DType, TaskNode, all_operators

UNIT_BYTES = 16 << 10  # of one KV page and head where pages travel through a ring
ALIGN = 256
ROUND_COLUMNS = 2048  # of an input, that loader warps bring at once: 8 in each of 2 shares of 32 lanes of 4 warps
EVEN_UNIT = 1024  # columns of a unit that 8 warps share in whole multiples of 128


@dataclass(frozen=True)
class Limits:
    """What a program is built for. `max_context`: tokens of prompt and output of one slot."""

    dtype: DType
    kv_dtype: DType
    max_slots: int
    max_context: int
    max_rows: int
    inputs: bool = False  # rows of the host may stand for tokens of a prompt
    hidden: bool = False  # what the head reads goes out to the host
    paced: bool = False  # steps can keep to a budget, on targets too where that takes a kernel of its own

    @property
    def sampled_rows(self) -> int:
        """Rows of a step that may want a token: a slot has at most one."""
        return min(self.max_rows, max(TILE_ROWS, self.max_slots))

    def wide(self, target: Target) -> bool:
        """Whether a step may have more rows than one tile on a target that has kernels of their own for those."""
        return target.backend == "cuda" and self.max_rows > TILE_ROWS

    def packs(self, target: Target) -> bool:
        """Whether the workers of a product share the work of packing its input when a step has several rows."""
        return target.backend == "cuda" and self.max_rows > 1


@dataclass(frozen=True)
class Lowered:
    """Task nodes in order, what they read and write, and the geometry of the KV pool."""

    nodes: tuple[TaskNode, ...]
    tensors: Mapping[str, TensorSize]
    weights: tuple[PackedWeight, ...]
    weights_bytes: int
    stream_bytes: int
    ropes: tuple[dict[str, Any], ...]
    page_tokens: int
    piece_tokens: int
    max_pieces: int
    kv_layers: int
    kv_heads: int
    head_dim: int
    ranks: int = 1
    window_bytes: int = 0
    exchanges: tuple[str, ...] = ()
    best_offset: int = 0
    part_vocab: int = 0


def lower(graph: Graph, target: Target, limits: Limits) -> Lowered:
    """Raises LoweringError naming a node that no task can run."""
    return _Lowering(graph, target, limits).run()


def page_tokens(target: Target, head_dim: int, kv_dtype: DType) -> int:
    """Tokens of a page: the target's, or as many as fill one stage of its ring, a power of two up to 64."""
    if not target.shared_bytes:
        return target.page_tokens
    fit = UNIT_BYTES // attention.token_bytes(head_dim, kv_dtype)
    return max(target.page_least, min(64, 1 << max(0, fit.bit_length() - 1)))


def splits(target: Target, kv_heads: int) -> int:
    """Tiles of one KV head, so that the tiles of all heads share out evenly over the workers. Where edges are by value
    a worker has one at most: two would be two items in turn while other workers have none."""
    if target.value_edges:
        return max(1, target.workers // kv_heads)
    even = math.lcm(kv_heads, target.workers) // kv_heads
    return even if kv_heads * even <= 4 * target.workers else -(-target.workers // kv_heads)


def shares(target: Target, heads: int, head_dim: int, rows: int) -> int:
    """Tiles of one head of `combine`: where each of a worker's 8 warps adds a (row, head), a power of two, so that all
    rows of a step are added at once, as far as there are workers and shares are whole columns."""
    count, most = 1, target.workers // heads if target.value_edges else 1
    while 8 * count < rows and 2 * count <= most and head_dim % (2 * count) == 0:
        count *= 2
    return count


def norm_tile(target: Target, cols: int) -> int:
    """Columns of a tile of a stored norm: an even share of each worker, but no less than 64 or than a sixteenth."""
    return max(64, -(-cols // (16 * min(16, target.workers))) * 16)


@dataclass
class _Lowering:
    graph: Graph
    target: Target
    limits: Limits
    nodes: list[TaskNode] = field(default_factory=list)
    tensors: dict[str, TensorSize] = field(default_factory=dict)
    weights: list[PackedWeight] = field(default_factory=list)
    ropes: list[RopeSpec] = field(default_factory=list)
    at: int = 0
    kv_layers: int = 0
    kv: tuple[int, int] | None = None  # heads and head_dim, the same in every layer
    heads: dict[str, HeadOrder] = field(default_factory=dict)  # of tensors of q, k and v
    outputs: dict[str, HeadOrder] = field(default_factory=dict)  # of padded outputs of attentions
    exchanges: Exchanges = field(default_factory=Exchanges)
    sums: dict[str, FusedExchange] = field(default_factory=dict)  # over ranks, by what each rank gives
    senders: dict[str, TaskNode] = field(default_factory=dict)  # products that send their outputs, by these

    def run(self) -> Lowered:
        self._inputs()
        fused = fuse(self.graph)
        self.heads, self.outputs = head_orders(fused, self.target)
        element = STAMPED_BYTES if self.target.stamped_links else FLOAT_BYTES
        self.exchanges = Exchanges.of(fused, self.graph, self.limits.max_rows, self.limits.sampled_rows, element)
        if self.target.value_edges and self.exchanges.ranks > 1:
            self.exchanges = self.exchanges.with_best(self.limits.max_rows, self.target.workers)
        self.sums = {f.input: f for f in fused if isinstance(f, FusedExchange) and not f.join}
        for item in fused:
            if isinstance(item, FusedEmbedding):
                self._embedding(item)
            elif isinstance(item, FusedMatmul):
                self._matmul(item)
            elif isinstance(item, FusedNorm):
                self._norm(item)
            elif isinstance(item, FusedExchange):
                self._exchange(item)
            elif isinstance(item, FusedOperator):
                lower_it = all_operators()[item.op].lower
                self.nodes.append(lower_it(item.name, item.inputs, item.output, item.attrs, _Place(self)))
            else:
                self._attention(item)
            if isinstance(item, FusedMatmul) and item.sampled and self.limits.hidden:
                self._hidden(item)
        if self.graph.output == LOGITS:
            self._sampling()
        else:
            self._outputs()
        if self.limits.packs(self.target):
            given, self.tensors = give_inputs(self.nodes, self.tensors)
            self.nodes = list(given)
        if self.limits.wide(self.target):
            self.nodes = list(give_wide(self.nodes))
            dealt, self.tensors = deal_products(self.nodes, self.tensors, self.target.workers, self.limits.max_rows)
            self.nodes = list(dealt)
        kv_heads, head_dim = self.kv or (1, 8)
        pages = page_tokens(self.target, head_dim, self.limits.kv_dtype)
        streamed = sum(n.task.cost(n, 0, n.tiles, 0).stream_bytes for n in self.nodes if "weight" in n.weights)
        return Lowered(
            tuple(self.nodes), self.tensors, tuple(self.weights), max(self.at, ALIGN), int(streamed),
            tuple(asdict(r) for r in self.ropes), pages, self._piece(pages, head_dim),
            self._pieces(pages, head_dim),
            self.kv_layers, kv_heads, head_dim, self.exchanges.ranks, self.exchanges.window_bytes,
            self.exchanges.names, self.exchanges.best_offset, self.exchanges.part_vocab,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ nodes
    def _inputs(self) -> None:
        width, column = sum(t.cols for t in self.graph.inputs), 0
        for t in self.graph.inputs:
            self._tensor(t.name, t.cols)
            self.nodes.append(input.node(t.name, cols=t.cols, output=t.name, width=width, column=column))
            column += t.cols

    def _outputs(self) -> None:
        """Rows instead of tokens: the end of a sequence is a token of no meaning."""
        self.tensors["sample.result"] = TensorSize(self.limits.max_rows, SAMPLE_RESULT.size, "u8")
        for name in self.graph.outputs:
            if name in self.outputs:
                raise LoweringError(f"node {name}: its heads are padded on {self.target.name}, and it is an output")
        widths = [self.tensors[name].cols for name in self.graph.outputs]
        for i, name in enumerate(self.graph.outputs):
            self.nodes.append(
                output.node(
                    f"output.{i}", cols=widths[i], input=name, width=sum(widths), column=sum(widths[:i]),
                    result=None if i else "sample.result",
                )
            )  # fmt: skip
        self.nodes.append(advance.node("advance", result="sample.result"))

    def _embedding(self, item: FusedEmbedding) -> None:
        table = self.graph.tensor(item.table)
        cols = table.cols
        name = self._weight(f"{item.name}.table", "table", _rows(table), cols, (table,))
        positions = None
        if item.positions is not None:
            places = self.graph.tensor(item.positions)
            positions = self._weight(f"{item.name}.positions", "table", _rows(places), cols, (places,))
        self._tensor(item.output, cols)
        self.nodes.append(
            embedding.node(
                item.name, cols=cols, table=name, output=item.output, dtype=self.limits.dtype, scale=item.scale,
                positions=positions, inputs=self.limits.inputs, layer=item.layer,
            )
        )  # fmt: skip

    def _norm(self, item: FusedNorm) -> None:
        cols = self.tensors[item.input].cols
        kinds = {n.kind for n in item.norms}
        if len(kinds) > 1 or len(item.norms) > 2 or len({n.eps for n in item.norms}) > 1:
            raise LoweringError(f"node {item.name}: its norms differ in kind or eps")
        order = self.heads.get(item.output)  # of heads normed together
        if order and order.share != 1 and kinds != {"rms"}:
            raise LoweringError(f"node {item.name}: {kinds} of heads of {order.size}, which {self.target.name} pads")
        widths = tuple(order.cols(w) if order else w for w in item.widths)
        betas = tuple(self.graph.tensor(n.beta) for n in item.norms if n.beta is not None)
        beta = self._weight(f"{item.name}.beta", "vector", sum(b.cols for b in betas), 0, betas) if betas else None
        self._tensor(item.output, cols)
        self.nodes.append(
            norm.node(
                item.name, cols=cols, input=item.input, output=item.output,
                norming=norm.Norming[kinds.pop().upper()] if kinds else norm.Norming.NONE,
                gamma=self._gamma(f"{item.name}.gamma", *item.norms, order=order), beta=beta,
                eps=item.norms[0].eps * (order.share if order else 1.0) if item.norms else 0.0, scale=item.scale,
                residual=item.residual, parts=(widths[0], sum(widths[1:])) if widths else None,
                tile_cols=norm_tile(self.target, cols), layer=item.layer,
            )
        )  # fmt: skip

    def _matmul(self, item: FusedMatmul) -> None:
        parts = tuple(self.graph.tensor(w) for w in item.weights)
        glu = item.epilogue == "glu"
        order, inner = self.heads.get(item.output), self.outputs.get(item.input)
        rows, k = sum(_rows(p) for p in parts), parts[0].cols
        rows, k = order.cols(rows) if order else rows, inner.cols(k) if inner else k
        n = rows // 2 if glu else rows
        packed_rows = -(-n // (self.target.tile_n // 2)) * self.target.tile_n if glu else rows
        layout = weight_layout(self.target, self.limits.dtype, packed_rows, k)
        kind = "interleaved" if glu else "matrix"
        weight = self._weight(f"{item.name}.weight", kind, rows, k, parts, layout.bytes, order=order, inner=inner)
        bias = self._bias(item, parts, layout.n_padded, glu)
        self._tensor(item.output, n, self.limits.sampled_rows if item.sampled else None)
        sends = self._sends(item, n)
        made = matmul.node(
            item.name, n=n, k=k, input=item.input, output=item.output, weight=weight, dtype=self.limits.dtype,
            tile_n=layout.tile_n, k_unit=layout.k_unit, units=layout.k_padded // layout.k_unit,
            gamma=self._gamma(f"{item.name}.gamma", item.norm), eps=item.norm.eps if item.norm else 0.0,
            residual=item.residual, bias=bias, glu=item.activation if glu else None, sampled=item.sampled,
            scale=item.scale, softcap=item.softcap, activation=None if glu else item.activation, sends=sends,
            layer=item.layer, rounds=-(-layout.k_padded // ROUND_COLUMNS) if self.target.value_edges else 0,
            even=self.target.value_edges and layout.k_unit == EVEN_UNIT,
        )  # fmt: skip
        self.nodes.append(made)
        if sends is not None:
            self.senders[item.output] = made
        if self.limits.packs(self.target) and not item.sampled:
            size = self.tensors[item.output]
            behind = -(-(given_bytes(size.cols) + self._packed_bytes(item.output)) // (4 * size.cols))
            self.tensors[item.output] = replace(size, rows=size.rows + behind)

    def _sends(self, item: FusedMatmul, n: int) -> dict[str, int] | None:
        """Of a product whose elements may go to the peers as they are made: where each says by itself that it is there,
        and in kernels that store all rows of a step in one way."""
        total = self.sums.get(item.output)
        narrow = self.limits.max_rows <= TILE_ROWS or self.target.backend == "cpu"
        plain = item.norm is None and item.epilogue == "store"
        if total is None or not (self.target.stamped_links and narrow and plain):
            return None
        return self._exchange_sizes(total, n)

    def _exchange_sizes(self, item: FusedExchange, cols: int) -> dict[str, int]:
        number = self.exchanges.names.index(item.name)
        return exchange_sizes(
            cols=cols, exchange=number, exchanges=len(self.exchanges.names), buffer=self.exchanges.buffers[number],
            rows=self.limits.sampled_rows if item.join else self.limits.max_rows, ranks=item.ranks,
            stamped=self.target.stamped_links,
        )  # fmt: skip

    def _attention(self, item: FusedAttention) -> None:
        order = self.heads.get(item.qkv)
        head_dim, share = (order.padded, order.share) if order else (item.head_dim, 1.0)
        shape = (item.kv_heads, head_dim)
        if self.kv not in (None, shape):
            raise LoweringError(f"node {item.name}: {shape} KV heads and head_dim, other layers have {self.kv}")
        self.kv = shape
        pages = page_tokens(self.target, head_dim, self.limits.kv_dtype)
        piece, pieces = self._piece(pages, head_dim), self._pieces(pages, head_dim)
        cos, sin = self._tables(item.rope)
        if item.q_norm and item.k_norm and item.q_norm.eps != item.k_norm.eps:
            raise LoweringError(f"node {item.name}: q and k norms have different eps")
        eps = share * next((n.eps for n in (item.q_norm, item.k_norm) if n), 0.0)
        partials = f"{item.name}.partials"
        self._tensor(partials, item.heads * pieces * (head_dim + 2))
        self._tensor(item.output, item.heads * head_dim)
        self.nodes.append(
            attention.node(
                item.name, heads=item.heads, kv_heads=item.kv_heads, head_dim=head_dim, qkv=item.qkv,
                partials=partials, kv_layer=self.kv_layers, kv_dtype=self.limits.kv_dtype, page_tokens=pages,
                piece_tokens=piece, max_pieces=pieces, splits=splits(self.target, item.kv_heads), scale=item.scale,
                cos=cos, sin=sin, rotary_dim=item.rope.rotary_dim if item.rope else None,
                interleaved=bool(item.rope and item.rope.interleaved) or bool(order and order.half),
                q_gamma=self._gamma(f"{item.name}.q_gamma", item.q_norm, order=order),
                k_gamma=self._gamma(f"{item.name}.k_gamma", item.k_norm, order=order), eps=eps, window=item.window,
                softcap=item.softcap, layer=item.layer, output=item.output if self.target.value_edges else None,
            )
        )  # fmt: skip
        self.nodes.append(
            combine.node(
                f"{item.name}.combine", heads=item.heads, kv_heads=item.kv_heads, head_dim=head_dim,
                partials=partials, output=item.output, piece_tokens=piece, max_pieces=pieces, window=item.window,
                layer=item.layer, direct=self.target.value_edges,
                shares=shares(self.target, item.heads, head_dim, self.limits.max_rows),
            )
        )  # fmt: skip
        self.kv_layers += 1

    def _exchange(self, item: FusedExchange) -> None:
        part, cols = self.tensors[item.input], self.graph.tensor(item.output).cols
        sent = self.senders.get(item.input)
        if sent is None:
            sent = push.node(
                f"{item.name}.push", input=item.input, sizes=self._exchange_sizes(item, part.cols),
                tile_cols=self._exchange_tile(part.cols, item.join), sampled=item.join, layer=item.layer,
            )  # fmt: skip
            self.nodes.append(sent)
        self._tensor(item.output, cols, self.limits.sampled_rows if item.join else None)
        self.nodes.append(
            receive.node(
                item.name, sent=sent, cols=cols, output=item.output, residual=item.residual,
                tile_cols=self._exchange_tile(cols, item.join), scale=item.scale, layer=item.layer,
            )
        )  # fmt: skip

    def _exchange_tile(self, cols: int, join: bool) -> int:
        """Columns of a tile: as of a norm, or of the many columns of logits an even share of every worker."""
        return max(64, -(-cols // (64 * self.target.workers)) * 64) if join else norm_tile(self.target, cols)

    def _hidden(self, head: FusedMatmul) -> None:
        """Export what the head multiplies, after its norm, which the head itself does not store."""
        source = head.input
        if head.norm is not None:
            source = "hidden.norm"
            self._norm(FusedNorm("hidden.norm", head.input, source, head.layer, (head.norm,)))
        cols = self.tensors[source].cols
        self.nodes.append(hidden.node("hidden", cols=cols, input=source, tile_cols=norm_tile(self.target, cols)))

    def _sampling(self) -> None:
        vocab, rows = self.graph.config.vocab, self.limits.sampled_rows
        self.tensors["sample.scaled"] = TensorSize(rows, vocab, "f32")
        self.tensors["sample.result"] = TensorSize(rows, SAMPLE_RESULT.size, "u8")
        logits = self.tensors[self.graph.output]
        # Behind the logits: of each sampled row and worker its largest one, 16 bytes.
        linked = self.exchanges.ranks > 1
        best = -(-rows * self.target.workers * 16 // (4 * vocab)) if self.target.value_edges else 0
        head = self.exchanges.logits if linked else self.graph.output  # what the head's product makes
        for name in {self.graph.output, head}:
            size = self.tensors[name]  # of a part as well: who finds the largest reckons with the whole vocabulary
            need = -(-(logits.rows + best) * vocab // size.cols) if best else size.rows
            if self.limits.packs(self.target) and name == head:  # behind that the packed input of the product
                need += -(-self._packed_bytes(name) // (4 * size.cols))
            self.tensors[name] = TensorSize(need, size.cols, size.dtype, keep=True)
        self.nodes.append(
            sample.node("sample", vocab=vocab, logits=self.graph.output, scaled="sample.scaled", result="sample.result",
                        max_rows=rows)
        )  # fmt: skip
        paced = self.limits.paced or self.target.backend == "cpu" or self.limits.wide(self.target)
        inputs = self.limits.inputs
        self.nodes.append(
            advance.node(
                "advance",
                result="sample.result",
                logits=head,
                vocab=vocab,
                inputs=inputs,
                paced=paced,
            )
        )

    def _packed_bytes(self, output: str) -> int:
        """Room behind a product's output for its input as steps of several rows pack it: of each row the squares of 8
        shares, and the columns in the type of the weights; that of wide steps behind that of narrow ones. See
        device/cuda_room.cuh and cuda_wide.cuh."""
        product = next(n for n in self.nodes if n.task is matmul.Matmul and n.tensors["output"] == output)
        columns = product.sizes["k_unit"] * product.sizes["units"]
        rows = TILE_ROWS + (row_capacity(self.limits.max_rows) if self.limits.wide(self.target) else 0)
        return ALIGN + rows * 8 * 4 + rows * columns * self.limits.dtype.bytes

    # ------------------------------------------------------------------------------------------ parts
    def _tensor(self, name: str, cols: int, rows: int | None = None) -> None:
        self.tensors[name] = TensorSize(rows or self.limits.max_rows, cols, "f32")

    def _piece(self, pages: int, head_dim: int) -> int:
        """Tokens of an item: those of the target, or as many whole pages as its ring holds, halved until they fit. A
        page of 8-bit elements takes as much of the ring as one of 16-bit ones, and has the same pieces."""
        piece = self.target.piece_tokens // pages * pages
        token = 2 * head_dim * max(2, self.limits.kv_dtype.bytes)
        while self.target.piece_bytes and piece * token > self.target.piece_bytes and piece % (2 * pages) == 0:
            piece //= 2
        return max(pages, piece)

    def _pieces(self, pages: int, head_dim: int) -> int:
        return -(-self.limits.max_context // self._piece(pages, head_dim))

    def _weight(
        self, name: str, kind: str, n: int, k: int, parts: tuple[Tensor | int, ...], size: int | None = None,
        add: float = 0.0, rope: int = -1, order: HeadOrder | None = None, inner: HeadOrder | None = None,
        scale: float = 1.0,
    ) -> str:  # fmt: skip
        """`order`: of the rows, which are those of q, k and v, or the elements of a norm; `inner`: of the columns. A
        number among the parts is so many zeros."""
        if size is None:
            size = n * max(k, 1) * (self.limits.dtype.bytes if kind == "table" else 4)
        values = replace(order, half=0) if order else None  # the third part, which is not rotated
        sources = tuple(
            p
            for i, t in enumerate(parts)
            for p in (_zeros(t, order) if isinstance(t, int) else _parts(t, order if i < 2 else values))
        )
        cols = (inner.size, inner.padded) if inner else (0, 0)
        self.weights.append(PackedWeight(name, kind, self.at, size, n, k, sources, add, rope, scale, *cols))
        self.at += -(-size // ALIGN) * ALIGN
        return name

    def _gamma(self, name: str, *norms: Norm | None, order: HeadOrder | None = None) -> str | None:
        """The gammas one behind the other, offsets added."""
        given = tuple(n for n in norms if n is not None)
        if not given:
            return None
        if len({n.offset for n in given}) > 1:
            raise LoweringError(f"{name}: norms of one task with different offsets")
        gammas = tuple(self.graph.tensor(n.gamma) for n in given)
        cols, add, scale = sum(g.cols for g in gammas), given[0].offset, 1.0
        if order:
            cols, scale = order.cols(cols), math.sqrt(order.share)
        return self._weight(name, "vector", cols, 0, gammas, add=add, order=order, scale=scale)

    def _bias(self, item: FusedMatmul, parts: tuple[Tensor, ...], padded: int, glu: bool) -> str | None:
        if not item.biases:
            return None
        tile = self.target.tile_n if glu else 0
        cols, order = sum(map(_rows, parts)), self.heads.get(item.output)
        cols = order.cols(cols) if order else cols
        vectors = tuple(  # zeros for a linear that has none
            self.graph.tensor(bias) if bias else _rows(part) for bias, part in zip(item.biases, parts)
        )
        return self._weight(f"{item.name}.bias", "vector", cols, tile, vectors, padded * 4, order=order)

    def _tables(self, rope: RopeSpec | None) -> tuple[str | None, str | None]:
        if rope is None:
            return None, None
        if rope not in self.ropes:
            index = len(self.ropes)
            self.ropes.append(rope)
            for kind in ("cos", "sin"):
                self._weight(
                    f"rope.{index}.{kind}", kind, self.limits.max_context, rope.rotary_dim // 2, (), None, 0.0, index
                )
        index = self.ropes.index(rope)
        return f"rope.{index}.cos", f"rope.{index}.sin"


@dataclass(frozen=True)
class _Place:
    """`Place` of megakernel.tasks.task."""

    lowering: _Lowering

    def tensor(self, name: str, cols: int) -> str:
        self.lowering._tensor(name, cols)
        return name

    def cols(self, name: str) -> int:
        return self.lowering.graph.tensor(name).cols

    def vector(self, name: str, weight: str) -> str:
        tensor = self.lowering.graph.tensor(weight)
        return self.lowering._weight(name, "vector", tensor.cols, 0, (tensor,))

    def tile(self, cols: int) -> int:
        return norm_tile(self.lowering.target, cols)


def _zeros(count: int, order: HeadOrder | None) -> tuple[WeightPart]:
    return (WeightPart("", 0, order.cols(count) if order else count),)


def _rows(tensor: Tensor) -> int:
    if tensor.rows is None:
        raise LoweringError(f"weight {tensor.name} is a vector; a matrix was expected")
    return tensor.rows


def _parts(tensor: Tensor, order: HeadOrder | None = None) -> tuple[WeightPart, ...]:
    source = tensor.source
    if source is None:
        raise LoweringError(f"{tensor.name} is not a weight of the checkpoint")
    heads = (order.size, order.half, order.padded) if order else ()
    cols = {"first_col": source.first_col, "stop_col": source.stop_col}
    return tuple(
        WeightPart(source.tensor, first, last, source.transposed, *heads, **cols) for first, last in source.ranges()
    )
