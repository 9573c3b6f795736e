"""Attention over pages: rotates and appends this step's keys and values, then attends, one piece of context an item.

For row r with position p, q-head h and its KV head g:
    q, k   rows of qkv; optional norm per head (gamma, eps); rotary embedding of the first rotary_dim elements
    s[t] = scale * q . k[t], optionally softcap * tanh(s / softcap), for t in (p - window, p]
    partial of piece j = positions [j * piece_tokens, (j + 1) * piece_tokens):
        m = max s[t],  l = sum exp(s[t] - m),  acc = sum exp(s[t] - m) v[t]
Keys and values are rounded to the type of the pages before use, also those of this step; 8-bit ones are stored with a
power of two for each token (see f8.py), which depends on that token alone. The sums run over t in one
fixed order, page by page, so a row's result depends on nothing but its own tokens.

qkv is f32 [rows, (heads + 2 kv_heads) * head_dim]: all q heads, all k heads, all v heads. partials is
f32 [rows][heads][max_pieces][head_dim + 2]: acc, m, l; pieces that a row does not reach are not written. With an
`output`, which goes with edges by value, a row whose context is one piece goes there at once, acc / l, and not to
partials; `combine` leaves such a row alone. Readers of the output wait for its values, and it is the same to them which
of the two wrote them. The schedule counts it as written by combine, which comes later.

Rows of one slot are consecutive and form a group. The items of a KV head are (group, piece) in order, pieces
ascending; tile `g * splits + s` takes every item j of head g with (j + g) % splits == s. So one tile alone touches a
page of this step's positions: it appends and it reads them. A device may deal parts of a group as groups of their own:
then its tiles share the appending, and whoever reads a page with such rows waits until all are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import LoweringError
from megakernel.tasks.record import NONE, NONE64
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, DType, Region, Task, TaskNode, Variant

Array = npt.NDArray[Any]
NO_WINDOW = 0xFFFFFFFF


@dataclass(frozen=True)
class AttentionConfig(Variant):
    kv_dtype: DType = DType.F32
    head_dim: int = 64
    group: int = 1  # q heads of one KV head
    kv_heads: int = 1
    rotary_dim: int = 64  # 0: no rotary embedding
    interleaved: bool = False  # pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    page_tokens: int = 32
    piece_tokens: int = 256
    q_norm: bool = False
    k_norm: bool = False
    softcap: bool = False


class Attention(Task):
    """Tile `g * splits + s`: share s of KV head g. See the module for the items of a tile."""

    name = "attention"
    awaits_values = True
    repeats = True  # a tile's pages
    body = "Attention"
    config = "AttentionConfig"
    fields = Struct(
        "AttentionFields",
        (
            Field("cos", "u64", doc="f32 [positions][rotary_dim / 2], offset in the weights, or kNone64"),
            Field("sin", "u32", doc="the same, bytes behind cos"),
            Field("output", "u32", doc="offset in the workspace, or kNone: where a row of one piece goes"),
            Field("q_gamma", "u64", doc="f32 [head_dim], offset in the weights, or kNone64"),
            Field("k_gamma", "u64"),
            Field("qkv", "u32", doc="offset in the workspace"),
            Field("partials", "u32", doc="offset in the workspace"),
            Field("layer", "u16", doc="layer of the KV pool"),
            Field("splits", "u16"),
            Field("max_pieces", "u32"),
            Field("window", "u32", doc="tokens that a row sees, itself included; 0xffffffff for all"),
            Field("eps", "f32"),
            Field("scale", "f32"),
            Field("softcap", "f32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        d, kv, group = node.sizes["head_dim"], node.sizes["kv_heads"], node.sizes["group"]
        low, high = first // node.sizes["splits"], -(-(first + count) // node.sizes["splits"])
        qkv, q_cols = node.tensors["qkv"], group * kv * d
        return (
            Region(qkv, low * group * d, high * group * d),
            Region(qkv, q_cols + low * d, q_cols + high * d),
            Region(qkv, q_cols + (kv + low) * d, q_cols + (kv + high) * d),
        )

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Which item a tile gets depends on the step, so the columns of a KV head are shared out in name only."""
        size, splits = head_columns(node.sizes) * node.sizes["group"], node.sizes["splits"]

        def edge(tile: int) -> int:
            return tile // splits * size + tile % splits * size // splits

        return (Region(node.tensors["partials"], edge(first), edge(first + count)),)

    @staticmethod
    def may_write(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        if "output" not in node.tensors:
            return ()
        size, splits = node.sizes["head_dim"] * node.sizes["group"], node.sizes["splits"]
        low, high = first // splits, -(-(first + count) // splits)
        return (Region(node.tensors["output"], low * size, high * size),)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        assert isinstance(node.variant, AttentionConfig)
        v = node.variant
        tokens = min(context, node.sizes["window"]) + 1
        share = count * tokens / node.sizes["splits"]
        flops = 4.0 * share * v.group * v.head_dim + count * 8.0 * v.group * v.head_dim
        return Cost(share * token_bytes(v.head_dim, v.kv_dtype), 4.0 * count * (v.group + 2) * v.head_dim, flops)

    @staticmethod
    def first_tiles(node: TaskNode) -> tuple[int, ...]:
        """Those of the first piece of a row; see `PageItems`."""
        splits = node.sizes["splits"]
        return tuple(head * splits + head % splits for head in range(node.tiles // splits))

    @staticmethod
    def by_value(node: TaskNode) -> bool:
        return True

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        def weight(role: str) -> int:
            return at.weight(node.weights[role]) if role in node.weights else NONE64

        behind = weight("sin") - weight("cos")
        if not 0 <= behind < 1 << 32:
            raise LoweringError(f"attention {node.name}: sin lies {behind} bytes behind cos, expected less than 4 GiB")
        return {
            **{role: weight(role) for role in ("cos", "q_gamma", "k_gamma")},
            "sin": behind,
            "output": at.tensor(node.tensors["output"]) if "output" in node.tensors else NONE,
            "qkv": at.tensor(node.tensors["qkv"]),
            "partials": at.tensor(node.tensors["partials"]),
            **{key: node.sizes[key] for key in ("layer", "splits", "max_pieces", "window")},
            **{key: node.scalars[key] for key in ("eps", "scale", "softcap")},
        }


def head_columns(sizes: Mapping[str, int]) -> int:
    """Columns of `partials` for one q head."""
    return sizes["max_pieces"] * (sizes["head_dim"] + 2)


def token_bytes(head_dim: int, kv_dtype: DType) -> int:
    """Bytes of the key and the value of one token of one KV head, with the exponents of 8-bit ones."""
    return 2 * head_dim * kv_dtype.bytes + (2 if kv_dtype is DType.F8 else 0)


def unit_bytes(page_tokens: int, head_dim: int, kv_dtype: DType) -> int:
    """Bytes of one page of one KV head: keys, values, then of 8-bit ones the exponents of the keys and the values."""
    return page_tokens * token_bytes(head_dim, kv_dtype)


def node(
    name: str, *, heads: int, kv_heads: int, head_dim: int, qkv: str, partials: str, kv_layer: int, kv_dtype: DType,
    page_tokens: int, piece_tokens: int, max_pieces: int, splits: int, scale: float, cos: str | None = None,
    sin: str | None = None, rotary_dim: int | None = None, interleaved: bool = False, q_gamma: str | None = None,
    k_gamma: str | None = None, eps: float = 0.0, window: int | None = None, softcap: float | None = None,
    layer: int = -1, output: str | None = None,
) -> TaskNode:  # fmt: skip
    """Attention of one layer; `kv_layer` is its index in the KV pool, `splits` the tiles of one KV head.

    Tensors: `qkv`, `partials` and, where edges are by value, the `output` of the combine that follows (see the
    module). Weights: `cos`, `sin` f32 [positions][rotary_dim / 2], both or neither; `q_gamma`, `k_gamma` f32
    [head_dim]. `max_pieces` is max_context / piece_tokens rounded up. Raises LoweringError for sizes that do not
    divide.
    """
    rotary = (head_dim if rotary_dim is None else rotary_dim) if cos is not None else 0
    problems = [
        (heads % kv_heads, f"heads {heads} is no multiple of kv_heads {kv_heads}"),
        (piece_tokens % page_tokens, f"piece_tokens {piece_tokens} is no multiple of page_tokens {page_tokens}"),
        (rotary % 2 or rotary > head_dim, f"rotary_dim {rotary} must be even and at most head_dim {head_dim}"),
        (head_dim % 8, f"head_dim {head_dim} is no multiple of 8"),
        (page_tokens % 8, f"page_tokens {page_tokens} is no multiple of 8"),
        ((cos is None) != (sin is None), "cos and sin go together"),
        (splits < 1, f"splits is {splits}, expected at least 1"),
    ]
    for bad, why in problems:
        if bad:
            raise LoweringError(f"attention {name}: {why}")
    group = heads // kv_heads
    variant = AttentionConfig(
        kv_dtype, head_dim, group, kv_heads, rotary, interleaved, page_tokens, piece_tokens, q_gamma is not None,
        k_gamma is not None, softcap is not None,
    )  # fmt: skip
    weights = {"cos": cos, "sin": sin, "q_gamma": q_gamma, "k_gamma": k_gamma}
    sizes = {
        "head_dim": head_dim, "group": group, "kv_heads": kv_heads, "layer": kv_layer, "splits": splits,
        "max_pieces": max_pieces, "window": window or NO_WINDOW,
    }  # fmt: skip
    return TaskNode(
        name, Attention, variant, kv_heads * splits,
        {"qkv": qkv, "partials": partials, **({"output": output} if output else {})},
        {key: value for key, value in weights.items() if value is not None}, sizes,
        {"eps": eps, "scale": scale, "softcap": softcap or 0.0}, layer,
    )  # fmt: skip


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotary embedding of the first `2 * cos.shape[-1]` elements of x [..., head_dim]."""
    half = cos.shape[-1]
    out: Array = x.copy()
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def prepare(
    x: Array, gamma: Array | None, eps: float, cos: Array | None, sin: Array | None, interleaved: bool
) -> Array:  # fmt: skip
    """Norm and rotation of heads x [heads, head_dim] at one position, in float32."""
    x = np.asarray(x, np.float32)
    if gamma is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * gamma
    return x if cos is None or sin is None else rotate(x, cos, sin, interleaved)


def reference(
    q: Array, keys: Array, values: Array, *, scale: float, softcap: float = 0.0, window: int | None = None
) -> Array:
    """Attention of one row: q [heads, head_dim] at the last position of keys, values [tokens, kv_heads, head_dim].

    q and keys are already normed and rotated, keys and values rounded to the type of the pages. [heads, head_dim] f32.
    """
    first = max(0, len(keys) - (window or len(keys)))
    k = np.repeat(np.asarray(keys[first:], np.float64), q.shape[0] // keys.shape[1], axis=1)
    v = np.repeat(np.asarray(values[first:], np.float64), q.shape[0] // keys.shape[1], axis=1)
    s = np.einsum("hd,thd->ht", np.asarray(q, np.float64), k) * scale
    if softcap:
        s = softcap * np.tanh(s / softcap)
    p = np.exp(s - s.max(1, keepdims=True))
    return np.asarray(np.einsum("ht,thd->hd", p / p.sum(1, keepdims=True), v), np.float32)


@dataclass(frozen=True)
class Case:
    """`slots`: (position of the first row, rows) of each group of the step."""

    slots: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: DType = DType.F32
    rotary_dim: int | None = None
    rope: bool = True
    interleaved: bool = False
    norm: bool = False
    window: int | None = None
    softcap: float | None = None
    splits: int = 2
    piece_tokens: int = 64


def cases() -> tuple[Case, ...]:
    """Context on both sides of a page and of a piece, one row and chunks, every option."""
    edges = tuple(Case(((p, 1),), 3, 1, 16) for p in (0, 1, 31, 32, 63, 64, 127, 128, 200))
    more = (
        Case(((0, 16),), 9, 3, 64, DType.BF16),
        Case(((5, 1), (60, 9), (130, 1), (0, 5)), 4, 2, 32, DType.BF16, splits=3),
        Case(((64, 16),), 8, 1, 24, interleaved=True),
        Case(((100, 2), (7, 3)), 5, 5, 40, rotary_dim=20, norm=True),
        Case(((90, 4),), 4, 2, 32, DType.BF16, norm=True, interleaved=True, rotary_dim=16),
        Case(((150, 3), (10, 1)), 4, 4, 16, window=50),
        Case(((70, 2),), 7, 1, 128, DType.F16, softcap=5.0, splits=1),
        Case(((40, 1),), 2, 2, 8, rope=False),
        Case(((0, 1),), 3, 1, 16, DType.F8),
        Case(((5, 1), (62, 9), (130, 1), (0, 5)), 6, 2, 64, DType.F8, splits=3),
        Case(((90, 3),), 4, 2, 24, DType.F8, norm=True, interleaved=True, rotary_dim=16, window=50, softcap=5.0),
    )
    return edges + more
