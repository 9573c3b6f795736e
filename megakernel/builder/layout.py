"""Layouts as values: a function from a logical coordinate to a place in memory, and the orders weights are packed in.

A shape is an int or a tuple of shapes; a stride has the same form. Coordinate digits run fastest in the first mode
(column-major order of the modes), as in the layout algebra of CuTe: an integer coordinate is split over the modes,
and each digit is multiplied by its stride. A swizzle is applied to the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from megakernel.device.hip_ring import ring_shape
from megakernel.errors import LoweringError
from megakernel.target import Target
from megakernel.tasks.task import DType

Ints = Union[int, tuple["Ints", ...]]  # noqa: UP007  (a string cannot stand beside `|` in Python 3.10)
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Swizzle:
    """XORs `bits` bits at `base` with the `bits` bits that are `shift` higher. Its own inverse."""

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise LoweringError(f"{self}: bits and base must be at least 0 and shift at least bits")

    def __call__(self, offset: int) -> int:
        mask = ((1 << self.bits) - 1) << (self.base + self.shift)
        return offset ^ ((offset & mask) >> self.shift)


@dataclass(frozen=True)
class Layout:
    """`shape` and `stride` of the same form; `swizzle` permutes the result."""

    shape: Ints
    stride: Ints
    swizzle: Swizzle | None = None

    def __post_init__(self) -> None:
        if not _congruent(self.shape, self.stride):
            raise LoweringError(f"layout shape {self.shape} and stride {self.stride} have different forms")
        if any(extent < 1 for extent, _ in self.modes()):
            raise LoweringError(f"layout shape {self.shape} has an extent under 1")

    def modes(self) -> list[tuple[int, int]]:
        """(extent, stride) of the flat modes, fastest first."""
        return list(zip(_flat(self.shape), _flat(self.stride)))

    def size(self) -> int:
        """Number of coordinates."""
        return prod(_flat(self.shape))

    def cosize(self) -> int:
        """One more than the largest offset, without the swizzle."""
        return 1 + sum((extent - 1) * stride for extent, stride in self.modes())

    def __call__(self, *coord: Ints) -> int:
        """Offset of a coordinate: one integer, or one per top-level mode, each an integer or nested as the shape is."""
        offset = _offset(coord[0] if len(coord) == 1 else tuple(coord), self.shape, self.stride)
        return self.swizzle(offset) if self.swizzle else offset

    def offsets(self) -> Iterator[int]:
        """Offsets of all integer coordinates in order."""
        return (self(i) for i in range(self.size()))

    def coalesce(self) -> Layout:
        """The same function of an integer with as few modes as possible."""
        out: list[tuple[int, int]] = []
        for extent, stride in self.modes():
            if extent == 1:
                continue
            if out and stride == out[-1][0] * out[-1][1]:
                out[-1] = (out[-1][0] * extent, out[-1][1])
            else:
                out.append((extent, stride))
        return _from_modes(out or [(1, 0)], self.swizzle)

    def compose(self, inner: Layout) -> Layout:
        """`self(inner(i))` as one layout of inner's shape. Raises LoweringError where extents do not divide."""
        if inner.swizzle:
            raise LoweringError(f"cannot compose with a swizzled inner layout {inner}")
        shape, stride = _compose(self.coalesce().modes(), inner.shape, inner.stride)
        return Layout(shape, stride, self.swizzle)

    def complement(self, size: int) -> Layout:
        """The layout of what this one skips among `size` offsets: together they reach each offset once."""
        out: list[tuple[int, int]] = []
        at = 1
        for stride, extent in sorted((s, e) for e, s in self.modes() if e > 1):
            if stride < at or stride % at:
                raise LoweringError(f"layout {self} overlaps itself or leaves no complement at stride {stride}")
            if stride > at:
                out.append((stride // at, at))
            at = stride * extent
        rest = -(-size // at)
        if rest > 1 or not out:
            out.append((rest, at))
        return _from_modes(out, None)

    def divide(self, tile: Layout) -> Layout:
        """Two modes: inside a tile, and which tile."""
        rest = tile.complement(self.size())
        both = Layout((tile.shape, rest.shape), (tile.stride, rest.stride))
        return self.compose(both)


def _congruent(a: Ints, b: Ints) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(_congruent(x, y) for x, y in zip(a, b))


def _flat(value: Ints) -> list[int]:
    return [value] if isinstance(value, int) else [x for part in value for x in _flat(part)]


def _from_modes(modes: Sequence[tuple[int, int]], swizzle: Swizzle | None) -> Layout:
    if len(modes) == 1:
        return Layout(modes[0][0], modes[0][1], swizzle)
    return Layout(tuple(e for e, _ in modes), tuple(s for _, s in modes), swizzle)


def _offset(coord: Ints, shape: Ints, stride: Ints) -> int:
    if isinstance(shape, int) and isinstance(stride, int):
        if not isinstance(coord, int):
            raise LoweringError(f"coordinate {coord} is deeper than shape {shape}")
        return coord * stride
    assert isinstance(shape, tuple) and isinstance(stride, tuple)
    if isinstance(coord, tuple):
        if len(coord) != len(shape):
            raise LoweringError(f"coordinate {coord} does not fit shape {shape}")
        return sum(_offset(c, s, d) for c, s, d in zip(coord, shape, stride))
    total = 0
    for index, (s, d) in enumerate(zip(shape, stride)):
        extent = prod(_flat(s))
        last = index == len(shape) - 1
        total += _offset(coord if last else coord % extent, s, d)
        coord //= extent
    return total


def _compose(outer: Sequence[tuple[int, int]], shape: Ints, stride: Ints) -> tuple[Ints, Ints]:
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        parts = [_compose(outer, s, d) for s, d in zip(shape, stride)]
        return tuple(p[0] for p in parts), tuple(p[1] for p in parts)
    assert isinstance(shape, int) and isinstance(stride, int)
    out: list[tuple[int, int]] = []
    left, skip = shape, stride
    for index, (extent, step) in enumerate(outer):
        last = index == len(outer) - 1
        if left == 1 or skip == 0:
            break
        if not last and skip >= extent:
            if skip % extent:
                raise LoweringError(f"stride {skip} does not divide by extent {extent} of the outer layout")
            skip //= extent
            continue
        if not last and extent % skip:
            raise LoweringError(f"extent {extent} of the outer layout does not divide by stride {skip}")
        take = left if last else min(left, extent // skip)
        if left % take:
            raise LoweringError(f"extent {left} does not divide by {take} of the outer layout")
        out.append((take, step * skip))
        left, skip = left // take, 1
    if left > 1:  # stride 0, or nothing was left of the outer layout
        out.append((left, 0))
    if not out:
        out = [(shape, 0)]
    return out[0] if len(out) == 1 else (tuple(e for e, _ in out), tuple(d for _, d in out))


# ---------------------------------------------------------------------------------------------- bank conflicts
def bank_conflicts(
    layout: Layout,
    access: Sequence[int],
    element_bytes: int,
    vector: int = 1,
    banks: int = 32,
    bank_bytes: int = 4,
) -> int:
    """Extra passes that one access of a group of lanes needs. 0 is conflict-free.

    `access`: the integer coordinate of each lane, in lane order; a lane reads `vector` elements from there, contiguous
    in memory. Lanes are served in groups that together ask for at most `banks * bank_bytes` bytes; a pass gives
    each bank one word, and lanes that ask for the same word share it.
    """
    lane_bytes = element_bytes * vector
    group = max(1, banks * bank_bytes // max(lane_bytes, bank_bytes))
    extra = 0
    for start in range(0, len(access), group):
        words: dict[int, set[int]] = {}
        for coord in access[start : start + group]:
            first = layout(coord) * element_bytes
            for word in range(first // bank_bytes, -(-(first + lane_bytes) // bank_bytes)):
                words.setdefault(word % banks, set()).add(word)
        extra += max(len(w) for w in words.values()) - 1
    return extra


def find_swizzle(
    layout: Layout,
    accesses: Sequence[Sequence[int]],
    element_bytes: int,
    vector: int = 1,
    banks: int = 32,
    bank_bytes: int = 4,
) -> Swizzle:
    """The smallest swizzle with the fewest conflicts over all accesses; it never splits a lane's vector.

    Swizzle(0, ...) means that the plain layout is already the best.
    """

    def conflicts(swizzle: Swizzle) -> int:
        trial = Layout(layout.shape, layout.stride, swizzle)
        return sum(bank_conflicts(trial, a, element_bytes, vector, banks, bank_bytes) for a in accesses)

    lowest = max(0, (vector - 1).bit_length())
    top = max(1, (layout.cosize() - 1).bit_length())
    tries = [Swizzle(0, lowest, 0)]
    for bits in range(1, 6):
        for base in range(lowest, top):
            tries += [Swizzle(bits, base, shift) for shift in range(bits, top - base - bits + 1)]
    best, fewest = tries[0], conflicts(tries[0])
    for swizzle in tries[1:]:
        if fewest == 0:
            break
        found = conflicts(swizzle)
        if found < fewest:
            best, fewest = swizzle, found
    return best


# ---------------------------------------------------------------------------------------------- packed weights
MAX_UNIT = 1024  # columns of the longest unit a stage carries


@dataclass(frozen=True)
class PackedLayout:
    """A matrix [n, k] in the order it is read: `layout(row, column)` is the element's index.

    Rows are padded with zeros to `n_padded`, columns to `k_padded`. Tiles of `tile_n` rows follow one another, and
    in a tile units of `k_unit` columns, each contiguous.
    """

    n: int
    k: int
    n_padded: int
    k_padded: int
    tile_n: int
    k_unit: int
    dtype: DType
    layout: Layout

    @property
    def elements(self) -> int:
        return self.n_padded * self.k_padded

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.bytes

    @property
    def tiles(self) -> int:
        return self.n_padded // self.tile_n

    @property
    def unit_bytes(self) -> int:
        """One unit of one tile: a contiguous copy."""
        return self.tile_n * self.k_unit * self.dtype.bytes


def weight_layout(target: Target, dtype: DType | str, n: int, k: int) -> PackedLayout:
    """The packed order of a matrix [n, k] on that target. Raises LoweringError for an empty matrix."""
    kind = DType(dtype)
    if n < 1 or k < 1:
        raise LoweringError(f"a weight needs at least one row and one column, got [{n}, {k}]")
    if target.backend == "hip":
        return _vectors(target, kind, n, k)
    return _fragments(target.tile_n, kind, n, k) if target.backend == "cuda" else _columns(target.tile_n, kind, n, k)


def _columns(tile_n: int, dtype: DType, n: int, k: int) -> PackedLayout:
    """[tiles][k / pair][tile_n][pair]: a vector register holds one column (pair 1) or two (16-bit types, pair 2)."""
    pair = 1 if dtype is DType.F32 else 2
    tiles, columns = -(-n // tile_n), -(-k // 2) * 2
    layout = Layout(((tile_n, tiles), (pair, columns // pair)), ((pair, tile_n * columns), (1, tile_n * pair)))
    return PackedLayout(n, k, tiles * tile_n, columns, tile_n, columns, dtype, layout)


def _fragments(tile_n: int, dtype: DType, n: int, k: int) -> PackedLayout:
    """Operand order of matrix cores with 8 weight rows.

    Of every 32 columns the operands of two steps of 16, the first four and the last four of each 8 columns: the inner
    order is permuted the same way for activations and weights. An operand of 16-bit elements is 8 rows of 32 bytes,
    whose halves change places in rows 4 to 7: as the units that multiply for four warps together want it in shared
    memory, and where a warp finds the 8 bytes of each lane without a bank conflict.
    """
    if tile_n != 8:
        raise LoweringError(f"fragment order has tiles of 8 rows, got {tile_n}")
    units = -(-k // MAX_UNIT)
    unit = -(-k // (32 * units)) * 32
    tiles, columns = -(-n // 8), unit * units
    layout = Layout(
        ((8, tiles), (4, 2, 4, columns // 32)), ((16, 8 * columns), (1, 128, 4, 256)), swizzle=Swizzle(1, 3, 3)
    )
    return PackedLayout(n, k, tiles * 8, columns, 8, unit, dtype, layout)


def _vectors(target: Target, dtype: DType, n: int, k: int) -> PackedLayout:
    """Operand order of matrix cores with 16 weight rows, in units that fit a stage of the target's ring.

    [k / group][16][group] with groups of 16 bytes: for every 32 columns a lane of each matrix instruction finds the
    columns that it needs of its row in whole groups, and lanes side by side read groups side by side.
    """
    if target.tile_n != 16:
        raise LoweringError(f"operand order has tiles of 16 rows, got {target.tile_n}")
    most = ring_shape(target).stage_bytes // (16 * dtype.bytes)
    units = -(-k // most)
    unit = -(-k // (32 * units)) * 32
    tiles, columns, group = -(-n // 16), unit * units, 16 // dtype.bytes
    layout = Layout(((16, tiles), (group, columns // group)), ((group, 16 * columns), (1, 16 * group)))
    return PackedLayout(n, k, tiles * 16, columns, 16, unit, dtype, layout)


def page_layouts(target: Target, dtype: DType, head_dim: int, page_tokens: int) -> tuple[Array, Array]:
    """Where keys and values are in a page of one KV head: element index of (token, dim), each [page_tokens, head_dim].

    As `tile_index` of the target's device half orders the two tiles of a page, or its matrix cores their operands."""
    d, t = head_dim, page_tokens
    if target.backend == "cuda":
        keys = Layout(((8, t // 8), (8, 4, d // 32)), ((32, 8 * d), (1, 8, 256)))
        values = Layout(((2, 4, 4, t // 32), (8, d // 8)), ((1, 8, 2, 32 * d), (32, 256)))
    else:
        of_keys, of_values = _stack(target, dtype, t), _stack(target, dtype, d)
        keys = Layout((t, (of_keys, d // of_keys)), (of_keys, (1, t * of_keys)))
        values = Layout(((of_values, t // of_values), d), ((1, d * of_values), of_values))
    return _grid(keys), _grid(values) + d * t


def _stack(target: Target, dtype: DType, columns: int) -> int:
    """Consecutive elements of one column that are side by side in a tile of so many columns, see `tile_index`."""
    if target.backend == "hip" and columns % 16 == 0:
        return 4 if dtype is DType.F32 else 8
    return 4 // dtype.bytes


def _grid(layout: Layout) -> Array:
    """Offsets of a layout of two modes, [first, second]."""
    rows, columns = (np.array(list(Layout(s, d).offsets())) for s, d in _axes(layout))
    return np.asarray(rows[:, None] + columns[None, :])


def pack(packed: PackedLayout, matrix: Array) -> Array:
    """The elements of `matrix` [n, k] in packed order, padding zero; flat, of the same dtype.

    Raises LoweringError when shape or element size is not the layout's.
    """
    if matrix.shape != (packed.n, packed.k) or matrix.itemsize != packed.dtype.bytes:
        raise LoweringError(
            f"pack: expected [{packed.n}, {packed.k}] of {packed.dtype.bytes}-byte elements, got "
            f"{list(matrix.shape)} of {matrix.itemsize}-byte elements"
        )
    out = np.empty(packed.elements, matrix.dtype)
    raw, source = _bits(out), _bits(np.ascontiguousarray(matrix))
    per_tile = packed.tile_n * packed.k_padded
    step = max(1, (1 << 20) // (per_tile * packed.dtype.bytes))  # tiles at a time: what the caches hold
    for first in range(0, packed.tiles, step):
        last = min(packed.tiles, first + step)
        rows = _padded(packed, source[first * packed.tile_n : last * packed.tile_n], last - first)
        piece, order = _transposed(packed, rows, last - first)
        target = raw[first * per_tile : last * per_tile].view(piece.dtype)
        np.copyto(target.reshape([piece.shape[i] for i in order]), piece.transpose(order))
        _swizzle(packed.layout.swizzle, raw[first * per_tile : last * per_tile])
    return out


def unpack(packed: PackedLayout, data: Array) -> Array:
    """The matrix [n, k] that `pack` was given."""
    if data.size != packed.elements:
        raise LoweringError(f"unpack: expected {packed.elements} elements, got {data.size}")
    blank = np.empty((packed.n_padded, packed.k_padded), _bits(data).dtype)
    piece, order = _transposed(packed, blank, packed.tiles)
    plain = _bits(np.ascontiguousarray(data).reshape(-1))
    if packed.layout.swizzle:
        plain = plain.copy()
        _swizzle(packed.layout.swizzle, plain)
    flat = plain.view(piece.dtype)
    piece.transpose(order)[...] = flat.reshape([piece.shape[i] for i in order])
    return np.ascontiguousarray(blank[: packed.n, : packed.k]).view(data.dtype)


def _swizzle(swizzle: Swizzle | None, raw: Array) -> None:
    """Puts the elements of whole periods where the swizzle has them."""
    if not swizzle or not swizzle.bits:
        return
    groups = raw.reshape(-1, 1 << (swizzle.shift + swizzle.bits), 1 << swizzle.base)
    within = Swizzle(swizzle.bits, 0, swizzle.shift)
    moved = [i for i in range(groups.shape[1]) if within(i) != i]
    groups[:, moved] = groups[:, [within(i) for i in moved]]


def interleave_rows(gate: Array, up: Array, tile_n: int) -> Array:
    """Rows of two matrices [n, k] in turn: of each `tile_n` rows the first half is of `gate`, the second of `up`.

    A last part tile is padded with zero rows.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or tile_n % 2:
        raise LoweringError(
            f"interleave_rows: expected two matrices of one shape and dtype and an even tile, got {list(gate.shape)} "
            f"{gate.dtype}, {list(up.shape)} {up.dtype}, tile {tile_n}"
        )
    half = tile_n // 2
    n, k = gate.shape
    tiles, whole = -(-n // half), n // half
    out = np.empty((tiles, 2, half, k), gate.dtype)
    for side, source in enumerate((gate, up)):
        out[:whole, side] = source[: whole * half].reshape(whole, half, k)
        if whole < tiles:
            out[whole, side] = np.zeros((), gate.dtype)
            out[whole, side, : n - whole * half] = source[whole * half :]
    return out.reshape(tiles * tile_n, k)


_RAW: dict[int, type[np.generic]] = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def _bits(array: Array) -> Array:
    """The same memory as unsigned integers, so that no element type needs support of its own."""
    return array.view(_RAW[array.itemsize])


def _padded(packed: PackedLayout, rows: Array, tiles: int) -> Array:
    """Those rows with the padding. Rows are a cache line longer than they need be: a stride that is a power of two
    would put a whole column into a few lines of the cache."""
    out = np.zeros((tiles * packed.tile_n, packed.k_padded + 64 // rows.itemsize), rows.dtype)[:, : packed.k_padded]
    out[: rows.shape[0], : rows.shape[1]] = rows
    return out


def _transposed(packed: PackedLayout, rows: Array, tiles: int) -> tuple[Array, list[int]]:
    """A view of row-major `rows` with one axis per mode of the layout, and the order of axes in memory.

    Innermost modes that are contiguous on both sides become one wide element.
    """
    row_modes, column_modes = (list(reversed(Layout(s, d).modes())) for s, d in _axes(packed.layout))
    row_modes[0] = (tiles, row_modes[0][1])
    extents = [e for e, _ in row_modes + column_modes]
    strides = [d for _, d in row_modes + column_modes]
    view = rows.reshape(extents)
    order = sorted(range(len(extents)), key=lambda i: -strides[i])
    wide = extents[-1] * rows.itemsize
    if strides[-1] == 1 and wide in _RAW and extents[-1] > 1:
        view = view.view(_RAW[wide])
    return view, order


def _axes(layout: Layout) -> list[tuple[Ints, Ints]]:
    assert isinstance(layout.shape, tuple) and isinstance(layout.stride, tuple)
    return list(zip(layout.shape, layout.stride))
