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
from megakernel.builder.build import assemble, build_graph, make_plan
from megakernel.builder.cache import compiled
from megakernel.builder.kernel import kernel_source, variants_of
from megakernel.builder.program import Program
from megakernel.device.device import Device
from megakernel.kv_tensors import Kv, read_kv, write_kv
from megakernel.runtime import Runtime
from megakernel.tasks import f8

Array = npt.NDArray[Any]
MODEL: Mapping[str, Any] = {  # attention with biases, one of which is the query of a row of zeros
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 288,
    "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 131,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "use_sliding_window": False,
}  # fmt: skip
ROWS = 16  # of a step
START = 62  # tokens before those of a step
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


def programs(
    device: Device, cache: Path, kv_dtypes: Sequence[str], dtype: str, fields: Mapping[str, Any]
) -> list[Program]:
    """One kernel for pages of all those types."""
    options = {"dtype": dtype, "max_context": 192, "max_slots": 2, "max_rows": ROWS}
    plans = [make_plan(fields, device.target, kv_dtype=kind, **options) for kind in kv_dtypes]
    nodes = [n for plan in plans for n in plan.lowered.nodes]
    source = kernel_source(nodes, device.target, capacity=ROWS)
    binary = compiled(source, device, cache)
    return [assemble(plan, source, binary, variants=variants_of(nodes)) for plan in plans]


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


def check_given(runtime: Runtime) -> Array:
    """Logits of two in one step; each alone has the same bits."""
    together = answers(runtime, (70, 100))
    runtime.reset()
    assert np.isfinite(together).all() and (together[0] != together[1]).any()
    assert answers(runtime, (70,))[0].tobytes() == together[0].tobytes()
    runtime.reset()
    return together


def check_own(runtime: Runtime) -> None:
    """Keys and values that the kernel makes, behind given ones, over the end of a page: the same bits in one step and
    token by token."""
    ids = [int(i) for i in np.random.default_rng(5).integers(1, MODEL["vocab_size"], START + 4)]
    found = []
    for first in (len(ids), START + 1):
        kv = given(runtime, 7, START)
        write_kv(runtime, kv, [(i, i) for i in range(-(-START // runtime.manifest.page_tokens))])
        admit(runtime, 0, ids[:first], len(ids) + 1, start=START)
        for at in range(first - 1, len(ids)):
            if at >= first:
                runtime.force_token(0, ids[at])
            runtime.launch(1)
            runtime.finish(120.0)
            runtime.events()
        pages = range(-(-len(ids) // runtime.manifest.page_tokens))
        made = read_kv(runtime, list(pages), ids)
        assert (
            np.asarray(made.keys[:, START:], np.float32).any() and np.asarray(made.values[:, START:], np.float32).any()
        )
        found.append(runtime.tensor("logits")[0].tobytes() + made.keys.tobytes() + made.values.tobytes())
        runtime.reset()
    assert found[0] == found[1]


def check_pages(device: Device, cache: Path, dtype: str = "bf16", wide: str = "bf16", **config: Any) -> None:
    """Of given keys and values the bits of wider pages; of the kernel's own the same bits in any chunks."""
    fields = {**MODEL, **config}
    found = []
    for program in programs(device, cache, ("f8", wide), dtype, fields):
        runtime = Runtime(program, device, Zeros(fields).read, spin_budget_ns=60_000_000_000)
        try:
            found.append(check_given(runtime).tobytes())
            if program.manifest.kv_dtype == "f8":
                check_own(runtime)
        finally:
            runtime.close()
    assert found[0] == found[1]
