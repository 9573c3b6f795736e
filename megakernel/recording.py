"""The rings of a recording in a device's memory: made and read between launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.program import Manifest
from megakernel.device.device import Buffer, Device
from megakernel.errors import FaultReport, TimelineError
from megakernel.tasks.record import NONE64, TRACE_EVENT, TRACE_RING, TRACE_RINGS

OPEN_STEPS = 64  # a recording without an end keeps about so many of the newest steps
MOST_BYTES = 1 << 30
LEAST_EVENTS = 64  # of a ring


@dataclass(frozen=True)
class Recording:
    """What the kernel wrote: `events` of TRACE_EVENT.dtype, times in ticks. `lost`: events overwritten, by worker.

    `first` and `last` are the steps that were asked for; `fault` is what ended the recording, if a fault did."""

    events: npt.NDArray[Any]
    lost: tuple[int, ...]
    first: int
    last: int
    fault: FaultReport | None = None


class Recorder:
    """Memory for one recording. `fault` is set by who sees one."""

    def __init__(self, manifest: Manifest, device: Device, first: int, steps: int | None) -> None:
        """Steps [first, first + steps), or all from `first` on. Raises TimelineError, CapacityError."""
        if not manifest.trace:
            raise TimelineError(
                f"program {manifest.name} was built without the timeline; open the model with trace=True to record"
            )
        if first < 1 or (steps is not None and steps < 1):
            raise TimelineError(f"a recording of {steps} steps after {first - 1}: expected at least one step")
        self._device, self._workers = device, manifest.workers
        self.first = first
        self.last = NONE64 if steps is None else first + steps - 1
        self.capacity = ring_capacity(manifest, steps or OPEN_STEPS)
        self.fault: FaultReport | None = None
        self.buffer: Buffer = device.allocate(self._workers * TRACE_RINGS * self._ring_bytes)
        if not self.buffer.zeroed:
            device.fill(self.buffer, 0)

    @property
    def _ring_bytes(self) -> int:
        return TRACE_RING.size + self.capacity * TRACE_EVENT.size

    def args(self) -> dict[str, int]:
        """Fields of KernelArgs."""
        return {
            "trace": self.buffer.address, "trace_capacity": self.capacity, "trace_first": self.first,
            "trace_last": self.last,
        }  # fmt: skip

    def read(self) -> Recording:
        """All that is in the rings, oldest first within each. Between launches."""
        raw = self._device.download(self.buffer, 0, self.buffer.bytes)
        found: list[npt.NDArray[Any]] = []
        lost = [0] * self._workers
        for index in range(self._workers * TRACE_RINGS):
            ring = raw[index * self._ring_bytes : (index + 1) * self._ring_bytes]
            written = int(ring[: TRACE_RING.size].view(TRACE_RING.dtype)["written"][0])
            events = ring[TRACE_RING.size :].view(TRACE_EVENT.dtype)
            lost[index // TRACE_RINGS] += max(0, written - self.capacity)
            at = np.arange(max(0, written - self.capacity), written) & (self.capacity - 1)
            found.append(events[at])
        return Recording(np.concatenate(found), tuple(lost), self.first, self.last, self.fault)

    def close(self) -> None:
        self._device.free(self.buffer)


def ring_capacity(manifest: Manifest, steps: int) -> int:
    """Events of a ring: a power of two that holds `steps` steps, as far as memory is not taken without measure."""
    wanted = max(LEAST_EVENTS, manifest.queue_length * steps)
    most = max(LEAST_EVENTS, MOST_BYTES // (manifest.workers * TRACE_RINGS * TRACE_EVENT.size))
    return 1 << ((wanted - 1).bit_length() if wanted <= most else most.bit_length() - 1)
