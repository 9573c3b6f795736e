"""A code object that is cut off, damaged or something else: an error that says what to do, and no other one."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megakernel.builder.cache import INCLUDE
from megakernel.device.code_object import COMPILER, kernel_report, metadata, symbol_bytes
from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import compile_code_object, find_compiler
from megakernel.device.hip_report import SYMBOL, code_report
from megakernel.errors import ProgramError
from megakernel.target import find_target

DEVICE = 'extern "C" __attribute__((device)) __attribute__((used)) const'
TEXT = f"""{DEVICE} unsigned long mk_abi_hash = 7;
{DEVICE} char {COMPILER}[] = __VERSION__;
extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256))) void mk_worker(int* p) {{
  *p = 1;
}}
"""
ADVICE = "build the program again"


@pytest.fixture(scope="module")
def whole() -> bytes:
    return compile_code_object(KernelSource(TEXT, {}, find_target("gfx942")), INCLUDE, find_compiler())


def read_all(data: bytes) -> bool:
    """Everything that is ever read of a code object. False: it was refused as it should be."""
    try:
        report = code_report(data)
        symbol_bytes(data, "mk_abi_hash")
    except ProgramError as e:
        assert ADVICE in str(e), e
        return False
    assert report["wave"] in (32, 64) and report["threads"] > 0
    return True


def test_what_is_read(whole: bytes) -> None:
    report = kernel_report(whole)
    assert (report.architecture, report.kernel, report.wave, report.threads) == ("gfx942", "mk_worker", 64, 256)
    assert "Clang" in report.compiler and symbol_bytes(whole, COMPILER)[-1:] == b"\0"
    assert 0 < report.code_bytes < 200, "a store and the end, without what pads them"
    assert code_report(whole)["file_bytes"] == len(whole) > 10 * report.code_bytes
    assert symbol_bytes(whole, "mk_abi_hash") == (7).to_bytes(8, "little")


def test_a_file_that_is_cut_off(whole: bytes) -> None:
    """The table of sections is at the end, so not one byte may be missing."""
    assert read_all(whole)
    assert not any(read_all(whole[:size]) for size in range(len(whole)))


def damaged(whole: bytes) -> Iterator[bytes]:
    """Each byte in turn with other values; each aligned word as the largest number; then many bytes at once."""
    for at in range(len(whole)):
        for value in {0xFF, whole[at] ^ 1} - {whole[at]}:
            yield whole[:at] + bytes([value]) + whole[at + 1 :]
    for at in range(0, len(whole) - 4, 4):
        yield whole[:at] + b"\xff" * 4 + whole[at + 4 :]
    dice = random.Random(1)
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(dice.choice((2, 8, 64))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        yield bytes(data)


def test_a_file_with_other_bytes_in_it(whole: bytes) -> None:
    """Of many nobody can tell: those in the machine code, which a saved program's own sums protect."""
    read = [read_all(data) for data in damaged(whole)]
    assert read.count(False) > 1000 and read.count(True) > 1000


def test_metadata_of_other_types(whole: bytes) -> None:
    """MessagePack of the right form with the wrong things in it."""
    for old, new in (
        (b"\xaf.wavefront_size\x40", b"\xaf.wavefront_size\x00"),  # divides
        (b"\xaf.wavefront_size\x40", b"\xaf.wavefront_size\xc0"),
        (b"\xa5.name\xa9mk_worker", b"\xa5.name\x98k_worker\x01"),
        (b"\xa5.name\xa9mk_worker", b"\xa5.name\xa9\xff\xfe_worker"),
        (b"amdhsa.kernels\x91", b"amdhsa.kernels\x90"),
        (b"amdhsa.kernels\x91", b"amdhsa.kernels\x01"),
        (b".private_segment_fixed_size", b".private_segment_fixed_zise"),
    ):
        assert whole.count(old) >= 1, old
        assert not read_all(whole.replace(old, new)), new


def test_a_map_of_maps_of_maps_ends(whole: bytes) -> None:
    """Python's own limit of depth is no error that says what to do."""
    at = whole.index(b"AMDGPU\0") + 8
    (size,) = struct.unpack_from("<I", whole, at - 16)
    with pytest.raises(ProgramError, match="more than 16 levels"):
        metadata(whole[:at] + b"\x91" * size + whole[at + size :])


def test_counts_that_are_no_counts(whole: bytes) -> None:
    counts = symbol_bytes(whole, SYMBOL)
    for other in (b"\xff" * len(counts), b"[" + b" " * (len(counts) - 2) + b"]"):
        with pytest.raises(ProgramError, match=rf"counts of instructions .* are damaged.*; {ADVICE}"):
            code_report(whole.replace(counts, other))


def test_other_files_are_refused() -> None:
    with pytest.raises(ProgramError, match=f"ELF.*{ADVICE}"):
        metadata(b"hello")
    with pytest.raises(ProgramError, match=f"metadata note.*{ADVICE}"):
        metadata(Path(sys.executable).resolve().read_bytes())
