"""AMD without a GPU: every target compiles and links, and the code object and its instructions are what they must be.

A machine without a clang for AMD fails here, it does not skip: `pip install ziglang` is enough.
"""

from __future__ import annotations

import ctypes
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.builder.build import make_plan, plan_source
from megakernel.builder.cache import INCLUDE
from megakernel.builder.kernel import kernel_source
from megakernel.device import hip
from megakernel.device.code_object import KernelReport, kernel_report, metadata, symbol_bytes
from megakernel.device.hip_compiler import WAVES, compile_assembly, compile_flags, find_compiler, link_assembly
from megakernel.errors import BuildError, DeviceUnavailable, NoCompiler, ProgramError, TargetError
from megakernel.target import TARGETS, find_target
from megakernel.tasks.record import ARGS, RING_ENTRIES, abi_hash
from megakernel.tasks.task import all_fields

AMD = [t.name for t in TARGETS.values() if t.backend == "hip"]
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 101,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 300, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LDS_LIMIT = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840, "gfx1100": 65536, "gfx1250": 327680}
MATRIX = {
    "gfx90a": "v_mfma_f32_16x16x16bf16_1k", "gfx942": "v_mfma_f32_16x16x16_bf16", "gfx950": "v_mfma_f32_16x16x32_bf16",
    "gfx1100": "v_wmma_f32_16x16x16_bf16", "gfx1250": "v_wmma_f32_16x16x32_bf16",
}  # fmt: skip
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
# Scalar registers that a wave of 64 keeps in lanes of vector registers: no memory is touched. Measured 132 to 150.
MAX_SCALAR_SPILLS = {64: 256, 32: 16}


@dataclass(frozen=True)
class Built:
    assembly: str
    code: bytes
    report: KernelReport


def build(target: str, folder: Path, dtype: str = "bf16") -> Built:
    plan = make_plan(TINY, find_target(target), dtype=dtype, max_context=200)
    compiler = find_compiler()
    text = compile_assembly(plan_source(plan), INCLUDE, compiler)
    path = folder / f"{target}.s"
    path.write_text(text)
    code = link_assembly(path, find_target(target), compiler)
    return Built(text, code, kernel_report(code))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    folder = tmp_path_factory.mktemp("hip")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(AMD, pool.map(lambda t: build(t, folder), AMD)))


# ------------------------------------------------------------------------------------------ code objects
@pytest.mark.parametrize("target", AMD)
def test_the_code_object(kernels: dict[str, Built], target: str) -> None:
    report, code = kernels[target].report, kernels[target].code
    assert (report.architecture, report.kernel, report.wave) == (target, hip.KERNEL, WAVES[target])
    assert report.threads == 256 and report.argument_bytes == ARGS.size + 16
    assert int.from_bytes(symbol_bytes(code, hip.ABI_SYMBOL), "little") == abi_hash(all_fields())


@pytest.mark.parametrize("target", AMD)
def test_no_spills_to_memory_and_no_scratch(kernels: dict[str, Built], target: str) -> None:
    report = kernels[target].report
    assert report.vgpr_spills == 0 and report.scratch_bytes == 0, report
    assert report.sgpr_spills <= MAX_SCALAR_SPILLS[report.wave], report
    assert not re.search(r"^\s+(scratch_|buffer_(load|store)_)", kernels[target].assembly, re.M)


@pytest.mark.parametrize("target", AMD)
def test_lds_is_within_the_limit(kernels: dict[str, Built], target: str) -> None:
    assert find_target(target).shared_bytes == LDS_LIMIT[target]
    assert LDS_LIMIT[target] - 4096 < kernels[target].report.lds_bytes <= LDS_LIMIT[target]


@pytest.mark.parametrize("target", AMD)
def test_the_matrix_instruction_is_used(kernels: dict[str, Built], target: str) -> None:
    used = set(re.findall(r"^\s+(v_[ws]?mfma\w*|v_wmma\w*)", kernels[target].assembly, re.M))
    assert used == {MATRIX[target]}


@pytest.mark.parametrize("target", AMD)
def test_order_between_workers_and_with_the_host(kernels: dict[str, Built], target: str) -> None:
    text = kernels[target].assembly
    for wanted in (ACQUIRE[target], RELEASE[target], SYSTEM_RELEASE[target]):
        assert re.search(rf"^\s+{wanted}\s*$", text, re.M), wanted
    assert len(re.findall(r"^\s+s_barrier(_wait)?\b", text, re.M)) > 20
    assert re.search(r"^\s+s_sleep", text, re.M), "a wait must give the others room"


@pytest.mark.parametrize("target", AMD)
def test_every_wave_drains_its_stores_before_the_group_meets(kernels: dict[str, Built], target: str) -> None:
    """`Worker::sync`: the lane that publishes for the group waits only for the stores of its own wave."""
    barrier = r"s_barrier_signal -1" if target == "gfx1250" else r"s_barrier\b"
    blocks = re.findall(rf";+\s?#?ASMSTART\n(?:.*\n)*?\s+{barrier}", kernels[target].assembly)
    drained = [b for b in blocks if re.search(r"vmcnt\(0\)|s_wait_storecnt 0x0", b)]
    assert len(drained) > 10


# ------------------------------------------------------------------------------------------ the device
def test_compile_through_the_device_interface(tmp_path: Path) -> None:
    """What `megakernel build --target gfx1100` does; with chaos on, so that those lines compile too."""
    device = hip.HipDevice(None, "no GPU here")
    nodes = make_plan(TINY, find_target("gfx1100"), dtype="f32", max_context=200).lowered.nodes
    few = [nodes[0], nodes[1], nodes[-1]]  # a short compilation: the first matmul is enough
    device.compile(kernel_source(few, find_target("gfx1100"), chaos=True), INCLUDE, tmp_path / "kernel.bin")
    report = hip.report_of(tmp_path / "kernel.bin")
    assert report.architecture == "gfx1100" and report.scratch_bytes == 0 and report.vgpr_spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("target", AMD)
def test_other_types_compile_without_spills(target: str, dtype: str, tmp_path: Path) -> None:
    made = build(target, tmp_path, dtype=dtype)
    assert made.report.vgpr_spills == 0 and made.report.scratch_bytes == 0, made.report
    assert made.report.lds_bytes <= LDS_LIMIT[target]


def test_compiler_id_names_target_and_flags() -> None:
    ids = {t: hip.HipDevice(None).compiler_id(find_target(t)) for t in AMD}
    assert len(set(ids.values())) == len(AMD)
    assert all(f"--offload-arch={t}" in text and "clang version" in text for t, text in ids.items())


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


def test_other_files_are_refused() -> None:
    with pytest.raises(ProgramError, match="ELF"):
        metadata(b"hello")
    with pytest.raises(ProgramError, match="metadata note"):
        metadata(Path(sys.executable).resolve().read_bytes())


# ------------------------------------------------------------------------------------------ hip-python, imitated
class Status(int):
    name = "hipSuccess"


OK, NOT_READY, NO_DEVICE = Status(0), Status(600), Status(100)
NO_DEVICE.name = "hipErrorNoDevice"


class FakeHip(types.ModuleType):
    """The calls that hip.py makes, with host memory. It proves the Python side only."""

    def __init__(self, architecture: bytes = b"gfx942:sramecc+:xnack-", count: int = 1) -> None:
        super().__init__("hip.hip")
        self.architecture, self.count, self.memory, self.launches = architecture, count, {}, []
        self.hipError_t = types.SimpleNamespace(hipErrorNotReady=NOT_READY)
        self.hipDeviceProp_t = types.SimpleNamespace
        names = ("WallClockRate", "CooperativeLaunch")
        self.hipDeviceAttribute_t = types.SimpleNamespace(**{f"hipDeviceAttribute{n}": n for n in names})
        self.hipMemcpyKind = types.SimpleNamespace(hipMemcpyHostToDevice=1, hipMemcpyDeviceToHost=2)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("hip"):
            return lambda *_args: (OK,)
        raise AttributeError(name)

    def hipGetDeviceCount(self) -> Any:
        return (OK, self.count) if self.count else (NO_DEVICE, 0)

    def hipGetDeviceProperties(self, p: Any, _index: int) -> Any:
        p.name, p.gcnArchName, p.multiProcessorCount = b"a GPU", self.architecture, 4
        p.sharedMemPerBlock, p.totalGlobalMem = 65536, 192 << 30
        return (OK,)

    def hipDeviceGetAttribute(self, name: str, _index: int) -> Any:
        return OK, {"WallClockRate": 100_000, "CooperativeLaunch": 1}[name]

    def hipMalloc(self, size: int) -> Any:
        array = np.zeros(size, np.uint8)
        self.memory[array.ctypes.data] = array
        return OK, array.ctypes.data

    def hipHostMalloc(self, size: int, flags: int) -> Any:
        assert flags & hip.COHERENT
        return self.hipMalloc(size)

    def hipHostGetDevicePointer(self, pointer: int, _flags: int) -> Any:
        return OK, pointer

    def hipMemcpyAsync(self, to: int, source: int, size: int, _kind: int, _stream: Any) -> Any:
        ctypes.memmove(to, source, size)
        return (OK,)

    def hipStreamCreateWithFlags(self, _flags: int) -> Any:
        return OK, "stream"

    def hipModuleLoadData(self, _code: bytes) -> Any:
        return OK, "module"

    def hipModuleGetFunction(self, _module: Any, name: bytes) -> Any:
        return OK, name

    def hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(self, *_args: Any) -> Any:
        return OK, 1

    def hipModuleLaunchCooperativeKernel(self, *args: Any) -> Any:
        self.launches.append(args)
        return (OK,)


def imitate(monkeypatch: pytest.MonkeyPatch, fake: types.ModuleType) -> None:
    package = types.ModuleType("hip")
    package.__spec__, package.hip = ModuleSpec("hip", None), fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hip", package)
    monkeypatch.setitem(sys.modules, "hip.hip", fake)
    hip.probe.cache_clear()


@pytest.fixture(autouse=True)
def _fresh_probe() -> Any:
    yield
    hip.probe.cache_clear()


def test_why_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(monkeypatch, FakeHip(count=0))
    (device,) = hip.devices()
    assert device.name == "hip" and "sees no GPU" in device.availability().reason

    class NoRuntime(FakeHip):
        def hipGetDeviceCount(self) -> Any:
            raise RuntimeError("cannot open shared object file libamdhip64.so")

    imitate(monkeypatch, NoRuntime())
    (device,) = hip.devices()
    assert "ROCm runtime is not installed" in device.availability().reason
    with pytest.raises(DeviceUnavailable):
        _ = device.target
    imitate(monkeypatch, FakeHip(b"gfx803"))
    (device,) = hip.devices()
    assert not device.availability().usable and "supported are gfx90a" in device.availability().reason
    monkeypatch.delitem(sys.modules, "hip")
    hip.probe.cache_clear()
    if not any((Path(p) / "hip").is_dir() for p in sys.path):
        assert "hip-python is not installed" in hip.devices()[0].availability().reason


def test_the_python_side_of_a_launch(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Built], tmp_path: Path
) -> None:
    fake = FakeHip()
    imitate(monkeypatch, fake)
    (device,) = hip.devices()
    assert device.availability().usable and device.target.workers == 4
    data = device.allocate(1024)
    device.upload(data, 8, np.arange(4, dtype=np.uint32))
    assert device.download(data, 8, 16).view(np.uint32).tolist() == [0, 1, 2, 3]
    ring = device.allocate(RING_ENTRIES, host_visible=True)
    assert ring.host is not None
    device.fill(ring, 0)
    binary = tmp_path / "kernel.bin"
    binary.write_bytes(kernels["gfx950"].code)
    with pytest.raises(ProgramError, match="built for gfx950"):
        device.load(binary, device.target, abi_hash(all_fields()))
    binary.write_bytes(kernels["gfx942"].code)
    with pytest.raises(ProgramError, match="record layout"):
        device.load(binary, device.target, 1)
    with pytest.raises(ProgramError, match="has 4 units"):
        device.load(binary, device.target.with_workers(304), abi_hash(all_fields()))
    loaded = device.load(binary, device.target, abi_hash(all_fields()))
    loaded.launch(ARGS.pack({"ring": ring.address, "workers": 4}))
    assert fake.launches[0][1:8] == (4, 1, 1, 256, 1, 1, 0)
    assert loaded.join(1.0) and loaded.wait_event(0, 0.1) and not loaded.running()
    loaded.close()
    loaded.close()
    device.free(ring)
    device.free(data)
