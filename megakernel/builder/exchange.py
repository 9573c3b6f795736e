"""Where the exchanges of a program lie in the windows: behind a counter of each exchange and sender, in two buffers.

A buffer is written again two exchanges later. That is early enough to be small, and safe because a rank sends its part
of the exchange between them after it has read the first (scheduler/exchanges.py proves it of every schedule).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megakernel.builder.fuse import Fused, FusedExchange
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
        first = -(-first // ALIGN) * ALIGN
        turns = [i % 2 for i in range(len(found))]
        if len(found) % 2:  # the last and the first of the next step are neighbours
            turns[-1] = 2
        sizes = [max((b for b, t in zip(bytes_of, turns) if t == turn), default=0) for turn in range(3)]
        starts = [first, first + sizes[0], first + sizes[0] + sizes[1]]
        joined = [f.input for f in found if f.join]
        return Exchanges(
            tuple(f.name for f in found), tuple(starts[t] for t in turns), ranks, sum(sizes) + first,
            joined[0] if joined else "", part_vocab=graph.tensor(joined[0]).cols if joined else 0,
        )  # fmt: skip
