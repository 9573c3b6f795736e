"""A CUDA device whose kernel runs on the host: cuda.h compiled by a C++ compiler, threads as fibers. See before.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megakernel.device import cpu
from megakernel.device.cpu import CpuDevice, CpuExecutable
from megakernel.device.cuda_compiler import DEFAULTS, Tunables, compile_flags
from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import find_compiler
from megakernel.target import Target, find_target
from tests.emulator.build import compile_on_host, headers_of

HERE = Path(__file__).parent
FLAGS = ("-ffp-contract=off", "-fdelayed-template-parsing")


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
        headers = headers_of(HERE, "include/megakernel/device/cuda_ptx.h")
        return " ".join((find_compiler().version, *host_flags(target, False, self._tunables), *FLAGS, headers))

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        flags = (*host_flags(source.target, source.chaos, self._tunables), *FLAGS)
        compile_on_host(source, include, output, HERE, find_compiler(), flags)

    def load(self, binary: Path, target: Target, abi_hash: int) -> CpuExecutable:
        library = ctypes.CDLL(str(binary))
        library.mk_emulated_abi.restype = ctypes.c_uint64
        assert library.mk_emulated_abi() == abi_hash
        cpu._declare(library)
        self._library = library
        return CpuExecutable(library, target.workers)
