"""The memory plan: a byte range of the workspace for every tensor, reused when all its readers came before.

A buffer may be taken over by a later tensor only when every node that writes or reads its old tensor is an ancestor
of every node that writes the new one. The scheduler then derives write-after-read waits from the same plan, and
`verify` proves the result at the level of single queue entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megakernel.tasks.task import TaskNode

ALIGN = 256


@dataclass(frozen=True)
class TensorSize:
    """A workspace tensor before it has an address: `rows` x `cols` of `dtype`. `keep`: never shares its buffer."""

    rows: int
    cols: int
    dtype: str
    keep: bool = False

    @property
    def bytes(self) -> int:
        width = {"f32": 4, "bf16": 2, "f16": 2, "u32": 4, "u8": 1}[self.dtype]
        return -(-self.rows * self.cols * width // ALIGN) * ALIGN


@dataclass(frozen=True)
class MemoryPlan:
    """`at[name]` = (offset, bytes); `total` bytes of workspace."""

    at: Mapping[str, tuple[int, int]]
    total: int


def touches(nodes: Sequence[TaskNode]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Writers and readers of every tensor, as node indices."""
    writers: dict[str, set[int]] = {}
    readers: dict[str, set[int]] = {}
    for i, node in enumerate(nodes):
        for region in node.task.writes(node, 0, node.tiles):
            writers.setdefault(region.tensor, set()).add(i)
        for region in node.task.reads(node, 0, node.tiles):
            readers.setdefault(region.tensor, set()).add(i)
    return writers, readers


def ancestors(nodes: Sequence[TaskNode]) -> list[int]:
    """For every node a bit set of the nodes that it depends on, directly or not."""
    writers, _ = touches(nodes)
    out: list[int] = []
    for i, node in enumerate(nodes):
        mask = 0
        for region in node.task.reads(node, 0, node.tiles):
            for w in writers.get(region.tensor, ()):
                if w < i:
                    mask |= out[w] | (1 << w)
        out.append(mask)
    return out


def plan(nodes: Sequence[TaskNode], sizes: Mapping[str, TensorSize], *, reuse: bool = True) -> MemoryPlan:
    """Place every tensor that a node touches."""
    writers, readers = touches(nodes)
    before = ancestors(nodes)
    order = sorted(sizes, key=lambda t: min(writers.get(t, {0})))
    at: dict[str, tuple[int, int]] = {}
    buffers: list[tuple[int, int, str]] = []  # offset, bytes, the tensor that holds it now
    total = 0
    for name in order:
        size = sizes[name]
        slot = None
        if reuse and not size.keep:
            for i, (_offset, room, holder) in enumerate(buffers):
                old = writers.get(holder, set()) | readers.get(holder, set())
                mask = sum(1 << n for n in old)
                fits = room >= size.bytes and not sizes[holder].keep
                done = bool(writers.get(name)) and all(mask & ~before[w] == 0 for w in writers[name])
                if fits and done and (slot is None or room < buffers[slot][1]):
                    slot = i
        if slot is None:
            buffers.append((total, size.bytes, name))
            at[name] = (total, size.bytes)
            total += size.bytes
        else:
            offset, room, _ = buffers[slot]
            buffers[slot] = (offset, room, name)
            at[name] = (offset, size.bytes)
    return MemoryPlan(at, max(total, ALIGN))
