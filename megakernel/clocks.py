"""From ticks of each worker's clock to nanoseconds of one clock, and how far that can be trusted.

Every step of every worker carries up to two readings of a clock that all workers share beside its own ticks. One rate
fits all (median of the slopes between readings, which a thread that lost its core between two reads does not move);
each worker has its own offset (median of what is left). What is left over time is its drift. Where ticks are readings
of the shared clock there is nothing to fit, and the drift says how well the two agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.tasks.record import TRACE_EVENT, Role
from megakernel.timeline import COUNTER, PEER, TIMES, Alignment, Edges, Events, looked_along, publishers, waiters

Reals = npt.NDArray[np.float64]
OWN_TICKS = frozenset({"cpu"})  # backends whose ticks are not the shared clock
MOST_READINGS = 256  # of a worker, for the slopes
MOST_PEERS = 512  # edges between devices whose hops are looked at
CLOCKS = {
    "cpu": "the core's counter against CLOCK_MONOTONIC",
    "cuda": "each multiprocessor's counter, from reading to reading of the device's global timer (steps of 32 ns)",
    "hip": "the device's steady counter",
}


def align(raw: Events, workers: int, backend: str) -> tuple[Events, Alignment]:
    """Events with times in nanoseconds from the first of them, and how they were aligned. `raw`: as it was recorded."""
    events = raw.copy()
    if not len(events):
        return events, Alignment(CLOCKS[backend], 1e9, (0.0,) * workers, (0.0,) * workers)
    first = int(events["start"].min())
    readings = _readings([events[events["worker"] == w] for w in range(workers)], first)
    own = backend in OWN_TICKS
    rate = _rate(readings) if own else 1.0
    fits = [_fit(ticks, clock, rate) for ticks, clock in readings]
    known = [f[0] for f in fits if f is not None]
    fallback = float(np.median(known)) if known else 0.0
    offset = np.array([f[0] if f is not None else fallback for f in fits]) if own else np.zeros(workers)
    steps = events["role"] == Role.CONTROL
    events["longest_wait"][steps] = events["first_data"][steps] = 0
    base = offset.min()
    for name in (*TIMES, "longest_wait"):
        column = events[name]
        there = column != 0
        since = 0 if name == "longest_wait" else first
        shift = 0.0 if name == "longest_wait" else offset[events["worker"][there]] - base
        made = np.rint((column[there].astype(np.int64) - since) * rate + shift)
        column[there] = np.maximum(made, 0).astype(np.uint64) + (name != "longest_wait")  # 0 is "not written"
    drift = tuple(f[1] if f is not None else 0.0 for f in fits)
    return events, Alignment(CLOCKS[backend], 1e9 / rate, tuple((offset - offset[0]).tolist()), drift)


def _readings(events: list[Events], first: int) -> list[tuple[Reals, Reals]]:
    """Of each worker ticks since `first` and nanoseconds of the shared clock since its first reading, in order."""
    found: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for mine in events:
        steps = mine[mine["role"] == Role.CONTROL]
        begins, ends = steps[steps["first_data"] != 0], steps[steps["longest_wait"] != 0]
        ticks = np.concatenate([begins["ready"], ends["end"]]).astype(np.int64) - first
        clock = np.concatenate([begins["first_data"], ends["longest_wait"]]).astype(np.int64)
        order = np.argsort(ticks, kind="stable")
        found.append((ticks[order], clock[order]))
    origin = min((int(clock.min()) for _, clock in found if len(clock)), default=0)  # a double does not hold it
    return [(ticks.astype(np.float64), (clock - origin).astype(np.float64)) for ticks, clock in found]


def _rate(readings: list[tuple[Reals, Reals]]) -> float:
    """Nanoseconds of a tick."""
    slopes: list[Reals] = []
    for ticks, clock in readings:
        stride = max(1, len(ticks) // MOST_READINGS)
        t, c = ticks[::stride], clock[::stride]
        half = len(t) // 2
        apart = t[half:] - t[: len(t) - half]  # each with one half of the recording later
        good = apart > 0
        slopes.append((c[half:] - c[: len(c) - half])[good] / apart[good])
    every = np.concatenate(slopes) if slopes else np.zeros(0)
    return float(np.median(every)) if len(every) and np.median(every) > 0 else 1.0


def _fit(ticks: Reals, clock: Reals, rate: float) -> tuple[float, float] | None:
    """Offset of a worker's clock in nanoseconds and its drift: how far its first and last readings are apart."""
    if not len(ticks):
        return None
    left = clock - ticks * rate
    part = max(1, len(left) // 4)
    return float(np.median(left)), abs(float(np.median(left[-part:]) - np.median(left[:part])))


def worst_hop(events: Events, edges: Edges, most_steps: int = 16) -> float | None:
    """The shortest time from a publication to the end of a wait for it, along the edges of the first steps: of waits
    for counters, and of those for values by a role that sees all of them."""
    worst: float | None = None
    tasks = events[(events["role"] != Role.CONTROL) & (events["published"] != 0)]
    made, seen = tasks[publishers(tasks)], tasks[waiters(tasks)]
    peers = edges[edges["kind"] == PEER]  # of stamped elements one for each tile
    edges = np.concatenate([edges[edges["kind"] != PEER], peers[:: 1 + len(peers) // MOST_PEERS]])
    for step in np.unique(tasks["step"])[:most_steps]:
        makers, waiting = (_by_node(part[part["step"] == step]) for part in (made, seen))
        for edge in edges:
            found, looked = _touching(makers, edge, "producer"), _touching(waiting, edge, "consumer")
            looked = looked[looked_along(looked, int(edge["kind"]))]
            if edge["kind"] not in (COUNTER, PEER):
                looked = looked[looked["role"] == Role.LOADER]
            if len(found) and len(looked):
                hop = float(int(looked["ready"].min()) - int(found["published"].max()))
                worst = hop if worst is None else min(worst, hop)
    return worst


def _by_node(events: Events) -> dict[int, Events]:
    return {int(n): events[events["node"] == n] for n in np.unique(events["node"])}


def _touching(by_node: dict[int, Events], edge: Any, side: str) -> Events:
    events = by_node.get(int(edge[side]))
    if events is None:
        return np.zeros(0, TRACE_EVENT.dtype)
    first, stop = int(edge[f"{side}_first"]), int(edge[f"{side}_first"]) + int(edge[f"{side}_count"])
    found: Events = events[(events["tile_begin"] < stop) & (events["tile_begin"] + events["tile_count"] > first)]
    return found
