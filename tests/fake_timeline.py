"""Timelines that nobody measured: the steps of `simulate`, written down as a kernel would have recorded them.

What the analysis must find in them is known, because the simulation says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megakernel.flow import edges_of
from megakernel.scheduler.calibration import Calibration, operator_name
from megakernel.scheduler.schedule import Schedule
from megakernel.scheduler.simulate import Simulation, simulate
from megakernel.target import Target
from megakernel.tasks.record import NONE, TRACE_EVENT, Role, TraceFlag
from megakernel.timeline import Alignment, Events, Meta, Timeline, TimelineNode

FIRST_STEP = 5
IDLE_NS = 700  # the first step's header comes that long after the recording began


def timeline_of(
    schedule: Schedule,
    target: Target,
    context: int = 0,
    *,
    steps: int = 3,
    calibration: Callable[[int], Calibration] = lambda _step: Calibration(),
    name: str = "fake",
    data_share: float = 0.0,
) -> Timeline:
    """A recording of `steps` simulated steps of a schedule without tickets, one role a worker.

    `calibration` may differ from step to step. The first `data_share` of an entry's time goes into its first data."""
    rows: list[dict[str, Any]] = []
    begin = IDLE_NS
    for step in range(FIRST_STEP, FIRST_STEP + steps):
        figures = calibration(step)
        said = simulate(schedule, target, context, figures)
        rows += _step(schedule, said, step, begin, round(figures.step_us * 1e3), data_share)
        begin = max(r["published"] for r in rows)
    events = np.zeros(len(rows), TRACE_EVENT.dtype)
    for i, row in enumerate(rows):
        for column, value in row.items():
            events[i][column] = value
    order = np.lexsort((events["start"], events["role"], events["worker"]))
    return Timeline(
        events[order], meta(target, schedule.workers, name, FIRST_STEP, FIRST_STEP + steps - 1, context),
        nodes(schedule, context), edges_of(schedule, by_value=False),
    )  # fmt: skip


def meta(target: Target, workers: int, name: str, first: int, last: int, context: int = 0) -> Meta:
    zeros = (0.0,) * workers
    return Meta(
        program=name, model=name, backend=target.backend, device="a simulation", target=target.name, workers=workers,
        roles=("worker",), ring_bytes=0, alignment=Alignment("simulated", 1e9, zeros, zeros, 0.0), first_step=first,
        last_step=last, context=context, rows=1.0, overflow=(0,) * workers, options={"workers": workers},
    )  # fmt: skip


def nodes(schedule: Schedule, context: int) -> tuple[TimelineNode, ...]:
    out = []
    for n in schedule.nodes:
        cost = n.task.cost(n, 0, n.tiles, context)
        out.append(
            TimelineNode(
                n.name, operator_name(n.name, n.layer), n.task.name, n.layer, n.tiles, cost.stream_bytes,
                cost.other_bytes, cost.flops,
            )
        )  # fmt: skip
    return tuple(out)


def _step(
    schedule: Schedule, said: Simulation, step: int, begin: int, header: int, data_share: float
) -> list[dict[str, Any]]:
    index = {n.name: i for i, n in enumerate(schedule.nodes)}
    waits = {(e.node, e.first): e.waits for queue in schedule.queues for e in queue}
    free = [begin + header] * schedule.workers
    out: list[dict[str, Any]] = []
    for s in sorted(said.spans, key=lambda s: (s.worker, s.start_us)):
        ready, end = begin + round(s.start_us * 1e3), begin + round(s.end_us * 1e3)
        waited, awaited = ready - free[s.worker], waits[index[s.node], s.first]
        out.append({
            "worker": s.worker, "role": Role.WORKER, "record": s.index, "node": index[s.node], "tile_begin": s.first,
            "tile_count": s.count, "step": step, "start": free[s.worker], "ready": ready,
            "first_data": ready + int((end - ready) * data_share), "end": end, "published": end,
            "longest_wait": waited, "longest_wait_counter": awaited[0].counter if waited and awaited else NONE,
        })  # fmt: skip
        free[s.worker] = end
    for worker in range(schedule.workers):
        out.append({
            "worker": worker, "role": Role.CONTROL, "record": NONE, "node": NONE, "tile_begin": 1,
            "tile_count": said.context, "step": step, "start": begin, "ready": begin + header,
            "first_data": begin + header, "end": free[worker], "published": free[worker], "longest_wait": header,
            "longest_wait_counter": NONE,
        })  # fmt: skip
    return out


def table(rows: Sequence[tuple[Any, ...]]) -> Events:
    """Events of a hand-made recording: (worker, role, record, node, tile, tiles, step, start, ready, data, end,
    published), and optionally flags."""
    out = np.zeros(len(rows), TRACE_EVENT.dtype)
    columns = (
        "worker", "role", "record", "node", "tile_begin", "tile_count", "step", "start", "ready", "first_data", "end",
        "published", "flags",
    )  # fmt: skip
    for i, row in enumerate(rows):
        for column, value in zip(columns, row):
            out[i][column] = value
    out["longest_wait_counter"] = NONE
    return out[np.lexsort((out["start"], out["role"], out["worker"]))]


def cut(timeline: Timeline, at: int) -> Events:
    """The events up to that time; those that had begun are cut there."""
    events = timeline.events[timeline.events["start"] <= at].copy()
    late = events["published"] > at
    for column in ("ready", "first_data", "end"):
        events[column] = np.minimum(events[column], at)
    events["published"][late] = 0
    events["flags"][late] |= np.uint8(TraceFlag.CUT)
    return events


def split(timeline: Timeline) -> Timeline:
    """The same recording of a worker with three roles: the producer reads each record's bytes as early as it can, the
    consumer works until shortly before the end, and the storer publishes."""
    rows = []
    free: dict[int, int] = {}
    for e in timeline.tasks[np.lexsort((timeline.tasks["start"], timeline.tasks["worker"]))]:
        worker, start, ready, end = (int(e[c]) for c in ("worker", "start", "ready", "end"))
        begin = free.get(worker, start)
        read = min(begin + (end - ready) // 2, end)
        free[worker] = read
        most = ready + (end - ready) * 9 // 10
        first = max(ready, min(read, most))
        for role, times in (
            (Role.PRODUCER, (begin, begin, read, read, read)),
            (Role.CONSUMER, (start, ready, first, most, most)),
            (Role.STORER, (start, most, most, end, int(e["published"]))),
        ):
            made = e.copy()
            made["role"] = role
            for column, value in zip(("start", "ready", "first_data", "end", "published"), times):
                made[column] = value
            rows.append(made)
    tasks = np.array(rows, timeline.events.dtype)
    events = np.concatenate([tasks, timeline.worker_steps])
    order = np.lexsort((events["start"], events["role"], events["worker"]))
    meta_ = replace(timeline.meta, roles=("producer", "consumer", "storer"), ring_bytes=1 << 16)
    return replace(timeline, events=events[order], meta=meta_)
