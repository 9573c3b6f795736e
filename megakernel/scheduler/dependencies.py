"""From a placement to a schedule: which entries wait for which counters.

Requirements come from regions (hazards.py). One that queue order and other waits already imply is dropped; what is
left is turned into counters: producers that have the same waiters share one, so a counter counts exactly the
producers that its waiters need. Every wait is for all producers of its counter.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megakernel.errors import ScheduleError
from megakernel.scheduler.hazards import Memory, Needs, Tiles, bits, requirements
from megakernel.scheduler.schedule import Entry, Placement, Schedule, Wait
from megakernel.tasks.record import MAX_WAITS
from megakernel.tasks.task import TaskNode

Place = tuple[int, int]  # worker and index in its queue; worker == number of workers means the shared list
Clock = npt.NDArray[np.int32]  # for each column how many of its entries are known to be done


@dataclass(frozen=True)
class Edge:
    """`consumer` must run after `producer`."""

    producer: Place
    consumer: Place


def schedule(
    nodes: Sequence[TaskNode],
    placement: Placement,
    policy_name: str,
    max_waits: int = MAX_WAITS,
    *,
    alias: Mapping[str, tuple[int, int]] | None = None,
    ticketed: frozenset[int] = frozenset(),
    loose: frozenset[int] = frozenset(),
) -> Schedule:
    """Add waits and signals to a placement.

    `alias`: byte range of each tensor; tensors that share memory are kept apart in time. `ticketed`: nodes whose
    entries go to the shared list. `loose`: nodes whose waits may be left out later (by_value.py), so that others must
    not rely on them. A last node of one tile ends the step and so follows everything else.
    Raises ScheduleError when queues contradict each other or an entry cannot be made to wait for few enough counters.
    """
    board = _lay_out(nodes, placement, ticketed)
    needs = requirements(nodes, board.tiles, alias)
    rank = _ranks(nodes, board, needs)
    kept = _reduce(nodes, board, needs, rank, loose)
    groups = _Groups(nodes, board, rank, kept, max_waits)
    waits, signal, counters = groups.assign()
    made = [Entry(t.node, t.first, t.count, waits[i], signal[i]) for i, t in enumerate(board.tiles)]
    queues = tuple(tuple(made[i] for i in column) for column in board.columns[: len(placement)])
    shared = tuple(made[column[0]] for column in board.columns[len(placement) :])
    return Schedule(tuple(nodes), queues, counters + len(ticketed), policy_name, ticketed, shared)


def edges(nodes: Sequence[TaskNode], placement: Placement, *, alias: Memory | None = None) -> tuple[Edge, ...]:
    """Every pair of entries that regions put in order, including the implied ones. For reports."""
    board = _lay_out(nodes, placement, frozenset())
    out = []
    for index, need in enumerate(requirements(nodes, board.tiles, alias)):
        for node, mask in need.items():
            out += [Edge(board.place(p), board.place(index)) for p in board.entries(node, mask)]
    return tuple(out)


@dataclass(frozen=True)
class _Board:
    """All entries by number, with their place. A column is a queue, or one entry of the shared list."""

    workers: int
    tiles: tuple[Tiles, ...]
    columns: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]  # node -> its entries; their order gives the bits of a mask
    column: tuple[int, ...]  # entry -> column
    position: tuple[int, ...]  # entry -> index in it

    def entries(self, node: int, mask: int) -> list[int]:
        return [self.members[node][b] for b in bits(mask)]

    def place(self, entry: int) -> Place:
        column = self.column[entry]
        return (column, self.position[entry]) if column < self.workers else (self.workers, column - self.workers)


def _lay_out(nodes: Sequence[TaskNode], placement: Placement, ticketed: frozenset[int]) -> _Board:
    tiles: list[Tiles] = []
    columns: list[list[int]] = []
    shared: list[Tiles] = []
    for queue in placement:
        column: list[int] = []
        popped: set[int] = set()
        for node, first, count in queue:
            if not 0 <= node < len(nodes):
                raise ScheduleError((f"a queue names node {node}; there are {len(nodes)}",))
            if node in ticketed:
                shared.append(Tiles(node, first, count))
                first, count = 0, 0
                if node in popped:
                    continue
                popped.add(node)
            column.append(len(tiles))
            tiles.append(Tiles(node, first, count))
        columns.append(column)
    for t in sorted(shared, key=lambda t: (t.node, t.first)):
        columns.append([len(tiles)])
        tiles.append(t)
    where = {e: (c, p) for c, column in enumerate(columns) for p, e in enumerate(column)}
    members: list[list[int]] = [[] for _ in nodes]
    for index, t in enumerate(tiles):
        members[t.node].append(index)
    return _Board(
        len(placement), tuple(tiles), tuple(map(tuple, columns)), tuple(map(tuple, members)),
        tuple(where[i][0] for i in range(len(tiles))), tuple(where[i][1] for i in range(len(tiles))),
    )  # fmt: skip


def _ends_step(nodes: Sequence[TaskNode]) -> bool:
    return bool(nodes) and nodes[-1].tiles == 1


def _ranks(nodes: Sequence[TaskNode], board: _Board, needs: Sequence[Needs]) -> list[int]:
    """Place of each node in one order that all queues and all requirements follow; ties by index."""
    before: list[set[int]] = [set() for _ in nodes]
    for t, need in zip(board.tiles, needs):
        before[t.node] |= need.keys()
    for column in board.columns:
        for left, right in pairwise(column):
            if board.tiles[left].node != board.tiles[right].node:
                before[board.tiles[right].node].add(board.tiles[left].node)
    if _ends_step(nodes):
        before[-1] |= set(range(len(nodes) - 1))
    return _topological(nodes, before)


def _topological(nodes: Sequence[TaskNode], before: Sequence[set[int]]) -> list[int]:
    after: list[list[int]] = [[] for _ in nodes]
    missing = [len(b) for b in before]
    for node, earlier in enumerate(before):
        for e in earlier:
            after[e].append(node)
    rank = [-1] * len(nodes)
    ready = [n for n, m in enumerate(missing) if m == 0]
    for place in range(len(nodes)):
        if not ready:
            stuck = [nodes[n].name for n, r in enumerate(rank) if r < 0]
            raise ScheduleError(
                (f"queues contradict each other or the data flow around nodes {', '.join(stuck[:6])}; "
                 "every queue must follow one common order of the nodes",)
            )  # fmt: skip
        node = heapq.heappop(ready)
        rank[node] = place
        for later in after[node]:
            missing[later] -= 1
            if missing[later] == 0:
                heapq.heappush(ready, later)
    return rank


Kept = list[tuple[int, int]]  # (producer node, set of its entries)


def _reduce(
    nodes: Sequence[TaskNode], board: _Board, needs: Sequence[Needs], rank: Sequence[int], loose: frozenset[int]
) -> list[Kept]:  # fmt: skip
    """The requirements that queue order and the other requirements do not imply, latest producers first. Those of nodes
    that are not loose must follow without what loose ones wait for: `firm` knows only that these are done."""
    clock = np.zeros((len(board.tiles), len(board.columns)), np.int32)
    firm = np.zeros_like(clock) if loose else clock
    kept: list[Kept] = [[] for _ in board.tiles]
    for node in sorted(range(len(nodes)), key=rank.__getitem__):
        cache: dict[tuple[int, int], tuple[Clock, Clock]] = {}
        firm_cache: dict[tuple[int, int], tuple[Clock, Clock]] = {}
        for entry in sorted(board.members[node], key=board.position.__getitem__):
            column, position = board.column[entry], board.position[entry]
            known = clock[entry]
            if position:
                known[:] = clock[board.columns[column][position - 1]]
                firm[entry] = firm[board.columns[column][position - 1]]
            wanted = sorted(needs[entry].items(), key=lambda item: -rank[item[0]])
            kept[entry] = _follow(board, clock, known, wanted, cache)
            if loose and node not in loose:
                kept[entry] = _follow(board, firm, firm[entry], wanted, firm_cache)
            if _ends_step(nodes) and node == len(nodes) - 1:
                kept[entry] += _follow(board, clock, known, _loose_ends(board, known, entry, rank), cache)
            known[column] = firm[entry, column] = position + 1
    return kept


def _follow(
    board: _Board, clock: Clock, known: Clock, wanted: Iterable[tuple[int, int]],
    cache: dict[tuple[int, int], tuple[Clock, Clock]],
) -> Kept:  # fmt: skip
    """Wait for each of `wanted` that is not yet known to be done; updates `known`."""
    kept: Kept = []
    for key in wanted:
        node, mask = key
        if mask & (mask - 1) == 0:  # one entry
            entry = board.members[node][mask.bit_length() - 1]
            if known[board.column[entry]] <= board.position[entry]:
                kept.append(key)
                np.maximum(known, clock[entry], out=known)
            continue
        if key not in cache:
            entries = board.entries(node, mask)
            need = np.zeros_like(known)
            np.maximum.at(need, [board.column[e] for e in entries], [board.position[e] + 1 for e in entries])
            cache[key] = need, clock[entries].max(axis=0)
        need, join = cache[key]
        if (known < need).any():
            kept.append(key)
            np.maximum(known, join, out=known)
    return kept


def _loose_ends(board: _Board, known: Clock, entry: int, rank: Sequence[int]) -> list[tuple[int, int]]:
    """The last entry of every column that is not known to be done when `entry` begins."""
    last: Needs = {}
    for column, members in enumerate(board.columns):
        earlier = [e for e in members if e != entry]
        if earlier and column != board.column[entry] and known[column] < len(earlier):
            node = board.tiles[earlier[-1]].node
            last[node] = last.get(node, 0) | 1 << board.members[node].index(earlier[-1])
    return sorted(last.items(), key=lambda item: -rank[item[0]])


@dataclass
class _Groups:
    """Turns kept requirements into counters of at most `max_waits` a record."""

    nodes: Sequence[TaskNode]
    board: _Board
    rank: Sequence[int]
    kept: Sequence[Kept]
    max_waits: int
    coarse: set[int] = field(default_factory=set)  # nodes that use one counter for all of their entries

    def assign(self) -> tuple[list[tuple[Wait, ...]], list[int | None], int]:
        """Waits and signal of every entry, and the number of counters."""
        while True:
            groups, waits = self._group()
            over = [e for e, w in enumerate(waits) if len(w) > self.max_waits]
            finest = {self._finest(groups, waits[e]) for e in over} - {None}
            if not finest:
                break
            self.coarse |= {n for n in finest if n is not None}
        for entry in over:
            self._hoist(entry, groups, waits)
        signal: list[int | None] = [None] * len(self.board.tiles)
        for counter, producers in enumerate(groups):
            for p in producers:
                signal[p] = counter
        done = [tuple(Wait(g, len(groups[g])) for g in sorted(w)) for w in waits]
        return done, signal, len(groups)

    def _group(self) -> tuple[list[tuple[int, ...]], list[list[int]]]:
        """Producers of each counter in order of rank, and for each entry the counters it waits for."""
        waiters: dict[int, dict[int, list[int]]] = {}  # producer node -> set of entries -> who waits for it
        for entry, kept in enumerate(self.kept):
            for node, mask in kept:
                waiters.setdefault(node, {}).setdefault(mask, []).append(entry)
        shared: dict[tuple[int, ...], list[int]] = {}  # waiting entries -> producers
        for node in sorted(waiters, key=self.rank.__getitem__):
            masks = waiters[node]
            for atom in _refine(masks, node in self.coarse):
                who = sorted({e for mask, entries in masks.items() if mask & atom for e in entries})
                shared.setdefault(tuple(who), []).extend(self.board.entries(node, atom))
        waits: list[list[int]] = [[] for _ in self.board.tiles]
        for counter, consumers in enumerate(shared):
            for entry in consumers:
                waits[entry].append(counter)
        return [tuple(p) for p in shared.values()], waits

    def _finest(self, groups: Sequence[tuple[int, ...]], waits: Sequence[int]) -> int | None:
        """The node with the most counters among those, if it has more than one and can be made coarse."""
        count: dict[int, int] = {}
        for g in waits:
            for node in {self.board.tiles[p].node for p in groups[g]} - self.coarse:
                count[node] = count.get(node, 0) + 1
        best = max(count, key=lambda n: (count[n], -n), default=None)
        return best if best is not None and count[best] > 1 else None

    def _hoist(self, entry: int, groups: Sequence[tuple[int, ...]], waits: list[list[int]]) -> None:
        """Let earlier entries of the same queue do some of the waiting, where that cannot close a circle."""
        board = self.board
        column = board.columns[board.column[entry]][: board.position[entry]]
        for group in sorted(waits[entry], key=lambda g: self._latest(groups[g])):
            if len(waits[entry]) <= self.max_waits:
                return
            for host in reversed(column):
                if self.rank[board.tiles[host].node] <= self._latest(groups[group]):
                    break
                if len(waits[host]) < self.max_waits or group in waits[host]:
                    waits[host] = sorted({*waits[host], group})
                    waits[entry].remove(group)
                    break
        if len(waits[entry]) > self.max_waits:
            raise ScheduleError((self._too_many(entry, groups, waits[entry]),))

    def _too_many(self, entry: int, groups: Sequence[tuple[int, ...]], waits: Sequence[int]) -> str:
        tiles, (worker, index) = self.board.tiles[entry], self.board.place(entry)
        names = sorted({self.nodes[self.board.tiles[p].node].name for g in waits for p in groups[g]})
        return (
            f"node {self.nodes[tiles.node].name}, tiles [{tiles.first}, {tiles.first + tiles.count}), worker {worker}, "
            f"entry {index}: would wait for {len(waits)} counters of nodes {', '.join(names[:8])}; a record holds "
            f"{self.max_waits}. Give the node fewer inputs or put a node before it that gathers some of them"
        )

    def _latest(self, producers: Sequence[int]) -> int:
        return max(self.rank[self.board.tiles[p].node] for p in producers)


def _refine(masks: Iterable[int], coarse: bool) -> list[int]:
    """The coarsest disjoint sets of which every mask is a union; one set for all when `coarse`."""
    union = 0
    for mask in masks:
        union |= mask
    if coarse:
        return [union]
    parts = [union]
    for mask in masks:
        parts = [p for part in parts for p in (part & mask, part & ~mask) if p]
    return parts
