"""The scan of models/, the published shapes and random weights."""

from __future__ import annotations

import math
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import megakernel.architectures as architectures
from megakernel.architectures import (
    find_model,
    known_models,
    parameter_shapes,
    random_weights,
    shape_config,
    shape_names,
    shape_parameters,
)
from megakernel.errors import GraphError, UnknownArchitecture
from megakernel.graph import Graph

SUPPORTED = [n for n in shape_names() if shape_config(n)["architectures"][0] in known_models()]


def test_families_are_found() -> None:
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(known_models())
    assert find_model({"architectures": ["LlamaForCausalLM"]}).ARCHITECTURES == ("LlamaForCausalLM",)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LLamaForCausalLM"]}, "nearest: LlamaForCausalLM"),
        ({"architectures": ["Zzz"]}, "config names architecture Zzz; known: .*LlamaForCausalLM, "),
        ({"model_type": "llama"}, "none \\(model_type 'llama'\\)"),
        ({"architectures": None}, "none"),
    ],
)
def test_unknown_architecture(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownArchitecture, match=words):
        find_model(config)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (types.SimpleNamespace(), "expected ARCHITECTURES"),
        (types.SimpleNamespace(ARCHITECTURES=("A",)), "expected ARCHITECTURES"),
        (types.SimpleNamespace(ARCHITECTURES=("A", "A"), build=len), "claimed by another"),
    ],
)
def test_a_bad_model_file_fails_loudly(monkeypatch: pytest.MonkeyPatch, module: Any, words: str) -> None:
    monkeypatch.setattr(architectures.importlib, "import_module", lambda name: module)
    known_models.cache_clear()
    try:
        with pytest.raises(GraphError, match=words):
            known_models()
    finally:
        known_models.cache_clear()


def test_shapes_by_name() -> None:
    assert len(shape_names()) == 28
    assert {"llama-3.2-1b", "llama-3.1-70b", "qwen3-8b", "smollm2-135m"} <= set(SUPPORTED)
    assert shape_config("Llama-3.2-1B")["hidden_size"] == 2048 and "params" not in shape_config("llama-3.2-1b")
    with pytest.raises(
        UnknownArchitecture, match=r"no published shape 'llama-3.2-1'; known: smollm2-135m, .*nearest: llama"
    ):
        shape_config("llama-3.2-1")


@pytest.mark.parametrize("name", SUPPORTED)
def test_parameters_of_published_shapes(name: str) -> None:
    config = shape_config(name)
    shapes = parameter_shapes(find_model(config).build(config))
    assert sum(math.prod(shape) for shape in shapes.values()) == shape_parameters(name)


def tiny(**change: Any) -> Graph:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 131, "attention_bias": True, **change,
    }  # fmt: skip
    return find_model(config).build(config)


def test_random_weights_are_reproducible() -> None:
    graph = tiny()
    one, two, other = random_weights(graph), random_weights(graph), random_weights(graph, seed=1)
    names = list(parameter_shapes(graph))
    for name, shape in parameter_shapes(graph).items():
        assert one(name).shape == shape and one(name).dtype == np.float32
        np.testing.assert_array_equal(one(name), two(name))
        assert not np.array_equal(one(name), other(name))
    q, k = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    assert not np.array_equal(one(q), one(k)) and names[0] == "model.embed_tokens.weight"
    with pytest.raises(GraphError, match="no weight 'x'"):
        one("x")


def test_random_weights_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "BLOCK_ELEMENTS", 48 * 10)
    weights = random_weights(tiny(), dtype="bf16")
    whole = weights("model.embed_tokens.weight")
    assert whole.dtype == ml_dtypes.bfloat16
    for rows in (
        slice(0, 131),
        slice(0, 1),
        slice(9, 11),
        slice(10, 20),
        slice(95, 131),
        slice(130, None),
        slice(5, 5),
    ):
        part = weights.read("model.embed_tokens.weight", "f32", rows)
        assert part.dtype == np.float32
        np.testing.assert_array_equal(part, whole[rows].astype(np.float32))
    vector = weights.read("model.norm.weight", "f32", slice(3, 9))
    np.testing.assert_array_equal(vector, weights("model.norm.weight")[3:9].astype(np.float32))
    with pytest.raises(GraphError, match="steps of 1"):
        weights.read("model.norm.weight", "f32", slice(0, 8, 2))


def test_random_weights_keep_activations_sane() -> None:
    pytest.importorskip("torch")
    graph = tiny(hidden_size=192, intermediate_size=512, num_hidden_layers=12, vocab_size=1000)
    weights = random_weights(graph)
    matrix, gamma = weights("model.layers.0.mlp.down_proj.weight"), weights("model.norm.weight")
    assert abs(matrix.std() * math.sqrt(512) - 1) < 0.02 and abs(matrix.mean()) < 1e-3
    assert abs(gamma.mean() - 1) < 0.02 and 0.03 < gamma.std() < 0.07
    assert abs(weights("model.layers.0.self_attn.q_proj.bias")).max() < 0.3
    logits = graph.interpret(weights, list(range(0, 1000, 50)))["logits"]
    assert 0.3 < float(logits.std()) < 3


@pytest.mark.parametrize(
    "family",
    ["Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Gemma2", "Gemma3", "Olmo2", "Granite", "Phi3", "Starcoder2",
     "GPTNeoX"],
)  # fmt: skip
def test_a_config_without_rope_has_transformers_defaults(family: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.models.families import Case

    known = family in ("Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3")
    drop = () if known else ("head_dim", "num_key_value_heads") if family == "GPTNeoX" else ("head_dim",)
    config = Case("defaults", family, "", {"hidden_size": 96}, drop).config().to_dict()
    full = {**config, "architectures": [f"{family}ForCausalLM"]}
    bare = {key: value for key, value in full.items() if "rope" not in key}
    assert find_model(bare).build(bare) == find_model(full).build(full)
