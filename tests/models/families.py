"""Tiny random models of every family, made by transformers at awkward sizes: what the tests of this folder compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

LIMIT = 2e-5  # relative error (2-norm) of float32 logits
PROMPT, DECODED = 37, 64  # tokens of the prompt (chunks of 16, 16 and 5 rows), and those decoded one by one after it

SIZES: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 104, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 263, "max_position_embeddings": 512, "num_hidden_layers": 3,
}  # fmt: skip
GPT2_SIZES: dict[str, Any] = {
    "n_embd": 80, "n_inner": 104, "n_head": 5, "n_layer": 3, "vocab_size": 263, "n_positions": 512,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 9 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)], "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
}  # fmt: skip
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0},
}


@dataclass(frozen=True)
class Case:
    """A model. `covers`: what it has that the others may not, in words."""

    name: str
    family: str  # prefix of transformers' class names
    covers: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()  # of SIZES, that this family's config does not know

    def config(self) -> Any:
        import transformers

        sizes = GPT2_SIZES if self.family == "GPT2" else SIZES
        name = "Gemma3Text" if self.family == "Gemma3" else self.family
        kept = {key: value for key, value in sizes.items() if key not in self.drop}
        config = getattr(transformers, f"{name}Config")(**{**kept, **self.fields})
        config._attn_implementation = "eager"
        return config

    def model(self) -> Any:
        """A transformers model, float32, with weights large enough for every part to matter."""
        import torch
        import transformers

        suffix = "LMHeadModel" if self.family == "GPT2" else "ForCausalLM"
        model = getattr(transformers, f"{self.family}{suffix}")(self.config()).eval()
        generator = torch.Generator().manual_seed(len(self.name))
        zero_centred = self.family.startswith("Gemma")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0.0, min(0.25, 2 * p.shape[-1] ** -0.5) if p.ndim == 2 else 0.2, generator=generator)
                if p.ndim == 1 and ("norm" in name or ".ln_" in name) and name.endswith("weight") and not zero_centred:
                    p.add_(1.0)
        return model


CASES: tuple[Case, ...] = (
    Case("llama", "Llama", "plain", {"attention_bias": True, "mlp_bias": True}),
    Case("llama3", "Llama", "llama3 rope scaling, tied head", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Case("mistral", "Mistral", "a sliding window in every layer", {"sliding_window": 33}),
    Case(
        "ministral",
        "Ministral",
        "a sliding window in some layers",
        {"sliding_window": 33, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    Case(
        "qwen2",
        "Qwen2",
        "bias on q, k and v only",
        {"use_sliding_window": True, "sliding_window": 31, "max_window_layers": 1},
    ),
    Case("qwen3", "Qwen3", "norm of each q and k head", {"tie_word_embeddings": True}),
    Case(
        "smollm3",
        "SmolLM3",
        "layers without rotary embedding",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "no_rope_layer_interval": 2, "pad_token_id": 0},
        ("head_dim",),
    ),
    Case(
        "gemma2",
        "Gemma2",
        "soft caps, norms on both sides, 1 + w, alternating window",
        {
            "sliding_window": 32,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    Case(
        "gemma3",
        "Gemma3",
        "two rope bases, five windows to one, q and k norm",
        {"num_hidden_layers": 7, "sliding_window": 20, "query_pre_attn_scalar": 24, "rope_parameters": TWO_BASES},
    ),
    Case(
        "olmo2",
        "Olmo2",
        "norms behind the blocks, q and k normed over all heads",
        {"hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 5},
        ("head_dim",),
    ),
    Case(
        "phi3",
        "Phi3",
        "fused q k v and gate up, window",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "sliding_window": 40, "pad_token_id": 0},
        ("head_dim",),
    ),
    Case(
        "phi4_mini",
        "Phi3",
        "part of a head rotated, longrope, tied head",
        {
            "hidden_size": 96,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        ("head_dim",),
    ),
    Case(
        "granite",
        "Granite",
        "four multipliers",
        {
            "hidden_size": 96,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
        },
        ("head_dim",),
    ),
    Case(
        "starcoder2",
        "Starcoder2",
        "layer norms, biases, no gate, window",
        {"hidden_size": 96, "sliding_window": 45},
        ("head_dim",),
    ),
    Case(
        "gpt_neox",
        "GPTNeoX",
        "attention and MLP side by side, heads fused one by one",
        {
            "hidden_size": 96,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
        ("head_dim", "num_key_value_heads"),
    ),
    Case(
        "gpt_neox_serial",
        "GPTNeoX",
        "attention before MLP",
        {
            "hidden_size": 96,
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        ("head_dim", "num_key_value_heads"),
    ),
    Case("gpt2", "GPT2", "learned positions, weights stored across"),
)


def find(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def save(model: Any, folder: Path) -> Path:
    """`model` as a checkpoint folder without a tokenizer."""
    model.save_pretrained(folder)
    return folder


def config_of(model: Any) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def ids_of(model: Any, count: int = PROMPT + DECODED) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, model.config.vocab_size, count)]


def reference(model: Any, ids: list[int]) -> Array:
    """transformers' float32 logits after every token, [tokens, vocab]."""
    import torch

    with torch.no_grad():
        out: Array = model(torch.tensor([ids])).logits[0].float().numpy()
    return out


def relative_error(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))
