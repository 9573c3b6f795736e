"""Keys and values of a sequence as tensors, out of the pages of the pool and into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.layout import page_layouts
from megakernel.errors import InvalidRequest
from megakernel.runtime import NUMPY_TYPES, Runtime
from megakernel.sampling import whole_ids
from megakernel.tasks.task import DType

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Kv:
    """Keys (normed and rotated) and values of `tokens`: [layers, tokens, kv_heads, head_dim], in the pool's type.

    As the program keeps them: where a target pads a head or turns its elements round, so do these."""

    tokens: tuple[int, ...]
    keys: Array
    values: Array


def read_kv(runtime: Runtime, pages: Sequence[int], tokens: Sequence[int]) -> Kv:
    """What the pages of a sequence hold for its first tokens, all of which have been computed."""
    m, kind, keys_at, values_at = _sizes(runtime)
    shape = (m.kv_layers, len(tokens), runtime.kv_heads, m.head_dim)
    keys, values = np.empty(shape, kind), np.empty(shape, kind)
    for index in range(-(-len(tokens) // m.page_tokens)):
        first = index * m.page_tokens
        count = min(m.page_tokens, len(tokens) - first)
        for layer in range(m.kv_layers):
            units = np.ascontiguousarray(runtime.page(layer, pages[index])).view(kind)
            keys[layer, first : first + count] = units[:, keys_at[:count]].transpose(1, 0, 2)
            values[layer, first : first + count] = units[:, values_at[:count]].transpose(1, 0, 2)
    return Kv(tuple(tokens), keys, values)


def write_kv(runtime: Runtime, kv: Kv, places: Sequence[tuple[int, int]]) -> None:
    """Fill pages that nobody uses: `places` are (index of the page in the sequence, page)."""
    m, kind, keys_at, values_at = _sizes(runtime)
    for index, page in places:
        first = index * m.page_tokens
        count = min(m.page_tokens, len(kv.tokens) - first)
        for layer in range(m.kv_layers):
            units = np.zeros((runtime.kv_heads, m.kv_unit_bytes // kind.itemsize), kind)
            units[:, keys_at[:count]] = kv.keys[layer, first : first + count].transpose(1, 0, 2)
            units[:, values_at[:count]] = kv.values[layer, first : first + count].transpose(1, 0, 2)
            runtime.set_page(layer, page, units)


def check_kv(runtime: Runtime, kv: Kv) -> None:
    """Raise InvalidRequest when the tensors are not of this program's shape and type, or hold what is no number: that
    would be a fault for every request beside the one that reads them."""
    m, kind, _, _ = _sizes(runtime)
    if not isinstance(kv, Kv):
        raise InvalidRequest(f"kv: expected a Kv, as `Engine.kv` gives it, got {kv!r:.80}")
    ids = whole_ids(kv.tokens, m.vocab, "kv")
    if not 1 <= len(ids) <= m.max_context:
        raise InvalidRequest(f"kv: expected 1 to {m.max_context} tokens, got {len(ids)}")
    shape = (m.kv_layers, len(ids), runtime.kv_heads, m.head_dim)
    for name, array in (("keys", kv.keys), ("values", kv.values)):
        if not isinstance(array, np.ndarray):
            raise InvalidRequest(f"kv: expected {name} as a numpy array, got {type(array).__name__}")
        if array.shape != shape or array.dtype != kind:
            raise InvalidRequest(
                f"kv: expected {name} of shape {list(shape)} (layers, tokens, kv_heads, head_dim) in {m.kv_dtype}, got "
                f"{list(array.shape)} {array.dtype}"
            )
        if not np.isfinite(array).all():
            at = np.argwhere(~np.isfinite(array))[0].tolist()
            raise InvalidRequest(f"kv: expected finite {name}, got {array[tuple(at)]} at {at}")


def _sizes(runtime: Runtime) -> tuple[Any, np.dtype[Any], Array, Array]:
    m = runtime.manifest
    layouts = page_layouts(runtime.target, DType(m.kv_dtype), m.head_dim, m.page_tokens)
    return m, np.dtype(NUMPY_TYPES[m.kv_dtype]), *layouts
