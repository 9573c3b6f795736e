"""What changed between two timelines: by operator, hop, worker, and of the step itself.

For each quantity there is one value a step. The change is the difference of the medians; its interval comes from a
moving-block bootstrap: blocks of following steps are drawn with replacement from both timelines, with a fixed seed, so
steps that resemble their neighbours do not make an interval too narrow. A change counts when its interval leaves out 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from megakernel.errors import TimelineError
from megakernel.report.arrivals import arrivals
from megakernel.report.hops import hops
from megakernel.report.steps import ROLES, Step, alike, finish, row_names, row_of, steps_of
from megakernel.tasks.record import Role
from megakernel.timeline import Timeline

CONFIDENCE: Final = 0.99  # of each interval; there are dozens, so one in twenty would say much that is not so
DRAWS: Final = 2000
SEED: Final = 0
LEAST_STEPS: Final = 8  # of each timeline; with fewer there is no interval
HOP_STEPS: Final = 32  # whose edges are looked at, spread over the timeline

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """Microseconds a step. kind: "step", "operator" (work and waiting for data, all workers), "hop" (median latency),
    "worker" (work and waiting for data). `low`, `high`: the interval of b - a; None with too few steps. `judged`:
    there are enough steps to say whether it changed."""

    kind: str
    name: str
    a_us: float | None
    b_us: float | None
    low: float | None = None
    high: float | None = None
    judged: bool = True

    @property
    def difference_us(self) -> float | None:
        return None if self.a_us is None or self.b_us is None else self.b_us - self.a_us

    @property
    def changed(self) -> bool:
        """The interval leaves out 0, or one of the two has no such thing."""
        if not self.judged:
            return False
        if self.a_us is None or self.b_us is None:
            return True
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Comparison:
    """`notes`: what else differs (target, workers, context, rows) and what the figures cannot say."""

    a: str
    b: str
    steps: tuple[int, int]
    confidence: float
    notes: tuple[str, ...]
    changes: tuple[Change, ...]

    def to_json(self) -> str:
        fields = asdict(self)
        for row, change in zip(fields["changes"], self.changes):
            row |= {"difference_us": change.difference_us, "changed": change.changed}
        return json.dumps(fields)


def compare(a: Timeline, b: Timeline, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Raises TimelineError when one of them has no complete step."""
    chosen = tuple(alike(steps_of(t)) for t in (a, b))
    for name, steps in zip(names, chosen):
        if not steps:
            raise TimelineError(f"{name} has no complete step to compare; record more steps")
    left, right = samples(a, chosen[0]), samples(b, chosen[1])
    rng = np.random.default_rng(SEED)
    many = min(map(len, chosen)) >= LEAST_STEPS
    changes = [_change(key, left.get(key), right.get(key), rng, many) for key in dict.fromkeys([*left, *right])]
    return Comparison(
        *names, (len(chosen[0]), len(chosen[1])), CONFIDENCE, tuple(_notes(a, b, chosen, names)), tuple(changes)
    )


def samples(timeline: Timeline, steps: Sequence[Step]) -> Mapping[tuple[str, str], Floats]:
    """(kind, name) -> microseconds, a value for each step."""
    numbers = [s.number for s in steps]
    tasks = timeline.tasks[np.isin(timeline.tasks["step"], numbers)]
    place = np.searchsorted(numbers, tasks["step"])
    spent = (finish(tasks) - tasks["ready"].astype(np.int64)) / 1e3
    out: dict[tuple[str, str], Floats] = {("step", "step"): np.array([s.length for s in steps]) / 1e3}
    working = tasks["role"] != Role.PRODUCER
    names = [n.operator for n in timeline.nodes]
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    of_event = np.array([known[n] for n in names])[tasks["node"]]
    sums = _sums(place[working], of_event[working], spent[working], len(steps), len(known))
    out |= {("operator", name): sums[:, i] for name, i in known.items()}
    out |= _hop_samples(timeline, steps)
    rows = row_names(timeline)
    at = {row: i for i, row in enumerate(rows)}
    sums = _sums(place, np.array([at[r] for r in row_of(tasks).tolist()]), spent, len(steps), len(rows))
    out |= {("worker", name): sums[:, at[row]] for row, name in rows.items() if row % ROLES != Role.PRODUCER}
    return out


def _sums(
    place: npt.NDArray[np.int64], column: npt.NDArray[np.int64], values: Floats, rows: int, columns: int
) -> Floats:
    out = np.zeros((rows, columns))
    np.add.at(out, (place, column), values)
    return out


def _hop_samples(timeline: Timeline, steps: Sequence[Step]) -> dict[tuple[str, str], Floats]:
    found: dict[tuple[str, str], list[float]] = {}
    every = max(1, -(-len(steps) // HOP_STEPS))
    for before, step in zip((None, *steps), steps):
        if step.number % every:
            continue
        pair = [s for s in (before, step) if s]
        for hop in hops(timeline, [arrivals(timeline, step)], pair):
            if hop.ns:
                found.setdefault(("hop", hop.kind), []).append(hop.median / 1e3)
    return {key: np.array(values) for key, values in found.items()}


def _change(key: tuple[str, str], a: Floats | None, b: Floats | None, rng: np.random.Generator, many: bool) -> Change:
    first, second = (None if v is None or not len(v) else float(np.median(v)) for v in (a, b))
    if a is None or b is None:
        return Change(*key, first, second, judged=many)
    if min(len(a), len(b)) < LEAST_STEPS:
        return Change(*key, first, second, judged=False)
    drawn = _medians(b, rng) - _medians(a, rng)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Change(*key, first, second, float(low), float(high))


def _medians(values: Floats, rng: np.random.Generator) -> Floats:
    """Medians of DRAWS samples as long as `values`, made of blocks that follow each other in it."""
    count = len(values)
    block = max(1, round(count ** (1 / 3)))
    starts = rng.integers(0, count - block + 1, (DRAWS, -(-count // block)))
    index = (starts[:, :, None] + np.arange(block)).reshape(DRAWS, -1)[:, :count]
    out: Floats = np.median(values[index], axis=1)
    return out


def _notes(a: Timeline, b: Timeline, chosen: Sequence[Sequence[Step]], names: tuple[str, str]) -> list[str]:
    facts = [
        {
            "program": t.meta.program, "device": t.meta.device, "target": t.meta.target, "workers": t.meta.workers,
            "context": round(float(np.mean([s.context for s in steps]))), "rows of a step": steps[0].rows,
            "nodes": len(t.nodes),
        }
        for t, steps in zip((a, b), chosen)
    ]  # fmt: skip
    out = [f"{what}: {facts[0][what]} and {facts[1][what]}" for what in facts[0] if facts[0][what] != facts[1][what]]
    out += [
        f"{name} has {len(steps)} steps; intervals need at least {LEAST_STEPS}"
        for name, steps in zip(names, chosen)
        if len(steps) < LEAST_STEPS
    ]
    out += [
        f"{name} ends with a fault: {t.meta.fault.text}" for name, t in zip(names, (a, b)) if t.meta.fault is not None
    ]
    return out
