"""The interface of every device: something that compiles a kernel, holds memory and runs launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import DeviceUnavailable
from megakernel.target import Target

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Availability:
    """Whether a device can be used here, and if not, one sentence that says why."""

    usable: bool
    reason: str
    description: str = ""


@dataclass(frozen=True)
class KernelSource:
    """What a compiler is given: the generated translation unit, generated headers by file name, extra defines."""

    text: str
    headers: Mapping[str, str]
    target: Target
    chaos: bool = False  # random delays and lost signals, for tests
    trace: bool = False  # record the timeline


@dataclass(frozen=True)
class Buffer:
    """Memory of a device. `host` is a NumPy view when the host can touch it, else None. `zeroed`: it is known to hold
    zeros when it is given out, so that nobody need touch its pages."""

    address: int
    bytes: int
    host: Bytes | None
    owner: object  # keeps the memory alive
    zeroed: bool = False


class Executable(ABC):
    """A loaded kernel with its workers. Not thread-safe; one driver thread uses it."""

    @abstractmethod
    def launch(self, args: bytes) -> None:
        """Start a launch with these KernelArgs and return at once. One launch at a time."""

    @abstractmethod
    def wait_event(self, ring_seen: int, timeout_s: float) -> bool:
        """Sleep until TokenRing.written > ring_seen or the launch ended; True when something happened.

        Releases the interpreter lock and does not spin."""

    @abstractmethod
    def running(self) -> bool:
        """Whether a launch has not ended yet."""

    @abstractmethod
    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the launch; False when it did not end in time."""

    @abstractmethod
    def notify(self) -> None:
        """Tell an idle kernel that the mailbox has an entry (a no-op where kernels poll)."""

    def facts(self) -> Mapping[str, Any]:
        """What the backend observed of the last launch, between launches; empty where it observes nothing."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End the workers and free the module. Idempotent."""


class Device(ABC):
    """A device of one backend."""

    name: str  # "cpu", "cuda:0", ...

    @abstractmethod
    def availability(self) -> Availability: ...

    @property
    @abstractmethod
    def target(self) -> Target:
        """The target of this very device (its own worker count, memory and instruction set)."""

    @abstractmethod
    def compiler_id(self, target: Target) -> str:
        """Name and version of the compiler and all flags: part of the cache key. Raises NoCompiler."""

    @abstractmethod
    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        """Compile to the file `output`. `include` holds the package's sources. Raises BuildError with the log."""

    def code_report(self, binary: Path) -> Mapping[str, Any]:
        """What the backend says of a compiled kernel (registers, occupancy, ...); empty where it says nothing."""
        return {}

    @abstractmethod
    def load(self, binary: Path, target: Target, abi_hash: int) -> Executable:
        """Load a compiled kernel. Raises ProgramError when its ABI or architecture is another."""

    @abstractmethod
    def allocate(self, nbytes: int, host_visible: bool = False) -> Buffer:
        """Memory aligned to at least 256 bytes; contents undefined. Raises CapacityError with sizes."""

    @abstractmethod
    def fill(self, buffer: Buffer, byte: int) -> None: ...

    @abstractmethod
    def upload(self, buffer: Buffer, offset: int, data: npt.NDArray[Any]) -> None:
        """Copy to the device; done when it returns."""

    @abstractmethod
    def download(self, buffer: Buffer, offset: int, nbytes: int) -> Bytes: ...

    def copy(self, buffer: Buffer, source: int, target: int, nbytes: int) -> None:
        """Copy inside a buffer, from byte `source` to byte `target`; done when it returns.

        A kernel that touches neither place may run."""
        self.upload(buffer, target, self.download(buffer, source, nbytes))

    @abstractmethod
    def free(self, buffer: Buffer) -> None: ...

    # -------------------------------------------------------------------------------------------- several devices
    def allocate_window(self, nbytes: int, shared: bool) -> Buffer:
        """Memory that peers write while kernels run; `shared`: also those of other processes. Raises CapacityError, or
        DeviceUnavailable where devices of this backend cannot work together."""
        raise DeviceUnavailable(f"device {self.name}: devices of its backend do not run one model together yet")

    def reach(self, peer: Device) -> None:
        """Make the windows of a device of this process writable for kernels of this one. Raises DeviceUnavailable."""
        raise DeviceUnavailable(f"device {self.name}: devices of its backend do not run one model together yet")

    def window_handle(self, buffer: Buffer) -> bytes:
        """What another process opens a shared window by."""
        raise DeviceUnavailable(f"device {self.name}: its memory cannot be shared with other processes")

    def seal_window(self, buffer: Buffer) -> None:
        """Every peer has opened it: no other process need be able to from here on."""
        return None

    def open_window(self, handle: bytes, nbytes: int) -> Buffer:
        """The window of a peer in another process; `free` it. Raises DeviceUnavailable."""
        raise DeviceUnavailable(f"device {self.name}: its memory cannot be shared with other processes")
