"""An imitation of hip-python 10 over host memory, as strict as the package about the number and order of arguments."""

from __future__ import annotations

import ctypes
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest

from megakernel.device import hip

# Every call that hip.py makes, with its parameters as hip-python 10.0 declares them; test_bindings.py compares them
# with the package where it is installed.
SIGNATURES: dict[str, tuple[str, ...]] = {
    "hipDeviceCanAccessPeer": ("deviceId", "peerDeviceId"),
    "hipDeviceEnablePeerAccess": ("peerDeviceId", "flags"),
    "hipDeviceGetAttribute": ("attr", "deviceId"),
    "hipEventCreateWithFlags": ("flags",),
    "hipEventDestroy": ("event",),
    "hipEventElapsedTime": ("start", "stop"),
    "hipEventQuery": ("event",),
    "hipEventRecord": ("event", "stream"),
    "hipExtMallocWithFlags": ("sizeBytes", "flags"),
    "hipFree": ("ptr",),
    "hipGetDeviceCount": (),
    "hipGetDeviceProperties": ("deviceId",),
    "hipHostFree": ("ptr",),
    "hipHostGetDevicePointer": ("hstPtr", "flags"),
    "hipHostMalloc": ("size", "flags"),
    "hipIpcCloseMemHandle": ("devPtr",),
    "hipIpcGetMemHandle": ("devPtr",),
    "hipIpcOpenMemHandle": ("handle", "flags"),
    "hipMalloc": ("size",),
    "hipMemGetInfo": (),
    "hipMemcpyAsync": ("dst", "src", "sizeBytes", "kind", "stream"),
    "hipMemsetAsync": ("dst", "value", "sizeBytes", "stream"),
    "hipModuleGetFunction": ("module", "kname"),
    "hipModuleLaunchCooperativeKernel": (
        "f", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes", "stream",
        "kernelParams",
    ),
    "hipModuleLoadData": ("image",),
    "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor": ("f", "blockSize", "dynSharedMemPerBlk"),
    "hipModuleUnload": ("module",),
    "hipRuntimeGetVersion": (),
    "hipSetDevice": ("deviceId",),
    "hipStreamCreateWithFlags": ("flags",),
    "hipStreamDestroy": ("stream",),
    "hipStreamSynchronize": ("stream",),
}  # fmt: skip


class Status(int):
    """An error code with its name, as the package's enum."""

    name: str

    def __new__(cls, value: int, name: str) -> Status:
        made = super().__new__(cls, value)
        made.name = name
        return made


OK = Status(0, "hipSuccess")
NO_DEVICE, NOT_READY = Status(100, "hipErrorNoDevice"), Status(600, "hipErrorNotReady")
PEER_KNOWN = Status(704, "hipErrorPeerAccessAlreadyEnabled")
OUT_OF_MEMORY, FAILED = Status(2, "hipErrorOutOfMemory"), Status(719, "hipErrorLaunchFailure")


class FakeHandle:
    """Of memory that another process may open."""

    def __init__(self) -> None:
        self.bytes = (ctypes.c_uint8 * 64)()

    def as_c_void_p(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self.bytes))


class FakeHip(types.ModuleType):
    """`answers`: what a call answers instead of its own doing, by name; `calls`: every call with its arguments."""

    def __init__(
        self, architecture: str = "gfx942:sramecc+:xnack-", count: int = 1, units: int = 4, lds: int = 65536,
        clock: int = 100_000, cooperative: int = 1, xcds: int | None = 2, version: int = 70_200_000,
        resident: int = 1, old: bool = False,
    ) -> None:  # fmt: skip
        super().__init__("hip.hip")
        self.old, self.calls, self.answers = old, [], {}  # old: hip-python before 10
        self.memory: dict[int, Any] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.count, self.units, self.lds, self.version, self.resident = count, units, lds, version, resident
        self.architecture = architecture
        self.attributes = {"WallClockRate": clock, "CooperativeLaunch": cooperative}
        if xcds is not None:
            self.attributes["NumberOfXccs"] = xcds
        self.hipError_t = types.SimpleNamespace(
            hipErrorNotReady=NOT_READY, hipErrorPeerAccessAlreadyEnabled=PEER_KNOWN
        )  # fmt: skip
        self.hipIpcMemHandle_t, self.hipIpcMemLazyEnablePeerAccess = FakeHandle, 1
        self.hipDeviceProp_t = types.SimpleNamespace
        self.hipDeviceAttribute_t = types.SimpleNamespace(**{f"hipDeviceAttribute{n}": n for n in self.attributes})
        self.hipMemcpyKind = types.SimpleNamespace(hipMemcpyHostToDevice=1, hipMemcpyDeviceToHost=2)

    def __getattr__(self, name: str) -> Any:
        if name not in SIGNATURES:
            raise AttributeError(f"module 'hip.hip' has no attribute {name!r}")

        def call(*args: Any) -> Any:
            takes = len(SIGNATURES[name]) + (self.old and name == "hipGetDeviceProperties")
            if len(args) != takes:
                raise TypeError(f"{name}() takes exactly {takes} positional arguments ({len(args)} given)")
            self.calls.append((name, *args))
            if name in self.answers:
                return self.answers[name]
            return getattr(self, f"do_{name}", lambda *_args: (OK,))(*args)

        return call

    def do_hipGetDeviceCount(self) -> Any:
        return (OK, self.count) if self.count else (NO_DEVICE, 0)

    def do_hipRuntimeGetVersion(self) -> Any:
        return OK, self.version

    def do_hipGetDeviceProperties(self, *args: Any) -> Any:
        p = args[0] if self.old else types.SimpleNamespace()
        p.name, p.gcnArchName, p.multiProcessorCount = "a GPU", self.architecture, self.units
        p.sharedMemPerBlock, p.totalGlobalMem = self.lds, 192 << 30
        if self.old:
            p.name, p.gcnArchName = p.name.encode(), p.gcnArchName.encode()
            return (OK,)
        return OK, p

    def do_hipDeviceGetAttribute(self, name: str, _index: int) -> Any:
        return OK, self.attributes[name]

    def do_hipMalloc(self, size: int) -> Any:
        array = np.zeros(size, np.uint8)
        self.memory[array.ctypes.data] = array
        return OK, array.ctypes.data

    def do_hipExtMallocWithFlags(self, size: int, flags: int) -> Any:
        assert flags == 1, "what a peer writes would be seen when the kernel has ended"
        return self.do_hipMalloc(size)

    def do_hipDeviceCanAccessPeer(self, _own: int, _peer: int) -> Any:
        return OK, 1

    def do_hipIpcGetMemHandle(self, address: int) -> Any:
        handle = FakeHandle()
        handle.bytes[:8] = address.to_bytes(8, "little")
        return OK, handle

    def do_hipIpcOpenMemHandle(self, handle: FakeHandle, _flags: int) -> Any:
        return OK, int.from_bytes(bytes(handle.bytes[:8]), "little")

    def do_hipHostMalloc(self, size: int, flags: int) -> Any:
        assert flags & hip.COHERENT, "the host would not see the kernel's stores while it runs"
        return self.do_hipMalloc(size)

    def do_hipHostGetDevicePointer(self, pointer: int, _flags: int) -> Any:
        return OK, pointer

    def do_hipMemGetInfo(self) -> Any:
        return OK, 1 << 30, 192 << 30

    def do_hipMemcpyAsync(self, to: int, source: int, size: int, _kind: int, _stream: Any) -> Any:
        ctypes.memmove(to, source, size)
        return (OK,)

    def do_hipMemsetAsync(self, to: int, value: int, size: int, _stream: Any) -> Any:
        ctypes.memset(to, value, size)
        return (OK,)

    def do_hipStreamCreateWithFlags(self, _flags: int) -> Any:
        return OK, f"stream {sum(c[0] == 'hipStreamCreateWithFlags' for c in self.calls)}"

    def do_hipEventCreateWithFlags(self, _flags: int) -> Any:
        return OK, f"event {sum(c[0] == 'hipEventCreateWithFlags' for c in self.calls)}"

    def do_hipEventElapsedTime(self, _start: Any, _stop: Any) -> Any:
        return OK, 1.25

    def do_hipModuleLoadData(self, _code: bytes) -> Any:
        return OK, "module"

    def do_hipModuleGetFunction(self, _module: Any, name: bytes) -> Any:
        return OK, name

    def do_hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(self, *_args: Any) -> Any:
        return OK, self.resident

    def do_hipModuleLaunchCooperativeKernel(self, *args: Any) -> Any:
        self.launches.append(args)
        return (OK,)


def imitate(monkeypatch: pytest.MonkeyPatch, fake: types.ModuleType) -> None:
    """`from hip import hip` gives `fake` from here on."""
    package = types.ModuleType("hip")
    package.__spec__, package.hip = ModuleSpec("hip", None), fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hip", package)
    monkeypatch.setitem(sys.modules, "hip.hip", fake)
    hip.probe.cache_clear()
