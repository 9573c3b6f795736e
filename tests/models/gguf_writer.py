"""GGUF files of the tiny models, with the names, the metadata and the changes of weights of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megakernel.checkpoint.gguf_names import llama3_divisors
from tests.models.families import Array

# Hugging Face name inside a layer -> GGUF's; a family's own come first.
BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OWN = {
    "gemma2": SANDWICH, "gemma3": SANDWICH, "olmo2": SANDWICH,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "gpt2": {
        "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    },
    "gptneox": {
        "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output", "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
}  # fmt: skip
TOP = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
}  # fmt: skip
GPT2_KEYS = {
    "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "norm_epsilon",
}  # fmt: skip
INTERLEAVED = ("llama", "smollm3", "granite")
PLUS_ONE = ("gemma2", "gemma3")


def write_gguf(path: Path, arch: str, config: Mapping[str, Any], weights: Mapping[str, Array]) -> Path:
    """`config`: the full one. Tensors are float32."""
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    config = {**config, **{common: config[own] for own, common in GPT2_KEYS.items() if arch == "gpt2"}}
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    dim = config.get("head_dim") or config["hidden_size"] // heads
    _metadata(writer, arch, config, heads, kv_heads, dim)
    for name, data in weights.items():
        stem, _, kind = name.rpartition(".")
        match = re.fullmatch(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.+)", stem)
        target = f"blk.{match[1]}.{ {**BLOCK, **OWN.get(arch, {})}[match[2]] }" if match else TOP[stem]
        if arch in INTERLEAVED and match and match[2] in ("self_attn.q_proj", "self_attn.k_proj"):
            data = _interleave(data, heads if "q_proj" in name else kv_heads)
        if arch in PLUS_ONE and name.endswith("norm.weight"):
            data = data + np.float32(1)
        data = plain_rows(arch, name, data, heads)
        writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_rows(arch: str, name: str, data: Array, heads: int) -> Array:
    """GPT-2's matrices transposed; GPT-NeoX' q, k and v of each head as all of q, all of k, all of v."""
    if arch == "gpt2" and name.endswith(".weight") and data.ndim == 2 and ".h." in name:
        return data.T
    if arch == "gptneox" and "query_key_value" in name:
        return data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)
    return data


def _interleave(rows: Array, heads: int) -> Array:
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _metadata(writer: Any, arch: str, c: Mapping[str, Any], heads: int, kv_heads: int, dim: int) -> None:
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if arch not in ("gpt2", "gptneox"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if arch == "gptneox":
        writer.add_parallel_residual(c["use_parallel_residual"])
        writer.add_layer_norm_eps(c["layer_norm_eps"])
    elif "norm_epsilon" in c:
        writer.add_layer_norm_eps(c["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if c.get("sliding_window") and arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(c["sliding_window"])
    if arch != "gpt2":
        _rope(writer, arch, c, dim)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(c["attention_multiplier"])
        writer.add_embedding_scale(c["embedding_multiplier"])
        writer.add_residual_scale(c["residual_multiplier"])
        writer.add_logit_scale(c["logits_scaling"])


def _rope(writer: Any, arch: str, c: Mapping[str, Any], dim: int) -> None:
    rope = c["rope_parameters"]
    rope = rope.get("full_attention", rope)
    rotated = int(dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        divisors = llama3_divisors(rotated, rope["rope_theta"], rope["factor"], 1.0, 4.0, 8192)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
