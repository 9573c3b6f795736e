"""A timeline as a Perfetto trace: workers are processes, roles threads, records slices with their waits inside, and an
arrow leads from the record that a wait ended with to the record that waited. Opens at ui.perfetto.dev, also offline."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from megakernel.errors import MissingExtra, TimelineError
from megakernel.tasks.record import Role, TraceFlag
from megakernel.timeline import EVENT_COLUMNS, Events, Timeline, looked_along, publishers, waiters

Indices = npt.NDArray[np.int64]

SEQUENCE: Final = 1  # one writer
WORKER_TRACK, ROLE_TRACK, RING_TRACK, TOTAL_TRACK, FAULT_TRACK = 1 << 32, 2 << 32, 3 << 32, 4 << 32, 5 << 32
BATCH: Final = 4096  # packets
PIECES: Final = 4  # of a ring, that a record's stream is counted in
BYTES: Final = 3  # CounterDescriptor.Unit.UNIT_SIZE_BYTES


def write_perfetto(timeline: Timeline, path: Path) -> Path:
    """Write the trace. Raises MissingExtra without the package `perfetto`, TimelineError when it cannot be written."""
    try:
        protos = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ModuleNotFoundError as e:
        raise MissingExtra(
            f'a trace needs the package {e.name}, which is not installed: pip install "megakernel-decode[profile]"'
        ) from e
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with work.open("wb") as file:
            _Writer(timeline, protos, file).run()
        os.replace(work, path)
    except OSError as e:
        work.unlink(missing_ok=True)
        raise TimelineError(f"cannot write the trace to {path}: {e.strerror or e}; choose another folder") from e
    return path


@dataclass(frozen=True)
class _Arrow:
    """From the record that was published last among those a record waited for. Indices of events."""

    source: int
    sink: int


class _Writer:
    def __init__(self, timeline: Timeline, protos: Any, file: IO[bytes]) -> None:
        self.timeline, self.protos, self.file = timeline, protos, file
        kinds = protos.TrackEvent  # looked up once: that costs more than a packet
        self.begins, self.ends = int(kinds.TYPE_SLICE_BEGIN), int(kinds.TYPE_SLICE_END)
        self.counts, self.instant = int(kinds.TYPE_COUNTER), int(kinds.TYPE_INSTANT)
        self.batch = protos.Trace()
        self.said: dict[tuple[bool, int], str] = {}  # what a wait was for

    def run(self) -> None:
        self._tracks()
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for number, arrow in enumerate(arrows(self.timeline), 1):
            starts.setdefault(arrow.source, []).append(number)
            ends.setdefault(arrow.sink, []).append(number)
        for index, row in enumerate(self.timeline.events.tolist()):
            self._slice(dict(zip(EVENT_COLUMNS, row)), starts.get(index, []), ends.get(index, []))
        if self.timeline.meta.ring_bytes:
            self._rings()
        if self.timeline.meta.fault is not None:
            self._fault()
        self._flush()

    def _put(self, time: int | None = None) -> Any:
        """A new packet to be filled. Traces written one after another are one trace: so memory is bounded."""
        if len(self.batch.packet) >= BATCH:
            self._flush()
        packet = self.batch.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        if time is not None:
            packet.timestamp = time
        return packet

    def _flush(self) -> None:
        self.file.write(self.batch.SerializeToString())
        self.batch = self.protos.Trace()

    # ------------------------------------------------------------------------------------------ tracks
    def _tracks(self) -> None:
        meta = self.timeline.meta
        for worker in range(meta.workers):
            packet = self._put()
            packet.track_descriptor.uuid = WORKER_TRACK + worker
            packet.track_descriptor.process.pid = worker + 1
            packet.track_descriptor.process.process_name = f"worker {worker}"
            mine = self.timeline.events[self.timeline.events["worker"] == worker]
            for role in np.unique(mine["role"]):
                name = "steps" if role == Role.CONTROL else Role(int(role)).name.lower()
                packet = self._put()
                packet.track_descriptor.uuid = _role_track(worker, int(role))
                packet.track_descriptor.thread.pid = worker + 1
                packet.track_descriptor.thread.tid = (worker + 1) * 16 + int(role)
                packet.track_descriptor.thread.thread_name = name
            if meta.ring_bytes:
                self._counter_track(RING_TRACK + worker, "bytes in the ring or on their way", WORKER_TRACK + worker)
        if meta.ring_bytes:
            self._counter_track(TOTAL_TRACK, "bytes in rings or in flight, all workers", None)

    def _counter_track(self, uuid: int, name: str, parent: int | None) -> None:
        packet = self._put()
        packet.track_descriptor.uuid = uuid
        packet.track_descriptor.name = name
        packet.track_descriptor.counter.unit = BYTES
        if parent is not None:
            packet.track_descriptor.parent_uuid = parent

    # ------------------------------------------------------------------------------------------ slices
    def _begin(self, time: int, track: int, name: str, category: str) -> Any:
        packet = self._put(time)
        packet.track_event.type = self.begins
        packet.track_event.track_uuid = track
        packet.track_event.name = name
        packet.track_event.categories.append(category)
        return packet

    def _end(self, time: int, track: int) -> None:
        packet = self._put(time)
        packet.track_event.type = self.ends
        packet.track_event.track_uuid = track

    def _slice(self, event: dict[str, int], starts: list[int], ends: list[int]) -> None:
        track = _role_track(event["worker"], event["role"])
        start, ready, first, end = event["start"], event["ready"], event["first_data"], event["end"]
        whole = event["role"] == Role.CONTROL
        node = None if whole else self.timeline.nodes[event["node"]]
        packet = self._begin(
            start, track, node.operator if node else f"step {event['step']}", node.task if node else "step"
        )
        self._notes(packet.track_event, event)
        if ready > start:
            self._begin(start, track, "wait for the header" if whole else "wait", "wait")
            self._end(ready, track)
        if not whole:
            if first > ready:
                self._begin(ready, track, "wait for data", "wait")
                self._end(first, track)
            packet = self._begin(first, track, "work", "work")
            packet.track_event.flow_ids.extend([*starts, *ends])
            self._end(end, track)
        self._end(max(end, event["published"]), track)

    def _notes(self, track_event: Any, event: dict[str, int]) -> None:
        notes: dict[str, int | str] = {"step": event["step"]}
        if event["role"] == Role.CONTROL:
            notes |= {"rows": event["tile_begin"], "context": event["tile_count"]}
        else:
            node = self.timeline.nodes[event["node"]]
            share = event["tile_count"] / max(1, node.tiles)
            notes |= {
                "node": node.name, "record": event["record"], "tiles": f"{event['tile_begin']} + {event['tile_count']}",
                "bytes": round(node.stream_bytes * share),
            }  # fmt: skip
            if event["longest_wait"]:
                notes |= {"longest wait ns": event["longest_wait"], "waited for": self._waited_for(event)}
        if event["flags"] & TraceFlag.CUT:
            notes["cut"] = "the launch ended inside this event"
        for name, value in notes.items():
            if isinstance(value, str):
                track_event.debug_annotations.add(name=name, string_value=value)
            else:
                track_event.debug_annotations.add(name=name, int_value=value)

    def _waited_for(self, event: dict[str, int]) -> str:
        key = (bool(event["flags"] & TraceFlag.BY_VALUE), event["longest_wait_counter"])
        if key not in self.said:
            self.said[key] = self.timeline.waited_for(event)
        return self.said[key]

    # ------------------------------------------------------------------------------------------ counters, fault
    def _rings(self) -> None:
        total: list[tuple[int, float]] = []
        ring, workers = self.timeline.meta.ring_bytes, self.timeline.meta.workers
        for worker in range(workers):
            changes = ring_changes(self.timeline, worker)
            total += changes
            self._counter(RING_TRACK + worker, changes, ring)
        self._counter(TOTAL_TRACK, total, workers * ring)

    def _counter(self, track: int, changes: list[tuple[int, float]], most: int) -> None:
        """Never more than there is room for: streams that are not as even as they are taken for would show more."""
        level = 0.0
        for time, change in sorted(changes):
            level += change
            packet = self._put(time)
            packet.track_event.type = self.counts
            packet.track_event.track_uuid = track
            packet.track_event.counter_value = min(most, max(0, round(level)))

    def _fault(self) -> None:
        fault, events = self.timeline.meta.fault, self.timeline.events
        assert fault is not None
        packet = self._put()
        packet.track_descriptor.uuid = FAULT_TRACK
        packet.track_descriptor.name = "fault"
        packet = self._put(int(max(events["end"].max(), events["published"].max())) if len(events) else 0)
        packet.track_event.type = self.instant
        packet.track_event.track_uuid = FAULT_TRACK
        packet.track_event.name = fault.text


def _role_track(worker: int, role: int) -> int:
    return ROLE_TRACK + worker * 16 + role


def ring_changes(timeline: Timeline, worker: int) -> list[tuple[int, float]]:
    """(time, bytes) of one worker: asked for by the producer, then taken by the consumers. A record streams evenly from
    its begin to its end, as nothing in between is recorded, in pieces of at most a quarter of the ring."""
    mine = timeline.tasks[timeline.tasks["worker"] == worker]
    keys = mine["step"].astype(np.int64) << 32 | mine["record"]
    asked, taken = mine["role"] == Role.PRODUCER, mine["role"] == Role.CONSUMER
    streamed = np.isin(keys, keys[asked]) & (asked | taken)
    mine, asked = mine[streamed], asked[streamed]
    of_tile = np.array([n.stream_bytes / max(1, n.tiles) for n in timeline.nodes])
    nbytes = of_tile[mine["node"]] * mine["tile_count"]
    begin = np.where(asked, mine["ready"], mine["first_data"]).astype(np.int64)
    pieces = np.maximum(2, np.ceil(nbytes * PIECES / timeline.meta.ring_bytes)).astype(np.int64)
    of = np.repeat(np.arange(len(mine)), pieces)
    place = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + 0.5) / pieces[of]
    time = begin[of] + np.rint(place * (mine["end"].astype(np.int64) - begin)[of]).astype(np.int64)
    change = (nbytes / pieces * np.where(asked, 1, -1))[of]
    return list(zip(time.tolist(), change.tolist()))


def arrows(timeline: Timeline) -> Iterator[_Arrow]:
    """For each record that waits, one arrow from what it waited for longest: the last published of its producers."""
    events = timeline.events
    source = np.full(len(events), -1, np.int64)
    latest = np.zeros(len(events), np.uint64)  # when it was published
    made = publishers(events) & (events["published"] != 0)
    waits = waiters(events) & ((events["flags"] & TraceFlag.CUT) == 0)
    for step in timeline.steps:
        of_step = events["step"] == step
        makers, waiting = (_by_node(events, np.flatnonzero(of_step & mask)) for mask in (made, waits))
        for edge in timeline.edges.tolist():
            producer, first, count, consumer, begin, length = edge[:6]
            found = _touching(events, makers.get(producer), first, count)
            seen = _touching(events, waiting.get(consumer), begin, length)
            seen = seen[looked_along(events[seen], edge[6])]
            if len(found) and len(seen):
                last = found[np.argmax(events["published"][found])]
                better = seen[latest[seen] < events["published"][last]]
                source[better], latest[better] = last, events["published"][last]
    for sink in np.flatnonzero(source >= 0):
        yield _Arrow(int(source[sink]), int(sink))


def _by_node(events: Events, indices: Indices) -> dict[int, Indices]:
    order = indices[np.argsort(events["node"][indices], kind="stable")]
    nodes, starts = np.unique(events["node"][order], return_index=True)
    return dict(zip(nodes.tolist(), np.split(order, starts[1:])))


def _touching(events: Events, indices: Indices | None, first: int, count: int) -> Indices:
    if indices is None:
        return np.zeros(0, np.int64)
    begin = events["tile_begin"][indices].astype(np.int64)
    out: Indices = indices[(begin < first + count) & (begin + events["tile_count"][indices] > first)]
    return out
