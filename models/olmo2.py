"""OLMo 2: norms behind each block and none before it, and a norm over all q heads and one over all k heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, read_model
from megakernel.models.fields import Fields

ARCHITECTURES = ("Olmo2ForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. attention_bias puts a bias on q, k, v and o."""
    fields = Fields(config)
    model = read_model(fields, max_positions=2048)
    bias = fields.flag("attention_bias", False)
    fields.only("mlp_bias", False)
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-5),
        activation=fields.activation("hidden_act", "silu"),
        windows=(None,) * model.layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="all",
        pre_norms=False,
        post_norms=True,
    )
    fields.finish()
    return decoder_graph(decoder)
