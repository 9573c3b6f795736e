"""GGUF's names and metadata keys, translated to those of Hugging Face."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NORM = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QUERIES = ("self_attn.q_proj", "attention.query_key_value")
_EXPERTS = {"ffn_gate_inp": "mlp.gate"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LLAMA = {**_NORM, **_ATTENTION, **_MLP}
_GEMMA = {**_LLAMA, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_STARCODER2 = {**_NORM, **_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip
_GPT_NEOX = {
    **_NORM, "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
_GPT_NEOX_TOP = {
    "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out",
}  # fmt: skip

PLAIN_ROWS = "_plain_rows"
"""Config key, true when a family's fused or transposed matrices are stored as plain rows: all q, all k, all v."""

SPLIT_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors [experts, rows, cols] that Hugging Face keeps as one matrix per expert."""

COMPUTED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that carry configuration; they are read into rope_parameters and have no Hugging Face name."""


@dataclass(frozen=True)
class Family:
    """A GGUF architecture: its Hugging Face names, and how its converter changed the weights.

    interleaved: q and k rows are stored for interleaved rotary embedding. norm_offset: what the converter added to
    norm weights. keys: config.json's names of metadata that no other family has. without: keys that its config has not.
    layer, top: prefix of a layer's names, and the names outside of the layers. renamed: keys that its config has under
    another name. plain_rows: see PLAIN_ROWS.
    """

    architecture: str
    model_type: str
    blocks: Mapping[str, str]
    activation: str = "silu"
    interleaved: bool = False
    norm_offset: float = 0.0
    keys: Mapping[str, str] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    layer: str = "model.layers"
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    renamed: Mapping[str, str] = field(default_factory=dict)
    plain_rows: bool = False


_GPT2_KEYS = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}  # fmt: skip
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale", "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
_BIASES = frozenset({"attention_bias", "mlp_bias"})

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", _LLAMA, interleaved=True),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _LLAMA, interleaved=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _LLAMA),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", {**_LLAMA, **_EXPERTS}),
    "phi3": Family("Phi3ForCausalLM", "phi3", _PHI3),
    "granite": Family("GraniteForCausalLM", "granite", _LLAMA, interleaved=True, keys=_GRANITE_KEYS),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        _STARCODER2,
        "gelu_pytorch_tanh",
        keys={"norm_epsilon": "attention.layer_norm_epsilon"},
        without=_BIASES | {"layer_norm_eps"},
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", {**_LLAMA, **_POST_NORMS}),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _GEMMA, "gelu_pytorch_tanh", norm_offset=1.0),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _GEMMA, "gelu_pytorch_tanh", norm_offset=1.0),
    "gpt2": Family(
        "GPT2LMHeadModel", "gpt2", _GPT2, "gelu_new", without=_BIASES | {"num_key_value_heads", "head_dim"},
        layer="transformer.h", top=_GPT2_TOP, renamed=_GPT2_KEYS, plain_rows=True,
    ),
    "gptneox": Family(
        "GPTNeoXForCausalLM", "gpt_neox", _GPT_NEOX, "gelu", keys={"use_parallel_residual": "use_parallel_residual"},
        without=frozenset({"mlp_bias", "num_key_value_heads", "head_dim"}), layer="gpt_neox.layers", top=_GPT_NEOX_TOP,
        plain_rows=True,
    ),
}  # fmt: skip


def family_of(arch: str) -> Family:
    """The family; an unknown one keeps GGUF's architecture name, which no model file will claim."""
    return FAMILIES.get(arch) or Family(arch, arch, {})


def hugging_face_name(arch: str, name: str, blocks: int) -> str:
    """The Hugging Face name of a GGUF tensor; for a family without a table here, what the gguf package knows.

    A name that nothing translates stays as it is, so that an error can show it.
    """
    stem, _, kind = name.rpartition(".")
    family = FAMILIES.get(arch)
    top = family.top if family else _TOP
    if stem in top:
        return f"{top[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and family and match[2] in family.blocks:
        return f"{family.layer}.{match[1]}.{family.blocks[match[2]]}.{kind}"
    return name if family else _from_package(arch, stem, kind, blocks) or name


def _from_package(arch: str, stem: str, kind: str, blocks: int) -> str | None:
    """The name in the gguf package's table: Llama's own when it is a candidate, else the only one under `model.`."""
    try:
        gguf: Any = importlib.import_module("gguf")
    except ModuleNotFoundError:
        return None
    numbers = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    if arch not in numbers:
        return None
    table = gguf.get_tensor_name_map(numbers[arch], blocks).mapping
    found = [key for key, (_, name) in table.items() if name == stem and key.startswith("model.layers.")]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    usual = f"model.layers.{match[1]}.{_LLAMA.get(match[2])}" if match else None
    if usual in found:
        return f"{usual}.{kind}"
    return f"{found[0]}.{kind}" if len(found) == 1 else None


def translate_config(
    metadata: Mapping[str, Any], names: frozenset[str], vocab_size: int, factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """config.json's keys from GGUF metadata.

    names: the tensors' Hugging Face names (tied heads and biases show there). factors: values of COMPUTED tensors.
    Keys without a value in the file are left out.
    """
    arch = str(metadata.get("general.architecture"))
    family = family_of(arch)

    def get(key: str, default: Any = None) -> Any:
        return _plain(metadata.get(f"{arch}.{key}", default))

    heads, hidden = get("attention.head_count"), get("embedding_length")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": _head_dim(get, heads, hidden),
        "hidden_act": family.activation,
        "vocab_size": vocab_size,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": get("attention.layer_norm_epsilon"),
        "sliding_window": get("attention.sliding_window"),
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "tie_word_embeddings": f"{family.top['output']}.weight" not in names,
        "attention_bias": bool({f"{family.layer}.0.{name}.bias" for name in _QUERIES} & names),
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in names,
        "rope_parameters": _rope(get, factors, heads, hidden),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if arch == "qwen3moe":
        config["norm_topk_prob"] = True
    if arch == "starcoder2":
        config["use_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
    if arch in ("gemma2", "gemma3"):
        config["query_pre_attn_scalar"] = _score_divisor(arch, config)
    config.update({ours: get(theirs) for ours, theirs in family.keys.items()})
    kept = {key: value for key, value in config.items() if value is not None and key not in family.without}
    plain = {PLAIN_ROWS: True} if family.plain_rows else {}
    return {**{family.renamed.get(key, key): value for key, value in kept.items()}, **plain}


def _score_divisor(arch: str, config: Mapping[str, Any]) -> Any:
    """query_pre_attn_scalar of Gemma, which GGUF does not hold: head_dim, or hidden / heads in the 27B models."""
    large = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[arch]
    return config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]


def _plain(value: Any) -> Any:
    """A float32 as the shortest decimal that means it (1e-05 and not 9.999999747378752e-06); one value of equals."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_dim(get: Any, heads: Any, hidden: Any) -> Any:
    if get("attention.key_length") is not None:
        return get("attention.key_length")
    if isinstance(heads, int) and isinstance(hidden, int) and heads and hidden % heads == 0:
        return hidden // heads
    return get("rope.dimension_count")


def _rope(get: Any, factors: Mapping[str, list[float]], heads: Any, hidden: Any) -> dict[str, Any] | None:
    theta, kind = get("rope.freq_base"), get("rope.scaling.type", "none")
    if theta is None and get("rope.dimension_count") is None and get("attention.layer_norm_rms_epsilon") is None:
        return None
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta or 10000.0}
    head_dim, rotated = _head_dim(get, heads, hidden), get("rope.dimension_count")
    if rotated is not None and head_dim and rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    original = get("rope.scaling.original_context_length")
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    if factor is not None and (kind != "none" or factor != 1.0):
        rope.update(rope_type="linear" if kind == "none" else kind, factor=factor)
    optional = {
        "original_max_position_embeddings": original,
        "attention_factor": get("rope.scaling.attn_factor"),
        "beta_fast": get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get("rope.scaling.yarn_beta_slow"),
    }
    rope.update({key: value for key, value in optional.items() if value is not None})
    if "rope_freqs.weight" in factors:
        rope.update(_llama3(factors["rope_freqs.weight"], rope["rope_theta"]))
    if "rope_factors_long.weight" in factors:
        rope.update(rope_type="longrope", long_factor=factors["rope_factors_long.weight"])
        rope.update(short_factor=factors.get("rope_factors_short.weight"))
    return rope


def llama3_divisors(dims: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What each of the dims / 2 rotary frequencies is divided by, float64 [dims / 2].

    Long wavelengths by `factor`, short ones by 1, and a blend between (Llama 3.1's rule).
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, dims, 2) / dims)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _llama3(divisors: list[float], theta: float) -> dict[str, Any]:
    """The llama3 rope parameters whose divisors these are; every published model has low 1, high 4, original 8192."""
    known = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factor = float(divisors[-1])
    expected = llama3_divisors(2 * len(divisors), theta, factor, 1.0, 4.0, 8192)
    if not np.allclose(expected, divisors, rtol=1e-4):
        return {"rope_type": "divisors of rope_freqs.weight that are not Llama 3's"}
    return {"rope_type": "llama3", "factor": factor, **known}
