"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's blocks from fused tensors, part of a head rotated, longrope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, read_model, rope_parameters, shown_window
from megakernel.models.fields import Fields

ARCHITECTURES = ("Phi3ForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. A null sliding_window is full attention.

    longrope has two tables. A program takes the one for its own max_context: the short one up to
    original_max_position_embeddings, the long one beyond, for every token.
    """
    fields = Fields(config)
    original = fields.integer("original_max_position_embeddings", 4096)
    rope = dict(rope_parameters(fields))
    if rope.get("rope_type") in ("su", "yarn"):  # names that the first files used for longrope
        rope["rope_type"] = "longrope"
    if rope.get("rope_type") == "longrope":
        rope.setdefault("original_max_position_embeddings", original)
    model = read_model(fields, max_positions=4096, partial=True, rope=rope)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    window = None if fields.raw("sliding_window") is None else fields.integer("sliding_window")
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-5),
        activation=fields.activation("hidden_act", "silu"),
        windows=(shown_window(window, model.max_positions),) * model.layers,
        fused=True,
    )
    fields.finish()
    return decoder_graph(decoder)
