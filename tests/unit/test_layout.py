"""Layout algebra, bank conflicts and the packed order of weights."""

from __future__ import annotations

import math
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.builder.layout import (
    Layout,
    PackedLayout,
    Swizzle,
    bank_conflicts,
    find_swizzle,
    interleave_rows,
    pack,
    unpack,
    weight_layout,
)
from megakernel.errors import LoweringError
from megakernel.target import TARGETS

NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
SHAPES = [(1, 1), (8, 32), (13, 50), (64, 64), (33, 1100), (5, 2080)]
powers = st.integers(0, 3).map(lambda e: 2**e)


def compact(extents: list[int], order: list[int]) -> Layout:
    """A layout that reaches every offset once, its modes from the fastest in `order`."""
    stride, at = [0] * len(extents), 1
    for mode in order:
        stride[mode], at = at, at * extents[mode]
    return Layout(tuple(extents), tuple(stride))


compacts = st.lists(powers, min_size=2, max_size=4).flatmap(
    lambda e: st.permutations(range(len(e))).map(lambda order: compact(e, list(order)))
)


def test_coordinates() -> None:
    layout = Layout(((2, 3), 4), ((12, 4), 1))
    assert layout.size() == 24 and layout.cosize() == 24
    assert layout((1, 2), 3) == layout(((1, 2), 3)) == layout(5, 3) == layout(5 + 6 * 3) == 12 + 8 + 3
    assert sorted(layout.offsets()) == list(range(24))
    with pytest.raises(LoweringError, match="does not fit"):
        layout(1, 2, 3)
    with pytest.raises(LoweringError, match="deeper"):
        layout((1, 2), (3, 4))
    with pytest.raises(LoweringError, match="different forms"):
        Layout((2, 3), 1)
    with pytest.raises(LoweringError, match="under 1"):
        Layout((2, 0), (1, 1))


@settings(max_examples=60, deadline=None)
@given(compacts)
def test_coalesce_is_the_same_function(layout: Layout) -> None:
    small = layout.coalesce()
    assert list(small.offsets()) == list(layout.offsets())
    assert len(small.modes()) <= len(layout.modes())


@settings(max_examples=100, deadline=None)
@given(compacts, st.data())
def test_compose_is_composition(outer: Layout, data: st.DataObject) -> None:
    size = outer.size()
    extent = data.draw(st.sampled_from([e for e in range(1, size + 1) if size % e == 0]))
    stride = data.draw(st.sampled_from([s for s in range(1, size // extent + 1) if (size // extent) % s == 0]))
    inner = Layout(extent, stride)
    both = outer.compose(inner)
    assert [both(i) for i in range(extent)] == [outer(inner(i)) for i in range(extent)]
    nested = Layout((extent, size // (extent * stride)), (stride, extent * stride))
    assert [outer.compose(nested)(i) for i in range(nested.size())] == [outer(nested(i)) for i in range(nested.size())]


def test_compose_names_what_does_not_divide() -> None:
    with pytest.raises(LoweringError, match="does not divide"):
        Layout((6, 2), (1, 12)).compose(Layout(4, 4))
    with pytest.raises(LoweringError, match="swizzled inner"):
        Layout(4, 1).compose(Layout(4, 1, Swizzle(1, 0, 1)))
    assert Layout(4, 2).compose(Layout(3, 0)) == Layout(3, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(powers, powers), min_size=1, max_size=3), powers)
def test_complement_reaches_the_rest(pairs: list[tuple[int, int]], more: int) -> None:
    shape, stride, at = [], [], 1
    for extent, gap in pairs:
        shape.append(extent)
        stride.append(at * gap)
        at *= gap * extent
    layout = Layout(tuple(shape), tuple(stride))
    rest = layout.complement(at * more)
    assert sorted(a + b for a in layout.offsets() for b in rest.offsets()) == list(range(at * more))


def test_divide_splits_into_tiles() -> None:
    rows = Layout(24, 1)
    tiled = rows.divide(Layout(4, 1))
    assert [tiled(i, 2) for i in range(4)] == [8, 9, 10, 11]
    strided = Layout(24, 3).divide(Layout(4, 6))
    assert [strided(i, 0) for i in range(4)] == [0, 18, 36, 54]
    with pytest.raises(LoweringError, match="overlaps itself"):
        Layout((2, 2), (1, 1)).complement(8)


def test_swizzle_is_its_own_inverse() -> None:
    swizzle = Swizzle(3, 3, 3)
    offsets = [swizzle(i) for i in range(1024)]
    assert sorted(offsets) == list(range(1024)) and all(swizzle(o) == i for i, o in enumerate(offsets))
    with pytest.raises(LoweringError, match="shift at least bits"):
        Swizzle(3, 0, 2)


def test_bank_conflicts_of_known_accesses() -> None:
    square = Layout((32, 32), (32, 1))  # rows of 32 words
    row, column = [32 * i for i in range(32)], list(range(32))
    assert bank_conflicts(square, row, 4) == 0  # along a row: one word of each bank
    assert bank_conflicts(square, column, 4) == 31  # down a column: one bank
    assert bank_conflicts(Layout((32, 32), (33, 1)), column, 4) == 0  # a padded row
    assert bank_conflicts(square, [0] * 32, 4) == 0  # one word for all
    assert bank_conflicts(Layout(32, 1), list(range(32)), 2) == 0  # two lanes share a word
    assert bank_conflicts(Layout(256, 1), list(range(0, 256, 8)), 2, vector=8) == 0  # 16 bytes a lane, in four passes
    assert bank_conflicts(Layout((8, 64), (64, 1)), list(range(8)), 2, vector=8) == 7


def test_a_search_finds_a_conflict_free_swizzle() -> None:
    square = Layout((32, 32), (32, 1))
    column, row = list(range(32)), [32 * i for i in range(32)]
    swizzle = find_swizzle(square, [column, row], 4)
    fixed = Layout(square.shape, square.stride, swizzle)
    assert swizzle.bits == 5 and sorted(fixed.offsets()) == list(range(1024))
    assert bank_conflicts(fixed, column, 4) == bank_conflicts(fixed, row, 4) == 0
    rows = Layout((8, 64), (64, 1))  # 8 lanes read 16 bytes down 8 rows of 128 bytes
    found = find_swizzle(rows, [list(range(8))], 2, vector=8)
    assert found == Swizzle(3, 3, 3)
    assert find_swizzle(square, [row], 4).bits == 0


@pytest.mark.parametrize("target", ["cpu-avx512", "cpu-generic", "sm_90a", "gfx942"])
@pytest.mark.parametrize("dtype", sorted(NUMPY))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packed_order_is_the_layout(target: str, dtype: str, n: int, k: int) -> None:
    packed = weight_layout(TARGETS[target], dtype, n, k)
    matrix = np.random.default_rng(n * k).standard_normal((n, k)).astype(NUMPY[dtype])
    data = pack(packed, matrix)
    assert data.shape == (packed.elements,) and data.dtype == matrix.dtype and data.nbytes == packed.bytes
    index = positions(packed)
    assert (np.sort(index.ravel()) == np.arange(packed.elements)).all()
    full = np.zeros((packed.n_padded, packed.k_padded), matrix.dtype)
    full[:n, :k] = matrix
    assert (data[index] == full).all()
    assert packed.n_padded % packed.tile_n == 0 and packed.k_padded % packed.k_unit == 0
    assert packed.n_padded - n < packed.tile_n and packed.tiles * packed.tile_n == packed.n_padded
    back = unpack(packed, data)
    assert back.dtype == matrix.dtype and (back == matrix).all()


def positions(packed: PackedLayout) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    plain, swizzle = Layout(packed.layout.shape, packed.layout.stride), packed.layout.swizzle or Swizzle(0, 0, 0)
    rows = np.array([plain(r, 0) for r in range(packed.n_padded)], np.int64)
    columns = np.array([plain(0, c) for c in range(packed.k_padded)], np.int64)
    index = rows[:, None] + columns[None, :]
    mask = ((1 << swizzle.bits) - 1) << (swizzle.base + swizzle.shift)
    return index ^ (index & mask) >> swizzle.shift


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5000), st.data())
def test_fragment_order_by_its_formula(n: int, k: int, data: st.DataObject) -> None:
    packed = weight_layout(TARGETS["sm_90a"], "bf16", n, k)
    unit, units = packed.k_unit, packed.k_padded // packed.k_unit
    assert unit % 32 == 0 and unit <= 1024 and units == math.ceil(k / 1024) and packed.k_padded >= k
    assert packed.unit_bytes == 8 * unit * 2
    row, column = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    tile, r, which, inside = row // 8, row % 8, column // unit, column % unit
    group, step, last = inside % 32 // 8, inside % 8 // 4, inside % 4
    want = ((tile * units + which) * (unit // 32) + inside // 32) * 256 + step * 128
    want += r * 16 + (group // 2 ^ r // 4) * 8 + group % 2 * 4 + last
    assert packed.layout(row, column) == want


def test_column_order_by_its_formula() -> None:
    for dtype, pair in (("f32", 1), ("bf16", 2)):
        packed = weight_layout(TARGETS["cpu-avx512"], dtype, 70, 33)
        assert (packed.n_padded, packed.k_padded) == (96, 34)
        for row, column in ((0, 0), (69, 32), (33, 5)):
            tile, r = divmod(row, 32)
            want = ((tile * (34 // pair) + column // pair) * 32 + r) * pair + column % pair
            assert packed.layout(row, column) == want


def test_slabs_of_tiles_follow_one_another() -> None:
    """Packing tiles one part at a time gives the same bytes as packing all."""
    for target in ("cpu-avx512", "sm_90a"):
        matrix = np.arange(96 * 100, dtype=np.float32).reshape(96, 100)
        whole = pack(weight_layout(TARGETS[target], "f32", 96, 100), matrix)
        parts = [pack(weight_layout(TARGETS[target], "f32", 32, 100), matrix[i : i + 32]) for i in (0, 32, 64)]
        assert (np.concatenate(parts) == whole).all()


def test_pack_keeps_every_bit() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024)  # NaN of every kind among them
    for target in ("cpu-avx512", "sm_90a"):
        packed = weight_layout(TARGETS[target], "bf16", 64, 1024)
        data = pack(packed, bits.view(ml_dtypes.bfloat16))
        assert (unpack(packed, data).view(np.uint16) == bits).all()
        assert (np.sort(data.view(np.uint16)) == bits.ravel()).all()


def test_pack_takes_views_and_refuses_other_shapes() -> None:
    packed = weight_layout(TARGETS["cpu-avx512"], "f32", 10, 6)
    matrix = np.arange(60, dtype=np.float32).reshape(6, 10).T
    assert (unpack(packed, pack(packed, matrix)) == matrix).all()
    with pytest.raises(LoweringError, match=r"expected \[10, 6\] of 4-byte elements, got \[6, 10\]"):
        pack(packed, matrix.T)
    with pytest.raises(LoweringError, match="2-byte elements"):
        pack(packed, matrix.astype(np.float16))
    with pytest.raises(LoweringError, match="elements, got 3"):
        unpack(packed, np.zeros(3, np.float32))
    with pytest.raises(LoweringError, match="at least one row"):
        weight_layout(TARGETS["cpu-avx512"], "f32", 0, 6)


def test_interleaved_rows() -> None:
    gate, up = np.full((6, 3), 1.0), np.full((6, 3), 2.0)
    out = interleave_rows(gate, up, 8)
    assert out[:, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0, 2, 2, 0, 0]
    with pytest.raises(LoweringError, match="one shape"):
        interleave_rows(gate, up[:3], 8)
    with pytest.raises(LoweringError, match="even tile"):
        interleave_rows(gate, up, 7)


@pytest.mark.alone
@pytest.mark.parametrize("target", ["cpu-avx512", "sm_90a"])
def test_packing_is_not_a_python_loop(target: str) -> None:
    """32 MB; a bound that a loaded machine meets with room, and a loop over elements misses by far."""
    packed = weight_layout(TARGETS[target], "bf16", 8192, 2048)
    matrix = np.zeros((8192, 2048), np.float16)
    start = time.perf_counter()
    pack(packed, matrix)
    assert time.perf_counter() - start < 1.5
