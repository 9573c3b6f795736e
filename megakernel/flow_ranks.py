"""Recordings of several ranks as one: rank r's workers and nodes follow those of the ranks before it.

So every event, edge and figure is of one device, and what joins them are edges from the tasks that send an exchange to
those that receive it elsewhere. GPUs have timers of their own; the exchanges say what these differ by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.program import Manifest
from megakernel.clocks import OWN_TICKS
from megakernel.recording import Recording
from megakernel.scheduler.exchanges import Ends, exchanges_of
from megakernel.tasks.record import NONE, Role
from megakernel.tasks.task import TaskNode
from megakernel.timeline import EDGE, PEER, TIMES, Alignment, Edges, Events, TimelineNode, waiters

Floats = npt.NDArray[np.float64]
OFFSET_OF_EDGE = ("producer", "consumer")
USUAL = 0.1  # quantile of what an element takes from one device to another
MOST_STEPS = 16  # that are looked at for it
FEW_WAITS = 8  # fewer are not trusted: then the shortest time of any element


def merged(recordings: Sequence[Recording], manifest: Manifest) -> Recording:
    """One recording of all ranks, in rank order."""
    events = []
    for rank, recording in enumerate(recordings):
        mine = recording.events.copy()
        mine["worker"] += np.uint16(rank * manifest.workers)
        _shift(mine["node"], rank * len(manifest.nodes))
        _shift(mine["longest_wait_counter"], rank * counters_of(manifest))
        events.append(mine)
    lost = tuple(count for r in recordings for count in r.lost)
    drift = tuple(ns for r in recordings for ns in r.drift_ns)
    return replace(recordings[0], events=np.concatenate(events), lost=lost, drift_ns=drift)


def _shift(column: Any, by: int) -> None:
    column[column != NONE] += np.uint32(by)


def counters_of(manifest: Manifest) -> int:
    """Numbers that counters of one rank take, those of its peers' parts included."""
    return manifest.counter_count + len(manifest.exchanges) * manifest.ranks


def edges_of_ranks(edges: Edges, nodes: Sequence[TaskNode], manifest: Manifest) -> Edges:
    """Each rank's own edges, and those between ranks."""
    count, numbers = len(nodes), counters_of(manifest)
    copies = []
    for rank in range(manifest.ranks):
        mine = edges.copy()
        for name in OFFSET_OF_EDGE:
            mine[name] += rank * count
        known = mine["counter"] != NONE
        mine["counter"][known] += rank * numbers
        copies.append(mine)
    between = [
        (sender * count + e.sender, *sent, rank * count + e.receiver, *received, PEER,
         rank * numbers + manifest.counter_count + e.exchange.number * manifest.ranks + sender)
        for e in exchanges_of(nodes)[0]
        for sent, received in _tiles_between(nodes, e)
        for sender in range(manifest.ranks)
        for rank in range(manifest.ranks)
        if rank != sender
    ]  # fmt: skip
    return np.sort(np.concatenate([*copies, np.array(between, EDGE)]))


def _tiles_between(nodes: Sequence[TaskNode], ends: Ends) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Tiles (first, count) that are sent and tiles that wait for them. A stamped element is waited for by itself, so a
    tile of a sum waits for those of the same columns. Logits are joined, and whose a tile has is not told here."""
    sender, receiver = nodes[ends.sender], nodes[ends.receiver]
    if _by_element(nodes, ends):
        return [(_of_columns(sender, receiver, t), (t, 1)) for t in range(receiver.tiles)]
    return [((0, sender.tiles), (0, receiver.tiles))]


def _by_element(nodes: Sequence[TaskNode], ends: Ends) -> bool:
    """Whether each element of a sum is waited for by itself."""
    return ends.exchange.stamped and nodes[ends.sender].sizes["cols"] == nodes[ends.receiver].sizes["cols"]


def _of_columns(sender: TaskNode, receiver: TaskNode, tile: int) -> tuple[int, int]:
    """The sender's tiles that have a column of that tile of the receiver's, (first, count)."""
    width, own = receiver.sizes["tile_cols"], sender.sizes.get("tile_cols", sender.sizes.get("tile_out", 1))
    first, stop = tile * width // own, -(-min(receiver.sizes["cols"], (tile + 1) * width) // own)
    return first, stop - first


# ---------------------------------------------------------------------------------------------- timers
def on_one_timer(
    events: Events, alignment: Alignment, nodes: Sequence[TaskNode], manifest: Manifest
) -> tuple[Events, Alignment]:
    """Merged events with the times of every rank by rank 0's timer, where each device has its own.

    An element that r sends takes as long to q as one back. So what seems to take longer one way than the other is
    twice what the timers differ by: offset = (there - back) / 2, hop = (there + back) / 2."""
    if manifest.backend in OWN_TICKS or not len(events):
        return events, alignment
    took = travel_ns(events, nodes, manifest)
    offset, hop = (took[0] - took[:, 0]) / 2, (took[0] + took[:, 0]) / 2
    offset[0] = hop[0] = 0.0
    offset = np.nan_to_num(offset)  # nothing was seen of this rank
    by = np.rint(offset).astype(np.int64)[events["worker"] // manifest.workers]
    first = int((events["start"].astype(np.int64) - by).min())
    shifted = events.copy()
    for name in TIMES:
        marked = events[name] != 0
        shifted[name][marked] = (events[name].astype(np.int64) - by - first + 1)[marked].astype(np.uint64)
    of_worker = zip(alignment.offset_ns, np.repeat(offset, manifest.workers).tolist())
    return shifted, replace(
        alignment, clock=f"{alignment.clock}; what those of the devices differ by is taken from their exchanges",
        offset_ns=tuple(own - timer for own, timer in of_worker),
        timer_offset_ns=tuple(offset.tolist()), timer_hop_ns=tuple(None if np.isnan(h) else h for h in hop.tolist()),
    )  # fmt: skip


def travel_ns(events: Events, nodes: Sequence[TaskNode], manifest: Manifest) -> Floats:
    """[from, to] what a stamped element of a sum usually takes between rank 0 and another, each end by its own timer;
    nan where none was seen."""
    count, ranks = len(nodes), manifest.ranks
    sums = [e for e in exchanges_of(nodes)[0] if _by_element(nodes, e)]
    steps = np.unique(events["step"])[:MOST_STEPS]
    tasks = events[(events["published"] != 0) & (events["role"] != Role.CONTROL) & np.isin(events["step"], steps)]
    tasks = tasks[np.isin(tasks["node"] % count, [n for e in sums for n in (e.sender, e.receiver)])]
    node, rank, waits = tasks["node"] % count, tasks["worker"] // manifest.workers, waiters(tasks)
    out = np.full((ranks, ranks), np.nan)
    for sender, receiver in ((s, r) for s in range(ranks) for r in range(ranks) if s != r and 0 in (s, r)):
        sent = _by_tile(tasks[(rank == sender) & np.isin(node, [e.sender for e in sums])], count)
        waited: list[int] = []
        shortest: list[int] = []
        for e in sums:
            part = receiver * counters_of(manifest) + manifest.counter_count + e.exchange.number * ranks + sender
            for event in tasks[(rank == receiver) & (node == e.receiver) & waits]:
                first = _of_columns(nodes[e.sender], nodes[e.receiver], int(event["tile_begin"]))[0]
                end = _of_columns(
                    nodes[e.sender], nodes[e.receiver], int(event["tile_begin"]) + int(event["tile_count"]) - 1
                )
                known = [sent.get((int(event["step"]), e.sender, t)) for t in range(first, sum(end))]
                if None in known:
                    continue
                last = max(t for t in known if t is not None)
                shortest.append(int(event["published"]) - last)
                if int(event["longest_wait_counter"]) == part and event["ready"]:
                    waited.append(int(event["ready"]) - last)
        if shortest:
            out[sender, receiver] = np.quantile(waited, USUAL) if len(waited) >= FEW_WAITS else min(shortest)
    return out


def _by_tile(sends: Events, count: int) -> dict[tuple[int, int, int], int]:
    """(step, node, tile) -> when the last role of it published."""
    out: dict[tuple[int, int, int], int] = {}
    for e in sends:
        for i in range(int(e["tile_count"])):
            key = int(e["step"]), int(e["node"]) % count, int(e["tile_begin"]) + i
            out[key] = max(out.get(key, 0), int(e["published"]))
    return out


def nodes_of_ranks(nodes: Sequence[TimelineNode], ranks: int) -> tuple[TimelineNode, ...]:
    """The nodes of every rank, by names of their own."""
    return tuple(replace(n, name=f"rank {r}: {n.name}") for r in range(ranks) for n in nodes)
