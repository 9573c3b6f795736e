"""Edges by value: where elements say by themselves whether they have been written, their readers need no counter.

A step then writes its own copy of the workspace, and no two tensors share memory, so nothing is overwritten that is
still read. What is left to counters is what such elements cannot carry: reads of other tensors, and the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megakernel.scheduler.schedule import Entry, Schedule
from megakernel.tasks.task import TaskNode


def values_of(nodes: Sequence[TaskNode]) -> frozenset[str]:
    """Tensors that are written by nodes which publish by value, and by no other node."""
    own: set[str] = set()
    other: set[str] = set()
    for node in nodes:
        (own if node.task.by_value(node) else other).update(r.tensor for r in node.task.writes(node, 0, node.tiles))
    return frozenset(own - other)


def drop_value_waits(schedule: Schedule) -> Schedule:
    """The schedule without the waits that values make needless, and without signals that nobody waits for.

    An entry keeps its waits when it reads a tensor that is no value, or cannot wait for values. Verify the schedule
    before: the order that its counters prove is the order that the values enforce."""
    values = values_of(schedule.nodes)
    keep = [_needs_counters(node, values) for node in schedule.nodes]
    queues = [[e if keep[e.node] else replace(e, waits=()) for e in queue] for queue in schedule.queues]
    shared = [e if keep[e.node] else replace(e, waits=()) for e in schedule.shared]
    waited = {w.counter for entries in (*queues, shared) for e in entries for w in e.waits}
    relays = tuple(r for r in schedule.relays if r.to in waited)
    waited |= {r.counter for r in relays}

    def quiet(entries: Iterable[Entry]) -> tuple[Entry, ...]:
        return tuple(e if e.signal in waited else replace(e, signal=None) for e in entries)

    return replace(schedule, queues=tuple(quiet(q) for q in queues), shared=quiet(shared), relays=relays)


def _needs_counters(node: TaskNode, values: frozenset[str]) -> bool:
    reads = {r.tensor for r in node.task.reads(node, 0, node.tiles)}
    return not node.task.awaits_values or not reads <= values
