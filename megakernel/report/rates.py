"""Bytes a second over time, against the ceiling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.report.steps import Step, finish
from megakernel.target import TARGETS
from megakernel.tasks.record import Role
from megakernel.timeline import Events, Timeline

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ceiling:
    """The best that reading can be, GB/s, and where the figure is from. 0: unknown."""

    gbps: float
    source: str


@dataclass(frozen=True)
class Rates:
    """Achieved GB/s in equal parts of a step of `bin_ns` each; their sum x bin_ns is `stream_bytes` of the step."""

    bin_ns: float
    gbps: tuple[float, ...]
    mean_gbps: float
    stream_bytes: float
    ceiling: Ceiling

    @property
    def floor_ns(self) -> float:
        """The time to read the step's bytes at the ceiling; 0 when that is unknown."""
        return self.stream_bytes / self.ceiling.gbps if self.ceiling.gbps else 0.0


def ceiling_of(timeline: Timeline, measured_gbps: float | None = None) -> Ceiling:
    """A measured rate where there is one, given or in the timeline, else what the target says."""
    if measured := measured_gbps or timeline.meta.ceiling_gbps:
        return Ceiling(measured, "measured: a plain read of the same bytes")
    target = TARGETS.get(timeline.meta.target)
    return Ceiling(target.stream_gbps, f"target {target.name}: {target.source}") if target else Ceiling(0.0, "unknown")


def rates(timeline: Timeline, step: Step, ceiling: Ceiling, bins: int = 200) -> Rates:
    """Of one step. A record's bytes are spread evenly over the time in which it reads."""
    readers = streaming(timeline)
    readers = readers[readers["step"] == step.number]
    begin, end = reading_time(readers)
    nbytes = stream_bytes(timeline, readers)
    if len(readers):  # tiles that had nothing to read may be left out: the others have read all of it
        ran = np.bincount(readers["node"], readers["tile_count"], len(timeline.nodes))
        nbytes *= (np.array([n.tiles for n in timeline.nodes]) / np.maximum(ran, 1))[readers["node"]]
    borders = np.linspace(min(step.begin, int(begin.min(initial=step.begin))), step.end, bins + 1)
    length = np.maximum(end - begin, 1.0)
    read = np.array([(nbytes * np.clip((t - begin) / length, 0, 1)).sum() for t in borders])
    width = float(borders[1] - borders[0])
    gbps = np.diff(read) / width if width else np.zeros(bins)
    total = float(nbytes.sum())
    return Rates(width, tuple(gbps.tolist()), total / step.length if step.length else 0.0, total, ceiling)


def streaming(timeline: Timeline) -> Events:
    """The events that read weights and KV: producers where there are any, else every record."""
    tasks = timeline.tasks
    producers = tasks[tasks["role"] == Role.PRODUCER]
    return producers if len(producers) else tasks


def stream_bytes(timeline: Timeline, events: Events) -> Floats:
    """Of each event: its share, by tiles, of what its node reads in a step."""
    per_tile = np.array([n.stream_bytes / max(1, n.tiles) for n in timeline.nodes])
    out: Floats = per_tile[events["node"]] * events["tile_count"] if len(events) else np.zeros(0)
    return out


def reading_time(events: Events) -> tuple[Floats, Floats]:
    """When each event reads: from ready until its work is done. A producer's ready is when it had the last stage that
    it waited for; it has read since its start, as fast as there was room."""
    end = np.where(events["end"] >= events["ready"], events["end"], finish(events).astype("u8"))
    begin = np.where(events["role"] == Role.PRODUCER, events["start"], events["ready"])
    return begin.astype(np.float64), end.astype(np.float64)
