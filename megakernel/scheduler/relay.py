"""Hierarchical counters: one counter for each group of workers, and one for all groups above them.

Many workers that add to one counter take turns: where each group of workers has a cache of its own, the counter moves
between the caches for every addition. A *relayed* edge gives each group that signals a counter of its own; the signal
that completes it adds 1 to the counter for all, which waiters look at as before. The waiters' threshold becomes the
number of groups. Which edges are relayed is decided edge by edge by `pays`; on a target of one group none is.

A worker's group is its place in the schedule; a device seats its workers so that a group shares a cache. Nothing but
speed depends on where a worker really is: all counters are of device scope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megakernel.scheduler.schedule import Entry, Relay, Schedule, Wait
from megakernel.target import Target

Choice = Callable[[Sequence[int], Target], bool]  # (signals of each group, target) -> whether the counter has relays


def group_of(worker: int, workers: int, groups: int) -> int:
    """The group of a worker: contiguous ranges of near-equal size."""
    return worker * groups // workers


def pays(signals: Sequence[int], target: Target) -> bool:
    """Whether a counter that gets `signals[g]` signals of group g in a step is better relayed.

    One counter takes its signals one after the other. With relays the groups count side by side, then the counter for
    all takes one signal of each, a hop later. A signal inside a group is taken to cost as much as one to all."""
    used = [n for n in signals if n]
    if target.groups < 2 or len(used) < 2:
        return False
    flat = sum(used) * target.signal_us
    return (max(used) + len(used)) * target.signal_us + target.hop_us < flat


def add_relays(schedule: Schedule, target: Target, choose: Choice = pays) -> Schedule:
    """The schedule with relays on those counters that `choose` names; the same object when there is none.

    Counters that shared entries signal stay as they are: no group is known to run them."""
    if target.groups < 2:
        return schedule
    found = _signals(schedule, target.groups)
    chosen = [c for c in sorted(found) if choose(found[c], target)]
    if not chosen:
        return schedule
    first_ticket = schedule.counters - len(schedule.ticketed)
    relays: list[Relay] = []
    own: dict[tuple[int, int], int] = {}  # counter and group -> the counter of the group
    for counter in chosen:
        for group, count in enumerate(found[counter]):
            if count:
                own[counter, group] = first_ticket + len(relays)
                relays.append(Relay(first_ticket + len(relays), count, counter))
    levels = {c: sum(n > 0 for n in found[c]) for c in chosen}

    def changed(entry: Entry, group: int) -> Entry:
        waits = tuple(Wait(w.counter, levels.get(w.counter, w.count)) for w in entry.waits)
        signal = entry.signal if entry.signal is None else own.get((entry.signal, group), entry.signal)
        return replace(entry, waits=waits, signal=signal)

    queues = tuple(
        tuple(changed(e, group_of(w, schedule.workers, target.groups)) for e in queue)
        for w, queue in enumerate(schedule.queues)
    )
    shared = tuple(changed(e, -1) for e in schedule.shared)
    return replace(
        schedule, queues=queues, shared=shared, counters=schedule.counters + len(relays), relays=tuple(relays)
    )


def _signals(schedule: Schedule, groups: int) -> dict[int, list[int]]:
    """For each counter its signals of each group in a step; not of those that shared entries signal."""
    found: dict[int, list[int]] = {}
    for worker, queue in enumerate(schedule.queues):
        for entry in queue:
            if entry.signal is not None:
                found.setdefault(entry.signal, [0] * groups)[group_of(worker, schedule.workers, groups)] += 1
    for entry in schedule.shared:
        if entry.signal is not None:
            found.pop(entry.signal, None)
    return found
