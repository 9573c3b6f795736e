"""Where the exchanges of a program lie in the windows: behind a counter of each exchange and sender, in a few buffers.

A buffer may be used again by an exchange that a rank sends only when it knows that all have read what lay there. Which
those are follows from what each exchange is computed from (`SentAfter`); scheduler/exchanges.py proves it of every
schedule. Two buffers in turn and one for the logits where each exchange is computed from the one before it; more where
attention and MLP of a layer read the same input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megakernel.builder.fuse import (
    Fused,
    FusedAttention,
    FusedEmbedding,
    FusedExchange,
    FusedMatmul,
    FusedNorm,
)
from megakernel.graph import Graph
from megakernel.tasks.record import BEST_BYTES, COUNTER_STRIDE, WINDOW

ALIGN = 256


@dataclass(frozen=True)
class Exchanges:
    """Of each exchange its name and the byte offset of its buffer in every window. logits: the ranks' part of them."""

    names: tuple[str, ...] = ()
    buffers: tuple[int, ...] = ()
    ranks: int = 1
    window_bytes: int = 0
    logits: str = ""
    best_offset: int = 0
    part_vocab: int = 0

    def with_best(self, rows: int, workers: int) -> Exchanges:
        """With room behind the buffers for the largest logit of each rank, row and worker."""
        size = self.ranks * rows * workers * BEST_BYTES
        return replace(self, best_offset=self.window_bytes, window_bytes=self.window_bytes + size)

    @staticmethod
    def of(fused: Sequence[Fused], graph: Graph, rows: int, sampled_rows: int, element: int) -> Exchanges:
        """`rows`, `sampled_rows`: what a step has room for; `element`: bytes of one."""
        found = [item for item in fused if isinstance(item, FusedExchange)]
        if not found:
            return Exchanges()
        ranks = found[0].ranks
        bytes_of = [
            -(-element * ranks * (sampled_rows if f.join else rows) * graph.tensor(f.input).cols // ALIGN) * ALIGN
            for f in found
        ]
        first = WINDOW.size + len(found) * ranks * COUNTER_STRIDE * 8
        turns = SentAfter.of(fused).turns()
        starts = [-(-first // ALIGN) * ALIGN]
        for turn in range(max(turns) + 1):
            starts.append(starts[-1] + max(b for b, t in zip(bytes_of, turns) if t == turn))
        joined = [f.input for f in found if f.join]
        return Exchanges(
            tuple(f.name for f in found), tuple(starts[t] for t in turns), ranks, starts[-1],
            joined[0] if joined else "", part_vocab=graph.tensor(joined[0]).cols if joined else 0,
        )  # fmt: skip


@dataclass(frozen=True)
class SentAfter:
    """For each exchange, as bits, those that a rank has received whole before it sends any of this one."""

    masks: tuple[int, ...]

    @staticmethod
    def of(fused: Sequence[Fused]) -> SentAfter:
        """From what the operators read. Every output of a product needs every column of its input; other operators are
        taken to need no more than some columns."""
        some: dict[str, int] = {}  # of a tensor the exchanges that some of its elements are computed from
        whole: dict[str, int] = {}  # those that each element is computed from all elements of
        masks: list[int] = []
        for item in fused:
            inputs = inputs_of(item)
            touched, mixed = (_union(table, inputs) for table in (some, whole))
            if isinstance(item, FusedMatmul):
                mixed |= some.get(item.input, 0)
            elif isinstance(item, FusedExchange):
                touched |= 1 << len(masks)
                masks.append(whole.get(item.input, 0))
            some[item.output], whole[item.output] = touched, mixed
        return SentAfter(tuple(masks))

    def turns(self) -> list[int]:
        """Which buffer each exchange takes: the first that all who had it before have left."""
        answers = [  # of each exchange those that are sent by who has read it
            sum(1 << m for m, mask in enumerate(self.masks) if mask >> j & 1) for j in range(len(self.masks))
        ]

        def left(j: int, k: int) -> bool:
            """Whether j, sent before k, has been read by all when k is sent."""
            return bool(answers[j] & self.masks[k])

        def left_before(j: int, k: int) -> bool:
            """The same of j of the step before: a rank ends a step when it has received all that was sent in it."""
            return bool(answers[j] or self.masks[k])

        holders: list[list[int]] = []
        out = []
        for k in range(len(self.masks)):
            free = (
                i for i, held in enumerate(holders)
                if all(left(j, k) and left_before(j, k) and left_before(k, j) for j in held)
            )  # fmt: skip
            turn = next(free, len(holders))
            if turn == len(holders):
                holders.append([])
            holders[turn].append(k)
            out.append(turn)
        return out


def inputs_of(item: Fused) -> tuple[str, ...]:
    """The activations that an operator reads."""
    if isinstance(item, FusedEmbedding):
        return ()
    if isinstance(item, FusedAttention):
        return (item.qkv,)
    if isinstance(item, FusedMatmul | FusedNorm | FusedExchange):
        return (item.input,) if item.residual is None else (item.input, item.residual)
    return item.inputs


def _union(table: dict[str, int], names: Sequence[str]) -> int:
    out = 0
    for name in names:
        out |= table.get(name, 0)
    return out
