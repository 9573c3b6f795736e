"""StarCoder2: layer norms, biases everywhere, an MLP without a gate, one sliding window for every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph, GraphBuilder
from megakernel.models.blocks import head as output_head
from megakernel.models.blocks import layer_norm, plain_mlp, project, read_model, rotate_and_attend, shown_window
from megakernel.models.fields import Fields

ARCHITECTURES = ("Starcoder2ForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. use_bias puts a bias on every linear but the head."""
    fields = Fields(config)
    c = read_model(fields, max_positions=4096, tied=True)
    eps, bias = fields.number("norm_epsilon", 1e-5), fields.flag("use_bias", True)
    activation = fields.activation("hidden_act", "gelu_pytorch_tanh")
    window = None if fields.raw("sliding_window") is None else fields.integer("sliding_window")
    window = shown_window(window, c.max_positions)
    fields.only("norm_type", "layer_norm")
    fields.only("mlp_type", "default")
    fields.finish()
    b = GraphBuilder(c)
    table = b.weight("model.embed_tokens.weight", c.vocab, c.hidden)
    x = b.embedding("embedding", table)
    widths = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    for i in range(c.layers):
        with b.layer(i):
            at = f"model.layers.{i}"
            normed = layer_norm(b, "attention_norm", x, f"{at}.input_layernorm", eps)
            q, k, v = (project(b, n, normed, f"{at}.self_attn.{n}_proj", w, c.hidden, bias) for n, w in widths.items())
            mixed = rotate_and_attend(b, q, k, v, c.rope, window)
            mixed = project(b, "attention_output", mixed, f"{at}.self_attn.o_proj", c.hidden, widths["q"], bias)
            x = b.add("attention_residual", x, mixed)
            normed = layer_norm(b, "mlp_norm", x, f"{at}.post_attention_layernorm", eps)
            inner = plain_mlp(b, normed, f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", activation, bias)
            x = b.add("mlp_residual", x, inner)
    x = layer_norm(b, "final_norm", x, "model.norm", eps)
    return output_head(b, x, table if c.tied else b.weight("lm_head.weight", c.vocab, c.hidden))
