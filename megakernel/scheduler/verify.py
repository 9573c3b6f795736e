"""Proof that a schedule is safe to run, or sentences that say why it is not.

Nothing here trusts how the schedule was made: regions are asked for again, order is derived from queues and counters
alone. A wait counts only if it is for every signal of its counter in a step: since counters never go back, one for
fewer is already true in a later step. It is accepted where nothing depends on it.

An entry A is known to be done before B begins when A stands before B in a queue, or a wait of B or of something before
B is for a counter that A, or something after A in its queue, signals. `clock[B][q]` is how many entries of queue q are
so known. Each entry of the shared list is a queue of its own, begun by no particular worker.

The counter of a group that has its `count` signals signals the counter above it (relay.py), which so knows what the
signals of the group make known. Both levels are checked: the count of a relay must be exactly the signals of its
counter, or it would be sent early, or never.

Where several devices run the schedule, an entry that receives an exchange waits for all entries that send it, on the
other devices. Those are like the ones here, so a deadlock between devices is one of this schedule with that wait too;
what it makes known of this device is nothing. Whether buffers are safe between devices: exchanges.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from megakernel.errors import ScheduleError
from megakernel.scheduler.exchanges import ExchangeCheck, exchanges_of
from megakernel.scheduler.schedule import Entry, Relay, Schedule
from megakernel.scheduler.verify_memory import Clock, MemoryCheck, describe
from megakernel.tasks.record import MAX_WAITS


def verify(
    schedule: Schedule,
    memory: Mapping[str, tuple[int, int]] | None = None,
    *,
    external: Collection[str] = (),
    repeats: bool = True,
) -> None:
    """Raise ScheduleError with every finding: a deadlock, a threshold that is not exact where something depends on it,
    a tile not run exactly once, a read before its write, a buffer written while it is read, a counter out of range.

    `memory`: byte offset and bytes of each tensor, to find buffers that share memory. `external`: tensors that are
    filled from outside. `repeats`: steps follow each other, so the last node must have one tile and follow all others.
    """
    findings = [*_shape(schedule), *_tiles(schedule), *_tickets(schedule), *_relays(schedule)]
    ends, wrong = exchanges_of(schedule.nodes)
    findings += wrong
    if findings:
        raise ScheduleError(tuple(findings))
    machine = _Machine(schedule)
    findings = [*_thresholds(schedule, machine), *machine.run()]
    if not findings:
        check = MemoryCheck(schedule, machine.columns, machine.clock, memory or {}, external)
        findings = check.run()
        findings += ExchangeCheck(schedule, ends, machine.columns, machine.clock).run()
        if repeats:
            findings += _end_of_step(schedule, machine)
    if findings:
        raise ScheduleError(tuple(findings))


def _all_entries(schedule: Schedule) -> list[tuple[str, Entry]]:
    out = [(f"worker {w}, entry {i}", e) for w, queue in enumerate(schedule.queues) for i, e in enumerate(queue)]
    return out + [(f"shared entry {i}", e) for i, e in enumerate(schedule.shared)]


def _shape(schedule: Schedule) -> list[str]:
    out = []
    for where, e in _all_entries(schedule):
        if not 0 <= e.node < len(schedule.nodes):
            out.append(f"{where}: names node {e.node}; there are {len(schedule.nodes)}")
            continue
        name = schedule.nodes[e.node].name
        if len(e.waits) > MAX_WAITS:
            out.append(f"{where}: node {name} waits for {len(e.waits)} counters; a record holds {MAX_WAITS}")
        usable = schedule.counters - len(schedule.ticketed)
        for counter in [w.counter for w in e.waits] + ([] if e.signal is None else [e.signal]):
            if not 0 <= counter < usable:
                out.append(f"{where}: node {name} uses counter {counter}; {usable} can be signalled")
        out += [f"{where}: node {name} waits for {w.count} signals; at least 1" for w in e.waits if w.count < 1]
    return out


def _tiles(schedule: Schedule) -> list[str]:
    ranges: list[list[tuple[int, int]]] = [[] for _ in schedule.nodes]
    out = []
    for where, e in _all_entries(schedule):
        if not 0 <= e.node < len(schedule.nodes) or (e.node in schedule.ticketed and not e.count):
            continue
        if e.count < 1:
            out.append(f"{where}: node {schedule.nodes[e.node].name} with {e.count} tiles")
        ranges[e.node].append((e.first, e.first + e.count))
    for node, found in zip(schedule.nodes, ranges):
        at = 0
        for first, stop in sorted(found):
            if first > at:
                out.append(f"node {node.name}: tiles [{at}, {first}) are on no worker")
            elif first < at:
                out.append(f"node {node.name}: tiles [{first}, {min(at, stop)}) run twice")
            at = max(at, stop)
        if at < node.tiles:
            out.append(f"node {node.name}: tiles [{at}, {node.tiles}) are on no worker")
        elif at > node.tiles:
            out.append(f"node {node.name}: tiles [{node.tiles}, {at}) do not exist")
    return out


def _tickets(schedule: Schedule) -> list[str]:
    out = [
        f"shared entry {i}: node {e.node} is not ticketed"
        for i, e in enumerate(schedule.shared)
        if e.node not in schedule.ticketed
    ]
    order = [e.node for e in schedule.shared]
    if order != sorted(order):
        out.append("the shared list is not in node order")
    for node in sorted(schedule.ticketed):
        taken = 0
        for worker, queue in enumerate(schedule.queues):
            own = [e for e in queue if e.node == node]
            taken += len(own)
            if len(own) > 1 or any(e.count for e in own):
                out.append(
                    f"worker {worker}: the queue must take tickets of node {node} once, with no tiles of its own"
                )
        if not taken:
            out.append(f"node {node} is ticketed and no worker takes its tickets")
    return out


def _relays(schedule: Schedule) -> list[str]:
    usable = schedule.counters - len(schedule.ticketed)
    signals = [0] * max(0, schedule.counters)
    for _, e in _all_entries(schedule):
        if e.signal is not None and 0 <= e.signal < usable:
            signals[e.signal] += 1
    sources = {r.counter for r in schedule.relays}
    out = []
    if len(sources) < len(schedule.relays):
        out.append("a counter of a group has two relays; a record holds one")
    for r in schedule.relays:
        name = f"the relay of counter {r.counter} to counter {r.to}"
        if not (0 <= r.counter < usable and 0 <= r.to < usable):
            out.append(f"{name}: {usable} counters can be signalled")
        elif r.to in sources:
            out.append(f"{name}: the latter has a relay itself; there are two levels")
        elif r.count < 1 or r.count != signals[r.counter]:
            out.append(f"{name} is sent after {r.count} signals; its counter gets {signals[r.counter]} in a step")
    return out


def _thresholds(schedule: Schedule, machine: _Machine) -> list[str]:
    return [
        f"{where}: node {schedule.nodes[e.node].name} waits for {w.count} signals of counter {w.counter}, "
        f"which gets {machine.signals[w.counter]} in a step"
        for where, e in _all_entries(schedule)
        for w in e.waits
        if w.count > machine.signals[w.counter]
    ]


def _end_of_step(schedule: Schedule, machine: _Machine) -> list[str]:
    last = len(schedule.nodes) - 1
    if last < 0 or schedule.nodes[last].tiles != 1:
        return ["the last node ends the step and must have one tile"]
    if last in schedule.ticketed:
        return ["the last node ends the step and cannot be ticketed"]
    worker, index = next((w, i) for w, q in enumerate(schedule.queues) for i, e in enumerate(q) if e.node == last)
    out = []
    for column, entries in enumerate(machine.columns):
        known = index + 1 if column == worker else int(machine.clock[worker][index][column])
        if known < len(entries):
            out.append(f"{describe(schedule, column, known)} may still run when the next step begins")
    return out


@dataclass
class _Machine:
    """Runs the counters to a fixed point, and keeps for each entry what is known to be done when it begins."""

    schedule: Schedule
    columns: list[tuple[Entry, ...]] = field(init=False)
    signals: list[int] = field(init=False)  # per counter, in a step
    value: list[int] = field(init=False)
    done: list[int] = field(init=False)  # per column
    clock: list[list[Clock]] = field(init=False)
    joined: list[Clock] = field(init=False)  # per counter: what its signals so far make known
    relays: dict[int, Relay] = field(init=False)
    sender: dict[int, int] = field(init=False)  # node that receives an exchange -> node that sends it
    left: list[int] = field(init=False)  # per node, entries that have not run

    def __post_init__(self) -> None:
        s = self.schedule
        self.columns = [*s.queues, *((e,) for e in s.shared)]
        self.signals, self.value = [0] * s.counters, [0] * s.counters
        for _, e in _all_entries(s):
            if e.signal is not None:
                self.signals[e.signal] += 1
        self.relays = {r.counter: r for r in s.relays}
        for r in s.relays:
            self.signals[r.to] += 1
        self.sender = {e.receiver: e.sender for e in exchanges_of(s.nodes)[0]}
        self.left = [0] * len(s.nodes)
        for _, e in _all_entries(s):
            self.left[e.node] += 1
        self.done = [0] * len(self.columns)
        self.clock = [[] for _ in self.columns]
        self.joined = [np.zeros(len(self.columns), np.int32) for _ in range(s.counters)]

    def run(self) -> list[str]:
        """Findings: the entries that never run, if any."""
        moved = True
        while moved:
            moved = False
            for column in range(len(self.columns)):
                while self._step(column):
                    moved = True
        stuck = [c for c, entries in enumerate(self.columns) if self.done[c] < len(entries)]
        return [self._explain(c) for c in stuck]

    def _step(self, column: int) -> bool:
        """Run the next entry of a column if it can run."""
        at = self.done[column]
        if at == len(self.columns[column]):
            return False
        entry = self.columns[column][at]
        if not self._waited(entry) or not self._sent(entry) or not self._tickets_allow(column, entry):
            return False
        self.clock[column].append(self._begin(column, entry))
        self.done[column] += 1
        self.left[entry.node] -= 1
        if entry.signal is not None:
            known = self.clock[column][at].copy()
            known[column] = max(int(known[column]), at + 1)
            self._signal(entry.signal, known)
        return True

    def _signal(self, counter: int, known: Clock) -> None:
        self.value[counter] += 1
        np.maximum(self.joined[counter], known, out=self.joined[counter])
        relay = self.relays.get(counter)
        if relay is not None and self.value[counter] == relay.count:
            self._signal(relay.to, self.joined[counter])

    def _waited(self, entry: Entry) -> bool:
        return all(self.value[w.counter] >= w.count for w in entry.waits)

    def _sent(self, entry: Entry) -> bool:
        """The other devices have sent what the entry receives."""
        return entry.node not in self.sender or not self.left[self.sender[entry.node]]

    def _begin(self, column: int, entry: Entry) -> Clock:
        at = self.done[column]
        if column >= self.schedule.workers:  # any worker that takes tickets may run it
            known: Clock = np.minimum.reduce([self._before(w, i) for w, i in self._takers(entry.node)])
        else:
            known = self._before(column, at)
        for w in entry.waits:
            if w.count == self.signals[w.counter]:
                known = np.maximum(known, self.joined[w.counter])
        return known

    def _before(self, column: int, at: int) -> Clock:
        if not at:
            return np.zeros(len(self.columns), np.int32)
        known: Clock = self.clock[column][at - 1].copy()
        known[column] = at
        return known

    def _takers(self, node: int) -> list[tuple[int, int]]:
        return [(w, i) for w, queue in enumerate(self.schedule.queues) for i, e in enumerate(queue) if e.node == node]

    def _tickets_allow(self, column: int, entry: Entry) -> bool:
        """Worst case: one worker takes all tickets in order, after every worker has come to them."""
        if entry.node not in self.schedule.ticketed:
            return True
        first = self.schedule.workers
        mine = [first + i for i, e in enumerate(self.schedule.shared) if e.node == entry.node]
        if column < first:
            return all(self.done[c] for c in mine)
        reached = all(self.done[w] >= i and self._waited(self.columns[w][i]) for w, i in self._takers(entry.node))
        return reached and all(self.done[c] for c in mine if c < column)

    def _explain(self, column: int) -> str:
        at = self.done[column]
        entry = self.columns[column][at]
        open_waits = [
            f"counter {w.counter} has {self.value[w.counter]} of {w.count}{self._groups(w.counter)}"
            for w in entry.waits
            if self.value[w.counter] < w.count
        ]
        if not open_waits and not self._sent(entry):
            open_waits = [f"a peer has not sent all of node {self.schedule.nodes[self.sender[entry.node]].name}"]
        why = "; ".join(open_waits) or "tickets are not handed out yet"
        return f"deadlock: {describe(self.schedule, column, at)} never runs: {why}"

    def _groups(self, counter: int) -> str:
        """The counters of groups that this one still lacks."""
        short = [r for r in self.relays.values() if r.to == counter and self.value[r.counter] < r.count]
        said = ", ".join(f"counter {r.counter} of a group has {self.value[r.counter]} of {r.count}" for r in short)
        return f" ({said})" if said else ""
