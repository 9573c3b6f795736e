"""Blocks that the decoder families share: attention with grouped heads, MLPs, norms around them, the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megakernel.graph import Graph, GraphBuilder, ModelConfig
from megakernel.models.fields import Fields
from megakernel.rope import RopeSpec, rope_spec, same_rope


@dataclass(frozen=True)
class Decoder:
    """What the blocks need beside ModelConfig. `windows` and `ropes` have one entry for each layer.

    windows: sliding window, None for full attention. ropes: rotary embedding, None for none; () is the config's in
    every layer. qk_norm: "head" norms each q and k head, "all" all of them together. pre_norms: x + f(norm(x)).
    post_norms: x + norm(f(x)). norm_offset is added to every norm's weight. fused: q, k, v are rows of one checkpoint
    tensor, gate and up of another. attention_scale: of the scores, None for head_dim^-0.5. residual_scale: of what a
    layer adds. logit_scale and logit_softcap apply to the logits, attention_softcap to the scores.
    """

    config: ModelConfig
    eps: float
    activation: str
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    fused: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    attention_softcap: float | None = None

    def rope(self, layer: int) -> RopeSpec | None:
        return self.ropes[layer] if self.ropes else self.config.rope


def read_model(
    fields: Fields, *, max_positions: int, head_dim: int | None = None,
    tied: bool = False, partial: bool = False, rope: Mapping[str, Any] | None = None, theta: float = 10000.0,
) -> ModelConfig:  # fmt: skip
    """The facts that every family's config states under the same names.

    max_positions, head_dim, tied, theta: the family's defaults for a config without them (head_dim None: hidden /
    heads). partial: partial_rotary_factor is understood. rope: the parameters of the rotary embedding if not the
    config's own.
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
        tied=fields.flag("tie_word_embeddings", tied),
        rope=rope_spec(
            {"rope_theta": theta, **(rope_parameters(fields) if rope is None else rope)},
            dim,
            positions,
            partial=partial,
        ),
    )


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """`rope_parameters`, or the older `rope_theta`, `rope_scaling` and `partial_rotary_factor` in its form."""
    given = fields.raw("rope_parameters") or fields.raw("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise fields.wrong("rope_parameters", "one object of numbers")
    check_rope_scaling(fields)
    out = {
        "rope_type": given.get("type", "default"),
        **{k: v for k, v in given.items() if k != "type" and v is not None},
    }
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        value = fields.raw(name)
        if value is not None and out.setdefault(name, value) != value:
            raise fields.wrong(name, f"{out[name]!r} as rope_parameters says")
    return out


def check_rope_scaling(fields: Fields) -> None:
    """Refuse a rope_scaling, the older key, that is not what rope_parameters says."""
    scaling, parameters = fields.raw("rope_scaling"), fields.raw("rope_parameters")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise fields.wrong("rope_scaling", "one object of numbers")
    if not same_rope(parameters, scaling, fields.raw("rope_theta")):
        raise fields.wrong("rope_scaling", f"nothing, or the same as rope_parameters, {parameters}")


def layer_windows(fields: Fields, layers: int, max_positions: int) -> tuple[int | None, ...]:
    """Sliding windows of a family with use_sliding_window, sliding_window, max_window_layers and layer_types (Qwen).

    Without layer_types the layers from max_window_layers on slide. A window of the whole context is none.
    """
    used = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window", 4096) if fields.raw("sliding_window") is not None or used else None
    window = window if used else None
    first = fields.raw("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.wrong("max_window_layers", "the number of the first layer that slides")
    default = ["sliding_attention" if used and i >= first else "full_attention" for i in range(layers)]
    kinds = layer_kinds(fields, default)
    if "sliding_attention" in kinds and window is None:
        raise fields.wrong("use_sliding_window", "true, since layer_types has sliding_attention")
    return kind_windows(kinds, window, max_positions)


def kind_windows(kinds: Sequence[str], window: int | None, max_positions: int) -> tuple[int | None, ...]:
    """The window of each layer: that of the layers of kind sliding_attention, none of the others."""
    return tuple(shown_window(window if kind == "sliding_attention" else None, max_positions) for kind in kinds)


def layer_kinds(fields: Fields, default: Sequence[str]) -> tuple[str, ...]:
    """`layer_types`, one of sliding_attention and full_attention for each layer, or the default."""
    return fields.each("layer_types", default, "sliding_attention", "full_attention")


def shown_window(window: int | None, max_positions: int) -> int | None:
    """The window, or None when it never hides a token."""
    return None if window is None or window >= max_positions else window


def decoder_graph(d: Decoder) -> Graph:
    """Embedding, layers of attention and gated MLP, final norm and head."""
    c = d.config
    b = GraphBuilder(c)
    table = b.weight("model.embed_tokens.weight", c.vocab, c.hidden)
    x = b.embedding("embedding", table, scale=d.embedding_scale)
    between = "pre_feedforward_layernorm" if d.post_norms else "post_attention_layernorm"
    for i in range(c.layers):
        with b.layer(i):
            prefix = f"model.layers.{i}"
            normed = norm(b, d, "attention_norm", x, f"{prefix}.input_layernorm") if d.pre_norms else x
            mixed = attention(b, d, normed, f"{prefix}.self_attn", i)
            x = residual(b, d, "attention", x, mixed, f"{prefix}.post_attention_layernorm")
            normed = norm(b, d, "mlp_norm", x, f"{prefix}.{between}") if d.pre_norms else x
            inner = gated_mlp(b, d, normed, f"{prefix}.mlp")
            x = residual(b, d, "mlp", x, inner, f"{prefix}.post_feedforward_layernorm")
    x = norm(b, d, "final_norm", x, "model.norm")
    return head(
        b, x, table if c.tied else b.weight("lm_head.weight", c.vocab, c.hidden), d.logit_scale, d.logit_softcap
    )


def residual(b: GraphBuilder, d: Decoder, name: str, x: str, added: str, weight: str) -> str:
    """`x + norm(added) * residual_scale`; the norm with checkpoint tensor `weight` only where there are post norms."""
    if d.post_norms:
        added = norm(b, d, f"{name}_post_norm", added, weight)
    if d.residual_scale != 1.0:
        added = b.scale(f"{name}_scale", added, d.residual_scale)
    return b.add(f"{name}_residual", x, added)


def head(b: GraphBuilder, x: str, weight: str, scale: float = 1.0, softcap: float | None = None) -> Graph:
    """Logits of normed activations: `x W^T`, scaled or soft-capped; the finished graph."""
    if scale != 1.0:
        b.scale("logits", b.linear("head", x, weight), scale)
    elif softcap is not None:
        b.softcap("logits", b.linear("head", x, weight), softcap)
    else:
        b.linear("logits", x, weight)
    return b.finish()


def norm(b: GraphBuilder, d: Decoder, name: str, x: str, weight: str) -> str:
    """RMS norm over all columns with the checkpoint tensor `weight`.weight."""
    return b.rms_norm(name, x, b.weight(f"{weight}.weight", b.config.hidden), eps=d.eps, offset=d.norm_offset)


def layer_norm(b: GraphBuilder, name: str, x: str, weight: str, eps: float) -> str:
    """Layer norm with the checkpoint tensors `weight`.weight and `weight`.bias."""
    gamma, beta = (b.weight(f"{weight}.{part}", b.config.hidden) for part in ("weight", "bias"))
    return b.layer_norm(name, x, gamma, beta, eps=eps)


def project(b: GraphBuilder, name: str, x: str, weight: str, n: int, k: int, bias: bool) -> str:
    """`x W^T + bias` with the checkpoint tensors `weight`.weight [n, k] and, when there is one, `weight`.bias [n]."""
    return b.linear(name, x, b.weight(f"{weight}.weight", n, k), b.weight(f"{weight}.bias", n) if bias else None)


def project_rows(b: GraphBuilder, names: Mapping[str, int], x: str, weight: str, k: int) -> tuple[str, ...]:
    """Linears named with their columns, one after the other in the rows of the checkpoint tensor `weight`.weight."""
    b.weight(f"{weight}.weight", sum(names.values()), k)
    at, made = 0, []
    for name, n in names.items():
        made.append(b.linear(name, x, b.weight_slice(f"{weight}.weight", at, at + n)))
        at += n
    return tuple(made)


def attention(b: GraphBuilder, d: Decoder, x: str, prefix: str, layer: int) -> str:
    """Projections, norm of q and k (optional), rotary embedding (optional), causal attention, output projection."""
    c = d.config
    widths = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    if d.fused:
        q, k, v = project_rows(b, widths, x, f"{prefix}.qkv_proj", c.hidden)
    else:
        q, k, v = (project(b, i, x, f"{prefix}.{i}_proj", n, c.hidden, d.qkv_bias) for i, n in widths.items())
    if d.qk_norm:
        q, k = (qk_norm(b, d, f"{i}_norm", value, f"{prefix}.{i}_norm") for i, value in (("q", q), ("k", k)))
    mixed = rotate_and_attend(
        b, q, k, v, d.rope(layer), d.windows[layer], scale=d.attention_scale, softcap=d.attention_softcap
    )
    return project(b, "attention_output", mixed, f"{prefix}.o_proj", c.hidden, widths["q"], d.output_bias)


def rotate_and_attend(
    b: GraphBuilder, q: str, k: str, v: str, rope: RopeSpec | None, window: int | None, *,
    scale: float | None = None, softcap: float | None = None,
) -> str:  # fmt: skip
    """Rotary embedding (optional) and causal attention with the config's heads."""
    c = b.config
    if rope is not None:
        q = b.rope("q_rope", q, heads=c.heads, head_dim=c.head_dim, spec=rope)
        k = b.rope("k_rope", k, heads=c.kv_heads, head_dim=c.head_dim, spec=rope)
    return b.attention(
        "attention", q, k, v, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim,
        scale=c.head_dim**-0.5 if scale is None else scale, window=window, softcap=softcap,
    )  # fmt: skip


def qk_norm(b: GraphBuilder, d: Decoder, name: str, x: str, weight: str) -> str:
    """RMS norm of each head by itself with one gamma [head_dim], or of all heads together."""
    group = d.config.head_dim if d.qk_norm == "head" else None
    cols = group or (d.config.heads if name == "q_norm" else d.config.kv_heads) * d.config.head_dim
    return b.rms_norm(name, x, b.weight(f"{weight}.weight", cols), eps=d.eps, offset=d.norm_offset, group=group)


def gated_mlp(b: GraphBuilder, d: Decoder, x: str, prefix: str) -> str:
    """`down(activation(gate(x)) * up(x))`."""
    c = d.config
    if d.fused:
        gate, up = project_rows(
            b, {"gate": c.intermediate, "up": c.intermediate}, x, f"{prefix}.gate_up_proj", c.hidden
        )
    else:
        gate, up = (
            project(b, i, x, f"{prefix}.{i}_proj", c.intermediate, c.hidden, d.mlp_bias) for i in ("gate", "up")
        )
    inner = b.glu("glu", gate, up, activation=d.activation)
    return project(b, "mlp_output", inner, f"{prefix}.down_proj", c.hidden, c.intermediate, d.mlp_bias)


def plain_mlp(b: GraphBuilder, x: str, up: str, down: str, activation: str, bias: bool) -> str:
    """`down(activation(up(x)))` with the checkpoint tensors `up` and `down`."""
    c = b.config
    inner = b.activation("activation", project(b, "up", x, up, c.intermediate, c.hidden, bias), activation=activation)
    return project(b, "mlp_output", inner, down, c.hidden, c.intermediate, bias)
