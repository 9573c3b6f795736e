"""Gemma 3 text models: five layers with a sliding window to one without, each kind with its own rotary base."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megakernel.graph import Graph
from megakernel.models.blocks import Decoder, check_rope_scaling, decoder_graph, kind_windows, layer_kinds, read_model
from megakernel.models.fields import Fields
from megakernel.rope import RopeSpec, rope_spec

ARCHITECTURES = ("Gemma3ForCausalLM",)
CHECKED = ("logits", "gguf", "random")

THETA = {"full_attention": 1000000.0, "sliding_attention": 10000.0}


def build(config: Mapping[str, Any]) -> Graph:
    """The graph of a config. The embedding is scaled by sqrt(hidden_size) and norms by 1 + weight, in float32."""
    fields = Fields(config)
    parameters = rope_of_kinds(fields)
    model = read_model(fields, max_positions=131072, head_dim=256, tied=True, rope=parameters["full_attention"])
    ropes: dict[str, RopeSpec | None] = {
        kind: rope_spec(given, model.head_dim, model.max_positions, partial=False) for kind, given in parameters.items()
    }
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(model.layers)]
    kinds = layer_kinds(fields, default)
    window = fields.integer("sliding_window", 4096)
    fields.only("hidden_act", fields.raw("hidden_activation") or "gelu_pytorch_tanh", "gelu", "gelu_pytorch_tanh")
    for name in ("use_bidirectional_attention", "mlp_bias"):
        fields.only(name, False)
    bias = fields.flag("attention_bias", False)
    if fields.raw("attn_logit_softcapping") is not None:  # transformers has the field and leaves the scores as they are
        raise fields.wrong("attn_logit_softcapping", "null")
    cap = None if fields.raw("final_logit_softcapping") is None else fields.number("final_logit_softcapping")
    decoder = Decoder(
        config=model,
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        windows=kind_windows(kinds, window, model.max_positions),
        ropes=tuple(ropes[kind] for kind in kinds),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(model.hidden),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=cap,
    )
    fields.finish()
    return decoder_graph(decoder)


def rope_of_kinds(fields: Fields) -> dict[str, dict[str, Any]]:
    """Rotary parameters of both kinds of layer: `rope_parameters` has one set for each kind; older configs say
    rope_theta and rope_scaling of the full layers and rope_local_base_freq of the others."""
    given = fields.raw("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise fields.wrong("rope_parameters", "one set of numbers for full_attention, one for sliding_attention")
    check_rope_scaling(fields)
    scaling, theta, local = (fields.raw(name) for name in ("rope_scaling", "rope_theta", "rope_local_base_freq"))
    if not any(kind in given for kind in THETA):
        given = {"full_attention": {**(scaling or {}), **given}}
    if set(given) - set(THETA) or not all(isinstance(value, Mapping) for value in given.values()):
        raise fields.wrong("rope_parameters", "one set of numbers for full_attention, one for sliding_attention")
    base = {"full_attention": theta, "sliding_attention": local}
    return {
        kind: {
            "rope_theta": base[kind] or THETA[kind],
            **{k: v for k, v in (given.get(kind) or {}).items() if v is not None},
        }
        for kind in THETA
    }
