"""The order of packed weights and the fragments of every matrix instruction against the table of the ISA documents."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from megakernel.builder.cache import INCLUDE
from megakernel.builder.layout import weight_layout
from megakernel.device.hip_compiler import WAVES, compile_flags, find_compiler
from megakernel.target import find_target
from megakernel.tasks.record import c_header
from megakernel.tasks.task import all_fields
from tests.emulator.build import host_command
from tests.hip.emulated import BUILTINS, HERE
from tests.hip.fragments import INSTRUCTIONS, OF_TARGET, Instruction

TARGETS = list(OF_TARGET)
Pair = ctypes.c_uint32 * 2


class Device:
    """hip_matrix.h of one target, compiled for the host."""

    def __init__(self, target: str, folder: Path) -> None:
        (folder / "megakernel_abi.h").write_text(c_header(all_fields()))
        (folder / "f.cpp").write_text(
            '#include "megakernel_abi.h"\n#include "megakernel/device/hip_matrix.h"\n#include "fragments.h"\n'
        )
        flags = [f for f in compile_flags(find_target(target), False, False) if not f.startswith("--offload")]
        builtins = [f"-DEMULATED{name}=1" for name in BUILTINS[target]]
        subprocess.run(
            [*host_command(find_compiler()), *flags, *builtins, f"-DFRAGMENTS_OF={OF_TARGET[target]}", "-O1", "-fPIC",
             "-shared", "-mfma", "-w", "-include", str(HERE / "before.h"), f"-I{folder}", f"-I{INCLUDE}", f"-I{HERE}",
             str(folder / "f.cpp"), "-o", str(folder / "f.so")],
            check=True, timeout=120,
        )  # fmt: skip
        self._library = ctypes.CDLL(str(folder / "f.so"))
        shape = (ctypes.c_uint32 * 3)()
        self._library.mk_shape(shape)
        self.step, self.octets, self.out = shape
        self.octet, self.row = self._library.mk_octet, self._library.mk_row
        self.tile_index = self._library.mk_tile_index

    def places(self, i: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
        operand, result = Pair(), Pair()
        self._library.mk_places(i, k, operand, result)
        return (operand[0], operand[1]), (result[0], result[1])


@pytest.fixture(scope="module", params=TARGETS)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Device, Instruction]:
    target = str(request.param)
    return target, Device(target, tmp_path_factory.mktemp(target)), INSTRUCTIONS[OF_TARGET[target]]


def test_the_emulator_follows_the_table(device: tuple[str, Device, Instruction]) -> None:
    target, code, table = device
    assert table.wave == WAVES[target]
    for i in range(16):
        for k in range(table.k):
            operand, result = code.places(i, k)
            assert operand == table.operand(i, k)[0] and result == table.result(i, k % 16)


def test_the_kernel_follows_the_table(device: tuple[str, Device, Instruction]) -> None:
    """Results: row and column of every item. Operands: A and B agree on the column of every item, and together the
    lanes hold each column of a step once for every row."""
    _target, code, table = device
    for i in range(16):
        for j in range(16):
            lane, item = table.result(i, j)
            assert lane % 16 == j and code.row(lane, item) == i and item < code.out
    items = len({item for k in range(table.k) for _lane, item in table.operand(0, k)})
    assert code.octets * 8 * table.k == items * code.step, "a lane's octets are the items of whole instructions"
    for row in range(16):
        columns = []
        for k in range(code.step):
            (lane, item), *copies = table.operand(row, k % table.k)
            which = k // table.k * items + item  # of the lane's octets, side by side
            columns.append(code.octet(lane, which // 8) * 8 + which % 8)
            assert lane % 16 == row
            for other, same in copies:
                assert same == item and code.octet(other, which // 8) == code.octet(lane, which // 8)
        assert sorted(columns) == list(range(code.step))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_weights_are_packed_in_the_order_of_the_operands(device: tuple[str, Device, Instruction], dtype: str) -> None:
    """What the builder writes is where the kernel reads, and lanes side by side read 16 bytes side by side."""
    target, code, table = device
    layout = weight_layout(find_target(target), dtype, 40, 300)
    group, unit = 16 // layout.dtype.bytes, layout.k_unit
    assert layout.unit_bytes % 1024 == 0 and unit % code.step == 0
    for row in (0, 7, 15, 16, 39):
        for column in (0, 1, 5, 8, 31, 63, unit - 1, unit, layout.k_padded - 1):
            at = (row // 16 * layout.k_padded + column // unit * unit) * 16
            index = at + code.tile_index(column % unit, row % 16, dtype == "f32")
            assert index == layout.layout((row, column))
    for octet in range(code.octets):
        lanes = [code.octet(lane, octet) * 8 // group * 16 + lane % 16 for lane in range(table.wave)]
        for first in range(0, table.wave, 16):
            assert lanes[first : first + 16] == list(range(lanes[first], lanes[first] + 16))
