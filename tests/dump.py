"""Launches that are written to files instead of run, for a kernel that is a program of its own (device/cpu_main.h)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megakernel.device.cpu import CpuDevice, CpuExecutable
from megakernel.runtime import Runtime
from megakernel.target import Target
from megakernel.tasks.record import ARGS, NONE


class Recorder(CpuDevice):
    """A device in the processor's memory that keeps the arguments of its launches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.launched: list[bytes] = []

    def load(self, binary: Path, target: Target, abi_hash: int) -> CpuExecutable:
        executable = super().load(binary, target, abi_hash)
        executable.launch = self.launched.append  # type: ignore[method-assign]
        return executable


def write_dump(runtime: Runtime, device: Recorder, folder: Path) -> Path:
    """The last launch of a runtime on `device`: its arguments and all memory that they point to. `folder`."""
    args = device.launched[-1]
    (folder / "args.bin").write_bytes(args)
    values = ARGS.unpack(args)
    assert values["drop_signal"] == NONE
    for name in values:
        if name in runtime._buffers:
            buffer = runtime.buffer(name)
            (folder / f"{name}.bin").write_bytes(device.download(buffer, 0, buffer.bytes))
    return folder
