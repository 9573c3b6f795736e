"""Fake tasks and graphs for the tests of the scheduler, and a check that they are what they claim to be."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megakernel.scheduler.hazards import node_edges
from megakernel.scheduler.schedule import Placement
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant


@dataclass(frozen=True)
class FakeVariant(Variant):
    width: int = 1


class Fake(Task):
    """Tile i reads and writes columns `[start + i * step, start + i * step + width)` of each named tensor."""

    name = "fake"
    body = "Fake"
    config = "FakeVariant"
    fields = Struct("FakeFields", (Field("input", "u64"), Field("width", "u32")))

    @staticmethod
    def _regions(node: TaskNode, prefix: str, first: int, count: int) -> tuple[Region, ...]:
        out: set[Region] = set()
        for role, tensor in node.tensors.items():
            if role.startswith(prefix):
                start, step, width = (node.sizes[f"{role}.{part}"] for part in ("start", "step", "width"))
                if step == width:
                    out.add(Region(tensor, start + first * step, start + (first + count) * step))
                else:
                    out |= {
                        Region(tensor, start + i * step, start + i * step + width) for i in range(first, first + count)
                    }
        return tuple(sorted(out))

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return Fake._regions(node, "in", first, count)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return Fake._regions(node, "out", first, count)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        one = node.sizes.get("bytes", 0)
        return Cost(float(one * count), 0.0, float(one * count * 2))

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        tensor = next(iter(node.tensors.values()), "")
        return {"input": at.tensor(tensor), "width": node.sizes.get("bytes", 0)}


Access = tuple[str, int, int, int]  # tensor, start, step, width


def node(name: str, tiles: int, reads: list[Access], writes: list[Access], nbytes: int = 0) -> TaskNode:
    tensors, sizes = {}, {"bytes": nbytes}
    for prefix, accesses in (("in", reads), ("out", writes)):
        for i, (tensor, start, step, width) in enumerate(accesses):
            tensors[f"{prefix}{i}"] = tensor
            sizes |= {f"{prefix}{i}.start": start, f"{prefix}{i}.step": step, f"{prefix}{i}.width": width}
    return TaskNode(name, Fake, FakeVariant(), tiles, tensors, {}, sizes)


def decoder(layers: int = 2, hidden: int = 64, tile: int = 8, heads: int = 4, nbytes: int = 1000) -> list[TaskNode]:
    """The nodes of a small transformer, with the tensors of each layer reused by the next."""
    wide = 3 * hidden
    out = [node("embed", 1, [], [("x", 0, hidden, hidden)])]

    def matmul(name: str, source: str, k: int, target: str, n: int, residual: bool = False) -> TaskNode:
        reads: list[Access] = [(source, 0, 0, k)]
        if residual:
            reads.append((target, 0, tile, tile))
        return node(name, n // tile, reads, [(target, 0, tile, tile)], nbytes=nbytes * tile * k // 64)

    head = hidden // heads
    for layer in range(layers):
        p = f"layer {layer} "
        out += [
            matmul(p + "qkv", "x", hidden, "qkv", wide),
            node(p + "attention", heads, [("qkv", 0, 0, wide)], [("partials", 0, head, head)], nbytes=nbytes),
            node(p + "combine", heads, [("partials", 0, 0, hidden)], [("attended", 0, head, head)]),
            matmul(p + "out", "attended", hidden, "x", hidden, residual=True),
            matmul(p + "gate_up", "x", hidden, "mlp", wide),
            matmul(p + "down", "mlp", wide, "x", hidden, residual=True),
        ]
    out.append(matmul("head", "x", hidden, "logits", 4 * hidden))
    out.append(node("sample", 2, [("logits", 0, 0, 4 * hidden)], [("sampled", 0, 1, 1)]))
    out.append(node("advance", 1, [("sampled", 0, 0, 2)], []))
    return out


def random_nodes(rng: random.Random, most: int = 7, most_tiles: int = 5) -> list[TaskNode]:
    """A random graph: some tensors are written more than once, and the last node has one tile."""
    out: list[TaskNode] = []
    columns: dict[str, int] = {}
    for index in range(rng.randint(2, most)):
        tiles = rng.randint(1, most_tiles)
        reads: list[Access] = []
        for tensor in rng.sample(sorted(columns), min(len(columns), rng.randint(0, 3))):
            total = columns[tensor]
            if rng.random() < 0.5:
                start = rng.randrange(total)
                reads.append((tensor, start, 0, rng.randint(1, total - start)))
            elif total >= tiles:
                step = rng.randint(1, total // tiles)
                reads.append((tensor, rng.randint(0, total - step * tiles), step, step))
        used = {r[0] for r in reads}
        again = [t for t, c in columns.items() if t not in used and c >= tiles]
        target, width = f"t{index}", rng.randint(1, 4)
        if again and rng.random() < 0.3:
            target = rng.choice(again)
            width = rng.randint(1, columns[target] // tiles)
        columns.setdefault(target, width * tiles)
        out.append(node(f"n{index}", tiles, reads, [(target, 0, width, width)], nbytes=rng.randint(0, 5000)))
    ends: list[Access] = [
        (t, 0, 0, columns[t]) for t in rng.sample(sorted(columns), rng.randint(1, min(2, len(columns))))
    ]
    out.append(node("end", 1, ends, []))
    return out


def random_memory(rng: random.Random, nodes: list[TaskNode]) -> dict[str, tuple[int, int]]:
    """A valid memory plan: a tensor may take over the bytes of one that no later node uses."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, n in enumerate(nodes):
        for r in Fake.reads(n, 0, n.tiles) + Fake.writes(n, 0, n.tiles):
            first.setdefault(r.tensor, index)
            last[r.tensor] = index
    at: dict[str, tuple[int, int]] = {}
    for tensor in sorted(first, key=lambda t: first[t]):
        size = rng.choice((64, 128))
        for _ in range(8):
            place = (64 * rng.randrange(4), size)
            live = [t for t in at if last[t] >= first[tensor]]
            if not any(at[t][0] < place[0] + size and place[0] < sum(at[t]) for t in live):
                at[tensor] = place
                break
        else:
            at[tensor] = (1000 + 200 * len(at), size)
    return at


def random_placement(
    rng: random.Random, nodes: list[TaskNode], workers: int, memory: dict[str, tuple[int, int]] | None = None
) -> Placement:
    """Random ranges on random workers; all queues follow one random order that the data flow allows."""
    before = node_edges(nodes, memory)
    queues: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
    done: set[int] = set()
    while len(done) < len(nodes):
        ready = [i for i in range(len(nodes)) if i not in done and before[i] <= done]
        if len(done) < len(nodes) - 1:
            ready = [i for i in ready if i != len(nodes) - 1]
        index = rng.choice(ready)
        done.add(index)
        tiles = nodes[index].tiles
        cuts = sorted({0, tiles, *(rng.randint(0, tiles) for _ in range(rng.randint(0, workers)))})
        for start, stop in pairwise(cuts):
            rng.choice(queues).append((index, start, stop - start))
    return tuple(tuple(q) for q in queues)


def test_decoder_reads_only_what_was_written() -> None:
    written: set[str] = set()
    for n in decoder():
        assert {r.tensor for r in Fake.reads(n, 0, n.tiles)} <= written
        written |= {r.tensor for r in Fake.writes(n, 0, n.tiles)}


def test_random_nodes_write_apart() -> None:
    for seed in range(50):
        for n in random_nodes(random.Random(seed)):
            regions = [Fake.writes(n, i, 1)[0] for i in range(n.tiles) if n.name != "end"]
            assert not any(a.overlaps(b) for i, a in enumerate(regions) for b in regions[:i])
