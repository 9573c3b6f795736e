"""AMD without a GPU: every target compiles and links, and the code object and its instructions are what they must be.

A machine without a clang for AMD fails here, it does not skip: `pip install ziglang` is enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megakernel.builder.build import make_plan, plan_source
from megakernel.builder.cache import INCLUDE
from megakernel.builder.kernel import kernel_source
from megakernel.device import hip
from megakernel.device.code_object import KernelReport, kernel_report, symbol_bytes
from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import (
    WAVES,
    Compiler,
    compile_assembly,
    compile_flags,
    find_compiler,
    link_assembly,
)
from megakernel.device.hip_report import Occupancy, count_instructions, occupancy, with_counts
from megakernel.device.hip_ring import ring_shape
from megakernel.errors import BuildError, NoCompiler, TargetError
from megakernel.target import TARGETS, find_target
from megakernel.tasks.record import ARGS, abi_hash
from megakernel.tasks.task import all_fields

AMD = [t.name for t in TARGETS.values() if t.backend == "hip"]
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 101,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 300, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LLAMA_1B: dict[str, Any] = {
    **TINY, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2_135M: dict[str, Any] = {
    **TINY, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"llama-3.2-1b": LLAMA_1B, "smollm2-135m": SMOLLM2_135M}
LDS_LIMIT = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840, "gfx1100": 65536, "gfx1250": 327680}
MATRIX = {
    "gfx90a": "v_mfma_f32_16x16x16bf16_1k", "gfx942": "v_mfma_f32_16x16x16_bf16", "gfx950": "v_mfma_f32_16x16x32_bf16",
    "gfx1100": "v_wmma_f32_16x16x16_bf16", "gfx1250": "v_wmma_f32_16x16x32_bf16",
}  # fmt: skip
# What brings weights to LDS. gfx1100 has no such instruction.
COPY = {
    "gfx90a": r"buffer_load_dword v\d+, s\[\d+:\d+\], s\d+ offen slc lds",
    "gfx942": r"buffer_load_dword v\d+, s\[\d+:\d+\], s\d+ offen nt lds",
    "gfx950": r"buffer_load_dwordx4 v\d+, s\[\d+:\d+\], s\d+ offen nt lds",
    "gfx1250": r"tensor_load_to_lds s\[\d+:\d+\], s\[\d+:\d+\]",
}
# What an acquire and a release between workers do to the caches. gfx90a has one L2 and gfx1100 writes through to it, so
# that their releases at agent scope wait for the stores and need nothing more.
ACQUIRE = {
    "gfx90a": r"buffer_wbinvl1_vol", "gfx942": r"buffer_inv sc1", "gfx950": r"buffer_inv sc1",
    "gfx1100": r"buffer_gl1_inv", "gfx1250": r"global_inv scope:SCOPE_DEV",
}  # fmt: skip
RELEASE = {
    "gfx90a": r"s_waitcnt vmcnt\(0\)", "gfx942": r"buffer_wbl2 sc1", "gfx950": r"buffer_wbl2 sc1",
    "gfx1100": r"s_waitcnt_vscnt null, 0x0", "gfx1250": r"global_wb scope:SCOPE_DEV",
}  # fmt: skip
SYSTEM_RELEASE = {
    "gfx90a": r"buffer_wbl2", "gfx942": r"buffer_wbl2 sc0 sc1", "gfx950": r"buffer_wbl2 sc0 sc1",
    "gfx1100": r"s_waitcnt_vscnt null, 0x0", "gfx1250": r"global_wb scope:SCOPE_SYS",
}  # fmt: skip
# Scalar registers that are kept in lanes of vector registers: no memory is touched.
MAX_SCALAR_SPILLS = {64: 256, 32: 64}


@dataclass(frozen=True)
class Built:
    assembly: str
    code: bytes
    report: KernelReport


def build_source(source: KernelSource) -> Built:
    """Compiled to assembly and linked, as compile_code_object does it."""
    compiler = find_compiler()
    text = compile_assembly(source, INCLUDE, compiler)
    with TemporaryDirectory(prefix="megakernel-") as folder:
        path = Path(folder) / "kernel.s"
        path.write_text(with_counts(text))
        code = link_assembly(path, source.target, compiler)
    return Built(text, code, kernel_report(code))


def build(target: str, dtype: str = "bf16", config: dict[str, Any] = LLAMA_1B, trace: bool = False) -> Built:
    plan = make_plan(config, find_target(target), dtype=dtype, max_context=2048)
    return build_source(plan_source(plan, trace=trace))


@cache
def kernel_of(model: str, target: str) -> Built:
    return build(target, config=MODELS[model])


@pytest.fixture(
    params=[
        pytest.param((model, target), marks=[pytest.mark.slow] * (model != "llama-3.2-1b" and target != "gfx942"))
        for model in MODELS
        for target in AMD
    ],
    ids="-".join,
)
def whole(request: pytest.FixtureRequest) -> tuple[str, Built]:
    """A target's name and the whole kernel of a model for it, built once for all tests."""
    return request.param[1], kernel_of(*request.param)


def check_resources(target: str, made: Built) -> None:
    """No spill to memory, no scratch, LDS within its limit; matrix instructions and copies are the target's own."""
    report, text = made.report, made.assembly
    assert report.vgpr_spills == 0 and report.scratch_bytes == 0, report
    assert report.sgpr_spills <= MAX_SCALAR_SPILLS[report.wave], report
    assert not re.search(r"^\s+(scratch_|buffer_store_|buffer_load_(?!.* lds$))", text, re.M)
    assert 0 < report.lds_bytes <= LDS_LIMIT[target]
    assert set(re.findall(r"^\s+(v_[ws]?mfma\w*|v_wmma\w*)", text, re.M)) <= {MATRIX[target]}
    for name, pattern in COPY.items():
        assert name == target or not re.search(rf"^\s+{pattern}$", text, re.M), (name, target)
    assert target == "gfx1250" or not re.search("tensor_|tensorcnt|asynccnt|async_to_lds", text)


# ------------------------------------------------------------------------------------------ code objects
def test_the_code_object(whole: tuple[str, Built]) -> None:
    target, made = whole
    report, code = made.report, made.code
    assert (report.architecture, report.kernel, report.wave) == (target, hip.KERNEL, WAVES[target])
    assert report.threads == 256 + ring_shape(find_target(target)).copiers * report.wave
    assert report.argument_bytes == ARGS.size + 24
    assert int.from_bytes(symbol_bytes(code, hip.ABI_SYMBOL), "little") == abi_hash(all_fields())
    assert "clang" in report.compiler.lower(), "a program says what compiled it"
    assert 10_000 < report.code_bytes < len(code)


def test_no_spills_to_memory_and_no_scratch(whole: tuple[str, Built]) -> None:
    check_resources(*whole)


def test_lds_is_within_the_limit(whole: tuple[str, Built]) -> None:
    target, made = whole
    assert find_target(target).shared_bytes == LDS_LIMIT[target]
    assert LDS_LIMIT[target] - 4096 < made.report.lds_bytes <= LDS_LIMIT[target]


def test_the_matrix_instruction_is_used(whole: tuple[str, Built]) -> None:
    target, made = whole
    assert set(re.findall(r"^\s+(v_[ws]?mfma\w*|v_wmma\w*)", made.assembly, re.M)) == {MATRIX[target]}


def test_weights_are_copied_to_lds(whole: tuple[str, Built]) -> None:
    """By the target's own instruction and no other one; where there is none, through registers."""
    target, made = whole
    text = made.assembly
    for name, pattern in COPY.items():
        assert bool(re.search(rf"^\s+{pattern}$", text, re.M)) == (name == target), (name, target)
    asynchronous = re.search(r"^\s+global_load_async_to_lds_b128 ", text, re.M)
    assert bool(asynchronous) == (target == "gfx1250"), "units too small for a descriptor"
    assert bool(re.search("tensor_|tensorcnt|asynccnt", text)) == (target == "gfx1250")
    if target == "gfx1100":
        assert re.search(r"^\s+global_load_b128 .*?^\s+ds_store_b128 ", text, re.M | re.S)


def test_every_copy_has_its_wait(whole: tuple[str, Built]) -> None:
    """Each counter is waited for down to every depth of the ring, and to nothing at the end. The cluster barrier, which
    one wave a workgroup may signal, is not used."""
    target, made = whole
    text, ring = made.assembly, ring_shape(find_target(target))
    waits = {name: {int(n, 0) for n in re.findall(rf"^\s+{name}", text, re.M)} for name in (
        r"s_waitcnt vmcnt\((\d+)\)$", r"s_wait_tensorcnt (0x\w+)", r"s_wait_asynccnt (0x\w+)",
    )}  # fmt: skip
    vector, tensor, asynchronous = waits.values()
    if target == "gfx1250":
        assert tensor == set(range(ring.stages)) and asynchronous == set(range(0, 64, 8))
    elif ring.copy_bytes:
        assert vector >= set(range(0, 64, 4))
        most = -(-ring.stage_bytes // (ring.copiers * WAVES[target] * ring.copy_bytes)) * (ring.stages - 1)
        assert most < 64, "a wave counts at most 63 loads on their way"
    assert "s_barrier_signal -3" not in text
    assert re.search(r"^\s+(s_wait_dscnt 0x0|s_waitcnt lgkmcnt\(0\))$", text, re.M)


def test_m0_and_wait_states_of_a_copy(whole: tuple[str, Built]) -> None:
    """The compiler does not look into assembly: M0 has no other user, and the wait states are there."""
    target, made = whole
    text = made.assembly
    if target not in ("gfx90a", "gfx942", "gfx950"):
        assert not re.search(r" lds$", text, re.M), "copies of another kind need neither"
        return
    copies = re.findall(rf"^\s+s_mov_b32 m0, s\d+\n\s+s_nop 4\n\s+{COPY[target]}$", text, re.M)
    assert len(copies) == len(re.findall(r" lds$", text, re.M)) == len(re.findall(r"\bm0\b", text)) > 0


def test_order_between_workers_and_with_the_host(whole: tuple[str, Built]) -> None:
    target, made = whole
    text = made.assembly
    for wanted in (ACQUIRE[target], RELEASE[target], SYSTEM_RELEASE[target]):
        assert re.search(rf"^\s+{wanted}\s*$", text, re.M), wanted
    assert len(re.findall(r"^\s+s_barrier(_wait)?\b", text, re.M)) > 20
    assert re.search(r"^\s+s_sleep", text, re.M), "a wait must give the others room"


PRIMITIVES = """#include "megakernel_abi.h"
#include "megakernel/device/hip.h"
using namespace megakernel::dev;
#define KERNEL extern "C" __attribute__((global)) void
KERNEL k_add_release(uint64_t* p) { p[64] = 1; add_release(p, 2); }
KERNEL k_store_release(uint64_t* p) { p[64] = 1; store_release(p, 2); }
KERNEL k_store_release_system(uint64_t* p) { p[64] = 1; store_release_system(p, 2ul); }
KERNEL k_load_acquire(uint64_t* p) { p[64] = load_acquire(p) + p[32]; }
KERNEL k_load_acquire_system(uint64_t* p) { p[64] = load_acquire_system(p) + p[32]; }
KERNEL k_acquire(uint64_t* p) { const uint64_t v = load_relaxed(p); acquire(); p[64] = v + p[32]; }
KERNEL k_fetch_add(uint64_t* p) { p[64] = fetch_add(p, 2); }
constexpr auto kLate = megakernel::abi::FaultKind::kWaitBudget;
KERNEL k_wait(uint64_t* p) { if (Worker(0, 0, 0).wait(p, 3, kLate, 0)) p[64] = p[32]; }
KERNEL k_signal(uint64_t* p) { p[64] = 1; Worker(0, 0, 0).signal(p, 0); }
template <class W> MK_DEVICE bool last(W&& w, uint64_t* p) {
  if constexpr (kGroups > 1) return w.signal_last(p, 0, 3);
  return false;
}
KERNEL k_signal_last(uint64_t* p) { p[64] = 1; if (last(Worker(0, 0, 0), p)) p[65] = p[32]; }
"""
SYSTEM_ACQUIRE = {
    "gfx90a": r"buffer_invl2", "gfx942": r"buffer_inv sc0 sc1", "gfx950": r"buffer_inv sc0 sc1",
    "gfx1100": r"buffer_gl1_inv", "gfx1250": r"global_inv scope:SCOPE_SYS",
}  # fmt: skip


@pytest.mark.parametrize("target", AMD)
def test_each_primitive_has_its_own_cache_operation(target: str) -> None:
    """Each on its own: in a whole kernel an operation that one primitive has lost is found in another one."""
    source = plan_source(make_plan(TINY, find_target(target), dtype="bf16", max_context=200))
    text = compile_assembly(replace(source, text=PRIMITIVES), INCLUDE, find_compiler())
    bodies = dict(re.findall(r"^k_(\w+):(.*?)^\s+s_endpgm", text, re.M | re.S))
    hand_over = r"^\s+(?:global|flat)_(?:atomic|store)\w*"
    for name, wanted in (
        ("add_release", RELEASE), ("store_release", RELEASE), ("store_release_system", SYSTEM_RELEASE),
        ("signal", RELEASE),
    ):  # fmt: skip
        *_, last = re.finditer(hand_over, bodies[name], re.M)
        before = bodies[name][: last.start()]
        operation = [m.end() for m in re.finditer(rf"^\s+{wanted[target]}\s*$", before, re.M)]
        assert operation, f"{name}: no {wanted[target]} before the hand-over"
        drained = r"vmcnt\(0\)|vscnt null, 0x0|s_wait_storecnt 0x0"
        assert re.search(drained, before[operation[-1] - 30 :]), f"{name}: the hand-over does not wait"
    for name, wanted in (
        ("load_acquire", ACQUIRE), ("acquire", ACQUIRE), ("load_acquire_system", SYSTEM_ACQUIRE),
    ):  # fmt: skip
        loads = [m.start() for m in re.finditer(r"^\s+(?:global|flat)_load", bodies[name], re.M)]
        between = bodies[name][loads[0] : loads[-1]]
        assert len(loads) == 2 and re.search(rf"^\s+{wanted[target]}\s*$", between, re.M), f"{name}: {between}"
    if find_target(target).groups > 1:
        before, _, after = re.split(r"^\s+((?:global|flat)_atomic)", bodies["signal_last"], flags=re.M)
        assert re.search(rf"^\s+{RELEASE[target]}\s*$", before, re.M), f"signal_last: {before}"
        seen = re.split(r"^\s+(?:global|flat)_load", after, flags=re.M)[0]
        assert re.search(rf"^\s+{ACQUIRE[target]}\s*$", seen, re.M), f"signal_last: {after}"
    *_, last = re.finditer(r"^\s+(?:global|flat)_load", bodies["wait"], re.M)
    straight = re.split(r"^(?:\.L\w+:|\s+s_c?branch).*$", bodies["wait"][: last.start()], flags=re.M)[-1]
    assert re.search(rf"^\s+{ACQUIRE[target]}\s*$", straight, re.M), f"wait: {straight}"
    for operation in (ACQUIRE[target], r"buffer_wbl2.*", r"global_wb .*"):
        assert not re.search(rf"^\s+{operation}\s*$", bodies["fetch_add"], re.M), "relaxed: no cache operation"


def test_every_wave_drains_its_stores_before_the_group_meets(whole: tuple[str, Built]) -> None:
    """`Worker::sync`: the lane that publishes for the group waits only for the stores of its own wave."""
    target, made = whole
    barrier = r"s_barrier_signal -1" if target == "gfx1250" else r"s_barrier\b"
    blocks = re.findall(rf";+\s?#?ASMSTART\n(?:.*\n)*?\s+{barrier}", made.assembly)
    drained = [b for b in blocks if re.search(r"vmcnt\(0\)|s_wait_storecnt 0x0", b)]
    assert len(drained) > 10


def test_workgroups_ask_for_their_xcd_where_there_are_several(whole: tuple[str, Built]) -> None:
    target, made = whole
    asked = re.findall(r"^\s+s_getreg_b32 \w+, hwreg\(HW_REG_XCC_ID, 0, 4\)", made.assembly, re.M)
    assert len(asked) == (1 if find_target(target).groups > 1 else 0)
    assert (target in ("gfx942", "gfx950")) == (find_target(target).groups > 1)


# ------------------------------------------------------------------------------------------ the device
def test_compile_through_the_device_interface(tmp_path: Path) -> None:
    """What `megakernel build --target gfx1100` does; with chaos on, so that those lines compile too."""
    device = hip.HipDevice(None, "no GPU here")
    nodes = make_plan(TINY, find_target("gfx1100"), dtype="f32", max_context=200).lowered.nodes
    few = [nodes[0], nodes[1], nodes[-1]]  # a short compilation: the first matmul is enough
    device.compile(kernel_source(few, find_target("gfx1100"), chaos=True), INCLUDE, tmp_path / "kernel.bin")
    report = device.code_report(tmp_path / "kernel.bin")
    assert report["architecture"] == "gfx1100" and report["scratch_bytes"] == 0 and report["vgpr_spills"] == 0
    assert report["occupancy"] == {"workgroups": 2, "bound": ("vector registers", "LDS"), "waves": 8, "most_waves": 16}
    counts = report["instructions"]
    assert counts["all"] == sum(counts["kinds"].values()) > 1000
    assert counts["kinds"]["barrier"] > 5 and counts["mnemonics"][MATRIX["gfx1100"]] == counts["kinds"]["matrix"]
    assert "scratch" not in counts["kinds"]


def test_copies_to_lds_are_counted_by_name() -> None:
    """gfx90a, gfx942 and gfx950 mark them by the last word of a load."""
    loads = "\tbuffer_load_dword v1, s[0:3], s5 offen nt lds\n\tbuffer_load_dword v1, off, s[0:3], 0 ; no lds\n"
    counts = count_instructions(
        loads + "\tbuffer_load_dwordx4 v1, s[0:3], s5 offen nt lds\n\ttensor_load_to_lds s[0:3]\n"
    )
    assert counts["kinds"] == {"copy to LDS": 3, "load": 1}
    assert counts["mnemonics"] == {"buffer_load_dword lds": 1, "buffer_load_dwordx4 lds": 1, "tensor_load_to_lds": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "trace"), [("f32", False), ("f16", False), ("bf16", True)])
@pytest.mark.parametrize("target", AMD)
def test_whole_kernels_of_other_types_and_with_recording(target: str, dtype: str, trace: bool) -> None:
    """Single tasks of this kind are in tests/hip/test_every_task.py."""
    check_resources(target, build(target, dtype, SMOLLM2_135M, trace))


def test_several_devices_write_each_other_at_system_scope() -> None:
    plan = make_plan(TINY, find_target("gfx942"), dtype="bf16", max_context=200, tp=2)
    made = build_source(plan_source(plan))
    check_resources("gfx942", made)
    lines = [line for line in made.assembly.splitlines() if "sc1" in line]
    assert any(re.search(r"flat_store_dwordx2|global_store_dwordx2", line) and "sc0" in line for line in lines)


def test_compiler_id_names_target_and_flags() -> None:
    ids = {t: hip.HipDevice(None).compiler_id(find_target(t)) for t in AMD}
    assert len(set(ids.values())) == len(AMD)
    assert all(f"--offload-arch={t}" in text and "clang version" in text for t, text in ids.items())


def test_all_that_bounds_the_occupancy_is_named() -> None:
    """By hand: 512 threads are 8 waves of 64; a unit has 4 SIMDs of 8 waves and 512 registers, and 64 KB of LDS."""
    report = KernelReport("gfx942", "k", "", 64, 512, 128, 100, 0, 0, 0, 32 << 10, 280, 1000)
    for vgprs, lds, workgroups, bound in (
        (128, 32 << 10, 2, ("vector registers", "LDS")),
        (128, 16 << 10, 2, ("vector registers",)),
        (129, 40 << 10, 1, ("vector registers", "LDS")),
        (100, 40 << 10, 1, ("LDS",)),
        (64, 16 << 10, 4, ("vector registers", "LDS", "waves")),
        (32, 1 << 10, 4, ("waves",)),
    ):  # fmt: skip
        found = occupancy(replace(report, vgprs=vgprs, lds_bytes=lds))
        assert found == Occupancy(workgroups, bound, 2 * workgroups, 8), (vgprs, lds)
    assert occupancy(replace(report, architecture="gfx1250")) is None


@pytest.mark.parametrize("said", ["", "g++ (Debian 12.2.0) 12.2.0"])
def test_a_command_that_is_no_clang(said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "hipcxx"
    command.write_text(f"#!/bin/sh\necho '{said}'\n")
    command.chmod(0o755)
    why = rf"hipcxx --version says '{re.escape(said)}', expected a clang; set MEGAKERNEL_HIPCXX to a clang"
    with pytest.raises(NoCompiler, match=why):
        find_compiler(str(command))
    monkeypatch.setenv("MEGAKERNEL_HIPCXX", "/bin/true")
    find_compiler.cache_clear()
    with pytest.raises(NoCompiler, match=r"/bin/true --version says .*, expected a clang"):
        find_compiler()
    monkeypatch.delenv("MEGAKERNEL_HIPCXX")
    find_compiler.cache_clear()


def test_a_compiler_that_writes_nothing() -> None:
    source = plan_source(make_plan(TINY, find_target("gfx942"), dtype="bf16", max_context=200))
    with pytest.raises(BuildError, match=r"/bin/true ended without an error and wrote no \.s file; set MEGAKERNEL"):
        compile_assembly(source, INCLUDE, Compiler("clang", ("/bin/true",), "clang version 22"))


# A script that says it is a clang; `{out}` of it are what it writes to the file after -o, and to the terminal.
GARBAGE = """#!/bin/sh
if [ "$1" = --version ]; then printf '\\377 clang\\n'; exit 0; fi
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
{body}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (r"printf '\377\376' >$out", r"hipcxx ended without an error and wrote a \.s file that is no assembly"),
        ("echo hello >$out", r"hipcxx ended without an error and wrote what is no code object \(.*ELF file\); set"),
        (": >$out", r"wrote what is no code object"),
        (r"printf '\377 boom' >&2; exit 1", r"ended with 1:\n\ufffd boom"),
    ],
)
def test_a_compiler_that_writes_garbage(body: str, said: str, tmp_path: Path) -> None:
    """To the terminal too: bytes that are no text do not hide the error."""
    command = tmp_path / "hipcxx"
    command.write_text(GARBAGE.format(body=body))
    command.chmod(0o755)
    source = plan_source(make_plan(TINY, find_target("gfx942"), dtype="bf16", max_context=200))
    with pytest.raises(BuildError, match=said):
        hip.HipDevice(None, compiler=str(command)).compile(source, INCLUDE, tmp_path / "k")
    assert not (tmp_path / "k").exists()


def test_a_compile_error_carries_the_log(tmp_path: Path) -> None:
    source = plan_source(make_plan(TINY, find_target("gfx942"), dtype="bf16", max_context=200))
    with pytest.raises(BuildError, match="no_such_name"):
        hip.HipDevice(None).compile(replace(source, text="int x = no_such_name;"), INCLUDE, tmp_path / "k")
    assert not (tmp_path / "k").exists()


def test_a_library_function_fails_at_link(tmp_path: Path) -> None:
    text = (
        '__attribute__((device)) float f(float);\nextern "C" __attribute__((global)) void k(float* p) { *p = f(*p); }'
    )
    source = replace(plan_source(make_plan(TINY, find_target("gfx942"), dtype="bf16", max_context=200)), text=text)
    with pytest.raises(BuildError, match="undefined"):
        hip.HipDevice(None).compile(source, INCLUDE, tmp_path / "k")


def test_unknown_targets_and_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="known: gfx90a"):
        compile_flags(find_target("sm_90a"), False, False)
    monkeypatch.setenv("MEGAKERNEL_HIPCXX", "/nowhere/clang++")
    find_compiler.cache_clear()
    with pytest.raises(NoCompiler, match="MEGAKERNEL_HIPCXX"):
        find_compiler()
    monkeypatch.delenv("MEGAKERNEL_HIPCXX")
    find_compiler.cache_clear()
