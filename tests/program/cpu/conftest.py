"""Tiny random checkpoints, and LLMs of them on the real CPU device. One compile cache for the whole session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megakernel.architectures import RandomWeights, find_model, parameter_shapes, random_weights
from megakernel.checkpoint import open_checkpoint
from megakernel.device.cpu import CpuDevice
from megakernel.graph import Graph
from megakernel.llm import LLM
from megakernel.settings import Settings

TINY: Mapping[str, Any] = {  # three q-heads for a KV head, head_dim is not hidden / heads, odd vocabulary
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 88, "intermediate_size": 150,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 331,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip

Open = Callable[..., LLM]


def write_checkpoint(folder: Path, seed: int = 1, **fields: Any) -> Path:
    """A Hugging Face folder with random float32 weights and no tokenizer."""
    config = {**TINY, **fields}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    graph = find_model(config).build(config)
    weights = random_weights(graph, seed)
    save_file({n: np.ascontiguousarray(weights(n)) for n in parameter_shapes(graph)}, folder / "model.safetensors")
    return folder


def reference(folder: Path, seed: int = 1) -> tuple[Graph, RandomWeights]:
    """Graph and weights that `write_checkpoint` wrote, for `Graph.interpret`."""
    with open_checkpoint(folder) as checkpoint:
        graph = find_model(checkpoint.config).build(checkpoint.config)
    return graph, random_weights(graph, seed)


@pytest.fixture(scope="session")
def cache(shared_cache: Path) -> Path:
    return shared_cache


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def opened(tiny: Path, cache: Path) -> Iterator[Open]:
    """Opens LLMs of the tiny model that are closed after the test: `opened(workers=3, dtype="f32", ...)`."""
    with ExitStack() as stack:

        def make(model: Path | str = tiny, spin_ms: int = 60_000, **options: Any) -> LLM:
            chosen = {"dtype": "f32", "workers": 2, "max_context": 600, **options}
            settings = Settings(cache=cache, spin_ms=spin_ms)
            return stack.enter_context(LLM(model, device=CpuDevice(), settings=settings, **chosen))

        yield make
