"""SmolLM3: Llama's blocks, no rotary embedding in every fourth layer (NoPE), sliding windows where the config asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, kind_windows, layer_kinds, read_model
from megakernel.models.fields import Fields

ARCHITECTURES = ("SmolLM3ForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. no_rope_layers holds 1 for each layer with rotary embedding and 0 for the others."""
    fields = Fields(config)
    model = read_model(fields, max_positions=32768, tied=True, theta=2000000.0)
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.each("no_rope_layers", [int((i + 1) % interval != 0) for i in range(model.layers)], 0, 1)
    used = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window", model.max_positions) if used or fields.raw("sliding_window") else None
    kinds = layer_kinds(fields, ["full_attention" if not used or r else "sliding_attention" for r in rotated])
    bias = fields.flag("attention_bias", False)
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        windows=kind_windows(kinds, window, model.max_positions),
        ropes=tuple(model.rope if r else None for r in rotated),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    fields.finish()
    return decoder_graph(decoder)
