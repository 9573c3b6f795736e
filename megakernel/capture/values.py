"""What a captured module's values are while its operators are read: rows of the graph, seen through views.

A view keeps, for each of its elements, which elements of one base it is a sum of, and with which coefficients. So every
way to reshape, permute, slice, stack, repeat, negate or rotate is followed exactly, on the shapes of the example, by
letting torch do it to the indices; what a view means is then read off the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megakernel.errors import MegakernelError

Tensor = torch.Tensor


class NotSupported(MegakernelError):
    """An operator, or a use of it, that no graph operator computes. The message is the reason alone."""


@dataclass(eq=False)
class Base:
    """Rows `[rows, cols]` that become tensors of the graph when a reader asks for some of their columns.

    make(low, high) gives the graph's name of columns [low, high). kind: what may still be fused into it: "linear"
    (weight, bias), "norm" (gamma, group), "activation" (of, activation), "embedding" (table), or "" for nothing.
    origin: the exported operator that it is the value of.
    """

    cols: int
    make: Callable[[int, int], str]
    kind: str = ""
    parts: dict[str, Any] = field(default_factory=dict)
    origin: Any = None
    made: dict[tuple[int, int, bytes], str] = field(default_factory=dict)

    def columns(self, low: int, high: int) -> str:
        """The graph's name of columns [low, high)."""
        return self.once(low, high, b"", lambda: self.make(low, high))

    def once(self, low: int, high: int, factors: bytes, make: Callable[[], str]) -> str:
        """What `make` gives for these columns times these factors, made once."""
        key = (low, high, factors)
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


@dataclass(frozen=True, eq=False)
class View:
    """`sum over terms of coefficient * base[index]`: indices into the flat base, coefficients of the same shape."""

    base: Base
    terms: tuple[tuple[Tensor, Tensor], ...]

    @property
    def shape(self) -> torch.Size:
        return self.terms[0][0].shape

    def map(self, function: Callable[[Tensor], Tensor]) -> View:
        """The same way of moving elements for every term."""
        return View(self.base, tuple((function(i), function(c)) for i, c in self.terms))

    def times(self, factor: Tensor | float) -> View:
        out = []
        for index, coefficient in self.terms:
            product = coefficient * factor
            out.append((index.expand(product.shape), product))
        return View(self.base, tuple(out))

    def plus(self, other: View) -> View:
        """Both of one base and shape. Terms of the same elements become one."""
        terms = list(self.terms)
        for index, coefficient in other.terms:
            for at, (known, old) in enumerate(terms):
                if torch.equal(known, index):
                    terms[at] = (known, old + coefficient)
                    break
            else:
                terms.append((index, coefficient))
        return View(self.base, tuple(terms))

    def single(self) -> tuple[Tensor, Tensor] | None:
        """The index and coefficient of a view that has one term."""
        return self.terms[0] if len(self.terms) == 1 else None


def whole(base: Base, lead: torch.Size) -> View:
    """All of a base, `[*lead, cols]`."""
    shape = (*lead, base.cols)
    return View(base, ((torch.arange(lead.numel() * base.cols).reshape(shape), torch.ones(shape)),))


def uniform(coefficient: Tensor) -> float | None:
    """The one value of all coefficients, None when they differ."""
    first = float(coefficient.reshape(-1)[0])
    return first if bool((coefficient == first).all()) else None


def row_columns(view: View, rows: int) -> tuple[int, int] | None:
    """(low, high) when the view is, row by row and in order, those columns of its base; None when it is not."""
    term = view.single()
    if term is None or view.shape.numel() % rows:
        return None
    index = term[0].reshape(rows, -1)
    low = int(index[0, 0])
    want = torch.arange(rows)[:, None] * view.base.cols + low + torch.arange(index.shape[1])
    high = low + index.shape[1]
    return (low, high) if high <= view.base.cols and torch.equal(index, want) else None


@dataclass(frozen=True, eq=False)
class Factor:
    """What a norm divides by: of the elements `of`, in groups along the last dimension. stage: "square", "mean",
    "root" (to divide by) or "factor" (to multiply with)."""

    of: View
    stage: str
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class Scores:
    """q k^T on its way to a softmax: scale * q k^T, or cap * tanh(scale * q k^T / cap). seen: by a mask, None for all.

    tanh: it has come; until the product with the cap its reciprocal is part of the scale. softmax: it has come."""

    q: View
    k: View
    scale: float = 1.0
    cap: float | None = None
    tanh: bool = False
    seen: Tensor | None = None
    softmax: bool = False


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that no input changes. name: of the parameter that it is. rows_of: the table whose first rows it is."""

    data: Tensor
    name: str | None = None
    rows_of: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Tokens:
    """The token ids from outside, of the shape `lead`."""

    lead: torch.Size
