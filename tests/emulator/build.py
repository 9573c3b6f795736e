"""Kernels of GPUs compiled for the host, between a before.h and an after.h, and the device that runs one."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megakernel.device import cpu
from megakernel.device.cpu import CpuDevice, CpuExecutable
from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import Compiler
from megakernel.errors import BuildError
from megakernel.target import Target, find_target

HERE = Path(__file__).parent


def host_command(compiler: Compiler) -> list[str]:
    """The host's C++ compiler in the clang that builds code objects."""
    if compiler.kind == "zig":
        return [*compiler.command[:-1], "c++", "-fno-sanitize=undefined"]
    return [compiler.command[0]]


def headers_of(folder: Path, *more: str) -> str:
    """The text of all that a kernel is compiled with beside its own: part of what its cache entry is named by."""
    names = ("before.h", "after.h", *more)
    shared = (HERE / "fibers.h", HERE / "host.h")
    return "".join(path.read_text() for path in (*shared, *(folder / name for name in names)))


def compile_on_host(
    source: KernelSource,
    include: Path,
    output: Path,
    folder: Path,
    compiler: Compiler,
    flags: Sequence[str],
    standalone: bool = False,
) -> None:
    """`output`: a shared library of the kernel and `folder`/after.h, or a program that runs a dump (see cpu_main.h).
    Raises BuildError with the compiler's words."""
    work = output.parent
    (work / "kernel.cpp").write_text(f'{source.text}\n#include "{folder / "after.h"}"\n')
    for name, text in source.headers.items():
        (work / name).write_text(text)
    line = [
        *host_command(compiler), *flags, "-O1", "-pthread", "-mfma", "-mf16c", "-w",
        *(["-DMEGAKERNEL_STANDALONE=1"] if standalone else ["-fPIC", "-shared"]),
        "-include", str(folder / "before.h"), f"-I{folder / 'include'}", f"-I{work}", f"-I{include}",
        str(work / "kernel.cpp"), "-o", str(output),
    ]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise BuildError(done.stderr[-8000:])


class EmulatedDevice(CpuDevice):
    """`workers` groups of a GPU target, each a thread of the host."""

    def __init__(self, target: str, workers: int) -> None:
        super().__init__(workers)
        self.name = f"emulated-{target}"
        self._emulated = replace(find_target(target), workers=workers)
        self._loaded: ctypes.CDLL | None = None

    @property
    def target(self) -> Target:
        return self._emulated

    @property
    def library(self) -> ctypes.CDLL:
        assert self._loaded is not None, "nothing has been loaded"
        return self._loaded

    def load(self, binary: Path, target: Target, abi_hash: int) -> CpuExecutable:
        library = ctypes.CDLL(str(binary))
        library.mk_emulated_abi.restype = ctypes.c_uint64
        assert library.mk_emulated_abi() == abi_hash
        cpu._declare(library)
        self._loaded = library
        return CpuExecutable(library, target.workers)
