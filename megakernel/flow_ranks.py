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
from megakernel.timeline import EDGE, PEER, TIMES, Alignment, Edges, Events, TimelineNode, publishers, waiters

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
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
    tasks = events[(events["role"] != Role.CONTROL) & (events["published"] != 0) & np.isin(events["step"], steps)]
    node, rank = tasks["node"] % count, tasks["worker"] // manifest.workers
    waits, tells = waiters(tasks), publishers(tasks)
    step = np.searchsorted(steps, tasks["step"])
    out = np.full((ranks, ranks), np.nan)
    for sender, receiver in ((s, r) for s in range(ranks) for r in range(ranks) if s != r and 0 in (s, r)):
        waited: list[Longs] = []
        seen: list[Longs] = []
        for e in sums:
            sent = _sent(tasks, (rank == sender) & (node == e.sender) & tells, step, len(steps), nodes[e.sender].tiles)
            here = (rank == receiver) & (node == e.receiver) & waits
            got = tasks[here]
            last = _last_of(sent, step[here], got, nodes[e.sender], nodes[e.receiver])
            part = receiver * counters_of(manifest) + manifest.counter_count + e.exchange.number * ranks + sender
            whole = last > 0
            mine = whole & (got["longest_wait_counter"] == part) & (got["ready"] != 0)
            waited.append(got["ready"][mine].astype(np.int64) - last[mine])
            seen.append(got["published"][whole].astype(np.int64) - last[whole])
        took, least = (np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in (waited, seen))
        if len(least):
            out[sender, receiver] = np.quantile(took, USUAL) if len(took) >= FEW_WAITS else least.min()
    return out


def _sent(tasks: Events, mine: npt.NDArray[np.bool_], step: Longs, steps: int, tiles: int) -> Longs:
    """[steps, tiles] when the last role of each tile published it; 0: not recorded."""
    out = np.zeros((steps, tiles), np.int64)
    of, which = tasks[mine], step[mine]
    for i in range(int(of["tile_count"].max(initial=0))):
        more = of["tile_count"] > i
        at = which[more], of["tile_begin"][more] + i
        np.maximum.at(out, at, of["published"][more].astype(np.int64))
    return out


def _last_of(sent: Longs, step: Longs, got: Events, sender: TaskNode, receiver: TaskNode) -> Longs:
    """When the last of the tiles was sent that each of the receiver's records needs; 0 when one is not recorded."""
    out = np.zeros(len(got), np.int64)
    for i, (begin, count) in enumerate(zip(got["tile_begin"].tolist(), got["tile_count"].tolist())):
        first = _of_columns(sender, receiver, begin)[0]
        tiles = sent[step[i], first : sum(_of_columns(sender, receiver, begin + count - 1))]
        out[i] = tiles.max() if tiles.all() else 0
    return out


def nodes_of_ranks(nodes: Sequence[TimelineNode], ranks: int) -> tuple[TimelineNode, ...]:
    """The nodes of every rank, by names of their own."""
    return tuple(replace(n, name=f"rank {r}: {n.name}") for r in range(ranks) for n in nodes)
