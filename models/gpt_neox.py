"""GPT-NeoX and Pythia: layer norms, biases, q k v of each head in one tensor, MLP beside the attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph, GraphBuilder
from megakernel.models.blocks import head as output_head
from megakernel.models.blocks import layer_norm, plain_mlp, project, read_model, rope_parameters, rotate_and_attend
from megakernel.models.fields import Fields

ARCHITECTURES = ("GPTNeoXForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. use_parallel_residual: x + attention(norm(x)) + mlp(norm(x)), else one after the other."""
    fields = Fields(config)
    rope = dict(rope_parameters(fields))
    part = fields.number("rotary_pct", 0.25)
    fields.only("partial_rotary_factor", part)  # transformers reads rotary_pct, or the one in rope_parameters
    rope.setdefault("partial_rotary_factor", part)
    rope.setdefault("rope_theta", fields.number("rotary_emb_base", 10000.0))
    fields.only("num_key_value_heads", fields.integer("num_attention_heads"))
    c = read_model(fields, max_positions=2048, partial=True, rope=rope)
    eps, bias = fields.number("layer_norm_eps", 1e-5), fields.flag("attention_bias", True)
    activation = fields.activation("hidden_act", "gelu")
    parallel = fields.flag("use_parallel_residual", True)
    by_head = not fields.raw("_plain_rows")  # GGUF files have all of q, all of k, all of v
    fields.finish()
    b = GraphBuilder(c)
    table = b.weight("gpt_neox.embed_in.weight", c.vocab, c.hidden)
    x = b.embedding("embedding", table)
    for i in range(c.layers):
        with b.layer(i):
            at = f"gpt_neox.layers.{i}"
            normed = layer_norm(b, "attention_norm", x, f"{at}.input_layernorm", eps)
            mixed = rotate_and_attend(
                b, *queries_keys_values(b, normed, f"{at}.attention.query_key_value", bias, by_head), c.rope, None
            )
            mixed = project(b, "attention_output", mixed, f"{at}.attention.dense", c.hidden, c.hidden, bias)
            mixed = b.add("attention_residual", x, mixed)
            normed = layer_norm(b, "mlp_norm", x if parallel else mixed, f"{at}.post_attention_layernorm", eps)
            inner = plain_mlp(b, normed, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h", activation, True)
            x = b.add("mlp_residual", mixed, inner)
    x = layer_norm(b, "final_norm", x, "gpt_neox.final_layer_norm", eps)
    return output_head(b, x, table if c.tied else b.weight("embed_out.weight", c.vocab, c.hidden))


def queries_keys_values(b: GraphBuilder, x: str, weight: str, bias: bool, by_head: bool) -> tuple[str, str, str]:
    """q, k and v: rows of one tensor that by head holds q, k and v of the first head, then those of the second, and so
    on, or else all of q, then of k, then of v."""
    c = b.config
    rows, dim = 3 * c.hidden, c.head_dim
    b.weight(f"{weight}.weight", rows, c.hidden)
    if bias:
        b.weight(f"{weight}.bias", rows)

    def part(name: str, index: int) -> str:
        start, stop = (index * dim, rows) if by_head else (index * c.hidden, (index + 1) * c.hidden)
        block, stride = (dim, 3 * dim) if by_head else (0, 0)
        matrix = b.weight_slice(f"{weight}.weight", start, stop, block=block, stride=stride)
        vector = b.weight_slice(f"{weight}.bias", start, stop, block=block, stride=stride) if bias else None
        return b.linear(name, x, matrix, vector)

    return part("q", 0), part("k", 1), part("v", 2)
