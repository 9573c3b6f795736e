"""What an AMD code object says of its kernel, read from the ELF file itself: no tool and no ROCm is needed.

Format: the AMDGPU chapter of LLVM's documentation (user guide for the AMDGPU backend, code object V5): a note of owner
"AMDGPU" and type 32 holds a MessagePack map.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megakernel.errors import ProgramError

METADATA_NOTE = 32
PT_LOAD, PT_NOTE, SHT_DYNSYM = 1, 4, 11


@dataclass(frozen=True)
class KernelReport:
    """Resources of one kernel. Spills: registers moved to memory (vector) or to lanes of vector registers (scalar).

    `scratch_bytes`: private memory of one lane. `lds_bytes`: of a workgroup. `threads`: of a workgroup."""

    architecture: str
    kernel: str
    wave: int
    threads: int
    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    argument_bytes: int


def kernel_report(data: bytes) -> KernelReport:
    """The report of the only kernel of a code object. Raises ProgramError for anything else."""
    found = metadata(data)
    kernels = found.get("amdhsa.kernels", [])
    if len(kernels) != 1:
        raise ProgramError(f"expected a code object with one kernel, got {len(kernels)}")
    k = kernels[0]
    return KernelReport(
        architecture=str(found["amdhsa.target"]).split("--")[-1].split(":")[0],
        kernel=k[".name"],
        wave=k[".wavefront_size"],
        threads=k[".max_flat_workgroup_size"],
        vgprs=k[".vgpr_count"],
        sgprs=k[".sgpr_count"],
        vgpr_spills=k.get(".vgpr_spill_count", 0),
        sgpr_spills=k.get(".sgpr_spill_count", 0),
        scratch_bytes=k[".private_segment_fixed_size"],
        lds_bytes=k[".group_segment_fixed_size"],
        argument_bytes=k[".kernarg_segment_size"],
    )


def metadata(data: bytes) -> dict[str, Any]:
    """The metadata map. Raises ProgramError when the file is no AMD code object."""
    for kind, offset, _address, size in _segments(data):
        if kind != PT_NOTE:
            continue
        at, end = offset, offset + size
        while at + 12 <= end:
            name_size, desc_size, note = struct.unpack_from("<III", data, at)
            name = data[at + 12 : at + 12 + name_size].rstrip(b"\0")
            start = at + 12 + -(-name_size // 4) * 4
            if name == b"AMDGPU" and note == METADATA_NOTE:
                found, _ = _unpack(data, start)
                if isinstance(found, dict):
                    return found
            at = start + -(-desc_size // 4) * 4
    raise ProgramError("not an AMD code object: there is no AMDGPU metadata note")


def symbol_bytes(data: bytes, name: str) -> bytes:
    """Initial contents of a global variable. Raises ProgramError when the code object has none of that name."""
    offset, count, entry = _section_table(data)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry) for i in range(count)]
    for section in sections:
        if section[1] != SHT_DYNSYM:
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            label, _info, _other, _index, value, size = struct.unpack_from("<IBBHQQ", data, at)
            end = data.index(b"\0", strings + label)
            if data[strings + label : end] == name.encode():
                start = _file_offset(data, value)
                return data[start : start + size]
    raise ProgramError(f"the code object has no symbol {name}")


def _section_table(data: bytes) -> tuple[int, int, int]:
    _check_elf(data)
    (offset,) = struct.unpack_from("<Q", data, 40)
    entry, count = struct.unpack_from("<HH", data, 58)
    return offset, count, entry


def _segments(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(type, file offset, address, bytes in the file) of each program header."""
    _check_elf(data)
    (offset,) = struct.unpack_from("<Q", data, 32)
    entry, count = struct.unpack_from("<HH", data, 54)
    for i in range(count):
        kind, _flags, at, address, _physical, size = struct.unpack_from("<IIQQQQ", data, offset + i * entry)
        yield kind, at, address, size


def _file_offset(data: bytes, address: int) -> int:
    for kind, offset, start, size in _segments(data):
        if kind == PT_LOAD and start <= address < start + size:
            return offset + address - start
    raise ProgramError(f"address {address:#x} of the code object is in no loaded segment")


def _check_elf(data: bytes) -> None:
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise ProgramError("not an AMD code object: it is no 64-bit little-endian ELF file")


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value and where it ends. Only what the metadata uses: maps, arrays, text, integers, booleans."""
    tag, at = data[at], at + 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag < 0x90 or tag in (0xDE, 0xDF):
        size, at = (tag & 15, at) if tag < 0x90 else _integer(data, at, 2 << (tag - 0xDE))
        return _unpack_map(data, at, size)
    if tag < 0xA0 or tag in (0xDC, 0xDD):
        size, at = (tag & 15, at) if tag < 0xA0 else _integer(data, at, 2 << (tag - 0xDC))
        values = []
        for _ in range(size):
            value, at = _unpack(data, at)
            values.append(value)
        return values, at
    if tag < 0xC0 or 0xD9 <= tag <= 0xDB:
        size, at = (tag & 31, at) if tag < 0xC0 else _integer(data, at, 1 << (tag - 0xD9))
        return data[at : at + size].decode(), at + size
    if 0xCC <= tag <= 0xCF:
        return _integer(data, at, 1 << (tag - 0xCC))
    if 0xD0 <= tag <= 0xD3:
        size = 1 << (tag - 0xD0)
        return int.from_bytes(data[at : at + size], "big", signed=True), at + size
    raise ProgramError(f"the metadata of the code object has an unknown MessagePack tag {tag:#x}")


def _unpack_map(data: bytes, at: int, size: int) -> tuple[dict[str, Any], int]:
    out: dict[str, Any] = {}
    for _ in range(size):
        key, at = _unpack(data, at)
        out[str(key)], at = _unpack(data, at)
    return out, at


def _integer(data: bytes, at: int, size: int) -> tuple[int, int]:
    return int.from_bytes(data[at : at + size], "big"), at + size
