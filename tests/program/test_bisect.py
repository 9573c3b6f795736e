"""The first task that computes something wrong is found, and nothing else is blamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megakernel import bisect
from megakernel.architectures import RandomWeights, random_weights
from megakernel.bisect import Finding, compare
from megakernel.builder.build import build_graph, build_program, rank_program
from megakernel.checkpoint import GenerationDefaults
from megakernel.cli import app
from megakernel.errors import CapacityError, InvalidRequest
from megakernel.origin import Origin
from megakernel.ranks import LocalRank, Ranks
from megakernel.runtime import Runtime
from megakernel.settings import read_settings
from tests.models.quick import QuickDevice

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 72, "intermediate_size": 104,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 263,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
OLMO = {**CONFIG, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 263, 21)]  # a step of 16 rows and one of 5
Change = Callable[[str, np.ndarray], np.ndarray]


def findings(
    config: dict[str, Any], change: Change | None = None, dtype: str = "f32", limit: float | None = 1e-4, **fields: Any
) -> tuple[Finding, ...]:
    """With the weights that the kernel gets passed through `change`."""
    device, graph = QuickDevice(), build_graph(config)
    target = replace(device.target, workers=3, **fields)
    weights: RandomWeights = random_weights(graph, seed=2, dtype=dtype)
    program = build_program(
        config, target, device, cache=read_settings().cache, dtype=dtype, max_context=64, max_slots=1, keep_tensors=True
    )

    def read(name: str, dtype: str, rows: slice) -> np.ndarray:
        data = np.array(weights.read(name, dtype, rows))
        return change(name, data) if change else data

    origin = Origin("tiny", config, lambda n, d, r: np.asarray(weights.read(n, d, r)), None, GenerationDefaults())
    runtime = Runtime(program, device, read)
    try:
        return compare(runtime, graph, origin, IDS, limit)
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("config", "fields"),
    [(CONFIG, {}), (OLMO, {}), (CONFIG, {"rotary_multiple": 32}), (OLMO, {"rotary_multiple": 32, "head_multiple": 24})],
    ids=["qwen3", "olmo2", "pairs", "padded"],
)
def test_every_tensor_of_a_good_step_agrees(config: dict[str, Any], fields: dict[str, Any]) -> None:
    found = findings(config, **fields)
    names = {f.tensor for f in found}
    assert {"embedding", "layers.2.attention.qkv", "layers.1.attention", "layers.0.glu", "logits"} <= names
    assert not [f for f in found if f.bad]


@pytest.mark.parametrize(
    ("tensor", "node"),
    [
        ("model.layers.1.mlp.down_proj.weight", "layers.1.mlp_residual"),
        ("model.layers.0.self_attn.k_proj.weight", "layers.0.attention.qkv"),
        ("model.layers.2.self_attn.q_norm.weight", "layers.2.attention.combine"),
        ("model.norm.weight", "logits"),
    ],
)
def test_the_first_bad_task_is_named(tensor: str, node: str) -> None:
    found = findings(CONFIG, lambda name, data: data + 0.5 if name == tensor else data)
    first = next(f for f in found if f.bad)
    assert first.node == node and first.limit == 1e-4 and first.got != first.expected


def test_rounding_alone_is_no_task_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model's own sums cancel out, rounding exceeds any fixed limit; here the limit is below all rounding."""
    monkeypatch.setitem(bisect.LIMITS, "bf16", 1e-5)  # type: ignore[attr-defined]  # a dict underneath
    found = findings(CONFIG, dtype="bf16", limit=None)
    assert max(f.error for f in found) > 1e-3 and not [f for f in found if f.bad]
    assert all(f.bad for f in findings(CONFIG, dtype="bf16", limit=1e-5) if f.tensor == "logits")

    wrong = "model.layers.1.mlp.down_proj.weight"
    found = findings(CONFIG, lambda name, data: data + data.dtype.type(0.5) * (name == wrong), dtype="bf16", limit=None)
    assert next(f.node for f in found if f.bad) == "layers.1.mlp_residual"


def test_the_tile_and_the_worker_are_named() -> None:
    """One weight of one output is wrong: its column, the tile of that column, and the worker with that tile."""

    def change(name: str, data: np.ndarray) -> np.ndarray:
        if name == "model.layers.1.self_attn.o_proj.weight":
            data[50, 3] += 4.0
        return data

    first = next(f for f in findings(CONFIG, change) if f.bad)
    assert (first.node, first.column, first.tile) == ("layers.1.attention_residual", 50, 50 // 32)
    assert 0 <= first.worker < 3


def findings_of_two(config: dict[str, Any], change: Change | None = None) -> tuple[Finding, ...]:
    """Of two devices; the weights of the second one's kernel are passed through `change`."""
    device, graph = QuickDevice(), build_graph(config)
    target = replace(device.target, workers=2)
    weights: RandomWeights = random_weights(graph, seed=2)
    program = build_program(
        config, target, device, cache=read_settings().cache, dtype="f32", max_context=64, max_slots=1,
        keep_tensors=True, tp=2,
    )  # fmt: skip

    def read(name: str, dtype: str, rows: slice) -> np.ndarray:
        return np.array(weights.read(name, dtype, rows))

    def changed(name: str, dtype: str, rows: slice) -> np.ndarray:
        return change(name, read(name, dtype, rows)) if change else read(name, dtype, rows)

    ranks = Ranks(program, device, read)
    try:
        ranks.join([LocalRank(Runtime(rank_program(program, config, target, 1), device, changed), "rank 1")])
        return compare(ranks, graph, Origin("tiny", config, read, None, GenerationDefaults()), IDS, 1e-4)
    finally:
        ranks.close()


@pytest.mark.parametrize("config", [CONFIG, OLMO], ids=["qwen3", "olmo2"])
def test_every_tensor_of_two_devices_agrees(config: dict[str, Any]) -> None:
    """Also where a norm over all heads keeps attentions whole."""
    found = findings_of_two(config)
    assert not [f for f in found if f.bad]
    of_rank = [[f.tensor for f in found if f.rank == r] for r in range(2)]
    assert of_rank[0] == of_rank[1]
    assert {"layers.2.attention.qkv", "layers.0.mlp_output.part", "layers.1.mlp_residual", "logits.part", "logits"} <= {
        *of_rank[0]
    }


def test_the_device_with_the_bad_part_is_named() -> None:
    """Rank 1's product of its own heads is wrong, then the sum on both; nothing of rank 0 before that."""
    name = "model.layers.1.self_attn.o_proj.weight"
    found = findings_of_two(CONFIG, lambda tensor, data: data + 0.5 if tensor == name else data)
    bad = [f for f in found if f.bad]
    assert (bad[0].node, bad[0].task, bad[0].rank) == ("layers.1.attention_output.part", "matmul", 1)
    assert [(f.node, f.rank) for f in bad[1:3]] == [("layers.1.attention_residual", r) for r in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from safetensors.numpy import save_file

    path = tmp_path_factory.mktemp("bisect")
    weights = random_weights(build_graph(CONFIG), seed=2)
    from megakernel.architectures import parameter_shapes

    save_file({n: np.array(weights.read(n)) for n in parameter_shapes(build_graph(CONFIG))}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    yield path


def test_the_command(folder: Path) -> None:
    run = CliRunner().invoke(app, ["bisect", str(folder), "--dtype", "f32", "--json", "--all"])
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.exit_code == 0 and lines[-1]["bad"] == 0 and lines[-1]["tensors"] == len(lines) - 1
    run = CliRunner().invoke(app, ["bisect", str(folder), "--dtype", "f32", "--json", "--limit", "0"])
    assert run.exit_code == 1 and json.loads(run.stdout.splitlines()[-1])["first_bad"] == "layers.0.attention.qkv"
    run = CliRunner().invoke(app, ["bisect", str(folder), "--dtype", "f32", "--json", "--limit", "0", "--tp", "2"])
    last = json.loads(run.stdout.splitlines()[-1])
    assert run.exit_code == 1 and (last["first_bad"], last["first_bad_rank"]) == ("layers.0.attention.qkv", 0)
    sentence = f"of layers.0.attention.qkv on rank 0 (cpu); {last['bad']} of {last['tensors']} tensors are bad\n"
    assert sentence in run.output  # one line where no terminal is
    run = CliRunner().invoke(app, ["bisect", str(folder), "--tokens", "128"])
    assert run.exit_code == 1 and "expected 1 to 127 tokens, got 128" in run.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seed", "-1"), "bisect: seed: expected an integer of at least 0, got -1"),
        (("--limit", "-1"), "bisect: limit: expected a number of at least 0, got -1.0"),
        (("--limit", "nan"), "bisect: limit: expected a number of at least 0, got nan"),
        (("--token-ids", "1,263"), "bisect: expected token ids from 0 to 262, got 263 at place 1"),
        (("--token-ids=-1"), "bisect: expected token ids from 0 to 262, got -1 at place 0"),
    ],
)
def test_wrong_values_are_one_sentence(folder: Path, options: tuple[str, ...] | str, words: str) -> None:
    run = CliRunner().invoke(app, ["bisect", str(folder), *([options] if isinstance(options, str) else options)])
    assert run.exit_code == 1 and run.output == f"error: {words}\n"


def test_a_program_that_reuses_memory_is_refused() -> None:
    device, graph = QuickDevice(), build_graph(CONFIG)
    program = build_program(CONFIG, device.target, device, cache=read_settings().cache, dtype="f32", max_context=64)
    weights = random_weights(graph, seed=2)
    runtime = Runtime(program, device, weights.read)
    origin = Origin("tiny", CONFIG, lambda n, d, r: np.asarray(weights.read(n, d, r)), None, GenerationDefaults())
    try:
        with pytest.raises(InvalidRequest, match="keep_tensors"):
            compare(runtime, graph, origin, IDS, 1e-4)
        with pytest.raises(CapacityError):
            from megakernel.bisect import _prompt

            _prompt(0, graph, 0)
    finally:
        runtime.close()
