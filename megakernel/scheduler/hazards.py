"""Who must come before whom, from the regions that entries read and write and from memory that tensors share.

Nodes run as if one after another in the order of the list; entries of one node run side by side. Hence an entry
comes after the last writers of what it reads, and after everything that touched what it overwrites.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megakernel.errors import ScheduleError
from megakernel.tasks.task import Region, TaskNode

Needs = dict[int, int]  # producer node -> set of its entries, as bits in the order they were given
Memory = Mapping[str, tuple[int, int]]  # tensor -> (byte offset, bytes)


@dataclass(frozen=True)
class Tiles:
    """Tiles `[first, first + count)` of a node, before anyone decides where they run."""

    node: int
    first: int
    count: int


@dataclass
class _Segment:
    """Columns of one tensor with one history: who wrote them last, who read them since."""

    start: int
    stop: int
    writers: Needs = field(default_factory=dict)
    readers: Needs = field(default_factory=dict)

    def split(self, at: int) -> _Segment:
        right = _Segment(at, self.stop, dict(self.writers), dict(self.readers))
        self.stop = at
        return right


def requirements(nodes: Sequence[TaskNode], tiles: Sequence[Tiles], memory: Memory | None = None) -> list[Needs]:
    """For each element of `tiles` the entries it must follow. Bit i of node p is the i-th element of p in `tiles`.

    Two tensors whose bytes overlap in `memory` conflict as a whole. Raises ScheduleError when entries of one node
    conflict with each other.
    """
    by_node: list[list[int]] = [[] for _ in nodes]
    for index, t in enumerate(tiles):
        by_node[t.node].append(index)
    writes = [_regions(nodes[t.node].task.writes, nodes, t) for t in tiles]
    columns: dict[str, int] = {}
    for regions in writes:
        for r in regions:
            columns[r.tensor] = max(columns.get(r.tensor, 0), r.stop)
    history = _History(memory or {}, columns)
    needs: list[Needs] = [{} for _ in tiles]
    for node, members in enumerate(by_node):
        reads = [_regions(nodes[node].task.reads, nodes, tiles[i]) for i in members]
        found = history.run(node, nodes[node].name, reads, [writes[i] for i in members])
        for index, need in zip(members, found):
            needs[index] = need
    return needs


def _regions(
    ask: Callable[[TaskNode, int, int], tuple[Region, ...]], nodes: Sequence[TaskNode], t: Tiles
) -> tuple[Region, ...]:
    return ask(nodes[t.node], t.first, t.count) if t.count else ()


def node_edges(nodes: Sequence[TaskNode], memory: Memory | None = None) -> list[set[int]]:
    """For each node the nodes it must follow."""
    whole = [Tiles(i, 0, n.tiles) for i, n in enumerate(nodes)]
    return [set(need) for need in requirements(nodes, whole, memory)]


def bits(mask: int) -> list[int]:
    """Positions of the set bits, ascending."""
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out


class _History:
    """State of every tensor while the nodes are walked in order."""

    def __init__(self, memory: Memory, columns: Mapping[str, int]) -> None:
        self.memory = memory
        self.columns = columns  # how wide each tensor is written
        self.segments: dict[str, list[_Segment]] = {}
        self.blocks: list[tuple[int, int, str]] = []  # byte range and the tensor that holds it now

    def run(
        self, node: int, name: str, reads: Sequence[Sequence[Region]], writes: Sequence[Sequence[Region]]
    ) -> list[Needs]:
        """What each entry of `node` must follow; then records that they ran."""
        needs: list[Needs] = [{} for _ in reads]
        self._read(node, reads, needs)
        self._check_apart(name, writes)
        for tensor in sorted({r.tensor for regions in writes for r in regions}):
            self._take(tensor)
        for bit, regions in enumerate(writes):
            for region in regions:
                found = self._touched(region)
                others = found.pop(node, 0) & ~(1 << bit)
                if others:
                    raise ScheduleError(
                        (
                            f"node {name}: entry {bit} writes {region.tensor}[{region.start}:{region.stop}) while "
                            f"entry {bits(others)[0]} of the same node reads it; give the output its own tensor",
                        )
                    )
                _merge(needs[bit], found)
        self._write(node, writes)
        return needs

    def _read(self, node: int, reads: Sequence[Sequence[Region]], needs: list[Needs]) -> None:
        readers: dict[Region, int] = {}
        for bit, regions in enumerate(reads):
            for region in regions:
                readers[region] = readers.get(region, 0) | 1 << bit
        for region, mask in readers.items():
            found: Needs = {}
            for segment in self._cut(region):
                _merge(found, segment.writers)
                segment.readers[node] = segment.readers.get(node, 0) | mask
            for bit in bits(mask):
                _merge(needs[bit], found)

    def _write(self, node: int, writes: Sequence[Sequence[Region]]) -> None:
        for bit, regions in enumerate(writes):
            for region in regions:
                for segment in self._cut(region):
                    segment.writers = {node: 1 << bit}
                    segment.readers = {}

    def _check_apart(self, name: str, writes: Sequence[Sequence[Region]]) -> None:
        flat = sorted((r, bit) for bit, regions in enumerate(writes) for r in regions if r.stop > r.start)
        last: tuple[Region, int] | None = None  # the region that reaches furthest
        for region, bit in flat:
            if last and last[1] != bit and last[0].overlaps(region):
                raise ScheduleError(
                    (
                        f"node {name}: entries {last[1]} and {bit} both write {region.tensor} at column "
                        f"{region.start}; tiles of a node must write apart",
                    )
                )
            if last is None or last[0].tensor != region.tensor or region.stop > last[0].stop:
                last = region, bit

    def _touched(self, region: Region) -> Needs:
        """Everything that used those columns since they were last written, and who wrote them."""
        found: Needs = {}
        for segment in self._cut(region):
            _merge(found, segment.writers)
            _merge(found, segment.readers)
        return found

    def _take(self, tensor: str) -> None:
        """Before `tensor` is written: who used its memory for other tensors counts as its reader."""
        if tensor not in self.memory:
            return
        low, high = self.memory[tensor][0], sum(self.memory[tensor])
        losers: set[str] = set()
        rest: list[tuple[int, int, str]] = []
        for start, stop, owner in self.blocks:
            if stop <= low or start >= high:
                rest.append((start, stop, owner))
                continue
            losers.add(owner)
            rest += [(start, low, owner)] if start < low else []
            rest += [(high, stop, owner)] if stop > high else []
        if losers == {tensor}:
            return
        self.blocks = [*rest, (low, high, tensor)]
        if losers:
            inherited = self._users(losers | {tensor})
            self.segments[tensor] = [_Segment(0, self.columns[tensor], {}, inherited)]

    def _users(self, tensors: set[str]) -> Needs:
        found: Needs = {}
        for tensor in tensors:
            for segment in self.segments.get(tensor, []):
                _merge(found, segment.writers)
                _merge(found, segment.readers)
        return found

    def _cut(self, region: Region) -> list[_Segment]:
        """Segments that cover exactly the region, made or split as needed."""
        if region.stop <= region.start:
            return []
        known = self.segments.setdefault(region.tensor, [])
        low = bisect_right(known, region.start, key=_stop)
        high = bisect_left(known, region.stop, lo=low, key=_start)
        out: list[_Segment] = []
        before: list[_Segment] = []
        after: list[_Segment] = []
        at = region.start
        for segment in known[low:high]:
            if segment.start < region.start:
                before = [segment]
                segment = segment.split(region.start)
            if segment.stop > region.stop:
                after = [segment.split(region.stop)]
            if segment.start > at:
                out.append(_Segment(at, segment.start))
            out.append(segment)
            at = segment.stop
        if at < region.stop:
            out.append(_Segment(at, region.stop))
        known[low:high] = before + out + after
        return out


def _start(segment: _Segment) -> int:
    return segment.start


def _stop(segment: _Segment) -> int:
    return segment.stop


def _merge(into: Needs, more: Needs) -> None:
    for node, mask in more.items():
        into[node] = into.get(node, 0) | mask
