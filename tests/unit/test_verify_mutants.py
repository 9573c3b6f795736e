"""`verify` against 1,000 damaged schedules: each is refused, or every interleaving of it is harmless."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megakernel.errors import ScheduleError
from megakernel.scheduler.dependencies import schedule
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.scheduler.verify import verify
from tests.unit.test_scheduler_fakes import random_memory, random_nodes, random_placement
from tests.unit.test_scheduler_machine import Memory, Model

KINDS = (
    "drop wait", "threshold", "cycle", "swap", "drop tile", "double tile", "drop signal", "other signal", "other wait",
)  # fmt: skip


def small_case(rng: random.Random) -> tuple[Schedule, Memory]:
    nodes = random_nodes(rng, most=4, most_tiles=3)
    workers = rng.randint(2, 3)
    memory = random_memory(rng, nodes) if rng.random() < 0.5 else {}
    return schedule(nodes, random_placement(rng, nodes, workers, memory), "random", alias=memory), memory


def put(s: Schedule, worker: int, index: int, *entries: Entry) -> Schedule:
    queue = s.queues[worker]
    changed = (*queue[:index], *entries, *queue[index + 1 :])
    return replace(s, queues=tuple(changed if w == worker else q for w, q in enumerate(s.queues)))


def mutate(rng: random.Random, s: Schedule, kind: str) -> Schedule | None:
    """`s` with one fault of that kind; None when it has no place for one."""
    places = [(w, i) for w, q in enumerate(s.queues) for i in range(len(q))]
    if kind in ("drop wait", "threshold", "other wait"):
        places = [(w, i) for w, i in places if s.queues[w][i].waits]
    elif kind in ("drop signal", "other signal"):
        places = [(w, i) for w, i in places if s.queues[w][i].signal is not None]
    elif kind == "swap":
        places = [(w, i) for w, i in places if i + 1 < len(s.queues[w])]
    if not places or (kind in ("cycle", "other signal", "other wait") and not s.counters):
        return None
    w, i = rng.choice(places)
    e = s.queues[w][i]
    at = rng.randrange(len(e.waits)) if e.waits else 0
    rest = e.waits[:at] + e.waits[at + 1 :]
    if kind == "drop wait":
        return put(s, w, i, replace(e, waits=rest))
    if kind == "threshold":
        count = e.waits[at].count + rng.choice((-2, -1, 1, 2))
        return put(s, w, i, replace(e, waits=(*rest, Wait(e.waits[at].counter, count))))
    if kind == "cycle":
        counter = rng.randrange(s.counters)
        signals = sum(x.signal == counter for q in s.queues for x in q)
        return put(s, w, i, replace(e, waits=(*e.waits, Wait(counter, signals))))
    if kind == "swap":
        swapped = list(s.queues[w])
        j = rng.choice([x for x in range(len(swapped)) if x != i])
        swapped[i], swapped[j] = swapped[j], swapped[i]
        return replace(s, queues=tuple(tuple(swapped) if x == w else q for x, q in enumerate(s.queues)))
    if kind == "drop tile":
        return put(s, w, i, replace(e, count=e.count - 1)) if rng.random() < 0.7 else put(s, w, i)
    if kind == "double tile":
        return put(s, w, i, e, e) if rng.random() < 0.5 else put(s, w, i, replace(e, count=e.count + 1))
    if kind == "drop signal":
        return put(s, w, i, replace(e, signal=None))
    if kind == "other signal":
        return put(s, w, i, replace(e, signal=rng.randrange(s.counters)))
    return put(s, w, i, replace(e, waits=(*rest, replace(e.waits[at], counter=rng.randrange(s.counters)))))


def refused(s: Schedule, memory: Memory) -> bool:
    try:
        verify(s, memory)
    except ScheduleError as error:
        assert error.findings
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_are_refused_or_harmless(kind: str) -> None:
    rng = random.Random(f"verify {kind}")
    outcome: Counter[str] = Counter()
    while sum(outcome.values()) < 120:
        s, memory = small_case(rng)
        mutant = mutate(rng, s, kind)
        if mutant is None or mutant == s:
            continue
        if refused(mutant, memory):
            outcome["refused"] += 1
            continue
        for steps in (1, 2):
            found = Model(mutant, memory, steps).explore()
            assert not found, f"verify accepted a {kind} mutant: {found}\n{mutant.queues}"
        outcome["harmless"] += 1
    assert outcome["refused"] >= 40, outcome


def test_sound_schedules_are_accepted_and_harmless() -> None:
    rng = random.Random(7)
    for _ in range(40):
        s, memory = small_case(rng)
        verify(s, memory)
        assert Model(s, memory, 1).explore() == ""
        assert Model(s, memory, 3).walk(rng) == ""
