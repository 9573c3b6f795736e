"""The CPU device: compiles with the machine's C++ compiler and runs workers as resident threads."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.device.device import Availability, Buffer, Bytes, Device, Executable, KernelSource
from megakernel.errors import BuildError, CapacityError, DeviceUnavailable, NoCompiler, ProgramError
from megakernel.settings import read_settings
from megakernel.target import TARGETS, Target, find_target

BASE_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra",
)  # fmt: skip
ISA_FLAGS = {
    "cpu-avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "cpu-avx2": ("-mavx2", "-mfma", "-mf16c"),
    "cpu-generic": ("-Wno-psabi",),
}
ISA_NEEDS = {  # flags as in /proc/cpuinfo
    "cpu-avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"}),
    "cpu-avx2": frozenset({"avx2", "fma", "f16c"}),
    "cpu-generic": frozenset[str](),
}
HUGE_PAGE = 2 << 20
SHARED_FOLDER = Path("/dev/shm")  # files in memory; the temporary folder where there is none


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Instruction set extensions of this machine, as the kernel names them; empty when it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def best_target(flags: frozenset[str]) -> str:
    """The first target of ISA_NEEDS that a machine with these flags runs."""
    return next(name for name, need in ISA_NEEDS.items() if need <= flags)


def find_compiler(wanted: str | None = None) -> tuple[str, ...]:
    """Command of a C++20 compiler. `wanted` (or MEGAKERNEL_CXX) names one; else g++, clang++, the ziglang wheel.

    Raises NoCompiler listing where it looked."""
    wanted = wanted or read_settings().cxx
    if wanted:
        command = tuple(shlex.split(wanted))
        if shutil.which(command[0]) is None:
            raise NoCompiler(f"MEGAKERNEL_CXX is {wanted!r}: {command[0]} is not an executable; name a C++ compiler")
        return command
    names = ("g++", "clang++", *(f"clang++-{v}" for v in range(24, 13, -1)), *(f"g++-{v}" for v in range(16, 11, -1)))
    for name in names:
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise NoCompiler(
        "no C++ compiler: looked for MEGAKERNEL_CXX, g++, clang++ and their numbered names in PATH, and for the "
        "ziglang package; install one, or `pip install ziglang`"
    )


@lru_cache(maxsize=8)
def compiler_version(command: tuple[str, ...]) -> str:
    """First line of --version. Raises BuildError when the compiler does not start."""
    try:
        line = [*command, "--version"]
        out = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"{' '.join(command)} --version failed: {e}; set MEGAKERNEL_CXX to a working compiler") from e
    return out.stdout.splitlines()[0] if out.stdout else "unknown"


def flags_for(target: Target, command: Sequence[str], chaos: bool, trace: bool) -> tuple[str, ...]:
    """All flags of one compilation."""
    isa = ISA_FLAGS[target.name] if platform.machine() in ("x86_64", "AMD64") else ()
    if "ziglang" in command:  # -mcpu instead of -m flags, this machine's own by default; no C++ library to build first
        levels = {"cpu-avx512": "x86_64_v4", "cpu-avx2": "x86_64_v3", "cpu-generic": "x86_64"}
        level = levels[target.name] if platform.machine() in ("x86_64", "AMD64") else "baseline"
        isa = (f"-mcpu={level}", "-nostdlib++", "-fno-sanitize=undefined")
    extra = (*(("-DMEGAKERNEL_CHAOS=1",) if chaos else ()), *(("-DMEGAKERNEL_TRACE=1",) if trace else ()))
    return (*BASE_FLAGS, *isa, *extra)


def compile_source(
    source: KernelSource, include: Path, output: Path, command: tuple[str, ...], extra: Sequence[str] = (),
    standalone: bool = False,
) -> None:  # fmt: skip
    """Compile `source` to `output`; `include` is the folder that holds the package. Raises BuildError with the log.

    standalone: a program that runs dumped launches (see cpu_main.h) instead of a shared object."""
    with tempfile.TemporaryDirectory(prefix="megakernel-") as folder:
        work = Path(folder)
        (work / "kernel.cpp").write_text(source.text)
        for name, text in source.headers.items():
            (work / name).write_text(text)
        flags = flags_for(source.target, command, source.chaos, source.trace)
        if standalone:
            flags = (*(f for f in flags if f != "-shared"), "-DMEGAKERNEL_STANDALONE=1")
        paths = [f"-I{work}", f"-I{include}", str(work / "kernel.cpp"), "-o", str(work / "out")]
        line = [*command, *flags, *extra, *paths]
        try:
            done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=600)
        except (OSError, subprocess.SubprocessError) as e:
            raise BuildError(f"{command[0]} did not run: {e}") from e
        if done.returncode != 0:
            raise BuildError(f"{' '.join(line)}\nended with {done.returncode}:\n{done.stderr[-8000:]}")
        if not (work / "out").exists():
            raise BuildError(
                f"{' '.join(command)} ended without an error and wrote nothing; set MEGAKERNEL_CXX to a C++20 compiler"
            )
        shutil.move(work / "out", output)


@dataclass(frozen=True)
class _Memory:
    """Owner of a buffer's pages."""

    pages: mmap.mmap | None
    array: Bytes
    path: Path | None = None  # of a file that other processes may map


class CpuExecutable(Executable):
    """A loaded kernel; its threads sleep between launches."""

    def __init__(self, library: ctypes.CDLL, workers: int) -> None:
        self._library = library
        self._handle: int | None = library.mk_open(workers)
        if not self._handle:
            raise DeviceUnavailable(f"the system did not start {workers} worker threads; lower the number of workers")

    def launch(self, args: bytes) -> None:
        self._library.mk_launch(self._open(), args)

    def wait_event(self, ring_seen: int, timeout_s: float) -> bool:
        return bool(self._library.mk_wait_event(self._open(), ring_seen, int(timeout_s * 1e9)))

    def running(self) -> bool:
        return self._handle is not None and bool(self._library.mk_running(self._handle))

    def join(self, timeout_s: float) -> bool:
        return self._handle is None or bool(self._library.mk_join(self._handle, int(timeout_s * 1e9)))

    def notify(self) -> None:
        """Nothing to do: the kernel looks at the mailbox in every step."""

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            self._library.mk_close(handle)

    def _open(self) -> int:
        if self._handle is None:
            raise ProgramError("the kernel was closed")
        return self._handle

    def __del__(self) -> None:
        self.close()


class CpuDevice(Device):
    """This machine's processor. `target_name` None chooses the best instruction set that it has."""

    name = "cpu"

    def __init__(self, workers: int | None = None, target_name: str | None = None, compiler: str | None = None) -> None:
        self._target = find_target(target_name or best_target(cpu_flags()))
        self._workers = workers or len(os.sched_getaffinity(0))
        self._compiler = compiler

    def availability(self) -> Availability:
        missing = ISA_NEEDS[self._target.name] - cpu_flags()
        if missing:
            lacks = ", ".join(sorted(missing))
            return Availability(False, f"{self._target.name} needs {lacks}, this processor lacks it")
        try:
            command = find_compiler(self._compiler)
            text = f"{self._target.name}, {self._workers} workers, {compiler_version(command)}"
        except BuildError as e:
            return Availability(False, str(e))
        return Availability(True, "", text)

    @property
    def target(self) -> Target:
        return replace(self._target, workers=self._workers)

    def compiler_id(self, target: Target) -> str:
        command = find_compiler(self._compiler)
        return " ".join((compiler_version(command), *command, *flags_for(target, command, False, False)))

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        compile_source(source, include, output, find_compiler(self._compiler))

    def load(self, binary: Path, target: Target, abi_hash: int) -> CpuExecutable:
        if target.name not in ISA_NEEDS:
            names = ", ".join(t.name for t in TARGETS.values() if t.backend == "cpu")
            raise ProgramError(f"{binary} was built for {target.name}; the CPU device runs {names}")
        missing = ISA_NEEDS[target.name] - cpu_flags()
        if missing:
            lacks = ", ".join(sorted(missing))
            raise ProgramError(f"{binary} was built for {target.name}; this processor lacks {lacks}")
        try:
            library = ctypes.CDLL(str(binary), mode=os.RTLD_LOCAL | os.RTLD_NOW)
            library.mk_abi_hash.restype = ctypes.c_uint64
        except (OSError, AttributeError) as e:
            raise ProgramError(f"{binary} is not a kernel for this machine ({e}); build the program again") from e
        got = library.mk_abi_hash()
        if got != abi_hash:
            layouts = f"record layout {got:016x}, expected {abi_hash:016x}"
            raise ProgramError(f"{binary} has {layouts}; build the program again")
        _declare(library)
        return CpuExecutable(library, target.workers)

    def allocate(self, nbytes: int, host_visible: bool = False) -> Buffer:
        """Zeroed pages, huge ones where the system gives them. Every buffer is host-visible here."""
        size = max(1, nbytes)
        try:
            memory = _small(size) if size < HUGE_PAGE else _large(size)
        except (OSError, MemoryError, ValueError) as e:
            raise CapacityError(f"cannot allocate {nbytes:,} bytes of host memory: {e}") from e
        return Buffer(memory.array.ctypes.data, nbytes, memory.array[:nbytes], memory, zeroed=True)

    def fill(self, buffer: Buffer, byte: int) -> None:
        _host(buffer)[:] = byte

    def upload(self, buffer: Buffer, offset: int, data: npt.NDArray[Any]) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        _range(buffer, offset, flat.nbytes)
        _host(buffer)[offset : offset + flat.nbytes] = flat

    def download(self, buffer: Buffer, offset: int, nbytes: int) -> Bytes:
        _range(buffer, offset, nbytes)
        out: Bytes = _host(buffer)[offset : offset + nbytes].copy()
        return out

    def free(self, buffer: Buffer) -> None:
        """The memory goes when the last view of it goes; the name of a shared window at once."""
        self.seal_window(buffer)

    def seal_window(self, buffer: Buffer) -> None:
        if isinstance(buffer.owner, _Memory) and buffer.owner.path is not None:
            buffer.owner.path.unlink(missing_ok=True)

    def allocate_window(self, nbytes: int, shared: bool) -> Buffer:
        """Of processes: a file in memory, until `free`."""
        if not shared:
            return self.allocate(nbytes)
        folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() and os.access(SHARED_FOLDER, os.W_OK) else None
        try:
            number, path = tempfile.mkstemp(prefix="megakernel-", dir=folder)
            try:
                os.posix_fallocate(number, 0, nbytes)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(number)
        except OSError as e:
            raise CapacityError(f"cannot share {nbytes:,} bytes with other processes: {e}") from e
        return _mapped(Path(path), nbytes)

    def reach(self, peer: Device) -> None:
        """Threads of one process share its memory."""

    def window_handle(self, buffer: Buffer) -> bytes:
        assert isinstance(buffer.owner, _Memory) and buffer.owner.path is not None
        return os.fsencode(buffer.owner.path)

    def open_window(self, handle: bytes, nbytes: int) -> Buffer:
        try:
            found = _mapped(Path(os.fsdecode(handle)), nbytes)
        except OSError as e:
            raise DeviceUnavailable(f"device {self.name}: the window of a peer cannot be opened: {e}") from e
        return replace(found, owner=None)


def devices() -> list[Device]:
    """The one CPU device; MEGAKERNEL_TARGET and MEGAKERNEL_WORKERS choose another instruction set or worker count."""
    settings = read_settings()
    name = settings.target if settings.target and settings.target.startswith("cpu") else None
    return [CpuDevice(settings.workers, name)]


def _small(size: int) -> _Memory:
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return _Memory(None, raw[start : start + size])


def _large(size: int) -> _Memory:
    """Anonymous pages aligned to a huge page."""
    pages = mmap.mmap(-1, size + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system may have none: small pages are slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    return _Memory(pages, raw[start : start + size])


def _mapped(path: Path, nbytes: int) -> Buffer:
    """A file's bytes, shared with whoever maps it."""
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED)
    array = np.frombuffer(pages, np.uint8)
    return Buffer(array.ctypes.data, nbytes, array, _Memory(pages, array, path))


def _host(buffer: Buffer) -> Bytes:
    assert buffer.host is not None
    return buffer.host


def _range(buffer: Buffer, offset: int, nbytes: int) -> None:
    if offset < 0 or offset + nbytes > buffer.bytes:
        raise ProgramError(f"bytes [{offset}, {offset + nbytes}) lie outside a buffer of {buffer.bytes}")


def _declare(library: ctypes.CDLL) -> None:
    handle = ctypes.c_void_p
    library.mk_open.restype, library.mk_open.argtypes = handle, [ctypes.c_uint32]
    library.mk_launch.restype, library.mk_launch.argtypes = None, [handle, ctypes.c_char_p]
    library.mk_running.restype, library.mk_running.argtypes = ctypes.c_int, [handle]
    library.mk_join.restype, library.mk_join.argtypes = ctypes.c_int, [handle, ctypes.c_int64]
    library.mk_wait_event.restype = ctypes.c_int
    library.mk_wait_event.argtypes = [handle, ctypes.c_uint64, ctypes.c_int64]
    library.mk_close.restype, library.mk_close.argtypes = None, [handle]
