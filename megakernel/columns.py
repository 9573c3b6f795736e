"""Long columns of whole numbers as text that JSON can hold: a timeline of a GPU has millions of events.

A packed column is "kind:base64", of what zlib makes of the differences between neighbours (modulo 2**64), of as many
bytes as the largest needs, first the lowest byte of all, then the next.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL = 6


def pack(column: npt.NDArray[Any]) -> str:
    """Any integers."""
    values = column.astype(np.int64)
    steps = np.diff(values, prepend=np.zeros(1, np.int64))
    width = next(w for w in (1, 2, 4, 8) if not len(steps) or _fits(steps, w))
    planes = steps.astype(f"<i{width}").view(np.uint8).reshape(-1, width).T
    return f"i{width}:" + base64.b64encode(zlib.compress(planes.tobytes(), LEVEL)).decode()


def unpack(text: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """What `pack` was given. Raises ValueError for anything else."""
    kind, _, data = text.partition(":")
    if kind not in ("i1", "i2", "i4", "i8"):
        raise ValueError(f"a packed column of kind {kind[:8]!r}")
    width = int(kind[1])
    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(data, validate=True)), np.uint8)
    except (zlib.error, binascii.Error) as e:
        raise ValueError(f"a packed column that is damaged: {e}") from e
    steps = planes.reshape(width, -1).T.copy().view(f"<i{width}").ravel()
    return np.cumsum(steps, dtype=np.int64).astype(dtype)


def _fits(values: npt.NDArray[np.int64], width: int) -> bool:
    info = np.iinfo(f"<i{width}")
    return bool(values.min() >= info.min and values.max() <= info.max)
