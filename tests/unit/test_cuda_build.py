"""Kernels for every CUDA target, without a GPU: they compile, and the machine code is what was meant."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megakernel.architectures import known_models, shape_config, shape_names
from megakernel.builder.build import Plan, make_plan, plan_source
from megakernel.builder.cache import INCLUDE
from megakernel.builder.kernel import kernel_source
from megakernel.device import cuda, cuda_compiler
from megakernel.device.cuda_compiler import STAGE_BYTES
from megakernel.devices import find_device
from megakernel.errors import DeviceUnavailable, LoweringError, NoCompiler, ProgramError, TargetError
from megakernel.target import TARGETS, find_target

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 544,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1003,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
NAMES = tuple(t.name for t in TARGETS.values() if t.backend == "cuda")
REGISTERS = 128  # what 16 warps of a processor's register file leave for one of 15 warps
H200 = cuda.GpuInfo(0, "NVIDIA H200", (9, 0), 132, 232448, 141 << 30)


def has_compiler() -> bool:
    try:
        cuda_compiler.open_nvrtc()
    except NoCompiler:
        return False
    return True


needs_wheels = pytest.mark.skipif(not has_compiler(), reason="the [cuda] wheels are not installed")


@cache
def built(name: str, chaos: bool = False, rows: int = 16) -> tuple[bytes, str]:
    target = find_target(name)
    plan = make_plan(CONFIG, target, max_context=1024, max_slots=max(4, rows), max_rows=rows)
    flags = (*cuda_compiler.compile_flags(target, chaos, False), "--ptxas-options=-v")
    return cuda_compiler.compile_cubin(plan_source(plan, chaos=chaos), INCLUDE, flags)


def disassembler() -> str | None:
    wheel = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/bin/cuobjdump"
    return str(wheel) if wheel.exists() else shutil.which("cuobjdump")


def machine_code(name: str, folder: Path, rows: int = 16) -> str:
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump: install nvidia-cuda-cuobjdump")
    (folder / "k.cubin").write_bytes(built(name, rows=rows)[0])
    return subprocess.run([tool, "-sass", str(folder / "k.cubin")], capture_output=True, text=True, check=True).stdout


@needs_wheels
@pytest.mark.parametrize("name", NAMES)
def test_compiles_within_its_registers(name: str) -> None:
    cubin, log = built(name)
    assert cubin[:4] == b"\x7fELF"
    used = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert used and max(used) <= REGISTERS, log


@needs_wheels
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        (name, head_dim) if (name, head_dim) == ("sm_90a", 64)
        else pytest.param(name, head_dim, marks=pytest.mark.slow)
        for name in NAMES for head_dim in (64, 256)
    ],
)  # fmt: skip
def test_attention_over_8_bit_pages_compiles(name: str, head_dim: int) -> None:
    """Alone: codes become bfloat16 in registers by products of pairs."""
    target = find_target(name)
    plan = make_plan({**CONFIG, "head_dim": head_dim}, target, max_context=1024, max_slots=4, kv_dtype="f8")
    nodes = [n for n in plan.lowered.nodes if n.task.name in ("attention", "advance")]
    flags = (*cuda_compiler.compile_flags(target, False, False), "--ptxas-options=-v")
    _, log = cuda_compiler.compile_cubin(kernel_source(nodes, target, capacity=16), INCLUDE, flags)
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", log)) <= REGISTERS
    assert not [n for n in re.findall(r"(\d+) bytes spill", log) if n != "0"]


@needs_wheels
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_120a"])
def test_matrix_cores_and_asynchronous_copies(name: str, tmp_path: Path) -> None:
    code = machine_code(name, tmp_path)
    assert "HMMA.16816.F32.BF16" in code
    assert ("UBLKCP" in code) == (name != "sm_80"), "bulk copies exist from compute capability 9.0 on"
    produced = "".join(
        line
        for start, size in _functions(built(name)[0], ("produce_rows",))
        for line in code.splitlines()
        if (at := re.search(r"/\*([0-9a-f]{4,})\*/\s+\S", line)) and start <= int(at.group(1), 16) < start + size
    )
    assert bool(re.search(r"LDGSTS\S*\.128", produced)) == (name == "sm_80"), "weights by 16 bytes a lane"


def overtaken(code: str) -> list[tuple[str, str]]:
    """Arrivals at barriers that do not wait for loads of shared memory before them, (arrival, load), in the order of
    the code, whatever branches there are. An instruction has in bits 110 to 112 the number of the scoreboard that is
    clear when its result is there, 7 for none, and in bits 116 to 121 those that it waits for."""
    found: list[tuple[str, str]] = []
    on_their_way: dict[int, str] = {}
    lines = code.splitlines()
    for line, after in pairwise(lines):
        at = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        upper = re.fullmatch(r"\s+/\* 0x([0-9a-f]{16}) \*/\s*", after)
        if not at or not upper:
            continue
        control = int(upper[1], 16) >> 41
        written, waited = control >> 5 & 7, control >> 11 & 63
        on_their_way = {number: load for number, load in on_their_way.items() if not waited >> number & 1}
        text = at[1].strip()
        if "SYNCS.ARRIVE" in text:
            found += [(text, load) for load in on_their_way.values()]
        if re.match(r"(@!?U?P\d+ )?LDS\b", text) and written < 6:
            on_their_way.setdefault(written, text)
        if re.match(r"(EXIT|RET)\b", text):
            on_their_way = {}
    return found


def test_overtaken_loads_are_found() -> None:
    def line(text: str, written: int = 7, waited: int = 0) -> str:
        control = (waited << 11 | 7 << 8 | written << 5) << 41
        return f"        /*0010*/    {text} ;    /* 0x{0:016x} */\n{' ' * 40}/* 0x{control:016x} */\n"

    load, arrive = line("LDS.128 R8, [R4]", written=2), "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R5+URZ+0x10], RZ"
    assert overtaken(load + line(arrive)) == [(arrive, "LDS.128 R8, [R4]")]
    assert overtaken(load + line("LOP3.LUT R5, R5, R8, RZ, 0xc0, !PT", waited=4) + line(arrive)) == []
    assert overtaken(load + line("HMMA.16816.F32.BF16 R8, R4, R8, R8", waited=2) + line(arrive)) != []


@needs_wheels
@pytest.mark.parametrize("rows", [16, 64])
def test_no_arrival_overtakes_a_load(tmp_path: Path, rows: int) -> None:
    """What arrives at a barrier says that memory may be written again: see docs/memory-model.md."""
    code = machine_code("sm_90a", tmp_path, rows)
    assert code.count("SYNCS.ARRIVE") > 20
    assert overtaken(code) == []


@needs_wheels
@pytest.mark.parametrize("rows", [16, 64])
def test_what_one_row_runs_in_every_layer_keeps_everything_in_registers(tmp_path: Path, rows: int) -> None:
    """Local memory beside a whole block's shared memory has next to no cache: one spill is a trip to the L2. And
    records are read as shared memory: a load that has to find out where it goes takes longer."""
    code = machine_code("sm_90a", tmp_path, rows)
    hot = (
        "consume_rowI", "load_rowI", "store_rowsI", "produce_rows", "AttentionI", "CombineI", "next_record",
        "fetch_record",
    )  # fmt: skip
    for start, size in _functions(built("sm_90a", rows=rows)[0], hot):
        found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
        lines = [m.group(2) for m in found if start <= int(m.group(1), 16) < start + size]
        assert lines
        assert not [line for line in lines if re.search(r"\b(LDL|STL)\b", line)]
        assert not [line for line in lines if re.search(r"(^|\s)LD\.", line)]


def _functions(cubin: bytes, names: tuple[str, ...], least: int | None = None) -> list[tuple[int, int]]:
    """(address, bytes) of the functions with one of `names` in their symbol, but for those of steps of several rows."""
    (section_at,) = struct.unpack_from("<Q", cubin, 0x28)
    (count,) = struct.unpack_from("<H", cubin, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, section_at + 64 * i) for i in range(count)]
    symbols = next(s for s in sections if s[1] == 2)
    strings = sections[symbols[6]][4]
    found = []
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name_at, info, _other, _section, value, size = struct.unpack_from("<IBBHQQ", cubin, at)
        name = cubin[strings + name_at : cubin.index(b"\0", strings + name_at)].decode()
        if info & 15 == 2 and "7several" not in name and any(n in name for n in names):
            found.append((value, size))
    assert len(found) >= (len(names) if least is None else least)
    return found


@needs_wheels
def test_products_of_four_warps_run_on(tmp_path: Path) -> None:
    """In a function that is called, or with a branch behind them, the compiler waits for each of them, and says so."""
    code, log = machine_code("sm_90a", tmp_path, 64), built("sm_90a", rows=64)[1]
    assert {n: code.count(f"HGMMA.64x{n}x16.F32.BF16") > 8 for n in (16, 32, 64)} == {16: True, 32: True, 64: True}
    assert "serialized" not in log
    waits = re.findall(r"WARPGROUP.DEPBAR|WARPGROUP.ARRIVE|HGMMA", code)
    assert waits.count("HGMMA") > 2 * waits.count("WARPGROUP.DEPBAR")
    assert "HGMMA" not in machine_code("sm_90a", tmp_path)


@needs_wheels
def test_only_a_kernel_with_room_for_many_rows_has_wide_products(tmp_path: Path) -> None:
    """Its products read no activations as they multiply: their input comes packed, by copies."""
    assert not _functions(built("sm_90a")[0], ("put_products",), least=0)
    found = _functions(built("sm_90a", rows=64)[0], ("put_productsI", "produce_wideI", "pack_rowsI", "clear_wideI"))
    assert len(found) > 8
    used = [int(n) for n in re.findall(r"Used (\d+) registers", built("sm_90a", rows=64)[1])]
    assert used and max(used) <= REGISTERS


@needs_wheels
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n != "sm_90a"])
def test_wide_steps_compile_for_every_target(name: str) -> None:
    """And have products of their own, also where the ring is too short for a room."""
    assert _functions(built(name, rows=64)[0], ("consume_wideI", "produce_wideI", "pack_rowsI", "clear_wideI"))
    used = [int(n) for n in re.findall(r"Used (\d+) registers", built(name, rows=64)[1])]
    assert used and max(used) <= REGISTERS


@needs_wheels
@pytest.mark.slow
def test_rows_of_the_host_in_and_out_compile() -> None:
    options = {"max_context": 1024, "max_slots": 4, "max_rows": 16, "inputs": True, "hidden": True}
    plan = make_plan(CONFIG, find_target("sm_90a"), **options)
    flags = (*cuda_compiler.compile_flags(plan.target, False, False), "--ptxas-options=-v")
    cubin, log = cuda_compiler.compile_cubin(plan_source(plan), INCLUDE, flags)
    assert cubin[:4] == b"\x7fELF" and max(int(n) for n in re.findall(r"Used (\d+) registers", log)) <= REGISTERS


@needs_wheels
def test_a_compilation_leaves_the_bytes_of_others_alone() -> None:
    """An empty log is one byte, and Python shares bytes objects of that length."""
    target = find_target("sm_90a")
    source = plan_source(make_plan(CONFIG, target, max_context=1024, max_slots=4, max_rows=16))
    few = replace(source, text='extern "C" __global__ void nothing() {}\n', headers={})
    _, log = cuda_compiler.compile_cubin(few, INCLUDE, ("--gpu-architecture=sm_90a",))
    assert log == "" and bytes([32]) == bytearray([32]) and b" ".hex() == "20"


@needs_wheels
def test_the_flavour_with_random_delays_compiles() -> None:
    plan = make_plan(CONFIG, find_target("sm_90a"), max_context=1024, max_slots=4, max_rows=16)
    assert "random_delay" in ptx(plan, chaos=True) and "random_delay" not in ptx(plan)


def ptx(plan: Plan, include: Path = INCLUDE, **flavour: bool) -> str:
    """What the compiler makes before it chooses registers and places: everything that a source can change, and a
    quarter of the time."""
    source, target = plan_source(plan, **flavour), plan.target
    flags = cuda_compiler.compile_flags(target, flavour.get("chaos", False), flavour.get("trace", False))
    virtual = [f.replace("=sm_", "=compute_") if f.startswith("--gpu-architecture") else f for f in flags]
    nvrtc = cuda_compiler.open_nvrtc()
    with cuda_compiler.compiled_program(source, include, virtual) as (program, _):
        text = b" " * cuda_compiler.checked(nvrtc.nvrtcGetPTXSize(program))
        cuda_compiler.checked(nvrtc.nvrtcGetPTX(program, text))
    return text.decode()


def _planned(shape: str, name: str) -> Plan:
    target = find_target(name)
    plan = make_plan(shape_config(shape), target, max_context=4096, max_slots=1)
    assert plan.lowered.piece_tokens * plan.lowered.head_dim * 4 <= cuda_compiler.stages_of(target) * STAGE_BYTES
    return plan


def _compiles(shape: str, name: str) -> None:
    plan = _planned(shape, name)
    flags = cuda_compiler.compile_flags(plan.target, False, False)
    _, log = cuda_compiler.compile_cubin(plan_source(plan), INCLUDE, flags)
    assert "error" not in log


@needs_wheels
def test_a_page_of_large_heads_takes_two_stages() -> None:
    assert ".entry mk_worker" in ptx(_planned("gemma-3-1b", "sm_90a"))


ARCHITECTURES = set(known_models())
SHAPES = [name for name in shape_names() if ARCHITECTURES & set(shape_config(name)["architectures"])]


@needs_wheels
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_published_shape_compiles(shape: str) -> None:
    _compiles(shape, "sm_90a")


@needs_wheels
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gemma-3-1b", "qwen3-0.6b", "llama-3.2-1b"])
def test_the_smallest_ring_holds_the_pages_of_an_item(shape: str) -> None:
    _compiles(shape, "sm_86")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"dtype": "f32"}, "dtype 'f32': sm_90a multiplies 16-bit elements; choose bf16 or f16, or the cpu device"),
        ({}, {"kv_dtype": "f32"}, "dtype 'f32': sm_90a multiplies 16-bit"),
    ],
)  # fmt: skip
def test_what_the_matrix_cores_cannot_take_is_an_error_before_the_compiler(
    change: Mapping[str, Any], options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(LoweringError, match=re.escape(message)):
        make_plan({**CONFIG, **change}, find_target("sm_90a"), **options)


@pytest.mark.parametrize(("head_dim", "padded"), [(40, 64), (80, 96), (96, 96), (128, 128)])
def test_heads_are_padded_to_what_the_matrix_cores_take(head_dim: int, padded: int) -> None:
    config = {**CONFIG, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "head_dim": head_dim}
    assert make_plan(config, find_target("sm_90a")).lowered.head_dim == padded


def test_the_ring_fits_every_shared_memory() -> None:
    stages = {name: cuda_compiler.stages_of(find_target(name)) for name in NAMES}
    assert stages == {"sm_80": 8, "sm_86": 4, "sm_89": 4, "sm_90a": 12, "sm_100a": 12, "sm_120a": 4}
    for name in NAMES:
        assert cuda_compiler.shared_bytes_of(find_target(name)) <= find_target(name).shared_bytes
    with pytest.raises(TargetError, match="48,000 bytes of shared memory for a block; the kernel needs 101,376"):
        cuda_compiler.stages_of(replace(find_target("sm_86"), shared_bytes=48_000))


def test_a_target_has_the_counts_of_its_gpu() -> None:
    assert cuda.target_for(H200).workers == 132
    small = cuda.target_for(replace(H200, processors=114))
    assert (small.name, small.workers) == ("sm_90a", 114)
    assert cuda.target_for(replace(H200, capability=(8, 7), shared_bytes=166912)).name == "sm_86"
    with pytest.raises(TargetError, match=r"compute capability 7\.5; supported are sm_80"):
        cuda.target_for(replace(H200, name="T4", capability=(7, 5)))


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    absent = cuda.CudaDevice(None, "there is no NVIDIA driver on this machine")
    assert not absent.availability().usable
    with pytest.raises(DeviceUnavailable, match="no NVIDIA driver"):
        _ = absent.target
    here = cuda.CudaDevice(H200)
    cubin = tmp_path / "kernel.bin"
    cubin.write_bytes(b"")
    with pytest.raises(ProgramError, match="was built for sm_80; NVIDIA H200 is sm_90a; build it for this device"):
        here.load(cubin, find_target("sm_80"), 0)
    with pytest.raises(ProgramError, match="built for 133 workers; NVIDIA H200 has 132 multiprocessors"):
        here.load(cubin, find_target("sm_90a").with_workers(133), 0)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("llama-3.2-1b", {(2048, 1, True), (8192, 4, True)}),
        ("qwen3-0.6b", {(1024, 1, True), (2048, 1, True), (3072, 2, True)}),
        ("smollm2-135m", {(576, 1, False), (1536, 1, False)}),
    ],
)
def test_loaders_know_the_rounds_of_an_input(shape: str, expected: set[tuple[int, int, bool]]) -> None:
    """Columns of an input, in how many rounds of 2,048 four warps bring it, whether 8 warps share a unit evenly."""
    plan = make_plan(shape_config(shape), find_target("sm_90a"), max_context=64, max_slots=1)
    products = [n for n in plan.schedule.nodes if n.task.name == "matmul"]
    assert {(n.sizes["k"], n.variant.rounds, n.variant.even) for n in products} == expected
    on_cpu = make_plan(shape_config(shape), find_target("cpu-generic"), max_context=64, max_slots=1)
    assert {(n.variant.rounds, n.variant.even) for n in on_cpu.schedule.nodes if n.task.name == "matmul"} == {
        (0, False)
    }


def test_a_gpu_that_cannot_be_used_says_why_by_any_of_its_names() -> None:
    found = find_device("cuda:0")
    assert found.name.split(":")[0] == "cuda" and (found.availability().usable or found.availability().reason)
    with pytest.raises(DeviceUnavailable, match="no device 'abacus:0'; known: cpu"):
        find_device("abacus:0")
