"""Llama: RMS norm, rotary embedding, grouped-query attention, gated MLP (Touvron et al. 2023); also SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, read_model
from megakernel.models.fields import Fields

ARCHITECTURES = ("LlamaForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. attention_bias puts a bias on q, k, v and o."""
    fields = Fields(config)
    model = read_model(fields, max_positions=2048)
    fields.only("rope_interleaved", False)  # a trainer's note: whatever it says, transformers pairs halves
    bias = fields.flag("attention_bias", False)
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        windows=(None,) * model.layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    fields.finish()
    return decoder_graph(decoder)
