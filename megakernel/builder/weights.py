"""Packing weights at load: checkpoint tensors into the order in which the kernel reads them.

One weight is read, packed and written at a time, large ones in slabs of whole tiles, so that host memory beyond
the device's own copy stays small. A NaN or infinity in a weight is an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.layout import interleave_rows, pack, weight_layout
from megakernel.builder.program import Manifest, PackedWeight, WeightPart
from megakernel.errors import CheckpointError
from megakernel.graph import RopeSpec
from megakernel.target import Target
from megakernel.tasks.task import DType

Array = npt.NDArray[Any]
Read = Callable[[str, str, slice], Array]  # (tensor, dtype, rows) -> [rows, cols]
Write = Callable[[int, Array], None]  # (byte offset in the weights segment, data)
Progress = Callable[[int], None]  # bytes written since the last call

SLAB_BYTES = 4 << 20


def pack_weights(
    manifest: Manifest, target: Target, read: Read, write: Write, progress: Progress | None = None
) -> None:
    """Write every weight of the program. Raises CheckpointError for a NaN, an infinity or a wrong shape."""
    for weight in manifest.weights:
        at = weight.offset
        for data in _slabs(weight, manifest, target, read):
            write(at, data)
            at += data.nbytes
            if progress:
                progress(data.nbytes)
        assert at == weight.offset + weight.bytes, (weight.name, at - weight.offset, weight.bytes)


def _slabs(weight: PackedWeight, manifest: Manifest, target: Target, read: Read) -> Iterator[Array]:
    if weight.kind in ("cos", "sin"):
        spec = RopeSpec(**manifest.rope[weight.rope])
        yield np.ascontiguousarray(spec.table(manifest.max_context)[0 if weight.kind == "cos" else 1], np.float32)
    elif weight.kind == "vector":
        yield _vector(weight, target, read)
    elif weight.kind == "table":
        yield from _table(weight, manifest.dtype, read)
    else:
        yield from _matrix(weight, manifest.dtype, target, read)


def _vector(weight: PackedWeight, target: Target, read: Read) -> Array:
    parts = [_elements(p, read) for p in weight.parts]
    if weight.kind == "vector" and weight.k and len(parts) == 2:  # bias of an interleaved matrix: k holds tile_n
        joined = interleave_rows(parts[0][:, None], parts[1][:, None], weight.k)[:, 0]
    else:
        joined = np.concatenate(parts)
    out = np.zeros(weight.bytes // 4, np.float32)
    out[: joined.size] = (joined + np.float32(weight.add)) * np.float32(weight.scale)
    return out


def _elements(part: WeightPart, read: Read) -> Array:
    if not part.tensor:
        return np.zeros(part.stop - part.start, np.float32)
    data = _finite(part.tensor, read(part.tensor, "f32", _rows(part.start, part.stop)).reshape(-1))
    return _spread(data, part.source_rows(0, part.rows(data.size))) if part.head else data


def _spread(data: Array, where: npt.NDArray[np.int64]) -> Array:
    """Rows of `data`; -1 is a row of zeros."""
    out = np.zeros((len(where), *data.shape[1:]), data.dtype)
    out[where >= 0] = data[where[where >= 0]]
    return out


def _table(weight: PackedWeight, dtype: str, read: Read) -> Iterator[Array]:
    part = weight.parts[0]
    step = max(1, SLAB_BYTES // max(1, weight.k * DType(dtype).bytes))
    for first in range(0, weight.n, step):
        yield _finite(part.tensor, read(part.tensor, dtype, slice(first, min(weight.n, first + step))))


def _matrix(weight: PackedWeight, dtype: str, target: Target, read: Read) -> Iterator[Array]:
    """Whole tiles at a time. The packed order is tile-major, so slabs of tiles follow one another."""
    tile = target.tile_n
    row_bytes = weight.k * DType(dtype).bytes
    step = max(1, SLAB_BYTES // (tile * row_bytes)) * tile
    for first in range(0, weight.n, step):
        last = min(weight.n, first + step)
        if weight.kind == "interleaved":
            gate, up = (_read_rows(weight, i, dtype, slice(first // 2, last // 2), read) for i in (0, 1))
            rows = interleave_rows(gate, up, tile)
        else:
            rows = _concatenated(weight, dtype, first, last, read)
        yield np.ascontiguousarray(pack(weight_layout(target, dtype, rows.shape[0], weight.k), rows))


def _concatenated(weight: PackedWeight, dtype: str, first: int, last: int, read: Read) -> Array:
    """Rows `[first, last)` of the parts put one under the other."""
    pieces, at = [], 0
    for i, part in enumerate(weight.parts):
        size = part.rows(part.stop - part.start)
        low, high = max(first, at), min(last, at + size)
        if low < high:
            pieces.append(_read_rows(weight, i, dtype, slice(low - at, high - at), read))
        at += size
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _read_rows(weight: PackedWeight, part: int, dtype: str, rows: slice, read: Read) -> Array:
    p = weight.parts[part]
    if p.head:
        return _ordered_rows(weight, part, dtype, rows, read)
    wanted = slice(p.start + rows.start, p.start + rows.stop)
    cols = slice(p.first_col, p.stop_col or None)
    if p.transposed:
        data = np.ascontiguousarray(_part_of(read, p.tensor, dtype, cols, wanted).T)
    else:
        data = _part_of(read, p.tensor, dtype, wanted, cols)
    head, padded = weight.col_head or 1, weight.col_padded or 1
    stored = weight.k // padded * head
    if data.shape[1] != stored:
        raise CheckpointError(f"tensor {p.tensor}: expected {stored} columns, got {data.shape[1]}")
    data = _finite(p.tensor, data)
    if head == padded:
        return data
    out = np.zeros((len(data), weight.k // padded, padded), data.dtype)
    out[:, :, :head] = data.reshape(len(data), -1, head)
    return out.reshape(len(data), weight.k)


def _part_of(read: Read, tensor: str, dtype: str, rows: slice, cols: slice) -> Array:
    """Some rows and columns; a source that has `columns` reads no more than those."""
    columns = getattr(read, "columns", None)
    if cols == slice(0, None) or columns is None:
        return read(tensor, dtype, rows)[:, cols]
    found: Array = columns(tensor, dtype, rows, cols)
    return found


def _ordered_rows(weight: PackedWeight, part: int, dtype: str, rows: slice, read: Read) -> Array:
    """The stored rows from the first to the last that are wanted are read, then put in order."""
    p = weight.parts[part]
    where = p.source_rows(rows.start, rows.stop)
    first, last = int(where[where >= 0].min(initial=p.stop)), int(where.max(initial=-1)) + 1
    plain = replace(weight, parts=(replace(p, head=0, half=0, padded=0),))
    stored = _read_rows(plain, 0, dtype, slice(min(first, last), last), read)
    return _spread(stored, np.where(where >= 0, where - first, -1))


def _finite(name: str, data: Array) -> Array:
    """`data` itself, or CheckpointError naming the first bad element."""
    if data.itemsize == 2:
        bits = data.view(np.uint16)
        exponent = np.uint16(0x7F80 if data.dtype.name == "bfloat16" else 0x7C00)
        bad = (bits & exponent) == exponent
    else:
        bad = ~np.isfinite(data)
    if bad.any():
        where = [int(i) for i in np.unravel_index(int(bad.argmax()), data.shape)]
        also = f", or the value is too large for {data.dtype.name}" if data.itemsize == 2 else ""
        raise CheckpointError(f"tensor {name} holds {data[tuple(where)]} at {where}; the checkpoint is damaged{also}")
    return data


def _rows(start: int, stop: int) -> slice:
    return slice(start, None if stop < 0 else stop)
