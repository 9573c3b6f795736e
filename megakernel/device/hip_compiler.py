"""Compilers of AMD code objects: which there are, their flags, and how a kernel becomes a code object.

The sources are freestanding, so any clang that knows the target will do; ROCm is not needed.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megakernel.device.code_object import REMEDY, kernel_report
from megakernel.device.device import KernelSource
from megakernel.device.hip_report import with_counts
from megakernel.device.hip_ring import ring_shape
from megakernel.errors import BuildError, NoCompiler, ProgramError
from megakernel.settings import read_settings
from megakernel.target import Target

SETTING = "MEGAKERNEL_HIPCXX"
WAVES = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1250": 32}  # lanes
NEWEST_CLANG, OLDEST_CLANG = 26, 22
_ANOTHER = f"set {SETTING} to a clang++ of version {OLDEST_CLANG} or newer"
STDINT = "\n".join(
    ["#pragma once"]
    + [f"typedef __{s}INT{n}_TYPE__ {s.lower()}int{n}_t;" for s in ("", "U") for n in (8, 16, 32, 64)]
)  # fmt: skip


@dataclass(frozen=True)
class Compiler:
    """`kind`: "clang" (links by itself), "zig" (clang and ld.lld of the ziglang package), "hiprtc" (ROCm's library)."""

    kind: str
    command: tuple[str, ...]
    version: str


@lru_cache(maxsize=8)
def find_compiler(wanted: str | None = None) -> Compiler:
    """The first that works of: `wanted` or MEGAKERNEL_HIPCXX, ROCm's clang, HIPRTC, clang++-22 or newer, ziglang.

    Raises NoCompiler listing where it looked, and for a command that is no clang."""
    wanted = wanted or read_settings().hip_cxx
    if wanted:
        command = tuple(shlex.split(wanted))
        if shutil.which(command[0]) is None:
            raise NoCompiler(f"{SETTING} is {wanted!r} and {command[0]} is not an executable; set it to a clang++")
        return Compiler("zig" if "ziglang" in command else "clang", command, _version(command))
    rocm = read_settings().rocm / "llvm" / "bin" / "clang++"
    if rocm.exists():
        return Compiler("clang", (str(rocm),), _version((str(rocm),)))
    hiprtc = _hiprtc()
    if hiprtc is not None:
        _status, major, minor = hiprtc.hiprtcVersion()
        return Compiler("hiprtc", (), f"hiprtc {major}.{minor}")
    for number in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1):
        path, linker = shutil.which(f"clang++-{number}"), shutil.which(f"ld.lld-{number}") or shutil.which("ld.lld")
        if path and linker:
            return Compiler("clang", (path, f"--ld-path={linker}"), _version((path,)))
    if importlib.util.find_spec("ziglang"):
        command = (sys.executable, "-m", "ziglang", "clang")
        return Compiler("zig", command, _version(command))
    raise NoCompiler(
        f"no compiler for AMD GPUs: looked for {SETTING}, {rocm}, HIPRTC through hip-python, clang++-{OLDEST_CLANG} or "
        "newer with its lld in PATH, and the ziglang package; install one, or `pip install ziglang`"
    )


def compile_flags(target: Target, chaos: bool, trace: bool) -> tuple[str, ...]:
    """Flags of a target that all compilers take. Raises TargetError for a target that hip.h does not know."""
    ring = ring_shape(target)
    return (
        f"--offload-arch={target.name}", "-O3", "-std=c++20", "-ffp-contract=fast", "-fno-strict-aliasing",
        f"-DMEGAKERNEL_WAVE={WAVES[target.name]}", f"-DMEGAKERNEL_LDS_BYTES={target.shared_bytes}",
        f"-DMEGAKERNEL_GROUPS={target.groups}",
        f"-DMEGAKERNEL_STAGES={ring.stages}", f"-DMEGAKERNEL_STAGE_BYTES={ring.stage_bytes}",
        f"-DMEGAKERNEL_COPIERS={ring.copiers}", f"-DMEGAKERNEL_COPY_BYTES={ring.copy_bytes}",
        *(("-DMEGAKERNEL_CHAOS=1",) if chaos else ()), *(("-DMEGAKERNEL_TRACE=1",) if trace else ()),
    )  # fmt: skip


FREESTANDING = (
    "-x", "hip", "--offload-device-only", "-nogpulib", "-nogpuinc", "-ffreestanding", "-Wall",
    "-Wno-unused-command-line-argument",
)  # fmt: skip


def compile_code_object(source: KernelSource, include: Path, compiler: Compiler) -> bytes:
    """The linked code object. `include`: the folder that holds the package. Raises BuildError with the log."""
    if compiler.kind == "hiprtc":
        return _compile_hiprtc(source, include)
    with tempfile.TemporaryDirectory(prefix="megakernel-") as folder:
        work = Path(folder)
        assembly = work / "kernel.s"
        assembly.write_text(with_counts(compile_assembly(source, include, compiler)))
        return link_assembly(assembly, source.target, compiler)


def check_code(code: bytes, target: Target, compiler: Compiler) -> None:
    """Raise BuildError for what is no code object of that target, naming the compiler that wrote it."""
    try:
        made = kernel_report(code).architecture
    except ProgramError as e:
        said = str(e).removesuffix(f"; {REMEDY}")
        raise BuildError(f"{_wrote(compiler)} what is no code object ({said}); {_ANOTHER}") from e
    if made != target.name:
        raise BuildError(f"{_wrote(compiler)} code for {made}, asked for {target.name}; {_ANOTHER}")


def compile_assembly(source: KernelSource, include: Path, compiler: Compiler) -> str:
    """The kernel's assembly, which is what the checks of instructions read. Raises BuildError with the log."""
    with tempfile.TemporaryDirectory(prefix="megakernel-") as folder:
        work = Path(folder)
        (work / "kernel.hip").write_text(source.text)
        for name, text in source.headers.items():
            (work / name).write_text(text)
        flags = compile_flags(source.target, source.chaos, source.trace)
        _call(
            *compiler.command, *FREESTANDING, *flags, f"-I{work}", f"-I{include}", "-S", str(work / "kernel.hip"), "-o",
            str(work / "kernel.s"),
        )  # fmt: skip
        made = _made(work / "kernel.s", compiler)
    try:
        return made.decode()
    except UnicodeDecodeError as e:
        raise BuildError(f"{_wrote(compiler)} a .s file that is no assembly ({e}); {_ANOTHER}") from e


def link_assembly(assembly: Path, target: Target, compiler: Compiler) -> bytes:
    """Assemble and link; an undefined symbol (a library function) is an error. Raises BuildError with the log."""
    out, machine = assembly.with_suffix(".co"), ("-target", "amdgcn-amd-amdhsa", f"-mcpu={target.name}")
    if compiler.kind == "zig":
        made = assembly.with_suffix(".o")
        _call(*compiler.command, *machine, "-c", str(assembly), "-o", str(made))
        zig = compiler.command[:-1]
        _call(*zig, "ld.lld", "-m", "elf64_amdgpu", "--no-undefined", "-shared", str(made), "-o", str(out))
    else:
        _call(*compiler.command, *machine, "-nogpulib", "-Wl,--no-undefined", str(assembly), "-o", str(out))
    return _made(out, compiler)


def _made(path: Path, compiler: Compiler) -> bytes:
    if not path.exists():
        raise BuildError(f"{_wrote(compiler)} no {path.suffix} file; {_ANOTHER}")
    return path.read_bytes()


def _wrote(compiler: Compiler) -> str:
    return f"{' '.join(compiler.command) or compiler.version} ended without an error and wrote"


def _call(*line: str) -> None:
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=600)
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"{line[0]} did not run: {e}") from e
    if done.returncode != 0:
        raise BuildError(f"{' '.join(line)}\nended with {done.returncode}:\n{done.stderr[-8000:]}")


def _version(command: tuple[str, ...]) -> str:
    try:
        line = [*command, "--version"]
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"{' '.join(command)} --version failed: {e}; set {SETTING} to a working clang++") from e
    said = (done.stdout.splitlines() or [""])[0]
    if "clang" not in said.lower():
        raise NoCompiler(f"{' '.join(command)} --version says {said[:80]!r}, expected a clang; {_ANOTHER}")
    return said


def is_rocm(version: str) -> bool:
    """Whether a clang's text about itself ("AMD clang version 20.0.0git ...") is that of ROCm's."""
    return version.startswith("AMD") and "clang" in version.lower()


# ------------------------------------------------------------------------------------------------ ROCm's library
def _hiprtc() -> Any | None:
    """hip-python's binding of HIPRTC when ROCm's library can be loaded. Unverified: written from its documentation."""
    if importlib.util.find_spec("hip") is None:
        return None
    try:
        from hip import hiprtc

        library: Any = hiprtc  # its functions have no types
        library.hiprtcVersion()
    except Exception:  # whatever a package of that name does
        return None  # no ROCm: the next compiler in the list is tried, and the error names them all
    return library


def _compile_hiprtc(source: KernelSource, include: Path) -> bytes:
    """Unverified: no ROCm was at hand."""
    rtc = _hiprtc()
    if rtc is None:
        raise NoCompiler("HIPRTC cannot be loaded any more; is ROCm still installed?")
    headers = {"stdint.h": STDINT, **source.headers}
    names, texts = [n.encode() for n in headers], [t.encode() for t in headers.values()]
    status, program = rtc.hiprtcCreateProgram(source.text.encode(), b"kernel.hip", len(names), texts, names)
    _hiprtc_checked(rtc, status, "")
    flags = (*compile_flags(source.target, source.chaos, source.trace), f"-I{include}")
    options = [f.encode() for f in flags]
    (status,) = rtc.hiprtcCompileProgram(program, len(options), options)
    _status, size = rtc.hiprtcGetProgramLogSize(program)
    log = bytearray(size)
    rtc.hiprtcGetProgramLog(program, log)
    _hiprtc_checked(rtc, status, log.decode(errors="replace"))
    status, size = rtc.hiprtcGetCodeSize(program)
    _hiprtc_checked(rtc, status, "")
    code = bytearray(size)
    (status,) = rtc.hiprtcGetCode(program, code)
    _hiprtc_checked(rtc, status, "")
    rtc.hiprtcDestroyProgram(program.createRef())
    return bytes(code)


def _hiprtc_checked(rtc: Any, status: Any, log: str) -> None:
    if status != rtc.hiprtcResult.HIPRTC_SUCCESS:
        raise BuildError(f"HIPRTC answered {status}:\n{log[-8000:]}")
