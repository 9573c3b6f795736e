"""Recordings of several ranks as one: rank r's workers and nodes follow those of the ranks before it.

So every event, edge and figure is of one device, and what joins them are edges from the tasks that send an exchange to
those that receive it elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megakernel.builder.program import Manifest
from megakernel.recording import Recording
from megakernel.scheduler.exchanges import exchanges_of
from megakernel.tasks.record import NONE
from megakernel.tasks.task import TaskNode
from megakernel.timeline import COUNTER, EDGE, Edges, TimelineNode

OFFSET_OF_EDGE = ("producer", "consumer")


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
        (sender * count + e.sender, 0, nodes[e.sender].tiles, rank * count + e.receiver, 0, nodes[e.receiver].tiles,
         COUNTER, rank * numbers + manifest.counter_count + e.exchange.number * manifest.ranks + sender)
        for e in exchanges_of(nodes)[0]
        for sender in range(manifest.ranks)
        for rank in range(manifest.ranks)
        if rank != sender
    ]  # fmt: skip
    return np.sort(np.concatenate([*copies, np.array(between, EDGE)]))


def nodes_of_ranks(nodes: Sequence[TimelineNode], ranks: int) -> tuple[TimelineNode, ...]:
    """The nodes of every rank, by names of their own."""
    return tuple(replace(n, name=f"rank {r}: {n.name}") for r in range(ranks) for n in nodes)
