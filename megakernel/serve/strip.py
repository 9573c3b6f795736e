"""The strip of the page: what the workers did in one step, out of a recording of the kernel's timeline."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megakernel.errors import ApiError, MegakernelError
from megakernel.tasks.record import Role

STEPS = 4  # of a recording: the last one that is whole is shown
MOST_WORKERS = 24  # that are drawn, evenly chosen


class Node(Protocol):
    @property
    def operator(self) -> str: ...


class Recorded(Protocol):
    """What a strip needs of a timeline: events of records, [n], with worker, role, step, node, ready and end (ns)."""

    @property
    def tasks(self) -> npt.NDArray[Any]: ...
    @property
    def complete_steps(self) -> tuple[int, ...]: ...
    @property
    def nodes(self) -> tuple[Node, ...]: ...


class Strips:
    """Records a few steps of whatever runs, one recording at a time. Of a model without recording, none."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def record(self, model: Any) -> dict[str, Any] | None:
        """The strip of a step that ran just now, None when none ran. Ends after two launches. Raises ApiError 404 for
        a model without timeline."""
        if not hasattr(model, "start_recording"):
            raise _none("this model records no timeline")
        async with self._one:
            try:
                await asyncio.to_thread(model.start_recording, STEPS)
                timeline = await asyncio.to_thread(model.stop_recording)
            except MegakernelError as e:
                raise _none(str(e)) from e
        return strip_of(timeline) if timeline.complete_steps else None


def _none(text: str) -> ApiError:
    return ApiError(404, f"timeline: {text}", code="no_timeline")


def strip_of(timeline: Recorded) -> dict[str, Any]:
    """`rows`: of each shown worker [begin, end, operator] of its records, nanoseconds from the begin of the step; where
    there is nothing it waits. `operators`: their names, most time first. `busy`: part of the span that is work."""
    step = timeline.complete_steps[-1]
    events = timeline.tasks[timeline.tasks["step"] == step]
    role = Role.CONSUMER if (events["role"] == Role.CONSUMER).any() else Role.WORKER
    events = events[events["role"] == role]
    begin = int(events["ready"].min())
    spans = np.stack([events["ready"] - begin, events["end"] - begin], axis=1).astype(np.int64)
    names = [timeline.nodes[int(n)].operator for n in events["node"]]
    spent: dict[str, int] = {}
    for name, (low, high) in zip(names, spans.tolist()):
        spent[name] = spent.get(name, 0) + high - low
    operators = sorted(spent, key=lambda name: -spent[name])
    number = {name: i for i, name in enumerate(operators)}
    workers = np.unique(events["worker"])
    shown = workers[np.linspace(0, len(workers) - 1, min(len(workers), MOST_WORKERS)).round().astype(int)]
    rows = [
        [[*spans[at].tolist(), number[names[at]]] for at in np.flatnonzero(events["worker"] == worker)]
        for worker in shown
    ]
    span = int(spans[:, 1].max())
    return {
        "step": step, "span_ns": span, "workers": shown.tolist(), "operators": operators, "rows": rows,
        "busy": sum(spent.values()) / max(1, span * len(workers)),
    }  # fmt: skip
