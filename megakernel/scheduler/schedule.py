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
class Relay:
    """Whose signal makes `counters[counter] == count * step` adds 1 to `counters[to]`: see relay.py."""

    counter: int
    count: int
    to: int


@dataclass(frozen=True)
class Schedule:
    """For each worker its ordered queue; `counters` is how many counters there are.

    Entries of a node in `ticketed` are in `shared`; a queue holds an entry of no tiles in their place (see ticket.py).
    The last `len(ticketed)` counters, in node order, hand out their tickets.
    """

    nodes: tuple[TaskNode, ...]
    queues: tuple[tuple[Entry, ...], ...]
    counters: int
    policy: str
    ticketed: frozenset[int] = frozenset()
    shared: tuple[Entry, ...] = ()
    relays: tuple[Relay, ...] = ()

    @property
    def workers(self) -> int:
        return len(self.queues)


# A placement is a schedule before dependencies: queues[worker] = ((node, first, count), ...) in order.
Placement = tuple[tuple[tuple[int, int, int], ...], ...]
