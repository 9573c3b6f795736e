"""A tensor as a file stores it, and how its rows become numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from megakernel.checkpoint.mapped import MappedFile
from megakernel.checkpoint.message import problem

Array = npt.NDArray[Any]

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}
"""The types that `Checkpoint.read` can return."""

ALL = slice(None)
CHUNK_VALUES = 1 << 20
"""Values decoded at a time: bounds the temporary float32 memory of a read (4 MiB)."""


@dataclass(frozen=True)
class Codec:
    """How rows are stored: `block_values` values in `block_bytes` bytes.

    `decode` maps bytes [rows, row_bytes] (uint8, contiguous) to values [rows, cols] of any float type.
    """

    name: str
    block_values: int
    block_bytes: int
    decode: Callable[[npt.NDArray[np.uint8]], Array]


def plain_codec(name: str) -> Codec:
    """The codec of an unquantised type: a reinterpretation of the bytes."""
    dtype = NUMPY_DTYPES[name]
    return Codec(name, 1, dtype.itemsize, lambda raw: raw.view(dtype))


def interleaved_rows(rows: npt.NDArray[np.int64], head_rows: int) -> npt.NDArray[np.int64]:
    """Where GGUF keeps row `rows[i]` of a q or k projection whose heads have `head_rows` rows each.

    The converter of llama.cpp stores each head as (pair, half) where Hugging Face has (half, pair):
    row h * d + s * d/2 + i lies at h * d + 2 * i + s.
    """
    half = head_rows // 2
    head, inside = np.divmod(rows, head_rows)
    return np.asarray(head * head_rows + 2 * (inside % half) + inside // half)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. A 1-d tensor is one row; more than two dimensions are rows of the last one.

    `head_rows` is not 0 for rows stored in interleaved order; `offset_value` is added to every value.
    """

    name: str
    file: MappedFile
    offset: int
    shape: tuple[int, ...]
    codec: Codec
    head_rows: int = 0
    offset_value: float = 0.0

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def flat_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.cols // self.codec.block_values * self.codec.block_bytes

    @property
    def nbytes(self) -> int:
        return self.flat_rows * self.row_bytes

    def read_flat(self, first: int, last: int, out: Array, cols: slice = ALL) -> None:
        """Decode flat rows [first, last) into `out` [last - first, cols], rounding to nearest even. `cols`: only these
        columns; where values are not in blocks, only their bytes are touched."""
        step = max(1, CHUNK_VALUES // max(1, self.cols))
        for start in range(first, last, step):
            stop = min(last, start + step)
            values = self.codec.decode(self._raw(start, stop))[:, cols]
            self._store(values, out[start - first : stop - first])
            if not self.head_rows:
                self.file.drop(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        if self.head_rows:
            self.file.drop(self.offset, self.nbytes)

    def _raw(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if self.head_rows:
            stored = self.file.view(self.offset, self.nbytes).reshape(self.flat_rows, self.row_bytes)
            return stored[interleaved_rows(np.arange(start, stop), self.head_rows)]
        count = (stop - start) * self.row_bytes
        raw = self.file.view(self.offset + start * self.row_bytes, count)
        return raw.reshape(stop - start, self.row_bytes)

    def _store(self, values: Array, out: Array) -> None:
        if values.dtype != out.dtype or self.offset_value:
            values = values.astype(np.float32, copy=False)
        if self.offset_value:
            values = values + np.float32(self.offset_value)
        try:
            with np.errstate(over="raise"):
                out[...] = values
        except FloatingPointError as error:
            raise problem(
                f"tensor {self.name}: a value is too large for {out.dtype}",
                self.file.path,
                expected=f"at most {np.finfo(np.float16).max} in f16",
                got=f"{np.nanmax(np.abs(values))}",
                todo="read it as bf16 or f32",
            ) from error
