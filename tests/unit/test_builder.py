"""Builder without a compiler: fusion, lowering, memory plan, packed weights, source text, cache, saved programs."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.architectures import random_weights, shape_config
from megakernel.builder import cache as cache_module
from megakernel.builder.build import Plan, make_plan, plan_source
from megakernel.builder.cache import cache_key, compiled, try_load
from megakernel.builder.dealing import sums_bytes
from megakernel.builder.kernel import variants_of
from megakernel.builder.layout import unpack, weight_layout
from megakernel.builder.memory import ancestors, touches
from megakernel.builder.program import Manifest, Program
from megakernel.builder.weights import pack_weights
from megakernel.errors import BuildError, CapacityError, CheckpointError, LoweringError, ProgramError, ScheduleError
from megakernel.opening import save_ranks
from megakernel.scheduler.verify import verify
from megakernel.target import TARGETS, find_target
from megakernel.tasks.task import DType

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 40, "intermediate_size": 68,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 101,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 300, "tie_word_embeddings": False, "attention_bias": True,
    "mlp_bias": True, "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
CPU = find_target("cpu-avx2")


def tiny_plan(**options: Any) -> Plan:
    return make_plan(TINY, CPU, **{"dtype": "f32", "max_context": 200, **options})


# ------------------------------------------------------------------------------------------ plans
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_plan_for_every_target(target: str) -> None:
    if TARGETS[target].backend == "cuda":
        made = make_plan({**TINY, "head_dim": 64}, find_target(target), dtype="bf16", max_context=200)
    else:
        made = make_plan(TINY, find_target(target), dtype="f32", max_context=200)
    assert made.schedule.workers == TARGETS[target].workers
    assert [n.task.name for n in made.lowered.nodes][-2:] == ["sample", "advance"]


def test_products_are_dealt_by_shares_where_it_pays() -> None:
    """Few tiles a worker, a long input, and steps of many rows; behind the output there is room for the sums."""
    config, target = shape_config("llama-3.2-1b"), find_target("sm_90a")
    few, many = (make_plan(config, target, max_rows=rows, max_context=512, max_slots=64).lowered for rows in (16, 64))
    dealt = [n for n in many.nodes if getattr(n.variant, "dealt", False)]
    assert [n.name for n in dealt] == [f"layers.{i}.mlp_residual" for i in range(16)]
    assert not any(getattr(n.variant, "dealt", False) for n in few.nodes)
    name, columns = dealt[0].tensors["output"], dealt[0].sizes["n"]
    assert (many.tensors[name].rows - few.tensors[name].rows) * columns * 4 >= sums_bytes(columns, 64)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 78, 132])
def test_a_plan_for_any_number_of_workers(workers: int) -> None:
    made = make_plan(TINY, CPU.with_workers(workers), dtype="f32", max_context=200)
    assert made.schedule.workers == workers


def test_memory_is_reused_only_after_all_readers() -> None:
    made = tiny_plan()
    writers, readers = touches(made.lowered.nodes)
    before = ancestors(made.lowered.nodes)
    at, pairs = made.memory.at, 0
    names = sorted(at, key=lambda t: min(writers[t]))
    for i, old in enumerate(names):
        for new in names[i + 1 :]:
            a, b = at[old], at[new]
            if a[0] < b[0] + b[1] and b[0] < a[0] + a[1]:
                pairs += 1
                for w in writers[new]:
                    assert all(before[w] >> n & 1 for n in writers[old] | readers.get(old, set())), (old, new)
    assert pairs > 0, "nothing is reused; the test would prove nothing"
    assert sum(size for _, size in at.values()) > made.memory.total


def test_verify_refuses_a_memory_plan_that_overlaps() -> None:
    made = tiny_plan()
    qkv, glu = "layers.0.attention.qkv", "layers.0.attention.partials"
    broken = {**made.memory.at, glu: made.memory.at[qkv]}
    with pytest.raises(ScheduleError):
        verify(made.schedule, broken)


def test_limits_are_checked() -> None:
    with pytest.raises(CapacityError, match="allows 1 to 300"):
        tiny_plan(max_context=301)
    with pytest.raises(CapacityError, match="max_rows 513: a step carries 1 to 512 rows"):
        tiny_plan(max_rows=513)
    with pytest.raises(LoweringError, match="unknown dtype 'int4'"):
        tiny_plan(dtype="int4")
    with pytest.raises(LoweringError, match=r"unknown dtype 'f8'; known: f32, bf16, f16$"):
        tiny_plan(dtype="f8")
    with pytest.raises(LoweringError, match="unknown kv_dtype 'e4m3'; known: f32, bf16, f16, f8"):
        tiny_plan(kv_dtype="e4m3")
    with pytest.raises(LoweringError, match="unknown policy"):
        tiny_plan(policy="best")


def test_the_kernel_source_is_a_short_type_list() -> None:
    made = make_plan(shape_config("llama-3.2-1b"), CPU)
    text = plan_source(made).text
    assert len(text.splitlines()) < 60
    assert len(variants_of(made.lowered.nodes)) < 12
    assert not any(word in text for word in ("for (", "while", "return"))


def test_golden_kernel_source() -> None:
    golden = Path(__file__).parent.parent / "golden" / "tiny_llama_kernel.cpp"
    text = plan_source(tiny_plan()).text
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "generated source changed; look at it, then run with UPDATE_GOLDEN=1"


# ------------------------------------------------------------------------------------------ weights
def manifest_of(made: Plan, dtype: str) -> Manifest:
    from megakernel.builder.build import _manifest

    return _manifest(made, plan_source(made), "tiny", 1, "balanced")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_packed_weights_hold_every_element(dtype: str) -> None:
    made = tiny_plan(dtype=dtype)
    manifest = manifest_of(made, dtype)
    source = random_weights(made.graph, 3, "f32")
    blob = np.full(manifest.weights_bytes, 0xEE, np.uint8)

    def read(name: str, kind: str, rows: slice) -> Any:
        import ml_dtypes

        types = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
        return np.asarray(source(name)).astype(types[kind])[rows]

    def write(at: int, data: Any) -> None:
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        assert (blob[at : at + raw.size] == 0xEE).all(), "written twice"
        blob[at : at + raw.size] = raw

    pack_weights(manifest, CPU, read, write)
    checked = 0
    for w in manifest.weights:
        raw = blob[w.offset : w.offset + w.bytes]
        if w.kind == "matrix":
            want = np.concatenate([read(p.tensor, dtype, slice(p.start, p.stop)) for p in w.parts])
            got = unpack(weight_layout(CPU, DType(dtype), w.n, w.k), raw.view(want.dtype))
        elif w.kind == "interleaved":
            half = CPU.tile_n // 2
            padded = -(-w.n // 2 // half) * CPU.tile_n
            rows = unpack(
                weight_layout(CPU, DType(dtype), padded, w.k),
                raw.view(read(w.parts[0].tensor, dtype, slice(0, 1)).dtype),
            )
            tiles = rows.reshape(-1, 2, half, w.k)
            got = np.concatenate([tiles[:, i].reshape(-1, w.k)[: w.n // 2] for i in (0, 1)])
            want = np.concatenate([read(p.tensor, dtype, slice(p.start, p.stop)) for p in w.parts])
        elif w.kind == "vector" and not w.k:
            want = np.concatenate([read(p.tensor, "f32", slice(p.start, p.stop)) for p in w.parts])
            got = raw.view(np.float32)[: want.size]
        else:
            continue
        assert np.array_equal(got.view(np.uint8), want.view(np.uint8)), w.name
        checked += 1
    assert checked >= 12


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_weight_that_is_not_finite_is_named(name: str, bad: float) -> None:
    made = tiny_plan(dtype="bf16")
    source = random_weights(made.graph, 3, "f32")

    def read(tensor: str, kind: str, rows: slice) -> Any:
        import ml_dtypes

        data = np.array(source(tensor), dtype=np.float32)
        if tensor == name:
            data.reshape(-1)[-1] = bad
        return data.astype(np.float32 if kind == "f32" else ml_dtypes.bfloat16)[rows]

    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        pack_weights(manifest_of(made, "bf16"), CPU, read, lambda at, data: None)


# ------------------------------------------------------------------------------------------ cache
class FakeDevice:
    """A compiler that writes the source's length, slowly if asked to."""

    name = "fake"

    def __init__(self, identity: str = "cc 1", delay: float = 0.0) -> None:
        self.identity, self.delay, self.compiles = identity, delay, 0

    def compiler_id(self, target: Any) -> str:
        return self.identity

    def compile(self, source: Any, include: Path, output: Path) -> None:
        self.compiles += 1
        output.write_bytes(b"half")
        time.sleep(self.delay)
        output.write_bytes(source.text.encode())


def test_a_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    device, source = FakeDevice(), plan_source(tiny_plan())
    first = compiled(source, device, tmp_path)  # type: ignore[arg-type]
    assert compiled(source, device, tmp_path) == first and device.compiles == 1  # type: ignore[arg-type]


def test_the_key_covers_source_flags_target_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plan_source(tiny_plan())
    keys = {cache_key(source, "cc 1")}
    keys.add(cache_key(source, "cc 2"))
    keys.add(cache_key(replace(source, text=source.text + " "), "cc 1"))
    keys.add(cache_key(replace(source, chaos=True), "cc 1"))
    keys.add(cache_key(replace(source, trace=True), "cc 1"))
    keys.add(cache_key(replace(source, target=find_target("cpu-generic")), "cc 1"))
    keys.add(cache_key(replace(source, headers={"megakernel_abi.h": "x"}), "cc 1"))
    copy = cache_module.PACKAGE / "tasks" / "task.py"
    monkeypatch.setattr(cache_module, "device_sources", lambda: (copy,))
    keys.add(cache_key(source, "cc 1"))
    assert len(keys) == 8


def test_a_damaged_entry_is_built_again(tmp_path: Path) -> None:
    device, source = FakeDevice(), plan_source(tiny_plan())
    binary = compiled(source, device, tmp_path)  # type: ignore[arg-type]
    binary.write_bytes(b"")
    assert try_load(binary.parent) is None
    assert compiled(source, device, tmp_path).read_bytes() == source.text.encode()  # type: ignore[arg-type]
    assert device.compiles == 2


def _build_in_process(folder: str, delay: float) -> None:
    compiled(plan_source(tiny_plan()), FakeDevice(delay=delay), Path(folder))  # type: ignore[arg-type]


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_build_in_process, args=(str(tmp_path), 0.2)) for _ in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
        assert w.exitcode == 0
    entries = [p for p in (tmp_path / "kernels").iterdir()]
    assert len(entries) == 1 and try_load(entries[0]) is not None


def test_a_build_killed_in_the_middle_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    code = f"from tests.unit.test_builder import _build_in_process; _build_in_process({str(tmp_path)!r}, 60)"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("kernels/.build-*/kernel.bin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.kill()
    child.wait()
    device, source = FakeDevice(), plan_source(tiny_plan())
    assert compiled(source, device, tmp_path).read_bytes() == source.text.encode()  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(BuildError, match="MEGAKERNEL_CACHE"):
        compiled(plan_source(tiny_plan()), FakeDevice(), blocked)  # type: ignore[arg-type]
    assert blocked.read_text() == "not a folder"


# ------------------------------------------------------------------------------------------ programs
def saved(tmp_path: Path) -> tuple[Program, Path]:
    from megakernel.builder.build import build_program

    program = build_program(TINY, CPU, FakeDevice(), cache=tmp_path / "cache", dtype="f32", max_context=200)  # type: ignore[arg-type]
    return program, program.save(tmp_path / "program")


def test_save_and_load(tmp_path: Path) -> None:
    program, folder = saved(tmp_path)
    again = Program.load(folder)
    assert again.manifest == program.manifest
    assert again.records.tobytes() == program.records.tobytes()
    assert again.source == program.source and again.binary.read_bytes() == program.binary.read_bytes()
    with pytest.raises(ProgramError, match="exists"):
        program.save(folder)


def test_a_program_that_another_process_saves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for it and the rename; what that one made stays."""
    program, folder = saved(tmp_path)
    late, rename = tmp_path / "late", os.rename

    def after_another(source: Path, target: Path) -> None:
        shutil.copytree(folder, late)
        rename(source, target)

    monkeypatch.setattr(os, "rename", after_another)
    with pytest.raises(ProgramError, match="late exists; give a new folder or remove it"):
        program.write(late)
    assert Program.load(late).manifest == program.manifest
    assert {p.name for p in tmp_path.iterdir() if p.name.startswith(".")} == set()


def test_ranks_go_to_a_new_folder_too(tmp_path: Path) -> None:
    """Never beside the files of another program."""
    program, folder = saved(tmp_path)
    of_two = replace(program, manifest=replace(program.manifest, ranks=2))
    with pytest.raises(ProgramError, match="exists; give a new folder"):
        save_ranks(of_two, TINY, CPU, folder)
    assert not (folder / "rank0").exists()


@pytest.mark.parametrize("name", ["records.npy", "kernel.bin", "manifest.json"])
def test_a_changed_file_is_refused(tmp_path: Path, name: str) -> None:
    _, folder = saved(tmp_path)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(bytes(data))
    with pytest.raises(ProgramError, match=name):
        Program.load(folder)


@pytest.mark.parametrize("sums", ["[]", "null", "{}", '{"kernel.bin": 1}', "not JSON"])
def test_sums_that_are_damaged_are_refused(tmp_path: Path, sums: str) -> None:
    """A file without a sum would be read unchecked."""
    _, folder = saved(tmp_path)
    (folder / "sums.json").write_text(sums)
    with pytest.raises(ProgramError, match="not a saved program"):
        Program.load(folder)


def test_texts_beside_a_program_have_sums_too(tmp_path: Path) -> None:
    program, _ = saved(tmp_path)
    folder = program.save(tmp_path / "more", {"report.json": "{}"})
    assert Program.load(folder).manifest == program.manifest
    (folder / "report.json").write_text("{ }")
    with pytest.raises(ProgramError, match=r"report\.json: content changed"):
        Program.load(folder)


def test_another_abi_is_refused(tmp_path: Path) -> None:
    program, _ = saved(tmp_path)
    other = replace(program, manifest=replace(program.manifest, abi_hash=1))
    with pytest.raises(ProgramError, match="record layout"):
        Program.load(other.save(tmp_path / "other"))


def test_a_folder_that_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="not a saved program"):
        Program.load(tmp_path)


def test_manifest_of_another_format() -> None:
    with pytest.raises(ProgramError, match="format 99"):
        Manifest.from_json(json.dumps({"format": 99}))


def test_a_whole_program_comes_from_the_cache(tmp_path: Path) -> None:
    from megakernel.builder.build import build_program

    stages: list[str] = []
    device = FakeDevice()

    def build(**options: Any) -> Program:
        stages.clear()
        return build_program(
            TINY,
            CPU,
            device,
            cache=tmp_path,
            dtype="f32",
            max_context=200,
            progress=stages.append,
            **options,  # type: ignore[arg-type]
        )

    first = build()
    assert stages == ["schedule", "compile"]
    again = build()
    assert stages == [] and again.manifest == first.manifest
    assert again.records.tobytes() == first.records.tobytes()
    assert build(max_slots=3).manifest.max_slots == 3 and stages
    entries = sorted((tmp_path / "programs").iterdir())
    assert len(entries) == 2
    for entry in entries:
        (entry / "records.npy").write_bytes(b"")
    assert build().records.tobytes() == first.records.tobytes() and stages == ["schedule", "compile"]
