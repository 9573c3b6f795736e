"""The host half of the HIP device against an imitation of hip-python: every answer it can get, and what it asks for."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.builder.build import make_plan, plan_source
from megakernel.builder.cache import INCLUDE
from megakernel.device import hip, hip_compiler
from megakernel.device.device import KernelSource
from megakernel.errors import CapacityError, DeviceUnavailable, MegakernelError, ProgramError
from megakernel.target import find_target
from megakernel.tasks.record import ARGS
from tests.hip.fake_runtime import FAILED, NO_DEVICE, NOT_READY, OK, OUT_OF_MEMORY, PEER_KNOWN, FakeHip, Status, imitate
from tests.unit.test_hip_build import TINY

ABI = 0x1234567890ABCDEF
# A kernel with the names that the host looks for; `mk_compiler` is what each test says it is.
TEXT = f"""extern "C" __attribute__((device)) __attribute__((used)) const unsigned long mk_abi_hash = {ABI}ul;
extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(256, 256))) void mk_worker(int* p) {{
  *p = 1;
}}
"""


@pytest.fixture(scope="session")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("tiny"), {}
    for name in ("gfx942", "gfx950"):
        made[name] = folder / f"{name}.bin"
        hip.HipDevice(None).compile(KernelSource(TEXT, {}, find_target(name)), INCLUDE, made[name])
    return made


@pytest.fixture(autouse=True)
def _fresh_probe() -> Iterator[None]:
    yield
    hip.probe.cache_clear()


def opened(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[FakeHip, hip.HipDevice]:
    fake = FakeHip(**fields)
    imitate(monkeypatch, fake)
    (device,) = hip.devices()
    assert isinstance(device, hip.HipDevice)
    return fake, device


# ------------------------------------------------------------------------------------------ why there is no device
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"count": 0}, "the ROCm runtime is installed and sees no GPU (hipErrorNoDevice)"),
        ({"version": 50_700_000}, "the ROCm runtime has HIP 5.7; 6.0 or newer is needed"),
        ({"architecture": "gfx803"}, "a GPU is gfx803; supported are gfx90a, gfx942, gfx950, gfx1100, gfx1250"),
        ({"lds": 32768}, "a GPU gives a workgroup 32,768 bytes of LDS; gfx942 needs 65,536"),
        ({"clock": 99_000}, "a GPU has a constant clock of 99000 kHz; the kernel expects 100000"),
        ({"cooperative": 0}, "a GPU has no cooperative launch, which keeps all workers resident"),
    ],
)
def test_one_sentence_for_each_reason(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], reason: str) -> None:
    _, device = opened(monkeypatch, **fields)
    state = device.availability()
    assert (state.usable, state.reason) == (False, reason)


def test_a_compiler_whose_code_must_not_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, device = opened(monkeypatch, architecture="gfx1250", lds=327680)
    found = hip_compiler.Compiler("clang", ("clang++",), "clang version 22.1")
    monkeypatch.setattr(hip, "find_compiler", lambda _wanted: found)
    state = device.availability()
    assert (
        not state.usable and "a GPU is gfx1250, whose kernels need a prologue that clang version 22.1" in state.reason
    )
    for kind, version in (
        ("clang", "AMD clang version 23.0 (roc-10.0)"), ("clang", "AMD AFAR drop #23.1 clang version 23.0"),
        ("hiprtc", "hiprtc 7.15"),
    ):  # fmt: skip
        monkeypatch.setattr(hip, "find_compiler", lambda _w, k=kind, v=version: hip_compiler.Compiler(k, (), v))
        assert device.availability().usable


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hip", None)  # as if it were not installed
    monkeypatch.setattr(hip.importlib.util, "find_spec", lambda _name: None)
    hip.probe.cache_clear()
    (device,) = hip.devices()
    assert device.availability().reason.startswith("the package hip-python is not installed; pip install")
    with pytest.raises(DeviceUnavailable, match="not installed"):
        _ = device.target


def test_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRuntime(FakeHip):
        def do_hipGetDeviceCount(self) -> Any:
            raise RuntimeError("failed to dlopen 'b'libamdhip64.so'': cannot open shared object file")

    imitate(monkeypatch, NoRuntime())
    assert "the ROCm runtime is not installed (failed to dlopen" in hip.devices()[0].availability().reason


def test_another_version_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHip()
    del fake.hipDeviceAttribute_t.hipDeviceAttributeWallClockRate
    imitate(monkeypatch, fake)
    assert "this version of hip-python lacks what is needed" in hip.devices()[0].availability().reason


@pytest.mark.parametrize("error", [ValueError("boom"), OSError("wrong ELF class"), SystemError()])
def test_a_package_that_breaks_leaves_the_other_devices_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    hip.probe.cache_clear()
    monkeypatch.setattr(hip, "_hip", broken)
    reason = hip.devices()[0].availability().reason
    assert reason.startswith(f"hip-python cannot be used ({type(error).__name__}")


def test_properties_that_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHip()
    fake.answers["hipDeviceGetAttribute"] = (NO_DEVICE, 0)
    imitate(monkeypatch, fake)
    reason = hip.devices()[0].availability().reason
    assert reason == "the GPUs cannot be asked for their properties: the HIP runtime answered hipErrorNoDevice"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    _, device = opened(monkeypatch)
    monkeypatch.setenv("MEGAKERNEL_HIPCXX", "/nowhere/clang++")
    hip_compiler.find_compiler.cache_clear()
    assert "/nowhere/clang++ is not an executable" in device.availability().reason
    hip_compiler.find_compiler.cache_clear()


# ------------------------------------------------------------------------------------------ what a device is
@pytest.mark.parametrize("old", [False, True])
def test_a_device_and_its_target(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    _, device = opened(monkeypatch, units=304, xcds=8, old=old)
    state = device.availability()
    assert state.usable and state.description == "a GPU, gfx942, 304 units, 192 GiB, HIP 7.2"
    assert (device.target.workers, device.target.groups, device.name) == (304, 8, "hip:0")


def test_partitions_and_runtimes_that_do_not_tell_xcds(monkeypatch: pytest.MonkeyPatch) -> None:
    _, part = opened(monkeypatch, units=38, xcds=1)  # one XCD as a device of its own
    assert (part.target.workers, part.target.groups) == (38, 1)
    _, silent = opened(monkeypatch, units=304, xcds=None)
    assert silent.target.groups == find_target("gfx942").groups == 8
    _, single = opened(monkeypatch, architecture="gfx90a", units=104, xcds=2)
    assert single.target.groups == 1, "a target whose hardware tells no XCD has one group"


def test_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHip(count=2)
    imitate(monkeypatch, fake)
    assert [d.name for d in hip.devices()] == ["hip:0", "hip:1"]
    hip.devices()[1].allocate(64)
    assert ("hipSetDevice", 1) in fake.calls


# ------------------------------------------------------------------------------------------ memory
def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device = opened(monkeypatch)
    data = device.allocate(1024)
    assert data.host is None
    device.fill(data, 7)
    device.upload(data, 8, np.arange(4, dtype=np.uint32))
    assert device.download(data, 8, 16).view(np.uint32).tolist() == [0, 1, 2, 3]
    assert device.download(data, 0, 8).tolist() == [7] * 8
    copies = [c for c in fake.calls if c[0] == "hipMemcpyAsync"]
    assert copies[0][1:4] == (data.address + 8, copies[0][2], 16) and copies[0][4:] == (1, "stream 1")
    assert copies[1][2] == data.address + 8 and copies[1][4:] == (2, "stream 1")
    with pytest.raises(ProgramError, match="outside a buffer"):
        device.upload(data, 1020, np.zeros(2, np.uint32))
    device.free(data)
    assert fake.calls[-1] == ("hipFree", data.address)


def test_host_visible_memory_is_fine_grained(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device = opened(monkeypatch)
    ring = device.allocate(4096, host_visible=True)
    flags = next(c for c in fake.calls if c[0] == "hipHostMalloc")[2]
    assert flags == 0x40000000 | 0x2 | 0x1  # hipHostMallocCoherent, Mapped, Portable
    assert ring.host is not None
    device.fill(ring, 3)
    device.upload(ring, 0, np.array([9], np.uint8))
    assert ring.host[:2].tolist() == [9, 3] and device.download(ring, 0, 2).tolist() == [9, 3]
    assert not any(c[0] in ("hipMemcpyAsync", "hipMemsetAsync") for c in fake.calls), "the host writes it itself"
    device.free(ring)
    assert fake.calls[-1][0] == "hipHostFree"


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device = opened(monkeypatch)
    fake.answers["hipMalloc"] = (OUT_OF_MEMORY, None)
    with pytest.raises(CapacityError, match=r"allocate 4,096 bytes; 1,073,741,824 of .* \(hipErrorOutOfMemory\)"):
        device.allocate(4096)


# ------------------------------------------------------------------------------------------ loading and launching
def test_what_is_refused_at_load(monkeypatch: pytest.MonkeyPatch, binaries: dict[str, Path]) -> None:
    _, device = opened(monkeypatch)
    with pytest.raises(ProgramError, match="built for gfx950; a GPU is gfx942"):
        device.load(binaries["gfx950"], device.target, ABI)
    with pytest.raises(ProgramError, match="record layout 1234567890abcdef, expected 0000000000000001"):
        device.load(binaries["gfx942"], device.target, 1)
    with pytest.raises(ProgramError, match="built for 304 workers; a GPU has 4 units"):
        device.load(binaries["gfx942"], device.target.with_workers(304), ABI)
    _, full = opened(monkeypatch, resident=0)
    with pytest.raises(ProgramError, match=r"has 4 workers; a GPU keeps 0 resident \(4 units, 0 each\)"):
        full.load(binaries["gfx942"], full.target, ABI)


MADE_BY = 'extern "C" __attribute__((device)) __attribute__((used)) const char mk_compiler[] = '


@pytest.mark.parametrize(
    ("compiler", "named"),
    [
        ("", "a compiler that it does not name"),
        ("__VERSION__", "Clang"),
        ('"clang version 22.1.8"', "clang version 22.1.8"),
    ],
)
def test_code_whose_compiler_is_not_the_one_that_this_gpu_needs(
    compiler: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever compiler is there now: a program may have been built elsewhere."""
    _, device = opened(monkeypatch, architecture="gfx1250", lds=327680)
    text = TEXT + (f"{MADE_BY}{compiler};\n" if compiler else "")
    device.compile(KernelSource(text, {}, find_target("gfx1250")), INCLUDE, tmp_path / "k.bin")
    with pytest.raises(ProgramError, match=rf"k.bin was built by .*{named}.*prologue.*with ROCm's compiler"):
        device.load(tmp_path / "k.bin", device.target, ABI)


@pytest.mark.parametrize("version", ["AMD Clang 20.0.0git (roc-7.1.1 25444)", "AMD AFAR drop #23.1.0 Clang 23.0.0git"])
def test_code_of_rocms_compiler_is_loaded(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, device = opened(monkeypatch, architecture="gfx1250", lds=327680)
    text = f'{TEXT}{MADE_BY}"{version}";\n'
    device.compile(KernelSource(text, {}, find_target("gfx1250")), INCLUDE, tmp_path / "k.bin")
    assert device.code_report(tmp_path / "k.bin")["compiler"] == version
    device.load(tmp_path / "k.bin", device.target, ABI).close()


def test_a_damaged_file_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, binaries: dict[str, Path], tmp_path: Path
) -> None:
    _, device = opened(monkeypatch)
    (tmp_path / "half.bin").write_bytes(binaries["gfx942"].read_bytes()[:900])
    with pytest.raises(ProgramError, match=r"half\.bin: .*; build the program again"):
        device.load(tmp_path / "half.bin", device.target, ABI)


def test_a_launch(monkeypatch: pytest.MonkeyPatch, binaries: dict[str, Path]) -> None:
    fake, device = opened(monkeypatch)
    ring = device.allocate(4096, host_visible=True)
    assert ring.host is not None
    loaded = device.load(binaries["gfx942"], device.target, ABI)
    assert ("hipModuleGetFunction", "module", b"mk_worker") in fake.calls
    assert not loaded.running() and loaded.facts() == {}
    seen: dict[str, Any] = {}

    def run(*given: Any) -> Any:
        """As the driver does: copies the arguments during the call."""
        pointers = (ctypes.c_uint64 * 4).from_address(given[9])
        seen["args"] = ctypes.string_at(pointers[0], ARGS.size)
        seen["words"] = [ctypes.c_uint64.from_address(p).value for p in pointers[1:]]
        places = (ctypes.c_uint32 * 4).from_address(seen["words"][2] + hip.SEATS_BYTES)
        seen["zeroed"] = not any(ctypes.string_at(seen["words"][2], hip.SEATS_BYTES + 16))
        places[:] = [5, 5, 2, 2]
        return (OK,)

    fake.do_hipModuleLaunchCooperativeKernel = run  # type: ignore[method-assign]
    args = ARGS.pack({"ring": ring.address, "workers": 4})
    for _ in range(2):  # the seats of the launch before are cleared
        fake.calls.clear()
        loaded.launch(args)
        names = [c[0] for c in fake.calls if c[0] != "hipSetDevice"]
        assert names == ["hipMemsetAsync", "hipEventRecord", "hipModuleLaunchCooperativeKernel", "hipEventRecord"]
        launch = next(c for c in fake.calls if c[0] == "hipModuleLaunchCooperativeKernel")
        assert launch[1:10] == (b"mk_worker", 4, 1, 1, 256, 1, 1, 0, "stream 2")
        assert seen["args"] == args and seen["words"][1] == hip.OVERFLOW_BYTES and seen["zeroed"]
        assert seen["words"][0] in fake.memory and len(fake.memory[seen["words"][0]]) == 4 * hip.OVERFLOW_BYTES
    assert loaded.facts() == {"launch_ms": 1.25, "xcd_of_worker": [5, 5, 2, 2]}
    fake.answers["hipEventQuery"] = (NOT_READY,)
    assert loaded.running() and not loaded.join(0.001) and not loaded.wait_event(0, 0.001) and loaded.facts() == {}
    ring.host[0] = 3  # the kernel has written three events
    assert loaded.wait_event(2, 0.001) and not loaded.wait_event(3, 0.001)
    fake.answers["hipEventQuery"] = (FAILED,)
    with pytest.raises(MegakernelError, match="ended with hipErrorLaunchFailure; start a new process"):
        loaded.running()
    del fake.answers["hipEventQuery"]
    loaded.close()
    loaded.close()
    ends = [c for c in fake.calls if c[0] in ("hipModuleUnload", "hipStreamDestroy", "hipEventDestroy")]
    assert len(ends) == 4 and not loaded.running() and loaded.join(0.0)


def test_a_launch_that_the_runtime_refuses(monkeypatch: pytest.MonkeyPatch, binaries: dict[str, Path]) -> None:
    fake, device = opened(monkeypatch)
    ring = device.allocate(4096, host_visible=True)
    loaded = device.load(binaries["gfx942"], device.target, ABI)
    fake.answers["hipModuleLaunchCooperativeKernel"] = (Status(720, "hipErrorCooperativeLaunchTooLarge"),)
    with pytest.raises(MegakernelError, match="the HIP runtime answered hipErrorCooperativeLaunchTooLarge"):
        loaded.launch(ARGS.pack({"ring": ring.address}))
    assert not loaded.running()


def test_the_size_of_the_seats_is_that_of_the_header() -> None:
    text = (INCLUDE / "megakernel" / "device" / "hip_seats.h").read_text()
    check = "static_assert(sizeof(megakernel::dev::Seats) == 128);"
    assert hip.SEATS_BYTES == 128 and "struct Seats" in text
    target = find_target("gfx942")
    source = plan_source(make_plan(TINY, target, dtype="bf16", max_context=200))
    head = source.text.split('#include "megakernel/tasks')[0] + '#include "megakernel/device/hip.h"\n' + check
    hip_compiler.compile_assembly(replace(source, text=head), INCLUDE, hip_compiler.find_compiler())


# ------------------------------------------------------------------------------------------ compilers
def test_hiprtc_comes_before_clang_where_rocm_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HIPRTC through hip-python: its calls in order, and the log of an error."""
    asked: list[tuple[Any, ...]] = []
    code = b"\x7fELF a code object"

    def call(name: str, answer: Any) -> Any:
        def made(*args: Any) -> Any:
            asked.append((name, *args))
            return answer(*args) if callable(answer) else answer

        return made

    def fill(data: bytes) -> Any:
        def into(_program: Any, buffer: bytearray) -> Any:
            buffer[:] = data
            return (0,)

        return into

    program = types.SimpleNamespace(createRef=lambda: "reference")
    rtc = types.ModuleType("hip.hiprtc")
    rtc.hiprtcResult = types.SimpleNamespace(HIPRTC_SUCCESS=0)  # type: ignore[attr-defined]
    for name, answer in {
        "hiprtcVersion": (0, 7, 2), "hiprtcCreateProgram": (0, program), "hiprtcCompileProgram": (0,),
        "hiprtcGetProgramLogSize": (0, 3), "hiprtcGetProgramLog": fill(b"log"), "hiprtcGetCodeSize": (0, len(code)),
        "hiprtcGetCode": fill(code), "hiprtcDestroyProgram": (0,),
    }.items():  # fmt: skip
        setattr(rtc, name, call(name, answer))
    imitate(monkeypatch, FakeHip())
    sys.modules["hip"].hiprtc = rtc  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hip.hiprtc", rtc)
    monkeypatch.delenv("MEGAKERNEL_HIPCXX", raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    hip_compiler.find_compiler.cache_clear()
    try:
        found = hip_compiler.find_compiler()
        assert (found.kind, found.version) == ("hiprtc", "hiprtc 7.2")
        source = KernelSource(TEXT, {"megakernel_abi.h": "// h"}, find_target("gfx942"))
        assert hip_compiler.compile_code_object(source, INCLUDE, found) == code
        created = next(c for c in asked if c[0] == "hiprtcCreateProgram")
        assert created[2:4] == (b"kernel.hip", 2) and created[5] == [b"stdint.h", b"megakernel_abi.h"]
        compiled = next(c for c in asked if c[0] == "hiprtcCompileProgram")
        assert compiled[2] == len(compiled[3]) and b"--offload-arch=gfx942" in compiled[3]
        assert asked[-1] == ("hiprtcDestroyProgram", "reference")
        rtc.hiprtcCompileProgram = call("hiprtcCompileProgram", (6,))  # type: ignore[attr-defined]
        with pytest.raises(hip_compiler.BuildError, match="log"):
            hip_compiler.compile_code_object(source, INCLUDE, found)
    finally:
        hip_compiler.find_compiler.cache_clear()


def test_windows_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process by peer access, in another by a handle; a window is fine-grained memory."""
    fake = FakeHip(count=2)
    imitate(monkeypatch, fake)
    one, two = hip.devices()
    assert isinstance(one, hip.HipDevice)
    window = one.allocate_window(1000, shared=True)
    one.reach(one)
    assert not any(call[0] == "hipDeviceEnablePeerAccess" for call in fake.calls)
    one.reach(two)
    assert ("hipDeviceEnablePeerAccess", 1, 0) in fake.calls
    fake.answers["hipDeviceEnablePeerAccess"] = (PEER_KNOWN,)
    one.reach(two)  # it was enabled before
    opened = two.open_window(one.window_handle(window), 1000)
    assert opened.address == window.address
    two.free(opened)
    assert ("hipIpcCloseMemHandle", window.address) in fake.calls
    fake.answers["hipDeviceCanAccessPeer"] = (OK, 0)
    with pytest.raises(DeviceUnavailable, match=r"GPU 0 \(a GPU\) cannot reach the memory of GPU 1 .*Infinity Fabric"):
        one.reach(two)
    fake.answers["hipIpcOpenMemHandle"] = (FAILED, 0)
    with pytest.raises(
        DeviceUnavailable, match=r"hip:1 cannot open the window of a peer .*run all ranks in one process"
    ):
        two.open_window(bytes(64), 1000)
