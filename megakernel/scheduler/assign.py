"""Policies: plain functions that place tiles on workers. A public function here that returns a Placement is one.

Every policy gives a worker at most one contiguous range of a node's tiles, and all queues follow one order of nodes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from megakernel.scheduler.exchanges import exchanges_of
from megakernel.scheduler.hazards import node_edges
from megakernel.scheduler.schedule import Placement
from megakernel.target import Target
from megakernel.tasks.task import Cost, TaskNode

Policy = Callable[[Sequence[TaskNode], Target, int], Placement]


def round_robin(nodes: Sequence[TaskNode], target: Target, context: int) -> Placement:
    """Near-equal ranges in worker order; the workers that get one tile more rotate from node to node."""
    build = _Builder(target.workers)
    turn = 0
    for index, node in enumerate(nodes):
        base, more = divmod(node.tiles, target.workers)
        build.add(index, [base + ((w - turn) % target.workers < more) for w in range(target.workers)])
        turn = (turn + more) % target.workers
    return build.placement()


def balanced(nodes: Sequence[TaskNode], target: Target, context: int) -> Placement:
    """Near-equal ranges, the remainder of each node to the workers that have the least work so far.

    A node's share never differs by more than one tile: its readers wait for the slowest worker, so paying back an
    earlier node with more than that only makes everyone wait (simulated on 16- and 36-layer decoders).

    Where edges are by value, a node whose task `repeats` is placed like the one of its kind before it; and workers that
    make the last of attention's result in every step get a tile less of what reads it, or none: they come to it late.
    """
    build = _Builder(target.workers)
    load = [0.0] * target.workers
    late: dict[str, set[int]] = {}  # tensor -> workers
    before: dict[tuple[object, int], list[int]] = {}
    for index, node in enumerate(nodes):
        tile = _tile_time(node, target, context)
        base, more = divmod(node.tiles, target.workers)
        counts = [base] * target.workers
        kind = (node.task, node.tiles)
        tired: set[int] = set()
        apart: list[tuple[int, int]] | None = None
        if target.value_edges:
            tired = tired.union(*(late.get(r.tensor, ()) for r in node.task.reads(node, 0, node.tiles)))
        if target.value_edges and node.task.repeats and kind in before:
            counts = before[kind]
        else:
            if 0 < len(tired) <= target.workers // 4:
                less = max(0, math.ceil(node.tiles / target.workers) - 1)
                base, more = divmod(node.tiles - less * len(tired), target.workers - len(tired))
                counts = [less if w in tired else base for w in range(target.workers)]
            rank = sorted(range(target.workers), key=lambda w: (w in tired, load[w], w))
            for worker in rank[:more]:
                counts[worker] += 1
            apart = _one_each(node, rank)
        before[kind] = counts
        ranges = apart or list(zip(np.cumsum([0, *counts]).tolist(), counts))
        _note_late(late, node, ranges)
        for worker, (_, count) in enumerate(ranges):
            took = node.tiles / target.workers if tired else count  # what they are spared is not made up for
            load[worker] += took * tile + (target.task_us if took else 0.0)
        build.add_ranges(index, ranges)
    return build.placement()


def _one_each(node: TaskNode, rank: Sequence[int]) -> list[tuple[int, int]] | None:
    """First tile and tiles of each worker, of a node that idles and of whose tiles some have work in every step: these
    go to the first workers of `rank`, as if there were no others. Of other nodes, or of too many tiles, None."""
    first = node.task.first_tiles(node)
    if not first or not node.task.idles or node.tiles > len(rank):
        return None
    rest = sorted(set(range(node.tiles)) - set(first))
    ranges = [(0, 0)] * len(rank)
    for workers, tiles in ((rank[: len(first)], first), (rank[len(first) : node.tiles], rest)):
        for worker, tile in zip(sorted(workers), tiles):
            ranges[worker] = tile, 1
    return ranges


def _note_late(late: dict[str, set[int]], node: TaskNode, ranges: Sequence[tuple[int, int]]) -> None:
    """Add to `late`, by tensor, the workers of this node that are the last to write it in every step."""
    written = [region.tensor for region in node.task.writes(node, 0, node.tiles)]
    instead = [region.tensor for region in node.task.may_write(node, 0, node.tiles)]
    first = node.task.first_tiles(node)
    tiles = set(first or range(node.tiles))
    busy = {w for w, (begin, count) in enumerate(ranges) if tiles.intersection(range(begin, begin + count))}
    if late.keys() & set(written):  # in steps where the node before has not done it in its place
        late.update({tensor: late[tensor] | busy for tensor in written if tensor in late})
    elif first:
        late.update({tensor: set(busy) for tensor in (*written, *instead)})


def critical_path(nodes: Sequence[TaskNode], target: Target, context: int) -> Placement:
    """List scheduling: the node with the longest way to the end first, each worker filled to the same finish time.

    Nodes with fewer tiles than workers go where their inputs were made, unless those workers are busy for longer than
    a hop takes. A part is sent before the peers' are waited for: they wait for this one.
    """
    before = node_edges(nodes)
    for ends in exchanges_of(nodes)[0]:
        before[ends.receiver].add(ends.sender)
    build = _Builder(target.workers)
    free = [0.0] * target.workers
    made: list[dict[int, float]] = [{} for _ in nodes]  # node -> worker -> when its part is done
    for index in _by_priority(nodes, before, target, context):
        node = nodes[index]
        tile = _tile_time(node, target, context)
        start = _starts(free, [made[b] for b in before[index]], target.hop_us)
        counts = _fill(start, node.tiles, tile, math.ceil(node.tiles / target.workers))
        for worker, count in enumerate(counts):
            if count:
                free[worker] = made[index][worker] = start[worker] + count * tile + target.task_us
        build.add(index, counts)
    return build.placement()


def find_policies() -> dict[str, Policy]:
    """Every policy of this file by name."""
    return {
        name: value
        for name, value in sorted(globals().items())
        if inspect.isfunction(value)
        and value.__module__ == __name__
        and not name.startswith("_")
        and inspect.signature(value).return_annotation == "Placement"
    }


class _Builder:
    """Collects the ranges of a placement."""

    def __init__(self, workers: int) -> None:
        self.queues: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]

    def add(self, node: int, counts: Sequence[int]) -> None:
        self.add_ranges(node, list(zip(np.cumsum([0, *counts]).tolist(), counts)))

    def add_ranges(self, node: int, ranges: Sequence[tuple[int, int]]) -> None:
        """First tile and tiles of each worker."""
        for queue, (first, count) in zip(self.queues, ranges):
            if count:
                queue.append((node, first, count))

    def placement(self) -> Placement:
        return tuple(tuple(q) for q in self.queues)


def _microseconds(cost: Cost, target: Target) -> float:
    """Time of some work on one worker, without what an entry costs anyway."""
    stream = cost.stream_bytes / (target.stream_gbps / target.workers) / 1e3
    return max(stream, cost.flops / target.worker_gflops / 1e3)


def _tile_time(node: TaskNode, target: Target, context: int) -> float:
    """Mean time of a tile; never zero, so that nodes without cost are spread too."""
    whole = _microseconds(node.task.cost(node, 0, node.tiles, context), target)
    return max(whole / max(1, node.tiles), 1e-6)


def _fill(load: Sequence[float], tiles: int, tile: float, most: int) -> list[int]:
    """How many of `tiles` each worker gets, at most `most`, so that `load + count * tile` is level."""
    have = np.asarray(load, np.float64)

    def share(level: float) -> npt.NDArray[np.int64]:
        return np.clip(np.floor((level - have) / tile), 0, most).astype(np.int64)

    low, high = float(have.min()), float(have.max()) + (tiles + 1) * tile
    for _ in range(60):
        if high - low < tile / 64:
            break
        level = (low + high) / 2
        low, high = (low, level) if share(level).sum() > tiles else (level, high)
    counts = [int(c) for c in share(low)]
    while (left := tiles - sum(counts)) > 0:
        for worker in sorted(range(len(load)), key=lambda w: (load[w] + counts[w] * tile, w)):
            if left and counts[worker] < most:
                counts[worker] += 1
                left -= 1
    return counts


def _by_priority(nodes: Sequence[TaskNode], before: Sequence[set[int]], target: Target, context: int) -> list[int]:
    """Nodes by the longest path from their start to the end of the step: an order that respects `before`."""
    path = [0.0] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        share = math.ceil(node.tiles / target.workers)
        path[index] += share * _tile_time(node, target, context) + target.task_us + 1e-9
        for b in before[index]:
            path[b] = max(path[b], path[index] + target.hop_us)
    order = sorted(range(len(nodes)), key=lambda i: (-path[i], i))
    if nodes and nodes[-1].tiles == 1:  # the end of the step
        order.remove(len(nodes) - 1)
        order.append(len(nodes) - 1)
    return order


def _starts(free: Sequence[float], inputs: Sequence[dict[int, float]], hop: float) -> list[float]:
    """When each worker can begin: it is free and has seen all inputs, its own without a hop."""
    start = list(free)
    for made in inputs:
        if not made:
            continue
        last = max(made, key=made.__getitem__)
        others = max((done for worker, done in made.items() if worker != last), default=None)
        for worker in range(len(start)):
            seen = made[last] + hop if worker != last else made[last]
            if worker == last and others is not None:
                seen = max(seen, others + hop)
            start[worker] = max(start[worker], seen)
    return start


POLICIES: dict[str, Policy] = find_policies()
