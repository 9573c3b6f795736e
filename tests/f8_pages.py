"""One model for the tests of 8-bit pages of every device: what attention makes of keys and values that the test gives.

The row that asks has key and value zero, in pages of any type, and a query that comes from a bias: so its logits are
the same bits over 8-bit pages and over wider ones that hold the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from bench.device_session import admit
from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program
from megakernel.device.device import Device
from megakernel.kv_tensors import Kv, read_kv, write_kv
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.tasks import f8

Array = npt.NDArray[Any]
MODEL: Mapping[str, Any] = {  # attention with biases, one of which is the query of a row of zeros
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 288,
    "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 131,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "use_sliding_window": False,
}  # fmt: skip
CODES = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8).view(ml_dtypes.float8_e4m3fn)


class Zeros:
    """Random weights; token 0 is a row of zeros, and no key or value has a bias."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._weights = random_weights(build_graph(config), seed=3, dtype="bf16")

    def read(self, name: str, dtype: str = "f32", rows: slice | None = None) -> Array:
        found = self._weights.read(name, dtype, rows).copy()
        if name.endswith(("k_proj.bias", "v_proj.bias")):
            found[:] = 0
        if name.endswith("q_proj.bias"):
            found *= 20  # such biases are small
        if name.endswith("embed_tokens.weight") and (rows is None or rows.indices(MODEL["vocab_size"])[0] == 0):
            found[0] = 0
        return found


def opened(device: Device, cache: Path, kv_dtype: str, dtype: str = "bf16", **config: Any) -> Runtime:
    fields = {**MODEL, **config}
    program = build_program(
        fields, device.target, device, cache=cache, dtype=dtype, kv_dtype=kv_dtype, max_context=192, max_slots=2
    )
    return Runtime(program, device, Zeros(fields).read, spin_budget_ns=60_000_000_000)


def given(runtime: Runtime, seed: int, tokens: int) -> Kv:
    """Keys and values that 8-bit pages hold exactly: all codes, and a power of its own for each token and head."""
    m, rng = runtime.manifest, np.random.default_rng(seed)
    shape = (m.kv_layers, tokens, m.kv_heads, m.head_dim)
    codes = rng.permutation(np.resize(CODES, int(np.prod(shape)))).astype(np.float32).reshape(shape)
    keys, values = (f8.rounded(codes * np.exp2(rng.integers(-12, -7, shape[:3]))[..., None]) for _ in range(2))
    return Kv((0,) * tokens, keys.astype(ml_dtypes.bfloat16), (values[::-1] * 64).astype(ml_dtypes.bfloat16))


def answers(runtime: Runtime, lengths: Sequence[int]) -> Array:
    """Logits of rows of zeros, one of each slot in one step, behind so many given keys and values."""
    m = runtime.manifest
    for slot, tokens in enumerate(lengths):
        kv = given(runtime, slot, tokens)
        pages = range(-(-tokens // m.page_tokens))
        write_kv(runtime, kv, [(i, slot * m.pages_per_slot + i) for i in pages])
        again = read_kv(runtime, [slot * m.pages_per_slot + i for i in pages], kv.tokens)
        assert again.keys.tobytes() == kv.keys.astype(again.keys.dtype).tobytes()
        admit(runtime, slot, [0], tokens + 1, start=tokens)
    runtime.launch(1)
    runtime.finish(120.0)
    runtime.events()
    return runtime.tensor("logits")[: len(lengths)].copy()


def check_given(device: Device, cache: Path, wide: str = "bf16", **config: Any) -> None:
    """Alone and beside another: the bits of wider pages of those values."""
    found = {}
    for kv_dtype in ("f8", wide):
        runtime = opened(device, cache, kv_dtype, **config)
        try:
            together = answers(runtime, (70, 100))
            runtime.reset()
            alone = answers(runtime, (70,))
        finally:
            runtime.close()
        assert np.isfinite(together).all() and (together[0] != together[1]).any()
        assert together[0].tobytes() == alone[0].tobytes(), kv_dtype
        found[kv_dtype] = together
    assert found["f8"].tobytes() == found[wide].tobytes()


def check_own(device: Device, cache: Path, **config: Any) -> Array:
    """Keys and values that the kernel makes: the same bits in a chunk and token by token. Logits of the last tokens."""
    ids = [int(i) for i in np.random.default_rng(5).integers(1, MODEL["vocab_size"], 69)]
    runtime = opened(device, cache, "f8", **config)
    try:
        chunk = forced_logits(runtime, ids, 66)
        runtime.reset()
        single = forced_logits(runtime, ids[:69], 60)[6:]
    finally:
        runtime.close()
    assert np.isfinite(chunk).all() and chunk.tobytes() == single.tobytes()
    return chunk
