"""The kernel for CUDA, run on the host: the logits of the interpreter, and the same tokens alone and in a batch.

An index, a fragment's order, a barrier that nobody completes or a sum that depends on the batch shows here, in the two ways
through a product (one row, several) and the three that its input can come. Caches and fences are not imitated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.device_session import generate
from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from tests.cuda.emulated import EmulatedCuda
from tests.gpu.machine import prompts

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 288,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 131,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "one unit": LLAMA,
    # Of more than 8 rows an input of three units does not fit the room, and each worker has many blocks of tiles: it passes
    # through again and again.
    "three units": {**LLAMA, "hidden_size": 2304, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    "units of 1,024 columns": {**LLAMA, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1},
    "heads of 96, padded units": {
        **LLAMA, "num_hidden_layers": 1, "num_attention_heads": 6, "head_dim": 96, "intermediate_size": 1184,
    },
    "normed heads of 128": {
        **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 128,
        "attention_bias": False,
    },
}  # fmt: skip


def opened(config: Mapping[str, Any], cache: Path, workers: int, **options: Any) -> tuple[Runtime, Any, Any]:
    device, graph = EmulatedCuda(workers), build_graph(config)
    weights = random_weights(graph, seed=3, dtype="bf16")
    chosen = {"dtype": "bf16", "max_context": 192, "max_slots": 3, **options}
    program = build_program(config, device.target, device, cache=cache, **chosen)
    return Runtime(program, device, weights.read, spin_budget_ns=60_000_000_000), graph, weights


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated-cuda")


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_logits_and_batches(shape: str, cache: Path) -> None:
    """A prompt in steps of 16 rows and one row at a time; three sequences together and alone."""
    run, graph, weights = opened(SHAPES[shape], cache, 3)
    ids = prompts(run.manifest.vocab, (20,))[0]
    try:
        got = forced_logits(run, ids, 17)
        given = prompts(run.manifest.vocab, (5, 3, 1))
        together = generate(run, given, 3)
        assert together == [generate(run, [p], 3)[0] for p in given]
    finally:
        run.close()
    want = graph.interpret(weights, ids)["logits"].numpy()[17:]
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 0.02, error


@pytest.mark.parametrize("options", [{"chaos": True}, {"max_rows": 64}, {"max_rows": 64, "chaos": True}], ids=str)
def test_same_tokens_with_delays_and_in_wide_steps(options: dict[str, Any], cache: Path) -> None:
    tokens = []
    for changed in ({}, options):
        run = opened(LLAMA, cache, 2, **changed)[0]
        run.chaos_seed = 7
        try:
            tokens.append(generate(run, prompts(run.manifest.vocab, (70, 3)), 3))
        finally:
            run.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("workers", [1, 5])
def test_same_tokens_on_any_number_of_workers(workers: int, cache: Path) -> None:
    tokens = []
    for count in (2, workers):
        run = opened(LLAMA, cache, count)[0]
        try:
            tokens.append(generate(run, prompts(run.manifest.vocab, (18, 3)), 3))
        finally:
            run.close()
    assert tokens[0] == tokens[1]


def test_a_lost_signal_is_a_fault(cache: Path) -> None:
    run = opened(LLAMA, cache, 2, chaos=True)[0]
    run.spin_budget_ns, run.drop_signal = 2_000_000_000, 0
    try:
        with pytest.raises(DeviceFault, match="budget"):
            generate(run, prompts(run.manifest.vocab, (3,)), 3)
    finally:
        run.close()
