"""Qwen2 and Qwen2.5: Llama's blocks with a bias on q, k and v, and a sliding window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, layer_windows, read_model
from megakernel.models.fields import Fields

ARCHITECTURES = ("Qwen2ForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config."""
    fields = Fields(config)
    model = read_model(fields, max_positions=32768)
    fields.only("attention_bias", True)
    fields.only("mlp_bias", False)
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        windows=layer_windows(fields, model.layers, model.max_positions),
        qkv_bias=True,
    )
    fields.finish()
    return decoder_graph(decoder)
