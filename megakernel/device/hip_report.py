"""The report of a compiled AMD kernel: registers, spills, LDS, occupancy and how many instructions of each kind.

Instructions are counted in the compiler's assembly and travel inside the code object, as the read-only variable
`mk_instructions`, so that a report needs no disassembler. Sources of the limits: LLVM's AMDGPU back end
(AMDGPUBaseInfo: register files, granules, waves) and the ROCm documentation (LDS of a compute unit).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megakernel.device.code_object import REMEDY, KernelReport, kernel_report, symbol_bytes
from megakernel.errors import ProgramError

SYMBOL = "mk_instructions"
# The first pattern that matches the begin of a mnemonic names its kind.
KINDS: tuple[tuple[str, str], ...] = (
    ("matrix", r"v_s?mfma|v_smfmac|v_s?wmma|v_swmmac"),
    ("copy to LDS", r"global_load_lds|buffer_load_\w+ lds|\w+_async_to_lds|tensor_load_to_lds"),
    ("cache", r"buffer_inv|buffer_wb|buffer_gl[01]_inv|global_inv|global_wb"),
    ("scratch", r"scratch_"),
    ("atomic", r"(global|flat|buffer|ds)_\w*(atomic|cmpst|add_rtn|add_u)"),
    ("load", r"(global|flat|buffer)_load|s_load|s_buffer_load"),
    ("store", r"(global|flat|buffer)_store"),
    ("LDS", r"ds_"),
    ("wait", r"s_wait"),
    ("barrier", r"s_barrier"),
    ("branch", r"s_branch|s_cbranch|s_setpc|s_swappc|s_endpgm"),
    ("vector", r"v_"),
    ("scalar", r"s_"),
)
LISTED = ("matrix", "copy to LDS", "cache")  # kinds whose mnemonics are counted one by one
LINE = re.compile(r"^\s+([a-z][a-z0-9_]+)(?=\s|$)[^\n;]*?(\slds)?[ \t]*(?:;.*)?$", re.M)  # gfx9 marks a copy at the end


@dataclass(frozen=True)
class Unit:
    """Limits of one compute unit. `vgprs`: of a lane, over all waves of a SIMD; `granule`: they are given in."""

    simds: int
    waves: int  # of a SIMD
    vgprs: int
    granule: int
    lds_bytes: int


UNITS: Mapping[str, Unit] = {
    "gfx90a": Unit(4, 8, 512, 8, 64 << 10),
    "gfx942": Unit(4, 8, 512, 8, 64 << 10),
    "gfx950": Unit(4, 8, 512, 8, 160 << 10),
    "gfx1100": Unit(4, 16, 1536, 24, 128 << 10),  # a pair of units, which a workgroup runs on
}


@dataclass(frozen=True)
class Occupancy:
    """Workgroups resident on a unit (on a pair of units of gfx1100), all that bounds them to so many, and waves of a
    SIMD."""

    workgroups: int
    bound: tuple[str, ...]
    waves: int
    most_waves: int


def occupancy(report: KernelReport) -> Occupancy | None:
    """None where the limits of the target are not published."""
    unit = UNITS.get(report.architecture)
    if unit is None:
        return None
    waves = -(-report.threads // report.wave)
    held = -(-max(1, report.vgprs) // unit.granule) * unit.granule
    fit = {
        "vector registers": unit.vgprs // held * unit.simds // waves,
        "LDS": unit.lds_bytes // max(1, report.lds_bytes),
        "waves": unit.waves * unit.simds // waves,
    }
    least = min(fit.values())
    bound = tuple(name for name, groups in fit.items() if groups == least)
    return Occupancy(least, bound, -(-least * waves // unit.simds), unit.waves)


def count_instructions(assembly: str) -> dict[str, Any]:
    """Static counts by kind, in all, and of single mnemonics of the kinds in LISTED."""
    kinds: Counter[str] = Counter()
    single: Counter[str] = Counter()
    patterns = [(name, re.compile(pattern)) for name, pattern in KINDS]
    for found in LINE.finditer(assembly):
        name = found.group(1) + (found.group(2) or "").replace("\t", " ")
        kind = next((k for k, pattern in patterns if pattern.match(name)), None)
        if kind is not None:
            kinds[kind] += 1
            single[name] += kind in LISTED
    mnemonics = {name: n for name, n in sorted(single.items()) if n}
    return {"all": sum(kinds.values()), "kinds": dict(sorted(kinds.items())), "mnemonics": mnemonics}


def with_counts(assembly: str) -> str:
    """The assembly with its own counts as the variable SYMBOL."""
    text = json.dumps(count_instructions(assembly), sort_keys=True)
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return (
        f'{assembly}\n\t.section\t.rodata.{SYMBOL},"a",@progbits\n\t.protected\t{SYMBOL}\n\t.globl\t{SYMBOL}\n'
        f'\t.type\t{SYMBOL},@object\n{SYMBOL}:\n\t.ascii\t"{quoted}"\n\t.size\t{SYMBOL}, {len(text)}\n'
    )


def code_report(code: bytes) -> dict[str, Any]:
    """What `megakernel build` writes of a code object. Raises ProgramError when it is none."""
    report = kernel_report(code)
    found = occupancy(report)
    return {
        **asdict(report),
        "file_bytes": len(code),
        "occupancy": asdict(found) if found else "the limits of this target are not published",
        "instructions": _counts(code),
        "state": "compiled and inspected; not run on hardware by the project",
    }


def _counts(code: bytes) -> dict[str, Any] | str:
    try:
        raw = symbol_bytes(code, SYMBOL)
    except ProgramError:
        return "not counted: the compiler that built it gives no assembly"
    try:
        counts = json.loads(raw)
    except ValueError:  # UnicodeDecodeError and JSONDecodeError are
        counts = None
    if not isinstance(counts, dict):
        raise ProgramError(f"the counts of instructions in {SYMBOL} are damaged: {raw[:40]!r}; {REMEDY}")
    return counts
