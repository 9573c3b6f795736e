"""Gemma 2: norms before and behind each block, soft-capped scores and logits, a window in every second layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, decoder_graph, kind_windows, layer_kinds, read_model
from megakernel.models.fields import Fields

ARCHITECTURES = ("Gemma2ForCausalLM",)
CHECKED = ("logits", "gguf", "random")


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. The embedding is scaled by sqrt(hidden_size) and norms by 1 + weight, in float32."""
    fields = Fields(config)
    model = read_model(fields, max_positions=8192, head_dim=256, tied=True)
    window = fields.integer("sliding_window", 4096)
    kinds = layer_kinds(fields, ["full_attention" if i % 2 else "sliding_attention" for i in range(model.layers)])
    fields.only("hidden_act", fields.raw("hidden_activation") or "gelu_pytorch_tanh", "gelu", "gelu_pytorch_tanh")
    for name in ("use_bidirectional_attention", "mlp_bias"):
        fields.only(name, False)
    bias = fields.flag("attention_bias", False)
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        windows=kind_windows(kinds, window, model.max_positions),
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(model.hidden),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=None
        if fields.null("attn_logit_softcapping")
        else fields.number("attn_logit_softcapping", 50.0),
        logit_softcap=None
        if fields.null("final_logit_softcapping")
        else fields.number("final_logit_softcapping", 30.0),
    )
    fields.finish()
    return decoder_graph(decoder)
