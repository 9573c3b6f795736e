"""The timeline of the CUDA kernel, without a GPU: no instruction of it when off; when on it fits as the kernel does."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from megakernel.builder.build import Plan, make_plan, plan_source
from megakernel.builder.cache import INCLUDE
from megakernel.device import cuda_compiler
from megakernel.target import find_target
from tests.tasks.test_trace_off import without_recording
from tests.unit.test_cuda_build import CONFIG, REGISTERS, _functions, built, disassembler, needs_wheels, ptx

pytestmark = needs_wheels
HOT = ("consume_rowI", "load_rowI", "store_rowsI", "produce_rows")
# Bytes that recording may add to a function that runs in every layer. An instruction has 16, and of what runs once a
# record each takes some 10 cycles: 60 in the consumers were 1.4 % of a step, 8 for each stage in the producer 3 %.
MOST = {"consume_rowI": 20 * 16, "load_rowI": 30 * 16, "store_rowsI": 24 * 16, "produce_rows": 24 * 16}


def plan_of(rows: int) -> Plan:
    return make_plan(CONFIG, find_target("sm_90a"), max_context=1024, max_slots=max(4, rows), max_rows=rows)


PLAN = plan_of(16)


@cache
def traced(rows: int = 16) -> tuple[bytes, str]:
    flags = (*cuda_compiler.compile_flags(PLAN.target, False, True), "--ptxas-options=-v")
    return cuda_compiler.compile_cubin(plan_source(plan_of(rows), trace=True), INCLUDE, flags)


def functions(text: str) -> str:
    """All but the constants of the headers, which nothing reads at run time."""
    return re.sub(r"^\.global \.align .*;\n", "", text, flags=re.M)


def test_no_instruction_of_recording_in_a_kernel_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the assembler gets is the same to the last letter, and so is the machine code."""
    off = functions(ptx(PLAN))
    assert off.count(".func") > 20 and functions(ptx(PLAN, trace=True)) != off, "the comparison can fail"
    monkeypatch.chdir(without_recording(tmp_path))  # the compiler looks for headers in the current folder first
    assert functions(ptx(PLAN, tmp_path)) == off


@pytest.mark.parametrize("rows", [16, 64])
def test_a_recording_kernel_fits_its_registers_and_shared_memory(tmp_path: Path, rows: int) -> None:
    cubin, log = traced(rows)  # shared memory is checked by a static_assert
    used = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert used and max(used) <= REGISTERS, log
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump: install nvidia-cuda-cuobjdump")
    (tmp_path / "k.cubin").write_bytes(cubin)
    code = subprocess.run([tool, "-sass", str(tmp_path / "k.cubin")], capture_output=True, text=True, check=True).stdout
    for start, size in _functions(cubin, HOT):
        found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
        lines = [m.group(2) for m in found if start <= int(m.group(1), 16) < start + size]
        assert any("SR_CLOCKLO" in line for line in lines), "it reads the clock"
        assert not [line for line in lines if re.search(r"\b(LDL|STL)\b", line)]


@pytest.mark.parametrize("name", HOT)
def test_what_runs_for_every_record_is_hardly_longer(name: str) -> None:
    without = [size for _, size in _functions(built("sm_90a")[0], (name,))]
    recording = [size for _, size in _functions(traced()[0], (name,))]
    assert len(without) == len(recording) > 0
    assert 0 < max(b - a for a, b in zip(without, recording)) <= MOST[name]
