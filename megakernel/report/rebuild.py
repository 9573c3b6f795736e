"""The schedule that a timeline ran, made from the timeline alone: `simulate` can run it without the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from megakernel.report.arrivals import arrivals
from megakernel.report.steps import ROLES, Step
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.tasks.record import Role, Struct
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


def schedule_of(timeline: Timeline, step: Step) -> Schedule:
    """Queues as they ran in that step. Every entry has its own counter and waits for those that its edges name."""
    seen = arrivals(timeline, step)
    place: dict[int, tuple[int, int]] = {}  # event -> worker and index in its queue
    queues: list[list[tuple[int, int, int, int]]] = [[] for _ in range(timeline.meta.workers)]
    columns = (seen.events[c].tolist() for c in ("record", "node", "tile_begin", "tile_count", "start"))
    at: dict[tuple[int, int, int, int], int] = {}
    records = list(zip(*columns))
    for event in sorted(range(len(records)), key=lambda e: (seen.rows[e] // ROLES, records[e][4])):
        worker, (record, node, first, count, _) = seen.rows[event] // ROLES, records[event]
        if seen.rows[event] % ROLES == Role.PRODUCER:
            continue
        key = (worker, record, node, first)
        if key not in at:
            at[key] = len(queues[worker])
            queues[worker].append((node, first, count, event))
        place[event] = (worker, at[key])
    number = {(w, i): n for n, (w, i) in enumerate((w, i) for w, queue in enumerate(queues) for i in range(len(queue)))}
    waits: dict[tuple[int, int], set[int]] = {}
    for event, found in enumerate(seen.of):
        for arrival in found:
            makers = {number[place[e]] for e in seen.sources[arrival.source].events}
            waits.setdefault(place[event], set()).update(makers - {number[place[event]]})
    return Schedule(
        tuple(_node(n) for n in timeline.nodes),
        tuple(
            tuple(
                Entry(node, first, count, tuple(Wait(c, 1) for c in sorted(waits.get((w, i), ()))), number[w, i])
                for i, (node, first, count, _) in enumerate(queue)
            )
            for w, queue in enumerate(queues)
        ),
        len(number),
        "recorded",
    )


def _node(node: TimelineNode) -> TaskNode:
    cost = {"stream_bytes": node.stream_bytes, "other_bytes": node.other_bytes, "flops": node.flops}
    return TaskNode(node.name, _task(node.task), Variant(), node.tiles, {}, scalars=cost, layer=node.layer)


@lru_cache
def _task(name: str) -> type[Task]:
    """`Recorded` under the name of a task, which calibrations go by."""
    return type(name, (Recorded,), {"name": name})
