"""A model of workers that run a schedule in every possible order, or in random ones: the judge in these tests.

It shares no code with the scheduler: conflicts are found pair by pair from regions, and counters are just numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from megakernel.scheduler.schedule import Entry, Schedule
from megakernel.tasks.task import Region
from tests.unit.test_scheduler_fakes import node

Memory = dict[str, tuple[int, int]]


def touch(schedule: Schedule, e: Entry) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    n = schedule.nodes[e.node]
    return (n.task.reads(n, e.first, e.count), n.task.writes(n, e.first, e.count)) if e.count else ((), ())


def meet(a: Region, b: Region, memory: Memory) -> bool:
    if a.tensor == b.tensor:
        return a.start < b.stop and b.start < a.stop
    if a.tensor not in memory or b.tensor not in memory:
        return False
    return memory[a.tensor][0] < sum(memory[b.tensor]) and memory[b.tensor][0] < sum(memory[a.tensor])


@dataclass
class Model:
    """`steps` steps of a schedule. A state is, for each worker, how many half-entries (begin, end) it has done."""

    schedule: Schedule
    memory: Memory
    steps: int = 1

    @cached_property
    def queues(self) -> list[list[Entry]]:
        return [list(q) for q in self.schedule.queues]

    @cached_property
    def conflicts(self) -> list[tuple[tuple[int, int], tuple[int, int], bool]]:
        """(a, b, later): both touch the same data; a must be done before b (`later`: b of the next step) begins."""
        flat = [((w, i), e, *touch(self.schedule, e)) for w, q in enumerate(self.queues) for i, e in enumerate(q)]
        out = []
        for at, a, a_reads, a_writes in flat:
            for bt, b, b_reads, b_writes in flat:
                pairs = [(x, y) for x in a_writes for y in b_reads + b_writes] + [
                    (x, y) for x in a_reads for y in b_writes
                ]
                if any(meet(x, y, self.memory) for x, y in pairs):
                    if at != bt:
                        out.append((at, bt, True))
                    if a.node < b.node:
                        out.append((at, bt, False))
        return out

    @cached_property
    def end(self) -> tuple[int, int]:
        last = len(self.schedule.nodes) - 1
        return next((w, i) for w, q in enumerate(self.queues) for i, e in enumerate(q) if e.node == last)

    def begun(self, state: tuple[int, ...], at: tuple[int, int], step: int) -> bool:
        return state[at[0]] > 2 * (step * len(self.queues[at[0]]) + at[1])

    def done(self, state: tuple[int, ...], at: tuple[int, int], step: int) -> bool:
        return state[at[0]] >= 2 * (step * len(self.queues[at[0]]) + at[1] + 1)

    def counters(self, state: tuple[int, ...]) -> list[int]:
        value = [0] * self.schedule.counters
        for w, queue in enumerate(self.queues):
            for i, e in enumerate(queue):
                if e.signal is not None:
                    value[e.signal] += sum(self.done(state, (w, i), s) for s in range(self.steps))
        for r in self.schedule.relays:  # one each time that the counter of a group reaches a multiple
            value[r.to] += sum(value[r.counter] >= r.count * (s + 1) for s in range(self.steps)) if r.count else 0
        return value

    def moves(self, state: tuple[int, ...]) -> list[int]:
        value = self.counters(state)
        out = []
        for w, queue in enumerate(self.queues):
            half = state[w]
            if half == 2 * len(queue) * self.steps:
                continue
            step, index = divmod(half // 2, len(queue))
            if half % 2 == 0:
                if step and index == 0 and not self.done(state, self.end, step - 1):
                    continue
                if any(value[x.counter] < x.count * (step + 1) for x in queue[index].waits):
                    continue
            out.append(w)
        return out

    def harm(self, state: tuple[int, ...]) -> str:
        for a, b, later in self.conflicts:
            for step in range(self.steps - later):
                if self.begun(state, b, step + later) and not self.done(state, a, step):
                    return f"entry {b} of step {step + later} began before entry {a} of step {step} was done"
        return ""

    def final(self) -> tuple[int, ...]:
        return tuple(2 * len(q) * self.steps for q in self.queues)

    def explore(self, most: int = 200_000) -> str:
        """Every reachable state; the first harm found, or the empty text."""
        start = tuple(0 for _ in self.queues)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            moves = self.moves(state)
            if not moves and state != self.final():
                return f"deadlock at {state}"
            for w in moves:
                after = tuple(s + (i == w) for i, s in enumerate(state))
                if after not in seen:
                    assert len(seen) < most, "too many states; make the case smaller"
                    seen.add(after)
                    todo.append(after)
                    if state[w] % 2 == 0 and (found := self.harm(after)):
                        return found
        return ""

    def walk(self, rng: random.Random) -> str:
        """One random run, with workers that are random factors slower than others."""
        state = tuple(0 for _ in self.queues)
        weight = [rng.choice((1, 1, 10, 100)) for _ in self.queues]
        while moves := self.moves(state):
            w = rng.choices(moves, [weight[m] for m in moves])[0]
            begins = state[w] % 2 == 0
            state = tuple(s + (i == w) for i, s in enumerate(state))
            if begins and (found := self.harm(state)):
                return found
        return "" if state == self.final() else f"deadlock at {state}"


def test_the_judge_sees_a_missing_wait_and_a_deadlock() -> None:
    from megakernel.scheduler.schedule import Wait

    nodes = (node("a", 1, [], [("x", 0, 1, 1)]), node("b", 1, [("x", 0, 0, 1)], []))
    good = Schedule(nodes, ((Entry(0, 0, 1, (), 0),), (Entry(1, 0, 1, (Wait(0, 1),)),)), 1, "hand")
    assert Model(good, {}).explore() == "" and Model(good, {}, steps=3).explore() == ""
    bad = Schedule(nodes, ((Entry(0, 0, 1, (), 0),), (Entry(1, 0, 1),)), 1, "hand")
    assert "began before" in Model(bad, {}).explore()
    stuck = Schedule(nodes, ((Entry(0, 0, 1, (), 0),), (Entry(1, 0, 1, (Wait(0, 2),)),)), 1, "hand")
    assert "deadlock" in Model(stuck, {}).explore()
