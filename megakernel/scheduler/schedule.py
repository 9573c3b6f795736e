"""Values of the scheduler: a queue entry, its waits and its signal, and the whole schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.tasks.task import TaskNode


@dataclass(frozen=True)
class Wait:
    """`counters[counter] >= count * step`."""

    counter: int
    count: int


@dataclass(frozen=True)
class Entry:
    """A contiguous range of tiles of one node on one worker, with what it waits for and what it signals."""

    node: int  # index into Schedule.nodes
    first: int
    count: int
    waits: tuple[Wait, ...] = ()
    signal: int | None = None


@dataclass(frozen=True)
class Schedule:
    """For each worker its ordered queue; `counters` is how many counters there are."""

    nodes: tuple[TaskNode, ...]
    queues: tuple[tuple[Entry, ...], ...]
    counters: int
    policy: str

    @property
    def workers(self) -> int:
        return len(self.queues)


# A placement is a schedule before dependencies: queues[worker] = ((node, first, count), ...) in order.
Placement = tuple[tuple[tuple[int, int, int], ...], ...]
