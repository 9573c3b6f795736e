"""Every CPU target compiles without a warning, whatever this machine can run; the library needs no C++ runtime."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megakernel.builder.kernel import kernel_source
from megakernel.device.cpu import ISA_NEEDS, CpuDevice, best_target, compile_source, find_compiler
from megakernel.device.device import KernelSource
from megakernel.errors import BuildError, NoCompiler, ProgramError
from megakernel.target import find_target
from megakernel.tasks import advance, attention, combine, embedding, matmul, sample
from megakernel.tasks.record import abi_hash
from megakernel.tasks.task import DType, all_fields

from .harness import ROOT


def source_for(name: str) -> KernelSource:
    target, kind = find_target(name), DType.BF16
    nodes = (
        embedding.node("e", cols=64, table="t", output="x", dtype=kind),
        matmul.node("m", n=64, k=64, input="x", output="y", weight="w", dtype=kind, tile_n=target.tile_n, gamma="g"),
        attention.node(
            "a", heads=3, kv_heads=1, head_dim=16, qkv="y", partials="p", kv_layer=0, kv_dtype=kind, page_tokens=32,
            piece_tokens=64, max_pieces=2, splits=1, scale=0.25,
        ),
        combine.node("c", heads=3, kv_heads=1, head_dim=16, partials="p", output="o", piece_tokens=64, max_pieces=2),
        sample.node("s", vocab=64, logits="y", scaled="z", result="r"),
        advance.node("adv", result="r"),
    )  # fmt: skip
    return kernel_source(nodes, target)


@pytest.mark.parametrize("name", ISA_NEEDS)
def test_compiles_without_a_warning(name: str, tmp_path: Path) -> None:
    output = tmp_path / "kernel.so"
    compile_source(source_for(name), ROOT, output, find_compiler(), ("-Werror",))
    if shutil.which("nm"):
        names = subprocess.run(["nm", "-D", str(output)], capture_output=True, text=True, check=True).stdout
        assert "mk_open" in names and "GLIBCXX" not in names and "CXXABI" not in names


def test_best_target() -> None:
    assert best_target(frozenset()) == "cpu-generic"
    assert best_target(frozenset({"avx2", "fma", "f16c", "sse2"})) == "cpu-avx2"
    assert best_target(ISA_NEEDS["cpu-avx512"]) == "cpu-avx512"


def test_a_compiler_that_is_not_there() -> None:
    with pytest.raises(NoCompiler, match="no-such-compiler"):
        find_compiler("no-such-compiler -O1")


def test_a_compiler_that_fails_gives_its_log(tmp_path: Path) -> None:
    source = source_for("cpu-generic")
    broken = KernelSource(source.text + "\nthis is not C++;\n", source.headers, source.target)
    with pytest.raises(BuildError, match="this is not"):
        compile_source(broken, ROOT, tmp_path / "kernel.so", find_compiler())
    assert not (tmp_path / "kernel.so").exists()


def test_a_file_that_is_no_kernel(tmp_path: Path) -> None:
    bad = tmp_path / "kernel.so"
    bad.write_bytes(b"nothing")
    device = CpuDevice()
    with pytest.raises(ProgramError, match="not a kernel"):
        device.load(bad, device.target, abi_hash(all_fields()))
    with pytest.raises(ProgramError, match="sm_90a"):
        device.load(bad, find_target("sm_90a"), 0)


def test_another_layout_is_refused(tmp_path: Path) -> None:
    device = CpuDevice()
    output = tmp_path / "kernel.so"
    device.compile(source_for(device.target.name), ROOT, output)
    with pytest.raises(ProgramError, match="record layout"):
        device.load(output, device.target, 1)
