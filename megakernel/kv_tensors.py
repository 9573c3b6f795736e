"""Keys and values of a sequence as tensors, out of the pages of the pool and into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.layout import page_layouts
from megakernel.builder.program import Manifest
from megakernel.errors import InvalidRequest
from megakernel.runtime import NUMPY_TYPES, Runtime
from megakernel.sampling import whole_ids
from megakernel.tasks import f8
from megakernel.tasks.task import DType

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Kv:
    """Keys (normed and rotated) and values of `tokens`: [layers, tokens, kv_heads, head_dim], in the pool's type; of a
    pool of f8 in bf16, which has each value exactly. Put back they give the same bytes.

    As the program keeps them: where a target pads a head or turns its elements round, so do these."""

    tokens: tuple[int, ...]
    keys: Array
    values: Array


def read_kv(runtime: Runtime, at: Sequence[int], tokens: Sequence[int]) -> Kv:
    """What the pages `at` of a sequence hold for its first tokens, all of which have been computed."""
    m, pages = runtime.manifest, _Pages.of(runtime)
    shape = (m.kv_layers, len(tokens), runtime.kv_heads, m.head_dim)
    keys, values = np.empty(shape, pages.kind), np.empty(shape, pages.kind)
    for index in range(-(-len(tokens) // m.page_tokens)):
        first = index * m.page_tokens
        count = min(m.page_tokens, len(tokens) - first)
        for layer in range(m.kv_layers):
            units = np.ascontiguousarray(runtime.page(layer, at[index]))
            for out, which in ((keys, 0), (values, 1)):
                out[layer, first : first + count] = pages.read(units, which, count).transpose(1, 0, 2)
    return Kv(tuple(tokens), keys, values)


def write_kv(runtime: Runtime, kv: Kv, places: Sequence[tuple[int, int]]) -> None:
    """Fill pages that nobody uses: `places` are (index of the page in the sequence, page)."""
    m, pages = runtime.manifest, _Pages.of(runtime)
    for index, page in places:
        first = index * m.page_tokens
        count = min(m.page_tokens, len(kv.tokens) - first)
        for layer in range(m.kv_layers):
            units = np.zeros((runtime.kv_heads, m.kv_unit_bytes), np.uint8)
            for given, which in ((kv.keys, 0), (kv.values, 1)):
                pages.write(units, which, given[layer, first : first + count].transpose(1, 0, 2))
            runtime.set_page(layer, page, units)


def check_kv(runtime: Runtime, kv: Kv) -> None:
    """Raise InvalidRequest when the tensors are not of this program's shape and type, or hold what is no number: that
    would be a fault for every request beside the one that reads them."""
    m, kind = runtime.manifest, _Pages.of(runtime).kind
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
                f"kv: expected {name} of shape {list(shape)} (layers, tokens, kv_heads, head_dim) in {_type_of(m)}, "
                f"got {list(array.shape)} {array.dtype}"
            )
        if not np.isfinite(array).all():
            at = np.argwhere(~np.isfinite(array))[0].tolist()
            raise InvalidRequest(f"kv: expected finite {name}, got {array[tuple(at)]} at {at}")


def _type_of(manifest: Manifest) -> str:
    return "bf16" if manifest.kv_dtype == DType.F8.value else manifest.kv_dtype


@dataclass(frozen=True)
class _Pages:
    """Where keys (0) and values (1) are in a page of one KV head, uint8 [kv_unit_bytes], and as what they are read."""

    kind: np.dtype[Any]
    eight: bool
    at: tuple[Array, Array]  # element of (token, dim)

    @classmethod
    def of(cls, runtime: Runtime) -> _Pages:
        m = runtime.manifest
        layouts = page_layouts(runtime.target, DType(m.kv_dtype), m.head_dim, m.page_tokens)
        return cls(np.dtype(NUMPY_TYPES[_type_of(m)]), m.kv_dtype == DType.F8.value, layouts)

    def read(self, units: Array, which: int, count: int) -> Array:
        """Of each of `units` the first tokens, [units, count, head_dim]."""
        at = self.at[which][:count]
        if not self.eight:
            return np.asarray(units.view(self.kind)[:, at])
        return f8.decode(units[:, at], units[:, self._exponents(which, count)]).astype(self.kind)

    def write(self, units: Array, which: int, given: Array) -> None:
        """Into each of `units` its first tokens, [units, tokens, head_dim]."""
        count = given.shape[1]
        at = self.at[which][:count]
        if not self.eight:
            units.view(self.kind)[:, at] = given
        else:
            units[:, at], units[:, self._exponents(which, count)] = f8.encode(given.astype(np.float32))

    def _exponents(self, which: int, count: int) -> slice:
        """They follow the codes of both: those of all keys, those of all values."""
        tokens, head_dim = self.at[0].shape
        first = 2 * tokens * head_dim + which * tokens
        return slice(first, first + count)
