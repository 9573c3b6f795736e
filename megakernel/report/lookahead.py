"""Queue look-ahead: what a worker could do or has done before it is at a record.

Where weights are streamed by a role of their own, how far that is ahead of the role that uses them. Everywhere, how
many of the records behind the one that waits could have begun in its place.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from megakernel.report.arrivals import WAITING_ROLES, Arrivals
from megakernel.report.rates import stream_bytes
from megakernel.report.steps import ROLES
from megakernel.tasks.record import Role
from megakernel.timeline import Timeline

BEHIND = 8  # records that are looked at behind one that waits


@dataclass(frozen=True)
class Lookahead:
    """`lead_records`, `lead_bytes`: for each record that is begun, how far the producer had come by then, a producer
    in the middle of a record counting as not having read it; empty without producers. `open_behind`: for each record
    that waited, how many of the next BEHIND of its queue had nothing to wait for when it began to wait."""

    lead_records: tuple[int, ...]
    lead_bytes: tuple[float, ...]
    open_behind: tuple[int, ...]


def lookahead(timeline: Timeline, seen: Arrivals) -> Lookahead:
    """Of one step."""
    queues: dict[int, list[int]] = {}
    for event, row in enumerate(seen.rows):
        queues.setdefault(row, []).append(event)
    starts, readies = seen.events["start"].tolist(), seen.events["ready"].tolist()
    records, behind = [], []
    ahead: list[float] = []
    for row, queue in queues.items():
        if row % ROLES not in WAITING_ROLES:
            continue
        for place, event in enumerate(queue):
            if readies[event] > starts[event] and seen.of[event]:
                later = queue[place + 1 : place + 1 + BEHIND]
                behind.append(sum(_open(seen, e, starts[event]) for e in later))
        producer = queues.get(row - row % ROLES + Role.PRODUCER)
        if producer:
            some, nbytes = _lead(timeline, seen, queue, producer)
            records += some
            ahead += nbytes
    return Lookahead(tuple(records), tuple(ahead), tuple(behind))


def _open(seen: Arrivals, event: int, time: int) -> bool:
    return all(a.time <= time for a in seen.of[event])


def _lead(timeline: Timeline, seen: Arrivals, queue: list[int], producer: list[int]) -> tuple[list[int], list[float]]:
    """Records and bytes that the producer has read beyond the records before each one of `queue`."""
    done = [seen.published[e] for e in producer]
    numbers = seen.events["record"].tolist()
    sizes = stream_bytes(timeline, seen.events[producer]).tolist()
    read = [0.0]
    for size in sizes:
        read.append(read[-1] + size)
    place = [numbers[e] for e in producer]
    starts = seen.events["start"].tolist()
    records, nbytes = [], []
    for event in queue:
        used = bisect.bisect_left(place, numbers[event])
        have = bisect.bisect_right(done, starts[event])
        records.append(have - used)
        nbytes.append(read[have] - read[used])
    return records, nbytes
