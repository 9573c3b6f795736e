"""Random structures go from Python to C and back: one small C++ library, compiled once, holds both directions."""

from __future__ import annotations

import ctypes
import random
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import RecordError
from megakernel.tasks.record import MAX_WAITS, RECORD, STRUCTS, abi_hash, c_header
from megakernel.tasks.struct import Field, Struct

BITS = {"u8": 8, "u16": 16, "u32": 32, "i32": 32, "f32": 32, "u64": 64, "i64": 64}


def random_structs(count: int) -> tuple[Struct, ...]:
    rng = random.Random(20)
    made: list[Struct] = []
    for i in range(count):
        fields = []
        for j in range(rng.randint(1, 7)):
            nested = [s for s in made if s.size <= 64]
            kind = rng.choice(nested) if nested and rng.random() < 0.2 else rng.choice(sorted(BITS))
            fields.append(Field(f"f{j}", kind, rng.choice((1, 1, 1, 2, 5))))
        plain = Struct(f"R{i}", tuple(fields))
        made.append(Struct(plain.name, plain.fields, -(-plain.size // 64) * 64) if rng.random() < 0.3 else plain)
    return tuple(made)


RANDOM = random_structs(40)
ALL = (*STRUCTS, *RANDOM)
SMALL = [i for i, s in enumerate(ALL) if s.size <= 512]


def leaves(s: Struct, path: str = "") -> list[tuple[str, str]]:
    """(C path, scalar type) of every scalar, in declared order."""
    out = []
    for f in s.fields:
        for i in range(f.count):
            name = f"{path}{f.name}" + (f"[{i}]" if f.count > 1 else "")
            out += leaves(f.type, name + ".") if isinstance(f.type, Struct) else [(name, f.type)]
    return out


def to_python(s: Struct, values: list[int]) -> tuple[Any, ...]:
    """Nested tuples in the form that NumPy takes, from bit patterns in declared order; consumes `values`."""
    out = []
    for f in s.fields:
        many = [
            to_python(f.type, values) if isinstance(f.type, Struct) else number(f.type, values.pop(0))
            for _ in range(f.count)
        ]
        out.append(many if f.count > 1 else many[0])
    return tuple(out)


def from_python(s: Struct, row: Any) -> list[int]:
    out: list[int] = []
    for f in s.fields:
        for item in row[f.name] if f.count > 1 else [row[f.name]]:
            out += from_python(f.type, item) if isinstance(f.type, Struct) else [pattern(f.type, item)]
    return out


def number(kind: str, bits: int) -> int | float:
    if kind == "f32":
        return float(np.uint32(bits & 0xFFFFFFFF).view(np.float32))
    bits &= (1 << BITS[kind]) - 1
    return bits - (1 << BITS[kind]) if kind[0] == "i" and bits >> (BITS[kind] - 1) else bits


def pattern(kind: str, value: Any) -> int:
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value) & ((1 << BITS[kind]) - 1)


def source() -> str:
    lines = [c_header(()), *(s.c_source() for s in RANDOM), "#include <string.h>", "using namespace megakernel::abi;"]
    for i, s in enumerate(ALL):
        if i in SMALL:
            get = "".join(
                f" {{ auto v = s->{p}; memcpy(out + {n}, &v, sizeof v); }}" for n, (p, _) in enumerate(leaves(s))
            )
            put = "".join(f" memcpy(&s->{p}, in + {n}, sizeof s->{p});" for n, (p, _) in enumerate(leaves(s)))
            lines.append(f'extern "C" void get_{i}(const {s.name}* s, uint64_t* out) {{{get} }}')
            lines.append(f'extern "C" void put_{i}({s.name}* s, const uint64_t* in) {{{put} }}')
    return "\n".join(lines)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("needs g++ or clang++ to compile the structures")
    folder: Path = tmp_path_factory.mktemp("records")
    (folder / "echo.cpp").write_text(source())
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "echo.cpp", "-o", "echo.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "echo.so"))


@settings(max_examples=200, deadline=None)
@given(which=st.sampled_from(SMALL), seed=st.integers(0, 2**32))
def test_python_to_c_to_python(library: ctypes.CDLL, which: int, seed: int) -> None:
    s, rng = ALL[which], random.Random(seed)
    kinds = [kind for _, kind in leaves(s)]
    values = [rng.choice((rng.getrandbits(BITS[k]), 0, (1 << BITS[k]) - 1, 1 << (BITS[k] - 1))) for k in kinds]
    values = [v & 0x7F7FFFFF if k == "f32" else v for k, v in zip(kinds, values)]  # no NaN: it need not keep its bits
    row = np.zeros((), s.dtype)
    row[()] = to_python(s, list(values))
    data = np.frombuffer(row.tobytes() + bytes(16), np.uint8).copy()
    seen = (ctypes.c_uint64 * len(values))()
    getattr(library, f"get_{which}")(aligned(data, s), seen)
    assert list(seen) == values
    back = np.zeros(s.size + 16, np.uint8)
    place = aligned(back, s)
    getattr(library, f"put_{which}")(place, (ctypes.c_uint64 * len(values))(*values))
    got = s.unpack(ctypes.string_at(place, s.size))
    assert from_python(s, got) == values


_keep: list[Any] = []


def aligned(data: np.ndarray[Any, Any], s: Struct) -> ctypes.c_void_p:
    """An address with 16-byte alignment that holds the bytes of `data`."""
    room = ctypes.create_string_buffer(s.size + 32)
    at = -(-ctypes.addressof(room) // 16) * 16
    ctypes.memmove(at, data.tobytes()[: s.size], s.size)
    _keep[:] = [*_keep[-3:], room]
    return ctypes.c_void_p(at)


def test_every_shared_structure_is_asserted_in_c() -> None:
    text = c_header(())
    for s in STRUCTS:
        assert f'static_assert(sizeof({s.name}) == {s.size}, "{s.name}");' in text
        for f, o in zip(s.fields, s.offsets):
            assert f"__builtin_offsetof({s.name}, {f.name}) == {o}" in text


def test_a_wrong_offset_does_not_compile(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("needs g++ or clang++")
    s = Struct("Odd", (Field("a", "u8"), Field("b", "u32")))
    good = "#include <stdint.h>\n" + s.c_source()
    for text, works in ((good, True), (good.replace("uint32_t b", "uint16_t b"), False)):
        (tmp_path / "x.cpp").write_text(text)
        command = [compiler, "-std=c++20", "-fsyntax-only", "x.cpp"]
        assert (subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0) == works


def test_pack_refuses_what_does_not_fit() -> None:
    s = Struct("S", (Field("a", "u8"), Field("b", "i32", 2)))
    assert s.unpack(s.pack({"a": 255, "b": [-1, 2]}))["b"].tolist() == [-1, 2]
    for values, message in (
        ({"a": 256}, r"S.a = 256 does not fit u8 \[0, 255\]"),
        ({"b": [1, 2, 3]}, "S.b holds 2 values, got 3"),
        ({"c": 1}, "has no field 'c'; it has a, b"),
    ):
        with pytest.raises(RecordError, match=message):
            s.pack(values)
    with pytest.raises(RecordError, match="expected 12 bytes, got 3"):
        s.unpack(b"abc")
    with pytest.raises(RecordError, match="its limit is 4"):
        _ = Struct("S", s.fields, 4).size
    with pytest.raises(RecordError, match="unknown type 'f64'"):
        _ = Struct("S", (Field("a", "f64"),)).size


def test_a_record_is_one_or_two_cache_lines_and_the_hash_covers_it() -> None:
    assert RECORD.size == 128 and len(RECORD.dtype["waits"].shape) == 1 and RECORD.dtype["waits"].shape[0] == MAX_WAITS
    one, other = Struct("T", (Field("a", "u32"),)), Struct("T", (Field("a", "i32"),))
    assert len({abi_hash(()), abi_hash((one,)), abi_hash((other,))}) == 3
