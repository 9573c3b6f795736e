"""Attention and combine on the CPU device against their references, through pages that earlier steps filled."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.tasks import attention, combine, f8
from megakernel.tasks.attention import Case
from megakernel.tasks.task import DType, TaskNode

from .harness import NUMPY, Array, Rows, blank, build, decode_rows, rounded, run_node

PAGE, CONTEXT, SLOTS = 32, 512, 4
PAGES = CONTEXT // PAGE
TOLERANCE = {DType.F32: 2e-6, DType.BF16: 1e-5, DType.F16: 5e-6, DType.F8: 1e-5}


def rotary(case: Case) -> int:
    return 0 if not case.rope else case.head_dim if case.rotary_dim is None else case.rotary_dim


def node_of(case: Case) -> TaskNode:
    return attention.node(
        "a", heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, qkv="qkv", partials="p", kv_layer=1,
        kv_dtype=case.kv_dtype, page_tokens=PAGE, piece_tokens=case.piece_tokens,
        max_pieces=CONTEXT // case.piece_tokens, splits=case.splits, scale=0.3, cos="cos" if case.rope else None,
        sin="sin" if case.rope else None, rotary_dim=case.rotary_dim, interleaved=case.interleaved,
        q_gamma="qg" if case.norm else None, k_gamma="kg" if case.norm else None, eps=1e-6, window=case.window,
        softcap=case.softcap,
    )  # fmt: skip


def combine_of(case: Case) -> TaskNode:
    return combine.node(
        "c", heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, partials="p", output="o",
        piece_tokens=case.piece_tokens, max_pieces=CONTEXT // case.piece_tokens, window=case.window,
    )  # fmt: skip


@lru_cache(maxsize=1)
def kernel() -> tuple[Path, tuple[TaskNode, ...]]:
    nodes = tuple(f(c) for c in attention.cases() for f in (node_of, combine_of))
    return build(nodes), nodes


class Model:
    """Random q, k, v of every position of every slot, before norm and rotation, and the tables."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(zlib.crc32(repr(replace(case, slots=(), splits=1)).encode()))
        self.case = case
        columns = (case.heads + 2 * case.kv_heads) * case.head_dim
        self.qkv = rng.standard_normal((SLOTS, CONTEXT, columns)).astype(np.float32)
        half = rotary(case) // 2
        angle = np.outer(np.arange(CONTEXT), 1e4 ** (-np.arange(half) / max(1, half)))
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.gammas = [(1 + 0.2 * rng.standard_normal(case.head_dim)).astype(np.float32) for _ in range(2)]
        self.table = (1 + rng.permutation(SLOTS * PAGES)).astype(np.uint32).reshape(SLOTS, PAGES)

    def heads(self, slot: int, position: int, which: str) -> Array:
        """q, k or v heads of one position, [heads, head_dim] in float32."""
        c = self.case
        first = {"q": 0, "k": c.heads, "v": c.heads + c.kv_heads}[which]
        count = c.heads if which == "q" else c.kv_heads
        x = self.qkv[slot, position, first * c.head_dim : (first + count) * c.head_dim].reshape(count, c.head_dim)
        if which == "v":
            return x
        gamma = self.gammas[which == "k"] if c.norm else None
        cos, sin = (self.cos[position], self.sin[position]) if c.rope else (None, None)
        return attention.prepare(x, gamma, 1e-6, cos, sin, c.interleaved)

    def cached(self, slot: int, tokens: int) -> tuple[Array, Array]:
        """Keys and values of positions [0, tokens), as the pages hold them: [tokens, kv_heads, head_dim]."""
        k, v = (np.stack([self.heads(slot, p, w) for p in range(tokens)]) for w in ("k", "v"))
        return rounded(k, self.case.kv_dtype), rounded(v, self.case.kv_dtype)

    def pool(self, filled: dict[int, int]) -> Array:
        """Two layers of pages; layer 1 holds the first filled[slot] positions, all else is garbage."""
        c = self.case
        size = attention.unit_bytes(PAGE, c.head_dim, c.kv_dtype)
        raw = np.full((2, 1 + SLOTS * PAGES, c.kv_heads, size), 0xFF, np.uint8)
        out = raw if c.kv_dtype is DType.F8 else raw.view(NUMPY[c.kv_dtype]).reshape(*raw.shape[:3], 2, -1)
        for slot, tokens in filled.items():
            if tokens == 0:
                continue
            k, v = self.cached(slot, tokens)
            for p in range(tokens):
                page, t = self.table[slot, p // PAGE], p % PAGE
                for h in range(c.kv_heads):
                    (put_codes if c.kv_dtype is DType.F8 else put)(out[1, page, h], k[p, h], v[p, h], t, c)
        return out


def put(unit: Array, k: Array, v: Array, t: int, case: Case) -> None:
    """As `append` does: a key is a column of its tile, a value a row, 16-bit types in pairs."""
    d, pair = case.head_dim, 1 if case.kv_dtype is DType.F32 else 2
    keys = unit[0].reshape(d // pair, PAGE, pair)
    values = unit[1].reshape(PAGE // pair, d, pair)
    keys[:, t, :] = k.reshape(d // pair, pair)
    values[t // pair, :, t % pair] = v
    if t % 2 == 0:
        values[(t + 1) // pair, :, (t + 1) % pair] = 0


def put_codes(unit: Array, k: Array, v: Array, t: int, case: Case) -> None:
    """Four dims of a key, or tokens of a value, side by side; the exponents behind both tiles."""
    d, half = case.head_dim, PAGE * case.head_dim
    keys, values = unit[:half].reshape(d // 4, PAGE, 4), unit[half : 2 * half].reshape(PAGE // 4, d, 4)
    codes, unit[2 * half + t] = f8.encode(k)
    keys[:, t, :] = codes.reshape(d // 4, 4)
    values[t // 4, :, t % 4], unit[2 * half + PAGE + t] = f8.encode(v)


def rows_of(case: Case) -> Rows:
    return Rows(tuple((0, slot, first + i, first) for slot, (first, n) in enumerate(case.slots) for i in range(n)))


def run(
    model: Model, rows: Rows, workers: int = 1, node: TaskNode | None = None, pool: Array | None = None,
    made: tuple[Path, tuple[TaskNode, ...]] | None = None,
) -> dict[str, Array]:  # fmt: skip
    case = model.case
    binary, nodes = made or kernel()
    pieces = CONTEXT // case.piece_tokens
    qkv = np.stack([model.qkv[slot, position] for _, slot, position, _ in rows.rows])
    if pool is None:
        pool = model.pool({slot: first for _, slot, _, first in rows.rows}).view(np.uint8)
    return run_node(
        binary, nodes, node or node_of(case), rows, workers=workers, page_tokens=PAGE,
        weights={"cos": model.cos, "sin": model.sin, "qg": model.gammas[0], "kg": model.gammas[1]},
        tensors={"qkv": qkv, "p": blank(len(qkv), case.heads, pieces, case.head_dim + 2)},
        extra={"kv": pool, "page_table": model.table},
        settings={"kv_layer_stride": pool.nbytes // 2},
    )  # fmt: skip


def combined(model: Model, rows: Rows, partials: Array, workers: int = 1) -> Array:
    binary, nodes = kernel()
    out = run_node(
        binary, nodes, combine_of(model.case), rows, workers=workers, weights={},
        tensors={"p": partials, "o": blank(len(rows.rows), model.case.heads * model.case.head_dim)},
    )  # fmt: skip
    return out["o"]


@pytest.mark.parametrize("case", attention.cases(), ids=str)
def test_values_and_pages(case: Case) -> None:
    model, rows = Model(case), rows_of(case)
    got = run(model, rows)
    output = combined(model, rows, got["p"]).reshape(len(rows.rows), case.heads, case.head_dim)
    for r, (_, slot, position, _) in enumerate(rows.rows):
        keys, values = model.cached(slot, position + 1)
        want = attention.reference(
            model.heads(slot, position, "q"), keys, values, scale=0.3, softcap=case.softcap or 0.0, window=case.window
        )
        assert np.abs(output[r] - want).max() <= TOLERANCE[case.kv_dtype] * max(1.0, np.abs(want).max())
    check_pages(model, rows, got["kv"])


def check_pages(model: Model, rows: Rows, raw: Array) -> None:
    """Every position up to the last row's is in its page, rounded once; nothing else was touched."""
    case = model.case
    last = {slot: position + 1 for _, slot, position, _ in rows.rows}
    want = model.pool(last).view(np.uint8).reshape(raw.shape)
    if case.kv_dtype is DType.F8:  # a float32 bit before the rounding may be a code after it
        assert (raw != want).mean() < 1e-3 and np.abs(raw.astype(int) - want).max() <= 1
        return
    kind = NUMPY[case.kv_dtype]
    got, want = (x.reshape(-1).view(kind).astype(np.float32) for x in (raw, want))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    close = np.abs(got - want) <= 2e-6 + 0.01 * np.abs(want) * (case.kv_dtype is not DType.F32)
    assert (same | close).all()
    assert same.mean() > 0.99


@pytest.mark.parametrize("case", [c for c in attention.cases() if sum(n for _, n in c.slots) > 1], ids=str)
def test_a_row_is_the_same_alone(case: Case) -> None:
    """A chunk of several rows of several slots against each slot's rows one step at a time."""
    model, rows = Model(case), rows_of(case)
    whole = run(model, rows)
    pool = model.pool({slot: first for _, slot, _, first in rows.rows}).view(np.uint8)
    for r, (_, slot, position, _) in enumerate(rows.rows):
        alone = run(model, Rows(((0, slot, position, position),)), pool=pool)
        assert alone["p"][0].tobytes() == whole["p"][r].tobytes()
        pool = alone["kv"]
    assert pool.tobytes() == whole["kv"].tobytes()


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_any_workers_and_splits(workers: int, splits: int) -> None:
    case = Case(((300, 3), (65, 1), (10, 5)), 4, 2, 32, DType.BF16, splits=3)
    assert case.head_dim == attention.cases()[10].head_dim
    model, rows = Model(case), rows_of(case)
    node = node_of(replace(case, splits=splits))
    base = run(model, rows)
    got = run(model, rows, workers, node)
    assert got["p"].tobytes() == base["p"].tobytes() and got["kv"].tobytes() == base["kv"].tobytes()
    assert combined(model, rows, base["p"], workers).tobytes() == combined(model, rows, base["p"]).tobytes()


@pytest.mark.parametrize("case", combine.cases(), ids=str)
def test_combine_values(case: combine.Case) -> None:
    rng = np.random.default_rng(1)
    node = combine.node(
        "c", heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, partials="p", output="o",
        piece_tokens=case.piece_tokens, max_pieces=CONTEXT // case.piece_tokens, window=case.window, shares=case.shares,
    )  # fmt: skip
    shape = (len(case.positions), case.heads, CONTEXT // case.piece_tokens, case.head_dim + 2)
    partials = rng.standard_normal(shape).astype(np.float32)
    partials[..., -1] = 1 + np.abs(partials[..., -1])
    partials[..., -2] *= 20
    want: list[Any] = []
    for r, position in enumerate(case.positions):
        first = max(0, position + 1 - (case.window or position + 1)) // case.piece_tokens
        last = position // case.piece_tokens
        partials[r, :, :first], partials[r, :, last + 1 :] = np.nan, np.nan
        want.append([combine.reference(partials[r, h, first : last + 1]) for h in range(case.heads)])
    binary, nodes = combine_kernel()
    out = run_node(
        binary, nodes, node, decode_rows(case.positions), weights={}, workers=2,
        tensors={"p": partials, "o": blank(len(case.positions), case.heads * case.head_dim)},
    )["o"].reshape(np.shape(want))  # fmt: skip
    assert np.abs(out - np.array(want)).max() < 1e-5


@lru_cache(maxsize=1)
def combine_kernel() -> tuple[Path, tuple[TaskNode, ...]]:
    nodes = tuple(
        combine.node(
            "c", heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, partials="p", output="o",
            piece_tokens=c.piece_tokens, max_pieces=CONTEXT // c.piece_tokens, window=c.window, shares=c.shares,
        )
        for c in combine.cases()
    )  # fmt: skip
    return build(nodes), nodes
