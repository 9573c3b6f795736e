"""What the tests of this folder run on: a GPU, or the device that MEGAKERNEL_TEST_DEVICE names.

cpu tries the tests themselves. emulated runs the kernel for CUDA on the host (tests/cuda), a thousand times slower: for
a few of them at a time, without a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.device_session import TINY
from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program
from megakernel.device.cuda import CudaDevice
from megakernel.device.cuda_compiler import Tunables
from megakernel.devices import list_devices, open_device
from megakernel.runtime import Runtime

NAME = os.environ.get("MEGAKERNEL_TEST_DEVICE", "cuda")
EMULATED = NAME == "emulated"
STATE = next((d.availability() for d in list_devices() if d.name.split(":")[0] == ("cpu" if EMULATED else NAME)), None)
needs_device = pytest.mark.skipif(
    STATE is None or not STATE.usable, reason=f"no {NAME}: {STATE.reason if STATE else 'no such device'}"
)
SEED = 3

# Every kind of task that a model here has, in sizes that matrix cores take: norms before and after, layer norms with
# biases, caps, windows, scaled embeddings, learned positions, partial and paired rotations, padded heads.
MODELS: Mapping[str, Mapping[str, Any]] = {
    **TINY,
    "tiny-gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 288, "intermediate_size": 544,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 517,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 48,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    },
    "tiny-neox": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 320, "intermediate_size": 640,
        "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 517, "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True,
        "hidden_act": "gelu", "tie_word_embeddings": False, "attention_bias": True,
    },
    "tiny-olmo2": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 320, "intermediate_size": 544,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 517,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "attention_bias": False,
    },
    # Rows of several units: what consumers hold of a product before its input comes depends on its units and tiles.
    "tiny-broad": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2304, "intermediate_size": 4352,
        "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 96, "vocab_size": 1517,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
}  # fmt: skip


def opened(
    name: str, *, workers: int | None = None, tunables: Tunables | None = None, **options: Any
) -> tuple[Runtime, Any, Any]:
    """A runtime, its graph and its weights. `tunables`: of the kernel for CUDA."""
    device, config = _emulated(workers) if EMULATED else open_device(NAME), MODELS[name]
    if tunables is not None and isinstance(device, CudaDevice):
        device.tunables = tunables
    target = device.target if workers is None or EMULATED else device.target.with_workers(workers)
    chosen = {"dtype": "bf16", "max_context": 1024, "max_slots": 4, "max_rows": 16, **options}
    program = build_program(config, target, device, cache=Path(tempfile.gettempdir()) / "megakernel", **chosen)
    graph = build_graph(config)
    weights = random_weights(graph, seed=SEED, dtype="bf16")
    return Runtime(program, device, weights.read, spin_budget_ns=(300 if EMULATED else 5) * 10**9), graph, weights


def _emulated(workers: int | None) -> Any:
    from tests.cuda.emulated import EmulatedCuda

    return EmulatedCuda(3 if workers is None else min(workers, 5))


def prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [[int(i) for i in rng.integers(0, vocab, n)] for n in lengths]
