"""What an AMD code object says of its kernel, read from the ELF file itself: no tool and no ROCm is needed.

A file that is damaged in any way raises ProgramError: every offset, size and type in it is checked before it is used.

Format: the AMDGPU chapter of LLVM's documentation (user guide for the AMDGPU backend, code object V5): a note of owner
"AMDGPU" and type 32 holds a MessagePack map.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megakernel.errors import ProgramError

METADATA_NOTE = 32
PT_LOAD, PT_NOTE, SHT_DYNSYM = 1, 4, 11
SEGMENT, SECTION, SYMBOL = "<IIQQQQ", "<IIQQQQIIQQ", "<IBBHQQ"  # program header (without its end), section, symbol
SEGMENT_BYTES, SECTION_BYTES, SYMBOL_BYTES = 56, 64, 24
DEEPEST = 16  # maps and arrays inside of each other; the metadata has 4
COMPILER = "mk_compiler"  # a variable of the kernel: the version of what compiled it, as that says of itself
REMEDY = "build the program again for an AMD target"


@dataclass(frozen=True)
class KernelReport:
    """Resources of one kernel. Spills: registers moved to memory (vector) or to lanes of vector registers (scalar).

    `scratch_bytes`: private memory of one lane. `lds_bytes`: of a workgroup. `threads`: of a workgroup. `code_bytes`:
    of machine code. `compiler`: what compiled it, empty where the code object does not say."""

    architecture: str
    kernel: str
    compiler: str
    wave: int
    threads: int
    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    argument_bytes: int
    code_bytes: int


def kernel_report(data: bytes) -> KernelReport:
    """The report of the only kernel of a code object. Raises ProgramError for anything else."""
    found = metadata(data)
    kernels = found.get("amdhsa.kernels")
    if not isinstance(kernels, list) or len(kernels) != 1 or not isinstance(kernels[0], dict):
        count = f"{len(kernels)} of them" if isinstance(kernels, list) else "no list of kernels"
        raise _bad(f"expected a code object with one kernel, got {count}")
    k = kernels[0]
    name, wave, threads = _text(k, ".name"), _number(k, ".wavefront_size"), _number(k, ".max_flat_workgroup_size")
    if wave not in (32, 64) or not 1 <= threads <= 1024:
        raise _bad(f"a kernel of {threads} threads in waves of {wave}: expected 1 to 1,024, and 32 or 64")
    return KernelReport(
        architecture=_text(found, "amdhsa.target").split("--")[-1].split(":")[0],
        kernel=name,
        compiler=_compiler(data),
        wave=wave,
        threads=threads,
        vgprs=_number(k, ".vgpr_count"),
        sgprs=_number(k, ".sgpr_count"),
        vgpr_spills=_number(k, ".vgpr_spill_count", 0),
        sgpr_spills=_number(k, ".sgpr_spill_count", 0),
        scratch_bytes=_number(k, ".private_segment_fixed_size"),
        lds_bytes=_number(k, ".group_segment_fixed_size"),
        argument_bytes=_number(k, ".kernarg_segment_size"),
        code_bytes=_symbol(data, name).size,
    )


def _number(values: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    found = values.get(name, otherwise)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 32:
        raise _bad(f"its metadata has {name} = {str(found)[:60]!r}, expected a number")
    return found


def _text(values: Mapping[str, Any], name: str) -> str:
    found = values.get(name)
    if not isinstance(found, str):
        raise _bad(f"its metadata has {name} = {str(found)[:60]!r}, expected a text")
    return found


def metadata(data: bytes) -> dict[str, Any]:
    """The metadata map. Raises ProgramError when the file is no AMD code object."""
    for kind, offset, _address, size in _segments(data):
        if kind != PT_NOTE:
            continue
        at, end = offset, offset + size
        while at + 12 <= end:
            name_size, desc_size, note = _unpack("<III", data, at)
            name = data[at + 12 : at + 12 + name_size].rstrip(b"\0")
            start = at + 12 + -(-name_size // 4) * 4
            if name == b"AMDGPU" and note == METADATA_NOTE:
                found, _ = _message(data, start, DEEPEST)
                if isinstance(found, dict):
                    return found
            at = start + -(-desc_size // 4) * 4
    raise _bad("not an AMD code object: there is no AMDGPU metadata note")


# ------------------------------------------------------------------------------------------------ the ELF file
@dataclass(frozen=True)
class _Symbol:
    address: int
    size: int


def symbol_bytes(data: bytes, name: str) -> bytes:
    """Initial contents of a global variable. Raises ProgramError when the code object has none of that name."""
    found = _symbol(data, name)
    for kind, offset, start, size in _segments(data):
        if kind == PT_LOAD and start <= found.address and found.address + found.size <= start + size:
            return _slice(data, offset + found.address - start, found.size)
    raise _bad(f"symbol {name} at {found.address:#x} of the code object is in no loaded segment")


def _symbol(data: bytes, name: str) -> _Symbol:
    wanted = name.encode() + b"\0"
    sections = list(_table(data, "section", SECTION, SECTION_BYTES, 40, 58))
    for section in sections:
        if section[1] != SHT_DYNSYM:
            continue
        if section[6] >= len(sections):
            raise _bad(f"its symbols have their names in section {section[6]} of {len(sections)}")
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], SYMBOL_BYTES):
            label, _info, _other, _index, value, size = _unpack(SYMBOL, data, at)
            if data[strings + label : strings + label + len(wanted)] == wanted:
                return _Symbol(value, size)
    raise _bad(f"the code object has no symbol {name}")


def _compiler(data: bytes) -> str:
    try:
        _symbol(data, COMPILER)
    except ProgramError:
        return ""  # of a version before it was recorded
    return symbol_bytes(data, COMPILER).rstrip(b"\0").decode("utf-8", "replace")


def _segments(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(type, file offset, address, bytes in the file) of each program header."""
    for kind, _flags, at, address, _physical, size in _table(data, "program", SEGMENT, SEGMENT_BYTES, 32, 54):
        yield kind, at, address, size


def _table(data: bytes, what: str, form: str, entry: int, offset_at: int, count_at: int) -> Iterator[tuple[int, ...]]:
    """Headers of one kind. `offset_at`, `count_at`: where the ELF header has their place, and size and number."""
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise _bad("not an AMD code object: it is no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, offset_at)
    size, count = struct.unpack_from("<HH", data, count_at)
    if count and size != entry:
        raise _bad(f"its {what} headers have {size} bytes, expected {entry}")
    for i in range(count):
        yield _unpack(form, data, offset + i * entry)


def _unpack(form: str, data: bytes, at: int) -> tuple[int, ...]:
    return struct.unpack(form, _slice(data, at, struct.calcsize(form)))


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise _bad(f"damaged or cut off: bytes [{at}, {at + size}) are asked for, the file has {len(data)}")
    return data[at : at + size]


def _bad(what: str) -> ProgramError:
    return ProgramError(f"{what}; {REMEDY}")


# ------------------------------------------------------------------------------------------------ MessagePack
def _message(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """One MessagePack value and where it ends. Only what the metadata uses: maps, arrays, text, integers, booleans."""
    if depth == 0:
        raise _bad(f"its metadata has more than {DEEPEST} levels")
    tag, at = _slice(data, at, 1)[0], at + 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag < 0x90 or tag in (0xDE, 0xDF):
        size, at = (tag & 15, at) if tag < 0x90 else _integer(data, at, 2 << (tag - 0xDE))
        return _map(data, at, size, depth)
    if tag < 0xA0 or tag in (0xDC, 0xDD):
        size, at = (tag & 15, at) if tag < 0xA0 else _integer(data, at, 2 << (tag - 0xDC))
        values = []
        for _ in range(size):
            value, at = _message(data, at, depth - 1)
            values.append(value)
        return values, at
    if tag < 0xC0 or 0xD9 <= tag <= 0xDB:
        size, at = (tag & 31, at) if tag < 0xC0 else _integer(data, at, 1 << (tag - 0xD9))
        return _utf8(_slice(data, at, size)), at + size
    if 0xCC <= tag <= 0xCF:
        return _integer(data, at, 1 << (tag - 0xCC))
    if 0xD0 <= tag <= 0xD3:
        size = 1 << (tag - 0xD0)
        return int.from_bytes(_slice(data, at, size), "big", signed=True), at + size
    raise _bad(f"the metadata of the code object has an unknown MessagePack tag {tag:#x}")


def _map(data: bytes, at: int, size: int, depth: int) -> tuple[dict[str, Any], int]:
    out: dict[str, Any] = {}
    for _ in range(size):
        key, at = _message(data, at, depth - 1)
        out[str(key)], at = _message(data, at, depth - 1)
    return out, at


def _integer(data: bytes, at: int, size: int) -> tuple[int, int]:
    return int.from_bytes(_slice(data, at, size), "big"), at + size


def _utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise _bad(f"a text of its metadata is not UTF-8: {raw[:40]!r}") from e
