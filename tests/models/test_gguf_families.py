"""GGUF files of the families: the same graph as of the folder, the same weights, and so the same logits to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megakernel import LLM
from megakernel.architectures import find_model
from megakernel.checkpoint import open_checkpoint
from megakernel.origin import open_origin
from tests.models.conftest import Subject, make
from tests.models.families import LIMIT, LLAMA3, Case, find, relative_error
from tests.models.gguf_writer import plain_rows, write_gguf

pytest.importorskip("gguf")


def changed(name: str, **fields: object) -> Case:
    """A case with fields that a GGUF file can say."""
    case = find(name)
    return replace(case, name=f"{name}_gguf", fields={**case.fields, **fields})


CASES: dict[str, tuple[str, Case]] = {
    "llama": ("llama", find("llama")),
    "llama3": ("llama", changed("llama3", rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192})),
    "smollm3": ("smollm3", changed("smollm3", no_rope_layer_interval=4, num_hidden_layers=5)),
    "qwen2": ("qwen2", changed("qwen2", use_sliding_window=False)),
    "qwen3": ("qwen3", find("qwen3")),
    "gemma2": ("gemma2", changed("gemma2", query_pre_attn_scalar=16)),
    "gemma3": ("gemma3", changed("gemma3", query_pre_attn_scalar=16, rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    })),
    "olmo2": ("olmo2", find("olmo2")),
    "phi3": ("phi3", find("phi3")),
    "phi4_mini": ("phi3", find("phi4_mini")),
    "granite": ("granite", find("granite")),
    "starcoder2": ("starcoder2", changed("starcoder2", sliding_window=None)),
    "gpt2": ("gpt2", find("gpt2")),
    "gpt_neox": ("gptneox", find("gpt_neox")),
    "gpt_neox_serial": ("gptneox", find("gpt_neox_serial")),
}  # fmt: skip
"""Name -> GGUF's architecture and the model."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Subject, Path]]:
    folder = tmp_path_factory.mktemp("gguf")

    def get(name: str) -> tuple[Subject, Path]:
        arch, case = CASES[name]
        subject = make(case, folder / name)
        return subject, write_gguf(folder / f"{name}.gguf", arch, subject.full, subject.weights)

    return get


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_is_the_same_model(written: Callable[[str], tuple[Subject, Path]], name: str) -> None:
    subject, path = written(name)
    with open_checkpoint(path) as checkpoint:
        graph = find_model(checkpoint.config).build(checkpoint.config)
        assert set(checkpoint.names()) == set(subject.weights)
        read = {tensor: checkpoint.read(tensor) for tensor in checkpoint.names()}
    heads = subject.full.get("num_attention_heads", 1)
    for tensor, data in subject.weights.items():
        data = plain_rows(CASES[name][0], tensor, data, heads)
        np.testing.assert_allclose(read[tensor], data, atol=2e-7, rtol=0)
    open_origin(path, cache=path.parent).close()  # every tensor is used
    got = graph.interpret(read.__getitem__, subject.ids)["logits"].numpy()
    assert relative_error(got, subject.expected) <= LIMIT


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_kernel_gives_the_same_bits(
    written: Callable[[str], tuple[Subject, Path]], opened: Callable[[Path], LLM], name: str
) -> None:
    subject, path = written(name)
    want = opened(subject.path).logits(subject.ids[:30], 20).tobytes()
    assert opened(path).logits(subject.ids[:30], 20).tobytes() == want
