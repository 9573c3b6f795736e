"""Kernels of GPUs compiled for the host, between a before.h and an after.h."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import Compiler
from megakernel.errors import BuildError

FIBERS = Path(__file__).parent / "fibers.h"


def host_command(compiler: Compiler) -> list[str]:
    """The host's C++ compiler in the clang that builds code objects."""
    if compiler.kind == "zig":
        return [*compiler.command[:-1], "c++", "-fno-sanitize=undefined"]
    return [compiler.command[0]]


def headers_of(folder: Path, *more: str) -> str:
    """The text of all that a kernel is compiled with beside its own: part of what its cache entry is named by."""
    names = ("before.h", "after.h", *more)
    return "".join(path.read_text() for path in (FIBERS, *(folder / name for name in names)))


def compile_on_host(
    source: KernelSource, include: Path, output: Path, folder: Path, compiler: Compiler, flags: Sequence[str]
) -> None:
    """`output`: a shared library of the kernel and `folder`/after.h. Raises BuildError with the compiler's words."""
    work = output.parent
    (work / "kernel.cpp").write_text(f'{source.text}\n#include "{folder / "after.h"}"\n')
    for name, text in source.headers.items():
        (work / name).write_text(text)
    line = [
        *host_command(compiler), *flags, "-O1", "-fPIC", "-shared", "-pthread", "-mfma", "-mf16c", "-w",
        "-include", str(folder / "before.h"), f"-I{folder / 'include'}", f"-I{work}", f"-I{include}",
        str(work / "kernel.cpp"), "-o", str(output),
    ]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise BuildError(done.stderr[-8000:])
