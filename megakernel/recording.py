"""The rings of a recording in a device's memory: made and read between launches.

Each worker has kTraceRings rings of TraceEvent, one for each role that records. Where roles run side by side it has one
of TraceMarks and rows of TracePass instead, of which events are made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.program import Manifest
from megakernel.device.device import Buffer, Device
from megakernel.errors import FaultReport, TimelineError
from megakernel.marks import events_of_marks
from megakernel.tasks.record import NONE64, TRACE_EVENT, TRACE_MARKS, TRACE_PASS, TRACE_RING, TRACE_RINGS
from megakernel.tasks.struct import Struct

OPEN_STEPS = 64  # a recording without an end keeps about so many of the newest steps
MOST_BYTES = 1 << 30
LEAST_EVENTS = 64  # of a ring
SIDE_BY_SIDE = frozenset({"cuda"})  # backends whose roles are


@dataclass(frozen=True)
class Recording:
    """What the kernel wrote: `events` of TRACE_EVENT.dtype, times in ticks. `lost`: events overwritten, by worker.

    `first` and `last` are the steps that were asked for; `fault` is what ended the recording, if a fault did."""

    events: npt.NDArray[Any]
    lost: tuple[int, ...]
    first: int
    last: int
    fault: FaultReport | None = None
    drift_ns: tuple[float, ...] = ()  # where times are nanoseconds already: of each worker's clock from a straight line


class Recorder:
    """Memory for one recording. `fault` is set by who sees one."""

    def __init__(
        self, manifest: Manifest, records: npt.NDArray[Any], device: Device, first: int, steps: int | None
    ) -> None:
        """Steps [first, first + steps), or all from `first` on. `records`: of the program, by worker. Raises
        TimelineError, CapacityError."""
        if not manifest.trace:
            raise TimelineError(
                f"program {manifest.name} was built without the timeline; open the model with trace=True to record"
            )
        if first < 1 or (steps is not None and steps < 1):
            raise TimelineError(f"a recording of {steps} steps after {first - 1}: expected at least one step")
        self._device, self._workers, self._records = device, manifest.workers, records
        self._rings = rings_of(manifest)
        self.first = first
        self.last = NONE64 if steps is None else first + steps - 1
        self.capacity = ring_capacity(manifest, steps or OPEN_STEPS)
        self.fault: FaultReport | None = None
        self._row = manifest.queue_length + 1  # of TRACE_PASS, for each step
        self._rows_bytes = self.capacity * TRACE_PASS.size if self._rings[0] is TRACE_MARKS else 0
        each = sum(self._bytes(entry) for entry in self._rings) + self._rows_bytes
        self.buffer: Buffer = device.allocate(self._workers * each)
        if not self.buffer.zeroed:
            device.fill(self.buffer, 0)

    def _bytes(self, entry: Struct) -> int:
        return TRACE_RING.size + self.capacity * entry.size

    def args(self) -> dict[str, int]:
        """Fields of KernelArgs."""
        return {
            "trace": self.buffer.address, "trace_capacity": self.capacity, "trace_first": self.first,
            "trace_last": self.last,
        }  # fmt: skip

    def read(self) -> Recording:
        """All that is in the rings, oldest first within each. Between launches."""
        raw = self._device.download(self.buffer, 0, self.buffer.bytes)
        if self._rings[0] is TRACE_MARKS:
            return self._of_marks(raw)
        found: list[npt.NDArray[Any]] = []
        lost = [0] * self._workers
        at = 0
        for worker in range(self._workers):
            for entry in self._rings:
                ring, at = raw[at : at + self._bytes(entry)], at + self._bytes(entry)
                kept, over = self._kept(int(ring[: TRACE_RING.size].view(TRACE_RING.dtype)["written"][0]))
                lost[worker] += over
                entries = ring[TRACE_RING.size :].reshape(-1, entry.size)
                found.append(entries[kept].reshape(-1).view(entry.dtype))
        return Recording(np.concatenate(found), tuple(lost), self.first, self.last, self.fault)

    def _kept(self, written: int) -> tuple[npt.NDArray[np.int64], int]:
        """Places of the entries of a ring that are there, oldest first, and how many are not."""
        over = max(0, written - self.capacity)
        return np.arange(over, written) & (self.capacity - 1), over

    def _of_marks(self, raw: npt.NDArray[np.uint8]) -> Recording:
        """Heads of rings by worker; then each place of a ring, and each of a row, of all workers side by side."""
        marks_at = self._workers * TRACE_RING.size
        passes_at = marks_at + self._workers * self.capacity * TRACE_MARKS.size
        written = raw[:marks_at].view(TRACE_RING.dtype)["written"]
        marks = raw[marks_at:passes_at].reshape(self.capacity, self._workers, TRACE_MARKS.size)
        passes = raw[passes_at:].view(TRACE_PASS.dtype).reshape(self.capacity, self._workers)
        rows = passes[: self._row * (self.capacity // self._row)].reshape(-1, self._row, self._workers)
        found, lost, drift = [], [], []
        for worker in range(self._workers):
            kept, over = self._kept(int(written[worker]))
            mine = marks[kept, worker].reshape(-1).view(TRACE_MARKS.dtype)
            events, off, overtaken = events_of_marks(worker, self._records[worker], mine, rows[:, :, worker])
            found.append(events)
            lost.append(over + overtaken)
            drift.append(off)
        return Recording(np.concatenate(found), tuple(lost), self.first, self.last, self.fault, tuple(drift))

    def close(self) -> None:
        self._device.free(self.buffer)


def rings_of(manifest: Manifest) -> tuple[Struct, ...]:
    """What the rings of a worker hold, in order."""
    return (TRACE_MARKS,) if manifest.backend in SIDE_BY_SIDE else (TRACE_EVENT,) * TRACE_RINGS


def ring_capacity(manifest: Manifest, steps: int) -> int:
    """Entries of a ring: a power of two that holds `steps` steps, as far as memory is not taken without measure, and
    one step at least. Where roles run side by side there are as many places for what producers leave."""
    wanted = max(LEAST_EVENTS, (manifest.queue_length + 1) * steps)  # of a step itself there is one too
    rings = rings_of(manifest)
    each = manifest.workers * (sum(entry.size for entry in rings) + (TRACE_PASS.size if rings[0] is TRACE_MARKS else 0))
    most = max(LEAST_EVENTS, 2 * (manifest.queue_length + 1), MOST_BYTES // each)
    return 1 << ((wanted - 1).bit_length() if wanted <= most else most.bit_length() - 1)
