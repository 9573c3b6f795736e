"""Blocks that the decoder families share: attention with grouped heads, gated MLP, pre-norm layers, the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megakernel.graph import Graph, GraphBuilder, ModelConfig
from megakernel.models.fields import Fields
from megakernel.rope import RopeSpec, rope_spec


@dataclass(frozen=True)
class Decoder:
    """What the blocks need beside ModelConfig. `windows`: sliding window of each layer, None for full attention."""

    config: ModelConfig
    rope: RopeSpec
    eps: float
    activation: str
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def read_model(
    fields: Fields, *, max_positions: int, head_dim: int | None = None, interleaved: bool = False
) -> ModelConfig:
    """The facts that every family's config states under the same names.

    max_positions and head_dim: the family's defaults for a config without them (head_dim None: hidden / heads).
    Raises UnsupportedConfig for a missing or impossible number.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if fields.raw("head_dim") is None and head_dim is None and hidden % heads:
        raise fields.wrong("head_dim", f"a number, since hidden_size {hidden} is not a multiple of {heads} heads")
    dim = fields.integer("head_dim", head_dim or hidden // heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {heads} attention heads")
    positions = fields.integer("max_position_embeddings", max_positions)
    return ModelConfig(
        architecture=fields.architecture,
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        max_positions=positions,
        tied=fields.flag("tie_word_embeddings", False),
        rope=rope_spec(rope_parameters(fields), dim, positions, partial=False, interleaved=interleaved),
    )


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """`rope_parameters`, or the older `rope_theta`, `rope_scaling` and `partial_rotary_factor` in its form."""
    given = fields.raw("rope_parameters") or fields.raw("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise fields.wrong("rope_parameters", "one object of numbers")
    fields.raw("rope_scaling")
    out = {"rope_type": given.get("type", "default"), **{k: v for k, v in given.items() if k != "type"}}
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        value = fields.raw(name)
        if value is not None and out.setdefault(name, value) != value:
            raise fields.wrong(name, f"{out[name]!r} as rope_parameters says")
    return out


def layer_windows(fields: Fields, layers: int, max_positions: int) -> tuple[int | None, ...]:
    """Sliding windows of a family with use_sliding_window, sliding_window, max_window_layers and layer_types (Qwen).

    Without layer_types the layers from max_window_layers on slide. A window of the whole context is none.
    """
    used = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window", 4096) if fields.raw("sliding_window") is not None or used else None
    window = window if used else None
    first = fields.raw("max_window_layers")
    first = 28 if first is None else first
    default = ["sliding_attention" if used and i >= first else "full_attention" for i in range(layers)]
    kinds = fields.raw("layer_types") or default
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise fields.wrong("layer_types", f"{layers} times sliding_attention or full_attention")
    if "sliding_attention" in kinds and window is None:
        raise fields.wrong("use_sliding_window", "true, since layer_types has sliding_attention")
    return tuple(shown_window(window if kind == "sliding_attention" else None, max_positions) for kind in kinds)


def shown_window(window: int | None, max_positions: int) -> int | None:
    """The window, or None when it never hides a token."""
    return None if window is None or window >= max_positions else window


def decoder_graph(d: Decoder) -> Graph:
    """A pre-norm decoder: `x += attention(norm(x))`, `x += mlp(norm(x))` in each layer, then norm and head."""
    c = d.config
    b = GraphBuilder(c)
    table = b.weight("model.embed_tokens.weight", c.vocab, c.hidden)
    x = b.embedding("embedding", table)
    for i in range(c.layers):
        with b.layer(i):
            prefix = f"model.layers.{i}"
            normed = norm(b, "attention_norm", x, f"{prefix}.input_layernorm", d.eps)
            x = b.add("attention_residual", x, attention(b, d, normed, f"{prefix}.self_attn", d.windows[i]))
            normed = norm(b, "mlp_norm", x, f"{prefix}.post_attention_layernorm", d.eps)
            x = b.add("mlp_residual", x, gated_mlp(b, d, normed, f"{prefix}.mlp"))
    x = norm(b, "final_norm", x, "model.norm", d.eps)
    b.linear("logits", x, table if c.tied else b.weight("lm_head.weight", c.vocab, c.hidden))
    return b.finish()


def norm(b: GraphBuilder, name: str, x: str, weight: str, eps: float) -> str:
    """RMS norm over all columns with the checkpoint tensor `weight`.weight."""
    return b.rms_norm(name, x, b.weight(f"{weight}.weight", b.config.hidden), eps=eps)


def project(b: GraphBuilder, name: str, x: str, weight: str, n: int, k: int, bias: bool) -> str:
    """`x W^T + bias` with the checkpoint tensors `weight`.weight [n, k] and, when there is one, `weight`.bias [n]."""
    return b.linear(name, x, b.weight(f"{weight}.weight", n, k), b.weight(f"{weight}.bias", n) if bias else None)


def attention(b: GraphBuilder, d: Decoder, x: str, prefix: str, window: int | None) -> str:
    """Projections, norm of each q and k head (optional), rotary embedding, causal attention, output projection."""
    c = d.config
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    q = project(b, "q", x, f"{prefix}.q_proj", width, c.hidden, d.qkv_bias)
    k = project(b, "k", x, f"{prefix}.k_proj", kv_width, c.hidden, d.qkv_bias)
    v = project(b, "v", x, f"{prefix}.v_proj", kv_width, c.hidden, d.qkv_bias)
    if d.qk_norm:
        q = head_norm(b, "q_norm", q, f"{prefix}.q_norm", d)
        k = head_norm(b, "k_norm", k, f"{prefix}.k_norm", d)
    q = b.rope("q_rope", q, heads=c.heads, head_dim=c.head_dim, spec=d.rope)
    k = b.rope("k_rope", k, heads=c.kv_heads, head_dim=c.head_dim, spec=d.rope)
    mixed = b.attention(
        "attention", q, k, v, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, scale=c.head_dim**-0.5,
        window=window,
    )  # fmt: skip
    return project(b, "attention_output", mixed, f"{prefix}.o_proj", c.hidden, width, d.output_bias)


def head_norm(b: GraphBuilder, name: str, x: str, weight: str, d: Decoder) -> str:
    """RMS norm of each head by itself, one gamma [head_dim] for all heads."""
    dim = d.config.head_dim
    return b.rms_norm(name, x, b.weight(f"{weight}.weight", dim), eps=d.eps, group=dim)


def gated_mlp(b: GraphBuilder, d: Decoder, x: str, prefix: str) -> str:
    """`down(activation(gate(x)) * up(x))`."""
    c = d.config
    gate = project(b, "gate", x, f"{prefix}.gate_proj", c.intermediate, c.hidden, d.mlp_bias)
    up = project(b, "up", x, f"{prefix}.up_proj", c.intermediate, c.hidden, d.mlp_bias)
    inner = b.glu("glu", gate, up, activation=d.activation)
    return project(b, "mlp_output", inner, f"{prefix}.down_proj", c.hidden, c.intermediate, d.mlp_bias)
