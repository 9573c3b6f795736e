"""Small checkpoints on disk: random ones made by transformers, and two whose tokens are known without a reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[np.float32]

# Several tiles of every matrix, and a vocabulary that is no multiple of a tile.
SIZES: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 263, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
}  # fmt: skip


def random_model(family: str = "Llama", seed: int = 0, spread: float = 0.25, **fields: Any) -> Any:
    """A transformers model, float32. `spread` of the weights: 0.25 is enough for every part to matter."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, spread if p.ndim == 2 else 0.2, generator=generator)
            if "norm" in name:
                p.add_(1.0)
    return model


def saved(model: Any, folder: Path) -> Path:
    """`model` as a checkpoint folder without a tokenizer."""
    model.save_pretrained(folder)
    return folder


def reference_logits(model: Any, ids: Sequence[int]) -> Array:
    """Float32 logits after every token, [tokens, vocab]."""
    import torch

    with torch.no_grad():
        out: Array = model(torch.tensor([list(ids)])).logits[0].float().numpy()
    return out


def relative_error(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def random_ids(count: int, vocab: int = SIZES["vocab_size"], seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, count)]


# ---------------------------------------------------------------------------------------------- known tokens
def table_config(vocab: int, hidden: int = 64, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": vocab,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        **fields,
    }  # fmt: skip


def table_model(
    folder: Path, embedding: Array, head: Array, *, generation: Mapping[str, Any] | None = None, **fields: Any
) -> Path:
    """A Llama whose layers add nothing: the logits after token t are head @ embedding[t], embedding[t] scaled to a
    mean square of one. [vocab, hidden] each."""
    vocab, hidden = embedding.shape
    config = table_config(vocab, hidden, **fields)
    heads, kv, dim, inner = 6, 2, 16, 32
    prefix = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (heads * dim, hidden), "self_attn.k_proj": (kv * dim, hidden),
        "self_attn.v_proj": (kv * dim, hidden), "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name in (f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = np.ones(hidden, np.float32)
    tensors["model.embed_tokens.weight"] = embedding.astype(np.float32)
    tensors["lm_head.weight"] = head.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def directions(vocab: int, hidden: int = 64, seed: int = 0) -> Array:
    """A vector of length sqrt(hidden) for each id; no two alike."""
    made = np.random.default_rng(seed).normal(size=(vocab, hidden))
    return (made / np.linalg.norm(made, axis=1, keepdims=True) * np.sqrt(hidden)).astype(np.float32)


def successor_model(folder: Path, vocab: int, **more: Any) -> Path:
    """After token t comes t + 1, and 0 after the last."""
    e = directions(vocab)
    return table_model(folder, e, np.roll(e, 1, axis=0) * 0.25, **more)
