"""Where a step's time goes. Every nanosecond of every row (a role of a worker) is work, waiting for data, waiting for
others, or idle; together they are rows x step, exactly.

Work is from first data to published; waiting for data from ready to first data; waiting for others from start to ready
and from the end of a step to the next one's header; the rest is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.report.steps import ROLES, Step, finish, row_names, row_of
from megakernel.tasks.record import Role
from megakernel.timeline import Timeline

WORK, DATA, OTHERS = 0, 1, 2
KINDS = ("work", "data", "others")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """Nanoseconds of all rows and steps together that belong to one name."""

    name: str
    work: int
    data: int
    others: int

    @property
    def total(self) -> int:
        return self.work + self.data + self.others


@dataclass(frozen=True)
class Breakdown:
    """`steps` steps of `length` ns together on `rows` rows. `header`: waiting for the next step's header."""

    steps: int
    length: int
    rows: int
    operators: tuple[Share, ...]  # most first
    layers: tuple[Share, ...]  # in order, "" for nodes of no layer
    by_row: tuple[Share, ...]  # `header` is among its `others`
    header: int
    idle: int

    @property
    def total(self) -> int:
        """rows x steps, in ns: what the operators, the header and `idle` sum up to."""
        return self.rows * self.length


def breakdown(timeline: Timeline, steps: Sequence[Step]) -> Breakdown:
    """Of these steps. A record that runs over the end of a step counts on both sides of it."""
    names = row_names(timeline)
    place = {row: i for i, row in enumerate(names)}
    row, begin, end, kind, node = _segments(timeline, place)
    inside = _Windows(steps)
    spent = inside.before(end) - inside.before(begin)
    by_node = np.zeros((len(timeline.nodes) + 1, 3), np.int64)
    np.add.at(by_node, (node, kind), spent)
    by_row = np.zeros((len(place), 3), np.int64)
    np.add.at(by_row, (row, kind), spent)
    header = int(by_node[-1].sum())
    total = len(place) * inside.total
    nodes = timeline.nodes
    operators = _shares(((n.operator, c) for n, c in zip(nodes, by_node)))
    layers = _shares((("" if n.layer < 0 else str(n.layer), c) for n, c in zip(nodes, by_node)))
    return Breakdown(
        len(steps), inside.total, len(place), tuple(sorted(operators, key=lambda s: (-s.total, s.name))),
        tuple(sorted(layers, key=lambda s: int(s.name or -1))),
        tuple(Share(name, *map(int, c)) for name, c in zip(names.values(), by_row)), header, total - int(spent.sum()),
    )  # fmt: skip


def _shares(items: Iterable[tuple[str, Ints]]) -> list[Share]:
    sums: dict[str, Ints] = {}
    for name, counts in items:
        sums[name] = sums.get(name, np.zeros(3, np.int64)) + counts
    return [Share(name, *map(int, c)) for name, c in sums.items()]


class _Windows:
    """How much of some disjoint intervals lies before a time."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._begin = np.array([s.begin for s in steps], np.int64)
        self._length = np.array([s.length for s in steps], np.int64)
        self._sum = np.concatenate(([0], np.cumsum(self._length)))
        self.total = int(self._sum[-1])

    def before(self, time: Ints) -> Ints:
        if not len(self._begin):
            return np.zeros_like(time)
        at = np.maximum(np.searchsorted(self._begin, time, "right") - 1, 0)
        out: Ints = self._sum[at] + np.clip(time - self._begin[at], 0, self._length[at])
        return out


def _segments(timeline: Timeline, place: dict[int, int]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Row, begin, end, kind and node (the number of nodes: a header) of every stretch; none overlap on a row."""
    tasks = timeline.tasks
    times = [tasks[c].astype(np.int64) for c in ("start", "ready", "first_data")]
    last = finish(tasks)
    times = [np.minimum(t, last) for t in times] + [last]  # of a cut event the later ones are 0
    times = list(np.maximum.accumulate(times))
    rows = np.array([place[r] for r in row_of(tasks).tolist()], np.int64)
    parts = [
        (rows, times[i], times[i + 1], np.full(len(tasks), kind), tasks["node"].astype(np.int64))
        for i, kind in ((0, OTHERS), (1, DATA), (2, WORK))
    ]
    waits = timeline.worker_steps
    for role in sorted({r % ROLES for r in place} - {Role.PRODUCER}):  # a producer does not wait for headers
        mine = waits[np.isin(waits["worker"].astype(np.int64) * ROLES + role, list(place))]
        where = np.array([place[int(w) * ROLES + role] for w in mine["worker"]], np.int64)
        parts.append((
            where, mine["start"].astype(np.int64), mine["ready"].astype(np.int64), np.full(len(mine), OTHERS),
            np.full(len(mine), len(timeline.nodes)),
        ))  # fmt: skip
    row, begin, end, kind, node = (np.concatenate(column).astype(np.int64) for column in zip(*parts))
    order = np.lexsort((end, begin, row))
    row, begin, end, kind, node = (column[order] for column in (row, begin, end, kind, node))
    return row, *_apart(row, begin, end), kind, node


def _apart(row: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The same stretches, sorted by row and begin, each cut off where an earlier one of its row still goes on."""
    span = int(end.max()) + 1 if len(end) else 1
    taken = np.maximum.accumulate(row * span + end)
    earlier = np.concatenate(([0], taken[:-1])) - row * span
    begin = np.maximum(begin, earlier)
    return begin, np.maximum(begin, end)
