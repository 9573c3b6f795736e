"""The part of `verify` that is about data: every read after its write, no buffer written while it is still read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.scheduler.schedule import Entry, Schedule
from megakernel.tasks.task import Region, TaskNode

Clock = npt.NDArray[np.int32]
NOBODY, LOST = -1, -2  # instead of a writer: never written; written over through another tensor


@dataclass(frozen=True)
class _Use:
    """One entry with what it touches."""

    number: int
    column: int
    position: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


@dataclass(frozen=True)
class _Read:
    """Columns read by some entries of a node: `need[q]` of each queue must be done before they are written."""

    node: int
    start: int
    stop: int
    need: Clock


class MemoryCheck:
    """Walks the nodes in order and keeps for each column of each tensor the entry that wrote it last."""

    def __init__(
        self,
        schedule: Schedule,
        columns: Sequence[Sequence[Entry]],
        clock: Sequence[Sequence[Clock]],
        memory: Mapping[str, tuple[int, int]],
        external: Collection[str],
    ) -> None:
        self.schedule, self.clock, self.memory, self.external = schedule, clock, memory, external
        self.width = len(columns)
        self.uses: list[list[_Use]] = [[] for _ in schedule.nodes]
        self.place: list[tuple[int, int]] = []
        self.owner: list[int] = []
        for column, queue in enumerate(columns):
            for position, e in enumerate(queue):
                node = schedule.nodes[e.node]
                if e.count:
                    reads = node.task.reads(node, e.first, e.count)
                    writes = node.task.writes(node, e.first, e.count)
                    self.uses[e.node].append(_Use(len(self.place), column, position, tuple(reads), tuple(writes)))
                self.place.append((column, position))
                self.owner.append(e.node)
        self.place_array = np.asarray(self.place, np.int64).reshape(-1, 2)
        self.writer = self._tensors()
        self.shares = _shares({t: memory[t] for t in self.writer if t in memory})
        self.reads: dict[str, list[_Read]] = {t: [] for t in self.writer}
        self.touched: dict[str, Clock] = {t: self._zero() for t in self.writer}
        self.lost_to: dict[str, int] = {}  # the node that last wrote over a tensor
        self.lost: set[str] = set()  # nothing of them is left
        self.findings: list[str] = []

    def run(self) -> list[str]:
        for node, uses in enumerate(self.uses):
            self._check_inside(self.schedule.nodes[node], uses)
            needs: dict[Region, Clock] = {}
            for use in uses:
                for region in use.reads:
                    self._read(use, region, needs)
            self._note_reads(node, uses)
            before = {t: self._elsewhere(t) for t in {r.tensor for u in uses for r in u.writes}}
            for tensor in self.lost & before.keys():
                self.writer[tensor][:] = LOST
            self.lost -= before.keys()
            for use in uses:
                for region in use.writes:
                    self._write(node, use, region, before[region.tensor])
            self._note_writes(node, uses)
        return self.findings

    def _tensors(self) -> dict[str, npt.NDArray[np.int64]]:
        size: dict[str, int] = {}
        for uses in self.uses:
            for use in uses:
                for r in use.reads + use.writes:
                    size[r.tensor] = max(size.get(r.tensor, 0), r.stop)
        return {t: np.full(n, NOBODY, np.int64) for t, n in size.items()}

    def _zero(self) -> Clock:
        return np.zeros(self.width, np.int32)

    def _need(self, numbers: npt.NDArray[np.int64]) -> Clock:
        need = self._zero()
        if len(numbers):
            at = self.place_array[numbers]
            np.maximum.at(need, at[:, 0], (at[:, 1] + 1).astype(np.int32))
        return need

    def _name(self, number: int) -> str:
        column, position = self.place[number]
        return describe(self.schedule, column, position)

    def _read(self, use: _Use, region: Region, needs: dict[Region, Clock]) -> None:
        if region.tensor in self.external:
            return
        if region not in needs:
            cells = self.writer[region.tensor][region.start : region.stop]
            writers = np.asarray([LOST]) if region.tensor in self.lost else _distinct(cells)
            needs[region] = self._need(writers[writers >= 0])
            if len(writers) and writers[0] == LOST:
                by = self.schedule.nodes[self.lost_to[region.tensor]].name
                self.findings.append(
                    f"{self._name(use.number)} reads {_show(region)}, whose memory node {by} wrote over"
                )
            elif NOBODY in writers:
                self.findings.append(f"{self._name(use.number)} reads {_show(region)}, which nothing has written")
        self._after(use, needs[region], f"reads {_show(region)} that may not be written yet")

    def _after(self, use: _Use, need: Clock, what: str) -> None:
        """Every entry that `need` counts must be done when `use` begins."""
        known = self.clock[use.column][use.position]
        if (known >= need).all():
            return
        late = int(np.flatnonzero(known < need)[0])
        other = describe(self.schedule, late, int(need[late]) - 1)
        self.findings.append(f"{self._name(use.number)} {what}: it does not wait for {other}")

    def _write(self, node: int, use: _Use, region: Region, elsewhere: Clock) -> None:
        cells = self.writer[region.tensor][region.start : region.stop]
        old = _distinct(cells)
        twice = [int(n) for n in old if n >= 0 and self.owner[n] == node and n != use.number]
        if twice:
            self.findings.append(f"{self._name(use.number)} writes {_show(region)}, as does {self._name(twice[0])}")
        before = [elsewhere, self._need(np.asarray([n for n in old if n >= 0 and n not in twice], np.int64))]
        for read in self.reads[region.tensor]:
            if read.node != node and read.start < region.stop and region.start < read.stop:
                before.append(read.need)
        for need in before:
            self._after(use, need, f"writes {_show(region)} that may still be in use")
        cells[:] = use.number

    def _elsewhere(self, tensor: str) -> Clock:
        """All earlier users of other tensors in the same memory."""
        need = self._zero()
        for other in self._sharing(tensor):
            np.maximum(need, self.touched[other], out=need)
        return need

    def _sharing(self, tensor: str) -> list[str]:
        return self.shares.get(tensor, [])

    def _note_reads(self, node: int, uses: Sequence[_Use]) -> None:
        by_region: dict[Region, list[int]] = {}
        for use in uses:
            for region in use.reads:
                by_region.setdefault(region, []).append(use.number)
        for region, numbers in by_region.items():
            need = self._need(np.asarray(numbers, np.int64))
            self.reads[region.tensor].append(_Read(node, region.start, region.stop, need))
            np.maximum(self.touched[region.tensor], need, out=self.touched[region.tensor])

    def _note_writes(self, node: int, uses: Sequence[_Use]) -> None:
        written: dict[str, list[tuple[Region, int]]] = {}
        for use in uses:
            for r in use.writes:
                written.setdefault(r.tensor, []).append((r, use.number))
        for tensor, by in written.items():
            need = self._need(np.asarray([number for _, number in by], np.int64))
            np.maximum(self.touched[tensor], need, out=self.touched[tensor])
            # Readers of columns that this node wrote all over are before it, so before whoever follows it.
            spans = _joined([(r.start, r.stop) for r, _ in by])
            self.reads[tensor] = [
                r for r in self.reads[tensor] if not any(a <= r.start and r.stop <= b for a, b in spans)
            ]
            for other in self._sharing(tensor):
                self.lost_to[other] = node
                self.lost.add(other)

    def _check_inside(self, node: TaskNode, uses: Sequence[_Use]) -> None:
        """Tiles of one node run in any order: none may read what another writes."""
        read = {r.tensor for u in uses for r in u.reads}
        written = {r.tensor for u in uses for r in u.writes}
        for tensor in sorted(written):
            for other in self._sharing(tensor):
                if other in read | written:
                    self.findings.append(f"node {node.name} uses {tensor} and {other}, which share memory")
        for tensor in sorted(read & written):
            owner = np.full(len(self.writer[tensor]), NOBODY, np.int64)
            for tile in range(node.tiles):
                for r in node.task.writes(node, tile, 1):
                    if r.tensor == tensor:
                        owner[r.start : r.stop] = tile
            for tile in range(node.tiles):
                for r in node.task.reads(node, tile, 1):
                    others = owner[r.start : r.stop] if r.tensor == tensor else owner[:0]
                    if ((others != NOBODY) & (others != tile)).any():
                        self.findings.append(
                            f"node {node.name}: tile {tile} reads {_show(r)}, which another tile writes"
                        )


def _distinct(cells: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The different values, ascending."""
    if len(cells) and (cells == cells[0]).all():
        return cells[:1]
    return np.unique(cells)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same columns in as few spans as possible."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


def _shares(placed: Mapping[str, tuple[int, int]]) -> dict[str, list[str]]:
    """For each tensor the others whose bytes overlap its own."""
    return {
        t: [o for o, (at, length) in placed.items() if o != t and at < offset + size and offset < at + length]
        for t, (offset, size) in placed.items()
    }


def _show(region: Region) -> str:
    return f"{region.tensor}[{region.start}:{region.stop})"


def describe(schedule: Schedule, column: int, position: int) -> str:
    """Words for an entry; a column past the last worker is an entry of the shared list."""
    shared = column >= schedule.workers
    entry = schedule.shared[column - schedule.workers] if shared else schedule.queues[column][position]
    place = f"shared entry {column - schedule.workers}" if shared else f"worker {column}, entry {position}"
    return f"node {schedule.nodes[entry.node].name} tiles [{entry.first}, {entry.first + entry.count}) ({place})"
