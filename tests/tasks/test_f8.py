"""8-bit pages on the CPU device: every code, every edge of rounding, and the bits of wider pages of those values."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from megakernel.tasks import attention, f8
from megakernel.tasks.attention import Case
from megakernel.tasks.task import DType, TaskNode

from .harness import Array, blank, build, rounded, run_node
from .test_attention import CONTEXT, PAGE, Model, node_of, rows_of
from .test_attention import run as run_case

DIM = 64
PLAIN = Case(((0, 16),), 3, 1, DIM, DType.F8, rope=False)  # a key is stored as it comes
ALONE = replace(PLAIN, heads=1, window=1)  # each row sees its own value alone
CODES = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
NUMBERS = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def test_codes_are_rounded_as_in_ml_dtypes() -> None:
    """Each code, what lies halfway to the next, and the floats beside that."""
    edges = edge_values()
    vectors = np.concatenate([np.full((len(edges), 1), 448, np.float32), edges[:, None]], 1)
    codes, exponents = f8.encode(vectors)
    want = np.where(np.abs(edges) > 448, np.copysign(448, edges), edges).astype(ml_dtypes.float8_e4m3fn)
    assert (exponents == 127).all() and codes[:, 1].tobytes() == want.tobytes()
    assert set(codes[:, 1]) == set(CODES)
    assert f8.decode(codes, exponents)[:, 1].tobytes() == want.astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("largest", "exponent", "code"),
    [
        (0.0, 10, 0x00), (1e-45, 10, 0x00), (2.0**-126, 10, 0x01), (448 * 2.0**-117, 10, 0x7E),
        (464 * 2.0**-117, 10, 0x7E), (464.0001 * 2.0**-117, 11, 0x77), (1.0, 119, 0x78), (448.0, 127, 0x7E),
        (464.0, 127, 0x7E), (464.0001, 128, 0x77), (3.4e38, 246, 0x7E),
        (np.inf, 255, 0x00), (-np.inf, 255, 0x00), (np.nan, 255, 0x00),
    ],
)  # fmt: skip
def test_exponents(largest: float, exponent: int, code: int) -> None:
    codes, exponents = f8.encode(np.array([0.0, largest], np.float32))
    assert (int(exponents), int(codes[1])) == (exponent, code)
    values = f8.decode(codes, exponents)
    assert np.isnan(values).all() if exponent == 255 else np.isfinite(values).all()


def test_values_are_bfloat16_and_encode_to_the_same_bytes() -> None:
    rng = np.random.default_rng(1)
    vectors = random_vectors(rng, 4000)
    codes, exponents = f8.encode(vectors)
    values = f8.decode(codes, exponents)
    assert values.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes() == values.tobytes()
    assert np.abs(values[values != 0]).min() >= 2.0**-126
    again = f8.encode(values)
    assert again[0].tobytes() == codes.tobytes() and again[1].tobytes() == exponents.tobytes()
    top = np.abs(vectors).max(-1, keepdims=True)
    inside = (top[:, 0] > 2.0**-100) & (top[:, 0] < 3e38)
    error = np.abs(values - vectors)[inside] / np.maximum(np.abs(vectors), top * 2.0**-13)[inside]
    assert error.max() <= 1 / 16


def edge_values() -> Array:
    """Codes, midpoints of neighbours and the floats next to these, of both signs."""
    positive = np.sort(NUMBERS[NUMBERS > 0])
    middles = np.concatenate([[positive[0] / 2], (positive[1:] + positive[:-1]) / 2, [464.0]]).astype(np.float32)
    near = np.concatenate([np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(1e9))[:-1]])
    near = near.astype(np.float32)
    return np.concatenate([NUMBERS, near, -near])


def random_vectors(rng: np.random.Generator, count: int) -> Array:
    """Of every size that a float32 may have, with elements far below the largest."""
    sizes = np.exp2(rng.uniform(-140, 127.9, (count, 1)))
    return (rng.standard_normal((count, DIM)) * np.exp2(-rng.exponential(4, (count, DIM))) / 8 * sizes).astype(
        np.float32
    )


@lru_cache(maxsize=1)
def kernel() -> tuple[Path, tuple[TaskNode, ...]]:
    nodes = tuple(node_of(c) for c in (*(replace(PLAIN, kv_dtype=t) for t in (DType.F32, DType.BF16, DType.F8)), ALONE))
    return build(nodes), nodes


def stored(vectors: Array) -> tuple[Array, Array, Array]:
    """Codes [16, 2, n] and exponents [16, 2] that the kernel makes of keys and values [16, 2, n], and what rows that
    see one value each find there."""
    binary, nodes = kernel()
    qkv = np.concatenate([np.zeros((16, DIM), np.float32), vectors.reshape(16, 2 * DIM)], 1)
    size = attention.unit_bytes(PAGE, DIM, DType.F8)
    out = run_node(
        binary, nodes, node_of(ALONE), rows_of(ALONE), weights={}, page_tokens=PAGE,
        tensors={"qkv": qkv, "p": blank(16, 1, CONTEXT // ALONE.piece_tokens, DIM + 2)},
        extra={"kv": np.full(2 * size, 0xFF, np.uint8), "page_table": np.zeros((4, CONTEXT // PAGE), np.uint32)},
        settings={"kv_layer_stride": size},
    )  # fmt: skip
    page, half = out["kv"][size:], PAGE * DIM
    keys = page[:half].reshape(DIM // 4, PAGE, 4).transpose(1, 0, 2).reshape(PAGE, DIM)
    values = page[half : 2 * half].reshape(PAGE // 4, DIM, 4).transpose(0, 2, 1).reshape(PAGE, DIM)
    exponents = page[2 * half :].reshape(2, PAGE)
    assert (page.reshape(-1)[2 * half :].reshape(2, PAGE)[:, 16:] == 0xFF).all(), "tokens that are not there"
    return np.stack([keys, values], 1)[:16], exponents.T[:16], out["p"][:, 0, 0, :DIM]


def test_the_kernel_stores_the_same_codes() -> None:
    edges = edge_values()
    edges = np.pad(edges, (0, -len(edges) % (DIM - 1))).reshape(-1, DIM - 1)
    edges = np.concatenate([np.full((len(edges), 1), 448, np.float32), edges], 1)
    tops = np.zeros((16, DIM), np.float32)
    tops[:, 5] = [
        0,
        1e-45,
        2.0**-126,
        464 * 2.0**-117,
        466 * 2.0**-117,
        464,
        465,
        3.4e38,
        2.0**120,
        1,
        -1,
        *([7.0] * 5),
    ]
    tops[11:16, 9] = [np.inf, -np.inf, np.nan, -0.0, -1e-30]
    vectors = np.concatenate([edges, tops, random_vectors(np.random.default_rng(2), 64)])
    vectors = np.pad(vectors, ((0, -len(vectors) % 32), (0, 0))).reshape(-1, 16, 2, DIM)
    for part in vectors:
        codes, exponents, seen = stored(part)
        want = f8.encode(part)
        assert codes.tobytes() == want[0].tobytes() and exponents.tobytes() == want[1].tobytes()
        values = f8.decode(codes, exponents)[:, 1]
        good = np.isfinite(values).all(-1) & (exponents[:, 0] != f8.NOT_FINITE)
        assert (seen[good] == values[good]).all() and np.isnan(seen[~good]).any(-1).all()


@pytest.mark.parametrize("wide", [DType.F32, DType.BF16])
@pytest.mark.parametrize("slots", [((0, 16),), ((5, 1), (62, 9), (130, 1), (0, 5))])
def test_results_are_those_of_wider_pages(wide: DType, slots: tuple[tuple[int, int], ...]) -> None:
    """Attention over 8-bit pages gives the bits that it gives over wider pages which hold the same values."""
    case = replace(PLAIN, slots=slots)
    model = Model(case)
    kv = model.qkv[..., 3 * DIM :].reshape(*model.qkv.shape[:2], 2, DIM)
    kv *= np.exp2(np.random.default_rng(3).integers(-6, 3, kv.shape[:3]))[..., None]
    rows = rows_of(case)
    got = run_case(model, rows, made=kernel())
    model.qkv[..., 3 * DIM :] = rounded(kv, DType.F8).reshape(*kv.shape[:2], 2 * DIM)
    assert run_case(model, rows, made=kernel())["p"].tobytes() == got["p"].tobytes(), "rounded once"
    model.case = replace(case, kv_dtype=wide)
    assert run_case(model, rows, made=kernel())["p"].tobytes() == got["p"].tobytes()


def test_sizes() -> None:
    assert attention.unit_bytes(32, 64, DType.F8) == 32 * (2 * 64 + 2)
    assert attention.unit_bytes(32, 64, DType.BF16) == 32 * 2 * 64 * 2
