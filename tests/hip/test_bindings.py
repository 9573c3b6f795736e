"""The host half through the real hip-python, above an imitation of the runtime library in C.

Names, numbers and order of arguments are what the package takes, and what it was asked for reaches the driver. Needs
the package, neither ROCm nor a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megakernel.builder.cache import INCLUDE
from megakernel.device import hip, hip_peer
from megakernel.device.cpu import find_compiler
from megakernel.device.device import KernelSource
from megakernel.target import find_target
from tests.hip.fake_runtime import SIGNATURES
from tests.hip.test_host import ABI, TEXT

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hip") is None, reason="hip-python is not installed: pip install hip-python"
)


def test_signatures_are_those_of_the_package() -> None:
    from hip import hip as package

    for name, parameters in SIGNATURES.items():
        head = (getattr(package, name).__doc__ or "").splitlines()[0]
        inside = re.fullmatch(rf"{name}\((.*)\)", head)
        assert inside, f"{name}: {head!r}"
        got = tuple(p.split()[-1] for p in inside.group(1).split(", ") if p)
        assert got == parameters, f"{name} takes {got}"


def test_constants_are_those_of_the_package() -> None:
    from hip import hip as package

    assert package.hipHostMallocCoherent == hip.COHERENT and package.hipStreamNonBlocking == hip.NON_BLOCKING
    assert package.hipHostMallocMapped == hip.MAPPED and package.hipHostMallocPortable == hip.PORTABLE
    assert package.hipDeviceMallocFinegrained == hip_peer.FINE_GRAINED
    assert (
        package.hipIpcMemHandle_t().c_sizeof() == hip_peer.HANDLE_BYTES and package.hipIpcMemLazyEnablePeerAccess == 1
    )
    names = [n for n in dir(package.hipDeviceAttribute_t) if n.startswith("hipDeviceAttribute")]
    assert {f"hipDeviceAttribute{n}" for n in ("WallClockRate", "CooperativeLaunch", "NumberOfXccs")} <= set(names)


def test_a_device_through_the_package(tmp_path: Path) -> None:
    library, binary = tmp_path / "libamdhip64.so", tmp_path / "kernel.bin"
    source = str(HERE / "runtime.c")
    subprocess.run([*find_compiler(), "-x", "c", "-shared", "-fPIC", source, "-o", str(library)], check=True)
    hip.HipDevice(None).compile(KernelSource(TEXT, {}, find_target("gfx942")), INCLUDE, binary)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_ATTRIBUTE": "100000"}
    environment.pop("ROCM_PATH", None)
    line = [sys.executable, "-m", "tests.hip.bindings_child", str(library), str(binary), str(ABI)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    calls = [line.removeprefix("call ") for line in done.stderr.splitlines() if line.startswith("call ")]
    assert "host 40000003" in calls and "load ELF" in calls and "function mk_worker" in calls
    assert "occupancy 256 0" in calls and "copy 16 1" in calls and "copy 16 2" in calls
    total = done.stdout.removeprefix("sum ").strip()
    launch = calls.index(f"launch 4 1 1 256 1 1 0 {total}")
    assert calls[launch - 1] == calls[launch + 1] == "record"


def test_why_there_is_no_device_without_the_runtime(tmp_path: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "ROCM_PATH": str(tmp_path)}
    text = "from megakernel.device import hip; print(hip.devices()[0].availability().reason)"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    assert "the ROCm runtime is not installed (failed to dlopen" in done.stdout or "sees no GPU" in done.stdout
