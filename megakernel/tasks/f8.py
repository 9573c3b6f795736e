"""Vectors of 8-bit floats: e4m3 numbers and one power of two, as the device halves store a token's key or value.

    value[i] = code[i] * 2^(exponent - 127)

code: e4m3 without infinities (sign, 4 bits of exponent with bias 7, 3 of fraction; largest 448), rounded to nearest
even. exponent: one byte, the smallest for which the largest element rounds to at most 448, from LEAST to MOST: so
every value is a bfloat16, and none of them a denormal one. What is larger than 448 * 2^(MOST - 127) becomes that. A
vector with an element that is no finite number has exponent NOT_FINITE and codes 0, and all its values are NaN.
Encoding what was decoded gives the same bytes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LEAST, MOST, NOT_FINITE = 10, 246, 255
_TIE = 0x680000  # fraction bits of 464: halfway between 448 and what would come next, and rounds to 448


def encode(x: Array) -> tuple[Array, Array]:
    """Codes uint8 [..., n] and exponents uint8 [...] of float vectors [..., n]."""
    x = np.ascontiguousarray(x, np.float32)
    top = (x.view(np.uint32) & 0x7FFFFFFF).max(-1)
    exponents = np.clip(((top + np.uint32(0x7FFFFF - _TIE)) >> 23).astype(np.int64) - 8, LEAST, MOST)
    finite = top < 0x7F800000
    scaled = np.where(finite[..., None], x, 0).astype(np.float64) * np.exp2(127.0 - exponents)[..., None]
    codes = np.clip(scaled, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes = np.where(finite[..., None], codes, np.uint8(0))
    return codes, np.where(finite, exponents, NOT_FINITE).astype(np.uint8)


def decode(codes: Array, exponents: Array) -> Array:
    """The values, float32 [..., n]."""
    factor = np.exp2(exponents.astype(np.float64) - 127)
    factor = np.where(exponents == NOT_FINITE, np.nan, factor)[..., None]
    with np.errstate(invalid="ignore"):
        return np.asarray(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * factor, np.float32)


def rounded(x: Array) -> Array:
    """x [..., n] as stored and read again, float32."""
    return decode(*encode(x))
