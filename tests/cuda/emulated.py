"""A CUDA device whose kernel runs on the host: cuda.h compiled by a C++ compiler, threads as fibers. See before.h."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megakernel.device.cuda_compiler import DEFAULTS, Tunables, compile_flags
from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import find_compiler
from megakernel.target import Target
from tests.emulator.build import EmulatedDevice, compile_on_host, headers_of

HERE = Path(__file__).parent
FLAGS = ("-ffp-contract=off", "-fdelayed-template-parsing")


def host_flags(target: Target, chaos: bool, tunables: Tunables) -> Sequence[str]:
    return [f for f in compile_flags(target, chaos, False, tunables) if f.startswith(("-D", "--std"))]


class EmulatedCuda(EmulatedDevice):
    """`workers` blocks of a CUDA target, each a thread of the host."""

    def __init__(self, workers: int = 2, target: str = "sm_90a", tunables: Tunables = DEFAULTS) -> None:
        super().__init__(target, workers)
        self._tunables = tunables

    def leave_out(self, count: int) -> None:
        """The last `count` blocks never start."""
        self.library.mk_leave_out(count)

    def compiler_id(self, target: Target) -> str:
        headers = headers_of(HERE, "include/megakernel/device/cuda_ptx.h")
        return " ".join((find_compiler().version, *host_flags(target, False, self._tunables), *FLAGS, headers))

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        flags = (*host_flags(source.target, source.chaos, self._tunables), *FLAGS)
        compile_on_host(source, include, output, HERE, find_compiler(), flags)
