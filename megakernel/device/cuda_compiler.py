"""From generated C++ to a cubin: NVRTC out of the wheels, no CUDA toolkit, no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel.device.device import KernelSource
from megakernel.errors import BuildError, MegakernelError, NoCompiler, TargetError
from megakernel.target import Target

INSTALL = 'pip install "megakernel-decode[cuda]"'
WARPS = 15  # as in cuda.h
STAGE_BYTES = 16384
SCRATCH_BYTES = 31488  # inputs, partial sums, merges
CONTROL_BYTES = 4352  # barriers, records, headers
MIN_STAGES = 4
PRELUDE = """#pragma once
#define __builtin_offsetof(type, member) __INTADDR__(&(((type*)0)->member))
#define __builtin_huge_valf() __builtin_bit_cast(float, 0x7f800000u)
template <class A, class B> constexpr bool mk_is_same = false;
template <class A> constexpr bool mk_is_same<A, A> = true;
#define __is_same(...) mk_is_same<__VA_ARGS__>
using int8_t = signed char; using uint8_t = unsigned char; using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned int; using int64_t = long long; using uint64_t = unsigned long long;
"""


@dataclass(frozen=True)
class Tunables:
    """What a build may choose. in_flight: stages being copied at once; more only delays everyone else's loads.
    calm: the same while the worker waits for values of others, whose way it then leaves free.
    spare_stages: stages given up, so that their memory serves as cache.
    narrow_rows, 1 to 16: steps of more rows are wide ones, in programs with room for more than 16.
    every_lane, 0 or 1: at a barrier every lane arrives, not one for its warp, and the cubin has line numbers: for tools
    that look for races."""

    in_flight: int = 5
    calm: int = 2
    spare_stages: int = 0
    narrow_rows: int = 16
    every_lane: int = 0


DEFAULTS = Tunables()


def stages_of(target: Target, tunables: Tunables = DEFAULTS) -> int:
    """Stages of the ring that fit the target's shared memory. Raises TargetError when they are too few."""
    stages = (target.shared_bytes - SCRATCH_BYTES - CONTROL_BYTES) // STAGE_BYTES - tunables.spare_stages
    if stages < MIN_STAGES:
        need = MIN_STAGES * STAGE_BYTES + SCRATCH_BYTES + CONTROL_BYTES
        raise TargetError(
            f"{target.name} has {target.shared_bytes:,} bytes of shared memory for a block; the kernel needs {need:,}"
        )
    return stages


def shared_bytes_of(target: Target, tunables: Tunables = DEFAULTS) -> int:
    """Shared memory that a block is launched with."""
    return stages_of(target, tunables) * STAGE_BYTES + SCRATCH_BYTES + CONTROL_BYTES


# ------------------------------------------------------------------------------------------------ compiler
def compile_flags(target: Target, chaos: bool, trace: bool, tunables: Tunables = DEFAULTS) -> tuple[str, ...]:
    """All NVRTC options but the include folder."""
    sizes = {
        "STAGES": stages_of(target, tunables), "IN_FLIGHT": tunables.in_flight, "CALM": tunables.calm,
        "SCRATCH_BYTES": SCRATCH_BYTES, "NARROW_ROWS": tunables.narrow_rows,
        "SHARED_BYTES": shared_bytes_of(target, tunables),
    }  # fmt: skip
    flavours = {"CHAOS": chaos, "TRACE": trace, "EVERY_LANE": bool(tunables.every_lane)}
    return (
        f"--gpu-architecture={target.name}",
        *("--std=c++20", "--device-as-default-execution-space", "-DMEGAKERNEL_NO_STD=1"),
        *(f"-DMEGAKERNEL_{name}={value}" for name, value in sizes.items()),
        *("--extra-device-vectorization", "--diag-suppress=177", "--diag-suppress=445"),
        *(("--generate-line-info",) if tunables.every_lane else ()),
        *(f"-DMEGAKERNEL_{name}=1" for name, wanted in flavours.items() if wanted),
    )


def compile_cubin(source: KernelSource, include: Path, flags: Sequence[str]) -> tuple[bytes, str]:
    """The cubin and the compiler's log. Raises NoCompiler without the wheels, BuildError with the log."""
    nvrtc = open_nvrtc()
    with compiled_program(source, include, flags) as (program, log):
        size = checked(nvrtc.nvrtcGetCUBINSize(program))
        cubin = _room(size)
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin[:size], log


@contextmanager
def compiled_program(source: KernelSource, include: Path, flags: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """NVRTC's program, destroyed at the end, and the compiler's log. Raises as `compile_cubin`."""
    nvrtc = open_nvrtc()
    headers = {"stdint.h": PRELUDE, **source.headers}
    names = [n.encode() for n in headers]
    texts = [t.encode() for t in headers.values()]
    program = checked(nvrtc.nvrtcCreateProgram(source.text.encode(), b"kernel.cu", len(names), texts, names))
    try:
        options = [f.encode() for f in (*flags, f"--include-path={include}")]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        log = _room(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b" \0").decode(errors="replace")
        if int(status) != 0:
            first = max(0, text.find("error:") - 200)
            raise BuildError(f"NVRTC {' '.join(flags)}\nended with {status.name}:\n{text[first : first + 8000]}")
        yield program, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _room(size: int) -> bytes:
    """Bytes for the library to write into. Never one alone: Python has a single object for each bytes of length 1, and
    an empty log would turn every b" " of the process into b"\\0"."""
    return b" " * max(size, 2)


def open_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as e:  # the bindings raise their own types for a library that is absent
        raise NoCompiler(f"NVRTC is not installed ({e}); {INSTALL}") from e
    return nvrtc


def checked(result: tuple[Any, ...]) -> Any:
    """The values of a call of the bindings. Raises MegakernelError with the name of the error."""
    status, *values = result
    if int(status) != 0:
        raise MegakernelError(f"the GPU driver answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values) if values else None
