"""Granite 3: Llama's blocks with multipliers of the embedding, the scores, what a layer adds, and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, read_model
from megakernel.models.fields import Fields

ARCHITECTURES = ("GraniteForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. Logits are divided by logits_scaling."""
    fields = Fields(config)
    model = read_model(fields, max_positions=2048)
    bias = fields.flag("attention_bias", False)
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        windows=(None,) * model.layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
    fields.finish()
    return decoder_graph(decoder)
