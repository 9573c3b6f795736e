"""Mistral: Llama's blocks with one sliding window for every layer, when sliding_window is set (Jiang et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, read_model, shown_window
from megakernel.models.fields import Fields

ARCHITECTURES = ("MistralForCausalLM",)
CHECKED = ("logits", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. A null sliding_window is full attention, an absent one the family's default of 4096."""
    fields = Fields(config)
    model = read_model(fields, max_positions=131072)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    window = None if fields.null("sliding_window") else fields.integer("sliding_window", 4096)
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        windows=(shown_window(window, model.max_positions),) * model.layers,
    )
    fields.finish()
    return decoder_graph(decoder)
