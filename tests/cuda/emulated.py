"""A CUDA device whose kernel runs on the host: cuda.h compiled by a C++ compiler, threads as fibers. See before.h."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megakernel.device import cpu
from megakernel.device.cpu import CpuDevice, CpuExecutable
from megakernel.device.cuda_compiler import DEFAULTS, Tunables, compile_flags
from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import find_compiler
from megakernel.errors import BuildError
from megakernel.target import Target, find_target
from tests.hip.emulated import host_command

HERE = Path(__file__).parent
FLAGS = (
    "-O1", "-fPIC", "-shared", "-pthread", "-mfma", "-mf16c", "-ffp-contract=off", "-w", "-fdelayed-template-parsing",
)  # fmt: skip
HEADERS = ("before.h", "after.h", "include/megakernel/device/cuda_ptx.h")


def host_flags(target: Target, chaos: bool, tunables: Tunables) -> Sequence[str]:
    return [f for f in compile_flags(target, chaos, False, tunables) if f.startswith(("-D", "--std"))]


class EmulatedCuda(CpuDevice):
    """`workers` blocks of a CUDA target, each a thread of the host."""

    def __init__(self, workers: int = 2, target: str = "sm_90a", tunables: Tunables = DEFAULTS) -> None:
        super().__init__(workers)
        self.name = f"emulated-{target}"
        self._emulated = replace(find_target(target), workers=workers)
        self._tunables = tunables
        self._library: ctypes.CDLL | None = None

    @property
    def target(self) -> Target:
        return self._emulated

    def leave_out(self, count: int) -> None:
        """The last `count` blocks never start."""
        assert self._library is not None, "nothing has been loaded"
        self._library.mk_leave_out(count)

    def compiler_id(self, target: Target) -> str:
        headers = "".join((HERE / name).read_text() for name in HEADERS)
        return " ".join((find_compiler().version, *host_flags(target, False, self._tunables), *FLAGS, headers))

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        work = output.parent
        (work / "kernel.cpp").write_text(f'{source.text}\n#include "{HERE / "after.h"}"\n')
        for name, text in source.headers.items():
            (work / name).write_text(text)
        line = [
            *host_command(find_compiler()), *host_flags(source.target, source.chaos, self._tunables), *FLAGS,
            "-include", str(HERE / "before.h"), f"-I{HERE / 'include'}", f"-I{work}", f"-I{include}",
            str(work / "kernel.cpp"), "-o", str(output),
        ]  # fmt: skip
        done = subprocess.run(line, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise BuildError(done.stderr[-8000:])

    def load(self, binary: Path, target: Target, abi_hash: int) -> CpuExecutable:
        library = ctypes.CDLL(str(binary))
        library.mk_emulated_abi.restype = ctypes.c_uint64
        assert library.mk_emulated_abi() == abi_hash
        cpu._declare(library)
        self._library = library
        return CpuExecutable(library, target.workers)
