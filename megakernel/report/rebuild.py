"""The schedule that a timeline ran, made from the timeline alone: `simulate` can run it without the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from megakernel.report.arrivals import Arrivals, arrivals
from megakernel.report.steps import ROLES, Step
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.tasks.record import Role
from megakernel.tasks.struct import Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant
from megakernel.timeline import Timeline, TimelineNode


class Recorded(Task):
    """A task that is known by its cost alone; the cost of a node is shared out evenly over its tiles."""

    name: ClassVar[str] = "recorded"
    body: ClassVar[str] = "Recorded"
    config: ClassVar[str] = "Variant"
    fields: ClassVar[Struct] = Struct("RecordedFields", ())

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return ()

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return ()

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        share = count / max(1, node.tiles)
        return Cost(*(node.scalars[name] * share for name in ("stream_bytes", "other_bytes", "flops")))

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        return {}


Item = tuple[int, int, int]  # node, first tile, tiles
Place = tuple[int, int]  # worker and index in its queue


def schedule_of(timeline: Timeline, step: Step) -> Schedule:
    """Queues as they ran in that step. Entries that are waited for together share a counter."""
    seen = arrivals(timeline, step)
    queues, place = _queues(timeline, seen)
    asked: dict[Place, set[int]] = {}  # entry -> the sources that it is one of
    for number, source in enumerate(seen.sources):
        for event in source.events:
            asked.setdefault(place[event], set()).add(number)
    groups = {key: i for i, key in enumerate(dict.fromkeys(frozenset(s) for s in asked.values()))}
    counter = {entry: groups[frozenset(sources)] for entry, sources in asked.items()}
    size = Counter(counter.values())
    of_source = [{counter[place[e]] for e in source.events} for source in seen.sources]
    waits: dict[Place, set[int]] = {}
    for event, found in enumerate(seen.of):
        for arrival in found:
            waits.setdefault(place[event], set()).update(of_source[arrival.source])
    return Schedule(
        tuple(_node(n) for n in timeline.nodes),
        tuple(
            tuple(
                Entry(*item, tuple(Wait(c, size[c]) for c in sorted(waits.get((w, i), ()))), counter.get((w, i)))
                for i, item in enumerate(queue)
            )
            for w, queue in enumerate(queues)
        ),
        len(groups),
        "recorded",
    )


def _queues(timeline: Timeline, seen: Arrivals) -> tuple[list[list[Item]], dict[int, Place]]:
    """What each worker ran, in order, and the place of every event but those of producers. Where roles run side by side
    some are ahead of others, and the order is that of the queue."""
    queues: list[list[Item]] = [[] for _ in range(timeline.meta.workers)]
    place: dict[int, Place] = {}
    at: dict[tuple[int, int, int, int], int] = {}
    columns = (seen.events[c].tolist() for c in ("start", "record", "node", "tile_begin", "tile_count"))
    records = list(zip(*columns))
    in_turn = timeline.meta.roles == ("worker",)
    for event in sorted(range(len(records)), key=lambda e: records[e][0 if in_turn else 1]):
        worker, (_, record, node, first, count) = seen.rows[event] // ROLES, records[event]
        if seen.rows[event] % ROLES == Role.PRODUCER:
            continue
        key = (worker, record, node, first)
        if key not in at:
            at[key] = len(queues[worker])
            queues[worker].append((node, first, count))
        place[event] = (worker, at[key])
    return queues, place


def _node(node: TimelineNode) -> TaskNode:
    cost = {"stream_bytes": node.stream_bytes, "other_bytes": node.other_bytes, "flops": node.flops}
    return TaskNode(node.name, _task(node.task), Variant(), node.tiles, {}, scalars=cost, layer=node.layer)


@lru_cache
def _task(name: str) -> type[Task]:
    """`Recorded` under the name of a task, which calibrations go by."""
    return type(name, (Recorded,), {"name": name})
