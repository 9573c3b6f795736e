"""The HIP device: compiles with any clang that knows AMD GPUs, loads and launches through hip-python.

Compiling and inspecting work on any machine. What asks a GPU or runs on one has not met hardware: tests run it against
an imitation of hip-python, and through the package itself above an imitation of the runtime library. docs/amd.md says
what that proves, what it does not, and how a person with a GPU runs all of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.device import hip_peer
from megakernel.device.code_object import KernelReport, kernel_report, symbol_bytes
from megakernel.device.device import Availability, Buffer, Bytes, Device, Executable, KernelSource
from megakernel.device.hip_compiler import (
    FREESTANDING,
    check_code,
    compile_code_object,
    compile_flags,
    find_compiler,
    is_rocm,
)
from megakernel.device.hip_report import code_report
from megakernel.errors import (
    BuildError,
    CapacityError,
    DeviceUnavailable,
    MegakernelError,
    ProgramError,
    TargetError,
)
from megakernel.target import TARGETS, Target
from megakernel.tasks.record import ARGS

INSTALL = 'pip install "megakernel-decode[hip]"'
KERNEL, ABI_SYMBOL = "mk_worker", "mk_abi_hash"
OVERFLOW_BYTES = 2 << 20  # of one worker: what a record needs beyond the LDS
CLOCK_KHZ = 100_000  # of the constant clock, as kTickNs in hip_isa.h has it
COHERENT, MAPPED, PORTABLE = 0x40000000, 0x2, 0x1  # flags of hipHostMalloc; coherent: fine-grained
NON_BLOCKING = 0x1  # flag of hipStreamCreateWithFlags
OLDEST_RUNTIME = 60000000  # HIP 6.0, the first with the properties that hip-python reads
NEEDS_ROCM = ("gfx1250",)  # clang 22 builds it as a compile check only
SEATS_BYTES = 128  # of Seats in hip_seats.h, before the place of each worker


# ------------------------------------------------------------------------------------------------ what is there
@dataclass(frozen=True)
class GpuInfo:
    """Properties of one GPU. `architecture` is "gfx942" without its features."""

    index: int
    name: str
    architecture: str
    units: int
    lds_bytes: int
    memory: int
    clock_khz: int
    cooperative: bool
    groups: int | None  # XCDs of the device as it is partitioned; None: the runtime does not say
    runtime: int  # version of HIP, 70200000 is 7.2


def _hip() -> Any:
    if importlib.util.find_spec("hip") is None:
        raise DeviceUnavailable(f"the package hip-python is not installed; {INSTALL}")
    from hip import hip

    return hip


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of a call of hip-python. Raises MegakernelError with the name of the error."""
    status, *values = result
    if int(status) != 0:
        raise MegakernelError(f"the HIP runtime answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values) if values else None


@lru_cache(maxsize=1)
def probe() -> tuple[tuple[GpuInfo, ...], str]:
    """The GPUs of this machine, or one sentence that says why there is none."""
    try:
        hip = _hip()
        status, count = hip.hipGetDeviceCount()
        if int(status) != 0 or count == 0:
            return (), f"the ROCm runtime is installed and sees no GPU ({status.name})"
        version = int(_checked(hip.hipRuntimeGetVersion()))
        if version < OLDEST_RUNTIME:
            return (), f"the ROCm runtime has HIP {_version(version)}; {_version(OLDEST_RUNTIME)} or newer is needed"
        return tuple(_info(hip, i, version) for i in range(count)), ""
    except DeviceUnavailable as e:
        return (), str(e)
    except (ImportError, RuntimeError) as e:  # hip-python loads libamdhip64.so at its first call
        return (), f"the ROCm runtime is not installed ({str(e).splitlines()[0][:120]})"
    except AttributeError as e:
        return (), f"this version of hip-python lacks what is needed ({e}); {INSTALL}"
    except MegakernelError as e:
        return (), f"the GPUs cannot be asked for their properties: {e}"
    except Exception as e:  # another package of that name, a broken one: the other devices still work
        said = (str(e).splitlines() or [""])[0][:120]
        return (), f"hip-python cannot be used ({type(e).__name__}: {said}); {INSTALL}"


def _version(number: int) -> str:
    return f"{number // 10_000_000}.{number // 100_000 % 100}"


def _properties(hip: Any, index: int) -> Any:
    """hip-python 10 returns the properties; versions before fill those that they are given."""
    try:
        return _checked(hip.hipGetDeviceProperties(index))
    except TypeError:
        properties = hip.hipDeviceProp_t()
        _checked(hip.hipGetDeviceProperties(properties, index))
        return properties


def _text(value: str | bytes) -> str:
    """hip-python 10 gives texts, versions before give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _info(hip: Any, index: int, runtime: int) -> GpuInfo:
    properties, kinds = _properties(hip, index), hip.hipDeviceAttribute_t

    def attribute(name: str) -> int:
        return int(_checked(hip.hipDeviceGetAttribute(getattr(kinds, f"hipDeviceAttribute{name}"), index)))

    return GpuInfo(
        index, _text(properties.name), _text(properties.gcnArchName).split(":")[0],
        int(properties.multiProcessorCount), int(properties.sharedMemPerBlock), int(properties.totalGlobalMem),
        attribute("WallClockRate"), attribute("CooperativeLaunch") == 1,
        attribute("NumberOfXccs") if hasattr(kinds, "hipDeviceAttributeNumberOfXccs") else None, runtime,
    )  # fmt: skip


def target_for(gpu: GpuInfo) -> Target:
    """The target of that GPU with its own count of units. Raises TargetError for one that no target describes."""
    base = TARGETS.get(gpu.architecture)
    if base is None or base.backend != "hip":
        names = ", ".join(t.name for t in TARGETS.values() if t.backend == "hip")
        raise TargetError(f"{gpu.name} is {gpu.architecture}; supported are {names}")
    if gpu.lds_bytes < base.shared_bytes:
        raise TargetError(
            f"{gpu.name} gives a workgroup {gpu.lds_bytes:,} bytes of LDS; {base.name} needs {base.shared_bytes:,}"
        )
    if gpu.clock_khz != CLOCK_KHZ:
        raise TargetError(f"{gpu.name} has a constant clock of {gpu.clock_khz} kHz; the kernel expects {CLOCK_KHZ}")
    groups = base.groups if gpu.groups is None or base.groups == 1 else max(1, gpu.groups)
    return replace(base, workers=gpu.units, groups=groups, stream_gbps=base.stream_gbps * gpu.units / base.workers)


# ------------------------------------------------------------------------------------------------ running
class HipExecutable(Executable):
    """A loaded kernel. Launches go to a stream of its own; nothing else is ever queued there. Not run on hardware."""

    def __init__(self, device: HipDevice, code: bytes, report: KernelReport, target: Target) -> None:
        self._hip, self._device, self._workers, self._threads = _hip(), device, target.workers, report.threads
        device.make_current()
        self._module: Any = _checked(self._hip.hipModuleLoadData(code))
        self._function = _checked(self._hip.hipModuleGetFunction(self._module, KERNEL.encode()))
        self._check_residency()
        self._overflow = device.allocate(target.workers * OVERFLOW_BYTES)
        self._seats = device.allocate(SEATS_BYTES + 4 * target.workers)
        device.fill(self._seats, 0)
        self._stream = _checked(self._hip.hipStreamCreateWithFlags(NON_BLOCKING))
        self._begin, self._end = (_checked(self._hip.hipEventCreateWithFlags(0)) for _ in range(2))
        self._launched = False
        self._ring: ctypes.c_uint64 | None = None

    def _check_residency(self) -> None:
        """All workgroups must be resident at once; the kernel's roll-call checks it again at every launch."""
        info = self._device.info
        groups = int(
            _checked(self._hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(self._function, self._threads, 0))
        )
        if groups * info.units < self._workers:
            raise ProgramError(
                f"the program has {self._workers} workers; {info.name} keeps {groups * info.units} resident "
                f"({info.units} units, {groups} each); build it for this device"
            )

    def launch(self, args: bytes) -> None:
        self._device.make_current()
        at = dict(zip((f.name for f in ARGS.fields), ARGS.offsets))["ring"]
        ring = self._device.host_address(int.from_bytes(args[at : at + 8], "little"))
        self._ring = ctypes.c_uint64.from_address(ring)  # TokenRing.written is its first word
        held = ctypes.create_string_buffer(args, len(args))
        words = [ctypes.c_uint64(v) for v in (self._overflow.address, OVERFLOW_BYTES, self._seats.address)]
        pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(v) for v in (held, *words)))
        _checked(self._hip.hipMemsetAsync(self._seats.address, 0, self._seats.bytes, self._stream))
        _checked(self._hip.hipEventRecord(self._begin, self._stream))
        _checked(
            self._hip.hipModuleLaunchCooperativeKernel(
                self._function, self._workers, 1, 1, self._threads, 1, 1, 0, self._stream, ctypes.addressof(pointers)
            )
        )
        _checked(self._hip.hipEventRecord(self._end, self._stream))
        self._launched = True

    def wait_event(self, ring_seen: int, timeout_s: float) -> bool:
        return _sleep_until(lambda: self._ring is None or self._ring.value > ring_seen or not self.running(), timeout_s)

    def running(self) -> bool:
        if self._module is None or not self._launched:
            return False
        self._device.make_current()
        (status,) = self._hip.hipEventQuery(self._end)
        if status == self._hip.hipError_t.hipErrorNotReady:
            return True
        if int(status) != 0:
            raise MegakernelError(f"the kernel on {self._device.name} ended with {status.name}; start a new process")
        return False

    def join(self, timeout_s: float) -> bool:
        return _sleep_until(lambda: not self.running(), timeout_s)

    def notify(self) -> None:
        """Nothing to do: the kernel looks at the mailbox in every step."""

    def facts(self) -> Mapping[str, Any]:
        """Of the last launch: its time by the device's clock, and the XCD that each worker ran on."""
        if self._module is None or not self._launched or self.running():
            return {}
        raw = self._device.download(self._seats, SEATS_BYTES, 4 * self._workers).view(np.uint32)
        elapsed = float(_checked(self._hip.hipEventElapsedTime(self._begin, self._end)))
        return {"launch_ms": elapsed, "xcd_of_worker": raw.tolist()}

    def close(self) -> None:
        if self._module is None:
            return
        self._device.make_current()
        _checked(self._hip.hipStreamSynchronize(self._stream))
        for event in (self._begin, self._end):
            _checked(self._hip.hipEventDestroy(event))
        _checked(self._hip.hipStreamDestroy(self._stream))
        _checked(self._hip.hipModuleUnload(self._module))
        self._device.free(self._overflow)
        self._device.free(self._seats)
        self._module = None


def _sleep_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Short sleeps until `ready`; False when the time ran out."""
    began = time.monotonic()
    while not ready():
        waited = time.monotonic() - began
        if waited >= timeout_s:
            return False
        time.sleep(1e-5 if waited < 0.01 else 1e-4)
    return True


class HipDevice(Device):
    """One GPU, or, where there is none, a device that says why and still compiles for every AMD target."""

    def __init__(self, info: GpuInfo | None, reason: str = "", compiler: str | None = None) -> None:
        self._info, self._reason, self._compiler = info, reason, compiler
        self.name = f"hip:{info.index}" if info else "hip"
        self._copies: Any = None  # stream of uploads and downloads, so that none waits for a kernel
        self._hosts: dict[int, int] = {}  # device address of host-visible memory -> host address

    @property
    def info(self) -> GpuInfo:
        if self._info is None:
            raise DeviceUnavailable(f"device hip: {self._reason}")
        return self._info

    def availability(self) -> Availability:
        if self._info is None:
            return Availability(False, self._reason)
        if not self._info.cooperative:
            return Availability(False, f"{self._info.name} has no cooperative launch, which keeps all workers resident")
        try:
            target_for(self._info)
            compiler = find_compiler(self._compiler)
        except (TargetError, BuildError) as e:
            return Availability(False, str(e))
        i = self._info
        if i.architecture in NEEDS_ROCM and compiler.kind != "hiprtc" and not is_rocm(compiler.version):
            return Availability(
                False, f"{i.name} is {i.architecture}, whose kernels need a prologue that {compiler.version} does not "
                "write; install ROCm's compiler",
            )  # fmt: skip
        text = f"{i.name}, {i.architecture}, {i.units} units, {i.memory >> 30} GiB, HIP {_version(i.runtime)}"
        return Availability(True, "", text)

    @property
    def target(self) -> Target:
        return target_for(self.info)

    def compiler_id(self, target: Target) -> str:
        compiler = find_compiler(self._compiler)
        return " ".join((compiler.version, *compiler.command, *FREESTANDING, *compile_flags(target, False, False)))

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        compiler = find_compiler(self._compiler)
        code = compile_code_object(source, include, compiler)
        check_code(code, source.target, compiler)
        output.write_bytes(code)

    def code_report(self, binary: Path) -> Mapping[str, Any]:
        return code_report(binary.read_bytes())

    def load(self, binary: Path, target: Target, abi_hash: int) -> HipExecutable:
        """Raises ProgramError for a file that is damaged, of another GPU, of other records or of too many workers, and
        for one that must not be run because of what compiled it."""
        code, own = binary.read_bytes(), self.target
        try:
            report, got = kernel_report(code), int.from_bytes(symbol_bytes(code, ABI_SYMBOL), "little")
        except ProgramError as e:
            raise ProgramError(f"{binary}: {e}") from e
        if report.architecture != own.name:
            raise ProgramError(
                f"{binary} was built for {report.architecture}; {self.info.name} is {own.name}; "
                "build it for this device"
            )
        if report.architecture in NEEDS_ROCM and not is_rocm(report.compiler):
            maker = report.compiler or "a compiler that it does not name"
            raise ProgramError(
                f"{binary} was built by {maker}, which does not write the prologue that kernels of {own.name} need; "
                "build it again on this machine, with ROCm's compiler"
            )
        if got != abi_hash:
            raise ProgramError(
                f"{binary} has record layout {got:016x}, expected {abi_hash:016x}; build the program again"
            )
        if target.workers > own.workers:
            raise ProgramError(
                f"{binary} was built for {target.workers} workers; {self.info.name} has {own.workers} units; "
                "build it for this device"
            )
        return HipExecutable(self, code, report, target)

    # -------------------------------------------------------------------------------------------- memory
    def make_current(self) -> None:
        """The GPU becomes this thread's."""
        hip = _hip()
        _checked(hip.hipSetDevice(self.info.index))
        if self._copies is None:
            self._copies = _checked(hip.hipStreamCreateWithFlags(NON_BLOCKING))

    def host_address(self, address: int) -> int:
        """Where the host sees host-visible memory."""
        return self._hosts[address]

    def allocate(self, nbytes: int, host_visible: bool = False) -> Buffer:
        self.make_current()
        hip, size = _hip(), max(nbytes, 256)
        # Coherent: the kernel's system-scope stores reach the host while the kernel runs.
        result = hip.hipHostMalloc(size, COHERENT | MAPPED | PORTABLE) if host_visible else hip.hipMalloc(size)
        if int(result[0]) != 0:
            free, total = _checked(hip.hipMemGetInfo())
            raise CapacityError(
                f"{self.name}: cannot allocate {nbytes:,} bytes; {free:,} of {total:,} are free ({result[0].name})"
            )
        pointer = result[1]
        if not host_visible:
            return Buffer(int(pointer), nbytes, None, pointer)
        host, address = int(pointer), int(_checked(hip.hipHostGetDevicePointer(pointer, 0)))
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
        self._hosts[address] = host
        return Buffer(address, nbytes, view, pointer)

    def fill(self, buffer: Buffer, byte: int) -> None:
        if buffer.host is not None:
            buffer.host[:] = byte
            return
        self.make_current()
        hip = _hip()
        _checked(hip.hipMemsetAsync(buffer.address, byte, buffer.bytes, self._copies))
        _checked(hip.hipStreamSynchronize(self._copies))

    def upload(self, buffer: Buffer, offset: int, data: npt.NDArray[Any]) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        _range(buffer, offset, flat.nbytes)
        if buffer.host is not None:
            buffer.host[offset : offset + flat.nbytes] = flat
            return
        self.make_current()
        self._copy(buffer.address + offset, flat.ctypes.data, flat.nbytes, "hipMemcpyHostToDevice")

    def download(self, buffer: Buffer, offset: int, nbytes: int) -> Bytes:
        _range(buffer, offset, nbytes)
        if buffer.host is not None:
            held: Bytes = buffer.host[offset : offset + nbytes].copy()
            return held
        self.make_current()
        out = np.empty(nbytes, np.uint8)
        self._copy(out.ctypes.data, buffer.address + offset, nbytes, "hipMemcpyDeviceToHost")
        return out

    def _copy(self, to: int, source: int, nbytes: int, kind: str) -> None:
        if nbytes == 0:
            return
        hip = _hip()
        _checked(hip.hipMemcpyAsync(to, source, nbytes, getattr(hip.hipMemcpyKind, kind), self._copies))
        _checked(hip.hipStreamSynchronize(self._copies))

    def free(self, buffer: Buffer) -> None:
        self.make_current()
        hip = _hip()
        self._hosts.pop(buffer.address, None)
        if isinstance(buffer.owner, hip_peer.Opened):
            _checked(hip.hipIpcCloseMemHandle(buffer.address))
            return
        _checked(hip.hipHostFree(buffer.owner) if buffer.host is not None else hip.hipFree(buffer.owner))

    def allocate_window(self, nbytes: int, shared: bool) -> Buffer:
        """Fine-grained memory: what a peer writes is seen while the kernel runs. Not run on hardware."""
        self.make_current()
        pointer = hip_peer.allocate(_hip(), self.name, nbytes)
        return Buffer(int(pointer), nbytes, None, pointer)

    def reach(self, peer: Device) -> None:
        assert isinstance(peer, HipDevice)
        if peer.info.index != self.info.index:
            self.make_current()
            hip_peer.enable(_hip(), self.info, peer.info)

    def window_handle(self, buffer: Buffer) -> bytes:
        self.make_current()
        return hip_peer.handle_of(_hip(), buffer.address)

    def open_window(self, handle: bytes, nbytes: int) -> Buffer:
        self.make_current()
        return Buffer(hip_peer.opened(_hip(), self.name, handle), nbytes, None, hip_peer.Opened())


def devices() -> Sequence[Device]:
    """Every AMD GPU of this machine, or one device that says why there is none and still compiles."""
    found, reason = probe()
    return [HipDevice(info) for info in found] or [HipDevice(None, reason)]


def _range(buffer: Buffer, offset: int, nbytes: int) -> None:
    if offset < 0 or offset + nbytes > buffer.bytes:
        raise ProgramError(f"bytes [{offset}, {offset + nbytes}) lie outside a buffer of {buffer.bytes}")
