"""Rotary tables against Hugging Face transformers, up to position 65536."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from megakernel.errors import GraphError, UnsupportedConfig
from megakernel.graph import RopeSpec
from megakernel.rope import rope_spec

POSITIONS = (0, 1, 100, 8191, 65536)
MAX = 131072

SETS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "smollm2": {"rope_type": "default", "rope_theta": 100000.0},
    "odd theta": {"rope_type": "default", "rope_theta": 12345.678},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.7},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama 3.1": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama 3.2": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768,
    },
    "yarn of gpt-oss": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "yarn of deepseek": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 4096,
    },
    "yarn small context": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 8,
    },
}  # fmt: skip


def spec_of(name: str, head_dim: int) -> RopeSpec:
    return rope_spec(SETS[name], head_dim, MAX, partial=False)


@pytest.mark.parametrize("head_dim", [10, 64, 96, 128])
@pytest.mark.parametrize("name", SETS)
def test_tables_equal_transformers(name: str, head_dim: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, max_position_embeddings=MAX, rope_parameters=dict(SETS[name])
    )
    reference = LlamaRotaryEmbedding(config)
    spec = spec_of(name, head_dim)
    theirs, ours = reference.inv_freq.numpy(), spec.frequencies()
    np.testing.assert_array_max_ulp(theirs, ours, 4)  # torch's float32 power is off by one ulp here and there
    slack = np.asarray(POSITIONS)[:, None] * np.abs(theirs.astype(np.float64) - ours) * 1.5
    slack += np.where(theirs != ours, np.spacing(np.asarray(POSITIONS, np.float32))[:, None], 0.0) + 4e-7
    cos, sin = reference(torch.zeros(1), torch.tensor([POSITIONS]))
    for expected, got in zip((cos, sin), spec.at(POSITIONS)):
        assert got.dtype == np.float32 and got.shape == (len(POSITIONS), head_dim // 2)
        assert np.all(np.abs(expected[0, :, : head_dim // 2].numpy() - got) <= slack)


@pytest.mark.parametrize("name", ["default", "smollm2", "llama 3.1", "llama 3.2"])
def test_published_frequencies_are_bitwise_equal(name: str) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=MAX, rope_parameters=dict(SETS[name])
    )
    np.testing.assert_array_equal(LlamaRotaryEmbedding(config).inv_freq.numpy(), spec_of(name, 64).frequencies())


def test_formula_in_float64() -> None:
    """At short positions the rounding of angles does not matter: cos(p theta^(-2i/d))."""
    positions = np.arange(64)
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, 32, 2) / 32)
    cos, sin = RopeSpec(32).at(positions)
    np.testing.assert_allclose(cos, np.cos(angles), atol=4e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=4e-6)


def test_table_is_at_of_all_positions() -> None:
    spec = spec_of("llama 3.2", 64)
    for whole, some in zip(spec.table(300), spec.at([7, 299])):
        assert whole.shape == (300, 32)
        np.testing.assert_array_equal(whole[[7, 299]], some)
    assert RopeSpec(8).table(0)[0].shape == (0, 4)


CHANGES = [
    ("default", {"theta": 10001.0}),
    ("linear", {"factor": 2.71}),
    ("llama 3.1", {"factor": 8.1}),
    ("llama 3.1", {"low_freq_factor": 1.01}),
    ("llama 3.1", {"high_freq_factor": 4.1}),
    ("llama 3.1", {"original_max_positions": 8100}),
    ("yarn", {"factor": 4.1}),
    ("yarn", {"beta_fast": 16.0}),
    ("yarn", {"beta_slow": 2.0}),
    ("yarn", {"original_max_positions": 16384}),
    ("yarn", {"truncate": False}),
    ("yarn", {"attention_factor": 1.0}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[f"{n}-{next(iter(c))}" for n, c in CHANGES])
def test_every_number_moves_the_table(name: str, change: dict[str, Any]) -> None:
    spec = spec_of(name, 64)
    before, after = spec.at([8191])[0], replace(spec, **change).at([8191])[0]
    assert np.abs(before - after).max() > 1e-4


def test_round_trip_through_a_dict() -> None:
    for name in SETS:
        spec = spec_of(name, 64)
        assert RopeSpec(**asdict(spec)) == spec


def test_partial_rotation() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    assert rope_spec(parameters, 128, MAX, partial=True).rotary_dim == 96
    with pytest.raises(UnsupportedConfig, match="whole heads"):
        rope_spec(parameters, 128, MAX, partial=False)


def test_dynamic_ends_where_its_frequencies_would_change() -> None:
    spec = rope_spec({"rope_type": "dynamic", "factor": 2.0}, 64, 100, partial=False)
    spec.table(100)
    with pytest.raises(GraphError, match="up to position 99, got 100"):
        spec.table(101)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rotary_dim": 7}, "7 elements"),
        ({"rotary_dim": 0}, "0 elements"),
        ({"rotary_dim": 8, "rope_type": "xpos"}, "'xpos' is unknown"),
        ({"rotary_dim": 8, "theta": 0.0}, "above 0"),
        ({"rotary_dim": 8, "rope_type": "llama3"}, "original_max_position_embeddings"),
    ],
)
def test_impossible_specs(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedConfig, match=words):
        RopeSpec(**arguments)
