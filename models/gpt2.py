"""GPT-2: learned positions, layer norms, biases, weights stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph, GraphBuilder, ModelConfig
from megakernel.models.blocks import head, layer_norm, rotate_and_attend
from megakernel.models.fields import Fields

ARCHITECTURES = ("GPT2LMHeadModel",)
CHECKED = ("logits", "gguf")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config."""
    fields = Fields(config)
    hidden, heads = fields.integer("n_embd", 768), fields.integer("n_head", 12)
    if hidden % heads:
        raise fields.wrong("n_embd", f"a multiple of the {heads} heads")
    c = ModelConfig(
        architecture=fields.architecture, vocab=fields.integer("vocab_size", 50257), hidden=hidden,
        intermediate=fields.integer("n_inner", 4 * hidden), layers=fields.integer("n_layer", 12), heads=heads,
        kv_heads=heads, head_dim=hidden // heads, max_positions=fields.integer("n_positions", 1024),
        tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip
    eps, activation = fields.number("layer_norm_epsilon", 1e-5), fields.activation("activation_function", "gelu_new")
    fields.only("n_ctx", c.max_positions)
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    for name in ("reorder_and_upcast_attn", *(n for n in config if n.startswith("summary_"))):
        fields.raw(name)
    across = not fields.raw("_plain_rows")  # GGUF files have them as [out, in]
    fields.finish()
    b = GraphBuilder(c)
    table = b.weight("transformer.wte.weight", c.vocab, c.hidden)
    x = b.embedding("embedding", table, positions=b.weight("transformer.wpe.weight", c.max_positions, c.hidden))
    for i in range(c.layers):
        with b.layer(i):
            at = f"transformer.h.{i}"
            normed = layer_norm(b, "attention_norm", x, f"{at}.ln_1", eps)
            q, k, v = stored(b, ("q", "k", "v"), normed, f"{at}.attn.c_attn", c.hidden, c.hidden, across)
            mixed = rotate_and_attend(b, q, k, v, None, None)
            (mixed,) = stored(b, ("attention_output",), mixed, f"{at}.attn.c_proj", c.hidden, c.hidden, across)
            x = b.add("attention_residual", x, mixed)
            normed = layer_norm(b, "mlp_norm", x, f"{at}.ln_2", eps)
            (inner,) = stored(b, ("up",), normed, f"{at}.mlp.c_fc", c.intermediate, c.hidden, across)
            inner = b.activation("activation", inner, activation=activation)
            (inner,) = stored(b, ("mlp_output",), inner, f"{at}.mlp.c_proj", c.hidden, c.intermediate, across)
            x = b.add("mlp_residual", x, inner)
    x = layer_norm(b, "final_norm", x, "transformer.ln_f", eps)
    return head(b, x, table if c.tied else b.weight("lm_head.weight", c.vocab, c.hidden))


def stored(
    b: GraphBuilder, names: tuple[str, ...], x: str, weight: str, n: int, k: int, across: bool
) -> tuple[str, ...]:
    """Linears of n columns from one checkpoint tensor: across, [k, n * len(names)], or [n * len(names), k]."""
    rows = n * len(names)
    b.weight(f"{weight}.weight", *((k, rows) if across else (rows, k)))
    b.weight(f"{weight}.bias", rows)
    return tuple(
        b.linear(
            name, x, b.weight_slice(f"{weight}.weight", i * n, i * n + n, transposed=across),
            b.weight_slice(f"{weight}.bias", i * n, i * n + n),
        )
        for i, name in enumerate(names)
    )  # fmt: skip
