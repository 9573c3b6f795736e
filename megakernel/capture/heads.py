"""What a captured attention is: heads read off views, rotations off coefficients, windows off masks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from megakernel.capture.values import NotSupported, Tensor, View
from megakernel.rope import RopeSpec

HIDDEN = -1e4  # an added mask value at or below hides a position
TOLERANCE = 2e-6  # of a table of cosines and sines
NEVER = 1 << 30  # more positions than any sequence has


@dataclass(frozen=True)
class Heads:
    """Columns [low, high) of the rows of a view's base as heads; each stands `repeat` times in the view.

    scale, gamma: what the elements are times, before the rotation; gamma [dim] when that differs, else None.
    """

    low: int
    high: int
    heads: int
    dim: int
    repeat: int
    scale: float
    gamma: Tensor | None
    rope: RopeSpec | None


def heads_of(view: View, length: int) -> Heads:
    """A view `[..., heads, length, dim]` of rows. Raises NotSupported."""
    if len(view.shape) < 3 or view.shape[-2] != length:
        raise NotSupported(f"attention takes [..., heads, {length} rows, head_dim], got {list(view.shape)}")
    count, dim = int(view.shape[-3]), int(view.shape[-1])
    batch = view.shape.numel() // (count * length * dim)
    cols = view.base.cols
    indices = [index.reshape(batch, count, length, dim) for index, _ in view.terms]
    row = torch.arange(batch)[:, None, None, None] * length + torch.arange(length)[None, None, :, None]
    if any(not torch.equal((index // cols).expand_as(index), row.expand_as(index)) for index in indices):
        raise NotSupported("attention over heads that are not those of the same rows in the same order")
    columns = [index % cols for index in indices]
    first = torch.stack([c.amin((0, 2, 3)) for c in columns]).amin(0)  # of each head
    low = int(first[0])
    repeat = next((n for n in range(1, count) if int(first[n]) != low), count)
    want = low + torch.arange(count) // repeat * dim
    own = [c - want[None, :, None, None] for c in columns]
    if any(bool((c < 0).any() | (c >= dim).any()) or not torch.equal(c, c[:1, :1].expand_as(c)) for c in own):
        raise NotSupported("attention over heads whose elements do not follow one another")
    matrix = torch.zeros(length, dim, dim)
    for c, (_, coefficient) in zip(own, view.terms):
        factors = coefficient.reshape(batch, count, length, dim)
        if not torch.equal(factors, factors[:1, :1].expand_as(factors)):
            raise NotSupported("heads that are scaled or rotated each in its own way")
        matrix.scatter_add_(2, c[0, 0][..., None], factors[0, 0][..., None])
    gamma = torch.diagonal(matrix[0]).clone()  # nothing is rotated at position 0
    plain = bool((gamma == gamma[0]).all())
    if bool((gamma == 0).any()) or (plain and float(gamma[0]) < 0) or count % repeat:
        raise NotSupported("attention over heads times 0 or a negative number, or not rotated from position 0 on")
    rope = rotation(matrix / gamma)
    high, scale = low + count // repeat * dim, float(gamma[0]) if plain else 1.0
    return Heads(low, high, count // repeat, dim, repeat, scale, None if plain else gamma, rope)


def rotation(matrix: Tensor) -> RopeSpec | None:
    """The rotary embedding that is `matrix` [positions, dim, dim] at each position, None for the identity."""
    identity = torch.eye(matrix.shape[1]).expand_as(matrix)
    if torch.allclose(matrix, identity, atol=TOLERANCE, rtol=0):
        return None
    turned = (matrix[-1] - torch.diag(torch.diagonal(matrix[-1]))).abs().amax(1) > 0
    rotary = int(turned.sum())
    if rotary % 2 == 0 and bool(turned[:rotary].all()):
        for interleaved in (False, True):
            spec = _frequencies(matrix, rotary, interleaved)
            if spec is not None:
                return spec
    raise NotSupported("queries and keys multiplied with a table that is no rotary embedding from position 0 on")


def _frequencies(matrix: Tensor, rotary: int, interleaved: bool) -> RopeSpec | None:
    """The specification, if the matrix is one with pairs of that kind."""
    half, (length, dim, _) = rotary // 2, matrix.shape
    a = torch.arange(0, rotary, 2) if interleaved else torch.arange(half)
    b = a + 1 if interleaved else a + half
    cos, sin = matrix[:, a, a].double().numpy(), matrix[:, b, a].double().numpy()
    near = np.arctan2(sin[1], cos[1])  # radians of one position, and then of more as far as they are known
    found = near.copy()
    for position in range(2, length):
        turns = np.round((position * found - np.arctan2(sin[position], cos[position])) / (2 * math.pi))
        found = (np.arctan2(sin[position], cos[position]) + 2 * math.pi * turns) / position
    if not bool((found > 0).all()):
        return None
    for spec in _candidates(found, rotary, interleaved):
        want_cos, want_sin = spec.table(length)
        want = torch.eye(dim).repeat(length, 1, 1)
        want[:, a, a], want[:, b, b] = torch.from_numpy(want_cos), torch.from_numpy(want_cos)
        want[:, b, a], want[:, a, b] = torch.from_numpy(want_sin), torch.from_numpy(-want_sin)
        if torch.allclose(matrix, want, atol=TOLERANCE, rtol=0):
            return spec
    return None


def _candidates(found: np.ndarray[tuple[int], np.dtype[np.float64]], rotary: int, interleaved: bool) -> list[RopeSpec]:
    """A round base, or else the frequencies themselves: they are known to about 1e-8."""
    specs = []
    if len(found) > 1:
        theta = float(found[-1] ** (-rotary / (rotary - 2)))
        specs = [RopeSpec(rotary, float(f"{theta:.{digits}g}"), interleaved=interleaved) for digits in (2, 4)]
    divisors = tuple(float(1 / f) for f in found)
    own = RopeSpec(
        rotary, 1.0, "longrope", interleaved, original_max_positions=NEVER, short_divisors=divisors,
        long_divisors=divisors,
    )  # fmt: skip
    return [*specs, own]


def window_of(seen: Tensor | None, length: int) -> int | None:
    """The sliding window of a mask `[..., length, length]` that is true where a row sees a position; None without one.

    Raises NotSupported for one that is not causal. A window that the example is too short for is not seen.
    """
    if seen is None:
        raise NotSupported("attention without a causal mask: rows would see rows after them")
    flat = seen.expand(*seen.shape[:-2], length, length).reshape(-1, length, length)
    if not bool((flat == flat[:1]).all()):
        raise NotSupported("attention with different masks for different heads or sequences")
    width = int(flat[0, -1].sum())
    row, column = torch.arange(length)[:, None], torch.arange(length)[None, :]
    if not torch.equal(flat[0], (column <= row) & (column > row - width)):
        raise NotSupported("attention with a mask that is neither causal nor a causal sliding window")
    return width if width < length else None


def seen_of(mask: Tensor) -> Tensor:
    """A mask that is added to scores, or one of truth values, as truth values: seen or not."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= HIDDEN
    if not bool((hidden | (mask == 0)).all()):
        raise NotSupported("a bias on attention scores other than a mask of zeros and large negative values")
    return ~hidden
