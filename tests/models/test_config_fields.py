"""Spellings of the same config, and fields that contradict: read as transformers reads them, or refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from megakernel.architectures import find_model
from megakernel.checkpoint.config import normalise_rope
from megakernel.errors import MegakernelError
from megakernel.graph import Graph
from tests.models.families import CASES, Case

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "base": {"rope_theta": 700.0},
    "scaling": {"rope_scaling": LINEAR},
    "both": {"rope_theta": 700.0, "rope_scaling": YARN},
}
"""What the fields before rope_parameters may say."""
ONCE = {case.family: case for case in reversed(CASES) if case.family != "GPT2"}


def bare(case: Case) -> dict[str, Any]:
    """The config without a word on rotary embedding."""
    full = case.config().to_dict()
    return {k: v for k, v in full.items() if "rope" not in k or k.startswith("no_rope")} | {
        "architectures": [f"{case.family}ForCausalLM"]
    }


def read(config: dict[str, Any]) -> Graph:
    """The graph of a folder's config.json."""
    folded = normalise_rope(config, Path("config.json"))
    return find_model(folded).build(folded)


def read_by_transformers(case: Case, config: dict[str, Any]) -> Graph:
    """The graph of the config as transformers fills it in."""
    full = type(case.config()).from_dict(deepcopy(config)).to_dict()
    return find_model(config).build({**full, "architectures": config["architectures"]})


@pytest.mark.parametrize("family", ONCE)
@pytest.mark.parametrize("old", OLD)
def test_older_spellings_are_read_as_transformers_reads_them(family: str, old: str) -> None:
    if family == "Phi3" and "rope_scaling" in OLD[old]:
        pytest.skip("Phi-3 has longrope alone")
    base = {"rotary_emb_base": 700.0, "rotary_pct": 0.5} if family == "GPTNeoX" else {}
    said = {k: v for k, v in OLD[old].items() if not base or k != "rope_theta"}
    config = {**bare(ONCE[family]), **said, **base}
    want = read_by_transformers(ONCE[family], config)
    assert read(config) == want
    assert find_model(config).build(config) == want


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 700.0},
        {"rope_local_base_freq": 900.0},
        {"rope_theta": 700.0, "rope_local_base_freq": 900.0, "rope_scaling": LINEAR},
        {"rope_theta": 700.0, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}},
    ],
)
def test_both_bases_of_gemma3(fields: dict[str, Any]) -> None:
    config = {**bare(ONCE["Gemma3"]), **fields}
    want = read_by_transformers(ONCE["Gemma3"], config)
    assert read(config) == want
    assert find_model(config).build(config) == want


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (f, {"rope_scaling": YARN}, "rope_scaling")
        for f in ("Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3", "Granite")
    ),
    ("Llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("Qwen3", {"layer_types": 5}, "layer_types: expected 3 times"),
    ("Gemma2", {"layer_types": [["full_attention"], [], 3]}, "layer_types: expected 3 times"),
    ("Qwen2", {"max_window_layers": "a"}, "max_window_layers: expected the number"),
    ("SmolLM3", {"no_rope_layers": 3}, "no_rope_layers: expected 3 times 0 or 1"),
    ("SmolLM3", {"no_rope_layers": [[1], 2, 3]}, "no_rope_layers: expected 3 times 0 or 1"),
    ("GPTNeoX", {"rope_parameters": None, "rotary_pct": 0.5, "partial_rotary_factor": 0.75}, "partial_rotary_factor"),
    ("Gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
]


@pytest.mark.parametrize(("family", "fields", "word"), REFUSED)
def test_what_transformers_would_read_otherwise_is_refused(family: str, fields: dict[str, Any], word: str) -> None:
    """Beside rope_parameters that say something else, rope_scaling wins there, and other fields are left unread; what
    is of another kind than it must be is refused by name."""
    config = {**ONCE[family].config().to_dict(), "architectures": [f"{family}ForCausalLM"], **fields}
    for build in (read, lambda c: find_model(c).build(c)):
        with pytest.raises(MegakernelError, match=word):
            build(config)
