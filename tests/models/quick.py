"""A CPU device whose kernels are compiled in little time, for tests of many small models: numbers, not speed."""

from __future__ import annotations

from pathlib import Path

from megakernel.device.cpu import CpuDevice, compile_source, find_compiler
from megakernel.device.device import KernelSource
from megakernel.target import Target

FLAGS = ("-O1",)


class QuickDevice(CpuDevice):
    """The same code with fewer optimisations."""

    def compiler_id(self, target: Target) -> str:
        return " ".join((super().compiler_id(target), *FLAGS))

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        compile_source(source, include, output, find_compiler(), FLAGS)
