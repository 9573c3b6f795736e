"""How many rows a step carries: the cost model's choice, and what it is made of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from megakernel.builder.build import make_plan
from megakernel.builder.layout import page_layouts
from megakernel.builder.rows import default_rows, first_chunk, step_us
from megakernel.errors import CapacityError, LoweringError
from megakernel.target import find_target
from megakernel.tasks.advance import AdvanceConfig
from megakernel.tasks.combine import Combine
from megakernel.tasks.embedding import Embedding
from megakernel.tasks.matmul import Matmul, MatmulConfig
from megakernel.tasks.norm import Norm
from megakernel.tasks.record import STEP, TILE_ROWS, abi_hash, row_capacity, step_header
from megakernel.tasks.task import DType, TaskNode, all_fields
from tests.gpu.machine import MODELS

CPU = find_target("cpu-avx2")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 301,
    "max_position_embeddings": 300000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def test_a_step_streams_and_then_computes() -> None:
    assert step_us(CPU, 20e6, 1e6, 1) == pytest.approx(1000)  # 20 MB at 20 GB/s
    assert step_us(CPU, 20e6, 1e6, 400) == pytest.approx(4000)  # 400 MFLOP at 100 GFLOP/s


def test_rows_follow_the_machine() -> None:
    """16-bit weights are streamed in half the time, so half the rows hide it; a small workspace is kept small."""
    assert default_rows(CPU, 2e8, 2e8, 1e3) == 64
    assert default_rows(CPU, 4e8, 2e8, 1e3) == 128
    assert default_rows(replace(CPU, worker_gflops=5.0), 2e8, 2e8, 1e3) == TILE_ROWS
    assert default_rows(CPU, 4e8, 2e8, 8e6) == 32
    assert default_rows(find_target("sm_90a"), 2.5e9, 2.5e9, 1e6, room=64) == 64
    assert default_rows(find_target("sm_90a"), 2.5e9, 2.5e9, 1e6, room=64, alone=True) == TILE_ROWS
    assert default_rows(find_target("sm_90a"), 2.5e9, 2.5e9, 1e7, room=64) == 32
    assert default_rows(find_target("sm_90a"), 15e9, 15e9, 2e7, room=64) == 64
    assert default_rows(find_target("gfx942"), 2.5e9, 2.5e9, 1e6, room=TILE_ROWS) == TILE_ROWS


def test_the_first_chunk_fits_the_budget() -> None:
    assert first_chunk(CPU, 2e8, 2e8, 50_000.0, 128) == 25
    assert first_chunk(CPU, 2e8, 2e8, 1.0, 128) == 1
    assert first_chunk(CPU, 2e8, 2e8, 1e9, 128) == 128


def test_programs_get_what_the_model_says_or_what_was_asked_for() -> None:
    large = {**CONFIG, "hidden_size": 768, "intermediate_size": 2048}
    made = make_plan(large, CPU, dtype="bf16", max_context=512)
    assert made.limits.max_rows == 64
    sizes = made.lowered.tensors
    assert all(sizes[name].rows == 64 for name in sizes if name.endswith("partials"))
    assert sizes["logits"].rows == TILE_ROWS and sizes["sample.scaled"].rows == TILE_ROWS  # 8 slots want 8 tokens
    assert make_plan(CONFIG, CPU, max_rows=512, max_slots=40, max_context=512).lowered.tensors["logits"].rows == 40
    assert make_plan(CONFIG, CPU, max_rows=5, max_context=512).lowered.tensors["logits"].rows == 5


def test_a_workspace_has_a_limit() -> None:
    with pytest.raises(CapacityError, match=r"the workspace takes .* must stay below 4 GiB; lower max_rows"):
        make_plan({**CONFIG, "num_attention_heads": 48, "head_dim": 64}, CPU, max_rows=512, max_context=300000)
    with pytest.raises(LoweringError, match="max_rows 65: the kernels of target sm_90a have room for 64 rows"):
        make_plan({**CONFIG, "head_dim": 32}, find_target("sm_90a"), max_rows=65)
    with pytest.raises(LoweringError, match="max_rows 17: the kernels of target gfx942 have room for 16 rows"):
        make_plan({**CONFIG, "head_dim": 32}, find_target("gfx942"), max_rows=17)


@pytest.mark.parametrize("slots", [4, 40])
def test_a_gpu_with_steps_of_several_rows_has_room_for_their_inputs(slots: int) -> None:
    """Behind each product's output, as `PackedRows` and behind it `PackedInput` of the device half find them: squares,
    then the columns. A program for one row has none."""
    target = find_target("sm_90a")
    config = {**CONFIG, "head_dim": 32, "max_position_embeddings": 512}
    single, plain, made = (make_plan(config, target, max_rows=n, max_slots=slots, max_context=512) for n in (1, 16, 48))
    assert made.limits.wide(target) and not plain.limits.wide(target)
    seen = 0
    for node in made.lowered.nodes:
        if node.task is not Matmul:
            continue
        sampled = node.variant.cpp().find(".sampled = true") >= 0
        rows = made.limits.sampled_rows if sampled else 48
        behind = rows * node.sizes["n"] * 4 + (rows * target.workers * 16 if sampled else 0)
        columns = node.sizes["k_unit"] * node.sizes["units"]
        narrow, wide = 16 * 8 * 4 + 16 * columns * 2, 64 * 8 * 4 + 48 * columns * 2
        given = 0 if sampled else 16 * -(-node.sizes["n"] // 32) * (16 + 64)  # its output, packed
        size = made.lowered.tensors[node.tensors["output"]]
        assert size.bytes >= -(-behind // 256) * 256 + given + narrow + wide
        rows = plain.limits.sampled_rows if sampled else 16
        behind = rows * node.sizes["n"] * 4 + (rows * target.workers * 16 if sampled else 0)
        assert plain.lowered.tensors[node.tensors["output"]].bytes >= -(-behind // 256) * 256 + given + narrow
        assert sampled or single.lowered.tensors[node.tensors["output"]].rows == 1
        seen += 1
    assert seen == 4 * 2 + 1
    for plan, paced in ((plain, False), (made, True)):
        assert [n.variant.paced for n in plan.lowered.nodes if isinstance(n.variant, AdvanceConfig)] == [paced]


def _given(node: TaskNode) -> bool:
    assert isinstance(node.variant, MatmulConfig)
    return node.variant.given


def _normed(node: TaskNode) -> bool:
    assert isinstance(node.variant, MatmulConfig)
    return node.variant.norm


def _gives(node: TaskNode) -> bool:
    return bool(getattr(node.variant, "gives", False))


@pytest.mark.parametrize("rows", [1, 16, 48])
def test_inputs_are_given_packed_by_who_writes_them(rows: int) -> None:
    """Every product of a Llama: qkv and gate and up from a sum, o from `combine`, down from gate and up, the head from
    the last sum; the gamma is that of the reader. A program for one row gives nothing."""
    config = {**CONFIG, "head_dim": 32, "max_position_embeddings": 512}
    made = make_plan(config, find_target("sm_90a"), max_rows=rows, max_slots=4, max_context=512).lowered
    writers = {n.tensors["output"]: n for n in made.nodes if n.task in (Matmul, Embedding, Combine)}
    for node in (n for n in made.nodes if n.task is Matmul):
        writer = writers[node.tensors["input"]]
        assert _given(node) == _gives(writer) == (rows > 1), node.name
        if rows > 1:
            assert not _normed(node) or writer.weights["gamma"] == node.weights["gamma"]
            size, k = made.tensors[node.tensors["input"]], node.sizes["k"]
            assert size.bytes >= -(-rows * k * 4 // 256) * 256 + 16 * k // 32 * (16 + 64)


@pytest.mark.parametrize("rows", [16, 48])
def test_inputs_without_a_norm_are_given_in_wide_steps(rows: int) -> None:
    """o by `combine` and down by gate and up, in chunks of their own units; not sums, which others read, too."""
    config = {**CONFIG, "head_dim": 32, "max_position_embeddings": 512}
    nodes = make_plan(config, find_target("sm_90a"), max_rows=rows, max_slots=4, max_context=512).lowered.nodes
    found = []
    for writer, reader in pairwise(nodes):
        if getattr(reader.variant, "given_wide", False):
            assert not _normed(reader) and writer.tensors["output"] == reader.tensors["input"]
            assert getattr(writer.variant, "gives_wide", 0) == reader.sizes["k_unit"] // 32 > 0
            found.append(reader.name)
    assert found == ([n.name for n in nodes if n.task is Matmul and not _normed(n)] if rows > 16 else [])
    assert len(found) == sum(getattr(n.variant, "gives_wide", 0) > 0 for n in nodes)


@pytest.mark.parametrize("family", ["gemma2", "neox"])
def test_inputs_of_norms_and_of_several_products_are_not_given(family: str) -> None:
    config = MODELS[f"tiny-{family}"]
    nodes = make_plan(config, find_target("sm_90a"), max_rows=16, max_slots=4, max_context=256).lowered.nodes
    writers = {n.tensors["output"]: n for n in nodes if "output" in n.tensors}
    products = [n for n in nodes if n.task is Matmul]
    given = [_given(n) for n in products]
    assert any(given) and not all(given)
    for node in products:
        readers = [n for n in products if n.tensors["input"] == node.tensors["input"]]
        if writers[node.tensors["input"]].task is Norm or len(readers) > 1:
            assert not _given(node), node.name


def test_headers_grow_in_few_sizes() -> None:
    assert [row_capacity(n) for n in (1, 16, 17, 32, 33, 64, 500, 512)] == [16, 16, 32, 32, 64, 64, 512, 512]
    assert step_header(16) is STEP and STEP.size == 512
    assert step_header(64).size >= 24 + 64 * 24 and step_header(64).size % 512 == 0
    assert abi_hash(all_fields()) == abi_hash(all_fields(), 16) != abi_hash(all_fields(), 32)


# ---------------------------------------------------------------------------------------------- places in a page
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_pages_of_gpus_are_in_the_order_of_their_matrix_cores(dim: int) -> None:
    """The formulas of `key_at` and `value_at` in the CUDA half, in elements."""
    keys, values = page_layouts(find_target("sm_90a"), DType.BF16, dim, 64)
    t, d = np.arange(64)[:, None], np.arange(dim)[None, :]
    assert (keys == t // 8 * (dim * 8) + d // 32 * 256 + (t % 8 * 4 + d % 32 // 8) * 8 + d % 8).all()
    place = t // 32 * (dim * 32) + d // 8 * 256 + (d % 8 * 4 + t % 8 // 2) * 8 + t % 32 // 8 * 2 + t % 2
    assert (values == dim * 64 + place).all()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("dim", [64, 24])
def test_pages_of_waves_are_in_the_order_of_their_tiles(dim: int, dtype: DType) -> None:
    """The formula of `tile_index` in the HIP half: vectors of 16 bytes or 8 codes, if columns are a multiple of 16."""
    keys, values = page_layouts(find_target("gfx942"), dtype, dim, 32)
    t, d = np.arange(32)[:, None], np.arange(dim)[None, :]
    vector, pair = 4 if dtype is DType.F32 else 8, 4 // dtype.bytes
    assert (keys == (d // vector * 32 + t) * vector + d % vector).all()
    vector = vector if dim % 16 == 0 else pair
    assert (values == dim * 32 + (t // vector * dim + d) * vector + t % vector).all()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("target", ["cpu-avx2", "gfx942", "sm_90a"])
def test_every_place_of_a_page_is_used_once(target: str, dtype: DType) -> None:
    keys, values = page_layouts(find_target(target), dtype, 64, 32)
    assert sorted([*keys.ravel(), *values.ravel()]) == list(range(2 * 64 * 32))
