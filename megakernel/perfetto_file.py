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

from megakernel.errors import MissingExtra, TimelineError
from megakernel.tasks.record import Role, TraceFlag
from megakernel.timeline import Events, Timeline

SEQUENCE: Final = 1  # one writer
WORKER_TRACK, ROLE_TRACK, RING_TRACK, TOTAL_TRACK, FAULT_TRACK = 1 << 32, 2 << 32, 3 << 32, 4 << 32, 5 << 32
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
        self.kinds = protos.TrackEvent

    def run(self) -> None:
        self._tracks()
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for number, arrow in enumerate(arrows(self.timeline), 1):
            starts.setdefault(arrow.source, []).append(number)
            ends.setdefault(arrow.sink, []).append(number)
        for index, event in enumerate(self.timeline.events):
            self._slice(event, starts.get(index, []), ends.get(index, []))
        if self.timeline.meta.ring_bytes:
            self._rings()
        if self.timeline.meta.fault is not None:
            self._fault()

    def _put(self, time: int | None = None) -> Any:
        packet = self.protos.TracePacket()
        packet.trusted_packet_sequence_id = SEQUENCE
        if time is not None:
            packet.timestamp = time
        return packet

    def _write(self, packet: Any) -> None:
        trace = self.protos.Trace()
        trace.packet.append(packet)
        self.file.write(trace.SerializeToString())  # traces written one after another are one trace

    # ------------------------------------------------------------------------------------------ tracks
    def _tracks(self) -> None:
        meta = self.timeline.meta
        for worker in range(meta.workers):
            packet = self._put()
            packet.track_descriptor.uuid = WORKER_TRACK + worker
            packet.track_descriptor.process.pid = worker + 1
            packet.track_descriptor.process.process_name = f"worker {worker}"
            self._write(packet)
            mine = self.timeline.events[self.timeline.events["worker"] == worker]
            for role in np.unique(mine["role"]):
                name = "steps" if role == Role.CONTROL else Role(int(role)).name.lower()
                packet = self._put()
                packet.track_descriptor.uuid = _role_track(worker, int(role))
                packet.track_descriptor.thread.pid = worker + 1
                packet.track_descriptor.thread.tid = (worker + 1) * 16 + int(role)
                packet.track_descriptor.thread.thread_name = name
                self._write(packet)
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
        self._write(packet)

    # ------------------------------------------------------------------------------------------ slices
    def _begin(self, time: int, track: int, name: str, category: str) -> Any:
        packet = self._put(time)
        packet.track_event.type = self.kinds.TYPE_SLICE_BEGIN
        packet.track_event.track_uuid = track
        packet.track_event.name = name
        packet.track_event.categories.append(category)
        return packet

    def _end(self, time: int, track: int) -> None:
        packet = self._put(time)
        packet.track_event.type = self.kinds.TYPE_SLICE_END
        packet.track_event.track_uuid = track
        self._write(packet)

    def _slice(self, event: Any, starts: list[int], ends: list[int]) -> None:
        track = _role_track(int(event["worker"]), int(event["role"]))
        start, ready, first, end = (int(event[k]) for k in ("start", "ready", "first_data", "end"))
        stop = end if event["flags"] & TraceFlag.CUT else max(end, int(event["published"]))
        whole = int(event["role"]) == Role.CONTROL
        name = f"step {int(event['step'])}" if whole else self.timeline.nodes[int(event["node"])].operator
        packet = self._begin(start, track, name, "step" if whole else self.timeline.nodes[int(event["node"])].task)
        self._notes(packet, event, whole)
        self._write(packet)
        if ready > start:
            self._write(self._begin(start, track, "wait for the header" if whole else "wait", "wait"))
            self._end(ready, track)
        if not whole:
            if first > ready:
                self._write(self._begin(ready, track, "wait for data", "wait"))
                self._end(first, track)
            packet = self._begin(first, track, "work", "work")
            packet.track_event.flow_ids.extend([*starts, *ends])
            self._write(packet)
            self._end(end, track)
        self._end(stop, track)

    def _notes(self, packet: Any, event: Any, whole: bool) -> None:
        notes: dict[str, int | str] = {"step": int(event["step"])}
        if whole:
            notes |= {"rows": int(event["tile_begin"]), "context": int(event["tile_count"])}
        else:
            node = self.timeline.nodes[int(event["node"])]
            share = int(event["tile_count"]) / max(1, node.tiles)
            notes |= {
                "node": node.name, "layer": node.layer, "record": int(event["record"]),
                "tiles": f"{int(event['tile_begin'])} + {int(event['tile_count'])}",
                "bytes": round(node.stream_bytes * share), "flops": round(node.flops * share),
                "longest wait ns": int(event["longest_wait"]), "waited for": self.timeline.waited_for(event),
            }  # fmt: skip
        if event["flags"] & TraceFlag.CUT:
            notes["cut"] = "the launch ended inside this event"
        for name, value in notes.items():
            note = packet.track_event.debug_annotations.add()
            note.name = name
            if isinstance(value, str):
                note.string_value = value
            else:
                note.int_value = value

    # ------------------------------------------------------------------------------------------ counters, fault
    def _rings(self) -> None:
        total: list[tuple[int, float]] = []
        for worker in range(self.timeline.meta.workers):
            changes = ring_changes(self.timeline, worker)
            total += changes
            self._counter(RING_TRACK + worker, changes)
        self._counter(TOTAL_TRACK, total)

    def _counter(self, track: int, changes: list[tuple[int, float]]) -> None:
        level = 0.0
        for time, change in sorted(changes):
            level += change
            packet = self._put(time)
            packet.track_event.type = self.kinds.TYPE_COUNTER
            packet.track_event.track_uuid = track
            packet.track_event.counter_value = max(0, round(level))
            self._write(packet)

    def _fault(self) -> None:
        fault, events = self.timeline.meta.fault, self.timeline.events
        assert fault is not None
        packet = self._put()
        packet.track_descriptor.uuid = FAULT_TRACK
        packet.track_descriptor.name = "fault"
        self._write(packet)
        packet = self._put(int(max(events["end"].max(), events["published"].max())) if len(events) else 0)
        packet.track_event.type = self.kinds.TYPE_INSTANT
        packet.track_event.track_uuid = FAULT_TRACK
        packet.track_event.name = fault.text
        self._write(packet)


def _role_track(worker: int, role: int) -> int:
    return ROLE_TRACK + worker * 16 + role


def ring_changes(timeline: Timeline, worker: int) -> list[tuple[int, float]]:
    """(time, bytes) of one worker: asked for by the producer, then taken by the consumers. Half at either end of a
    record's stream, as nothing in between is recorded."""
    out: list[tuple[int, float]] = []
    mine = timeline.tasks[timeline.tasks["worker"] == worker]
    streams = {(int(e["step"]), int(e["record"])) for e in mine[mine["role"] == Role.PRODUCER]}
    for e in mine:
        if (int(e["step"]), int(e["record"])) not in streams or e["role"] not in (Role.PRODUCER, Role.CONSUMER):
            continue
        node = timeline.nodes[int(e["node"])]
        half = node.stream_bytes * int(e["tile_count"]) / max(1, node.tiles) / 2
        sign = 1 if e["role"] == Role.PRODUCER else -1
        begin = e["ready"] if e["role"] == Role.PRODUCER else e["first_data"]
        out += [(int(begin), sign * half), (int(e["end"]), sign * half)]
    return out


def arrows(timeline: Timeline) -> Iterator[_Arrow]:
    """For each record that waits, one arrow from what it waited for longest: the last published of its producers."""
    events = timeline.events
    tasks = np.flatnonzero((events["role"] != Role.CONTROL) & (events["role"] != Role.PRODUCER))
    into: dict[int, list[Any]] = {}
    for edge in timeline.edges:
        into.setdefault(int(edge["consumer"]), []).append(edge)
    order = tasks[np.lexsort((events["node"][tasks], events["step"][tasks]))]
    keys = events["step"][order].astype(np.int64) << 32 | events["node"][order]
    for index in tasks:
        event = events[index]
        if event["role"] == Role.STORER or event["flags"] & TraceFlag.CUT:
            continue
        best, latest = -1, -1
        for edge in into.get(int(event["node"]), ()):
            if not _overlap(event, edge, "consumer"):
                continue
            key = int(event["step"]) << 32 | int(edge["producer"])
            made = order[np.searchsorted(keys, key) : np.searchsorted(keys, key, side="right")]
            found = made[_touches(events[made], edge)]
            if len(found):
                last = int(found[np.argmax(events["published"][found])])
                if int(events["published"][last]) > latest:
                    best, latest = last, int(events["published"][last])
        if best >= 0:
            yield _Arrow(best, int(index))


def _overlap(event: Any, edge: Any, side: str) -> bool:
    first, count = int(edge[f"{side}_first"]), int(edge[f"{side}_count"])
    begin = int(event["tile_begin"])
    return begin < first + count and begin + max(1, int(event["tile_count"])) > first


def _touches(events: Events, edge: Any) -> Any:
    first, stop = int(edge["producer_first"]), int(edge["producer_first"]) + int(edge["producer_count"])
    begin = events["tile_begin"].astype(np.int64)
    return (begin < stop) & (begin + events["tile_count"] > first)
