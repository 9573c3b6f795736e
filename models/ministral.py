"""Ministral: Mistral's blocks with a sliding window in the layers that layer_types names, in every layer without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, kind_windows, layer_kinds, read_model
from megakernel.models.fields import Fields

ARCHITECTURES = ("MinistralForCausalLM",)
CHECKED = ("logits", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. A null sliding_window is full attention, an absent one the family's default of 4096."""
    fields = Fields(config)
    model = read_model(fields, max_positions=131072)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    window = None if fields.null("sliding_window") else fields.integer("sliding_window", 4096)
    kinds = layer_kinds(fields, ["full_attention" if window is None else "sliding_attention"] * model.layers)
    if window is None and "sliding_attention" in kinds:
        raise fields.wrong("sliding_window", "a number, since layer_types has sliding_attention")
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        windows=kind_windows(kinds, window, model.max_positions),
    )
    fields.finish()
    return decoder_graph(decoder)
