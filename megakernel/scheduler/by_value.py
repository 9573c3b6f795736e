"""Edges by value: where elements say by themselves whether they have been written, their readers need no counter.

A step then writes its own copy of the workspace, and no two tensors share memory, so nothing is overwritten that is
still read. What is left to counters is what such elements cannot carry: reads of other tensors, and the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megakernel.errors import ScheduleError
from megakernel.scheduler.hazards import Tiles, bits, requirements
from megakernel.scheduler.schedule import Entry, Schedule
from megakernel.tasks.task import TaskNode


def values_of(nodes: Sequence[TaskNode]) -> frozenset[str]:
    """Tensors that are written by nodes which publish by value, and by no other node."""
    own: set[str] = set()
    other: set[str] = set()
    for node in nodes:
        (own if node.task.by_value(node) else other).update(r.tensor for r in node.task.writes(node, 0, node.tiles))
    return frozenset(own - other)


def loose_nodes(nodes: Sequence[TaskNode]) -> frozenset[int]:
    """Nodes that wait for values instead of counters. An entry of one may be done before what a counter would have made
    it wait for: it may have no work in this step, and that it saw a value orders no other loads."""
    values = values_of(nodes)
    return frozenset(i for i, node in enumerate(nodes) if not _needs_counters(node, values))


def drop_value_waits(schedule: Schedule) -> Schedule:
    """The schedule without the waits that values make needless, and without signals that nobody waits for.

    An entry keeps its waits when it reads a tensor that is no value, or cannot wait for values; of a schedule made with
    `loose_nodes` these are enough for it. Verify the schedule before: the order that its counters prove is the order
    that the values enforce. Raises ScheduleError when such an entry has not waited for all that it reads."""
    loose = loose_nodes(schedule.nodes)
    keep = [i not in loose for i in range(len(schedule.nodes))]
    queues = [[e if keep[e.node] else replace(e, waits=()) for e in queue] for queue in schedule.queues]
    shared = [e if keep[e.node] else replace(e, waits=()) for e in schedule.shared]
    waited = {w.counter for entries in (*queues, shared) for e in entries for w in e.waits}
    relays = tuple(r for r in schedule.relays if r.to in waited)
    waited |= {r.counter for r in relays}

    def quiet(entries: Iterable[Entry]) -> tuple[Entry, ...]:
        return tuple(e if e.signal in waited else replace(e, signal=None) for e in entries)

    made = replace(schedule, queues=tuple(quiet(q) for q in queues), shared=quiet(shared), relays=relays)
    findings = _unordered(made, loose)
    if findings:
        raise ScheduleError(findings)
    return made


def _unordered(schedule: Schedule, loose: frozenset[int]) -> tuple[str, ...]:
    """Entries that read plainly what may not have been written: the waits that are left do not say that it has."""
    entries = [(c, p, e) for c, queue in enumerate(schedule.queues) for p, e in enumerate(queue)]
    needs = requirements(schedule.nodes, [Tiles(e.node, e.first, e.count) for _, _, e in entries])
    members: list[list[int]] = [[] for _ in schedule.nodes]
    signallers: dict[int, list[int]] = {}
    for i, (_, _, e) in enumerate(entries):
        members[e.node].append(i)
        if e.signal is not None:
            signallers.setdefault(e.signal, []).append(i)
    for relay in schedule.relays:
        signallers.setdefault(relay.to, []).extend(signallers.get(relay.counter, []))
    known = np.zeros((len(entries), len(schedule.queues)), np.int32)  # of each queue how many entries are done before
    first = np.cumsum([0, *map(len, schedule.queues)])
    out = []
    for node in range(len(schedule.nodes)):
        joined: dict[int, npt.NDArray[np.int32]] = {}
        for i in members[node]:
            column, position, entry = entries[i]
            if position:
                known[i] = known[first[column] + position - 1]
                known[i, column] = position
            for wait in entry.waits:
                if wait.counter not in joined:
                    of = signallers.get(wait.counter, [])
                    joined[wait.counter] = known[of].max(0, initial=0)
                    np.maximum.at(joined[wait.counter], [entries[s][0] for s in of], [entries[s][1] + 1 for s in of])
                np.maximum(known[i], joined[wait.counter], out=known[i])
            if node in loose:
                continue
            read = [(members[n][b], n) for n, mask in needs[i].items() for b in bits(mask)]
            late = next((n for s, n in read if known[i, entries[s][0]] <= entries[s][1]), None)
            if late is not None:
                name, before = schedule.nodes[node].name, schedule.nodes[late].name
                out.append(f"node {name} tiles [{entry.first}, {entry.first + entry.count}) reads plainly what node "
                           f"{before} writes, and no wait that is left says that it has")  # fmt: skip
    return tuple(out)


def _needs_counters(node: TaskNode, values: frozenset[str]) -> bool:
    reads = {r.tensor for r in node.task.reads(node, 0, node.tiles)}
    return not node.task.awaits_values or not reads <= values
