"""Every model file against Hugging Face transformers in float32, on tiny random models with awkward sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest

from megakernel.architectures import find_model, parameter_shapes
from megakernel.errors import UnsupportedConfig
from megakernel.graph import Graph
from megakernel.interpret import Interpreter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LIMIT = 2e-5  # relative error of logits
TOKENS = 70

SIZES = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

BETAS = {**YARN, "original_max_position_embeddings": 1024, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        """A transformers model with weights large enough for every part to matter."""
        config = getattr(transformers, f"{self.family}Config")(**{**SIZES, **self.fields})
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{self.family}ForCausalLM")(config).eval()
        generator = torch.Generator().manual_seed(len(self.name))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.normal_(0.0, 0.3 if p.ndim == 2 else 0.2, generator=generator)
                if "norm" in name:
                    p.add_(1.0)
        return model


LLAMA = [
    Case("plain", "Llama"),
    Case("tied", "Llama", {"tie_word_embeddings": True}),
    Case("attention_bias", "Llama", {"attention_bias": True}),
    Case("mlp_bias", "Llama", {"mlp_bias": True}),
    Case("own_head_dim", "Llama", {"head_dim": 10}),
    Case("all_of_it", "Llama", {"head_dim": 10, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("gelu", "Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    Case("eps", "Llama", {"rms_norm_eps": 1e-2}),
    Case("theta", "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 130000.0}}),
    Case("linear", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    Case("dynamic", "Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    Case("llama3", "Llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    Case("yarn", "Llama", {"head_dim": 16, "rope_parameters": YARN}),
    Case("yarn_betas", "Llama", {"head_dim": 16, "rope_parameters": BETAS}),
    Case("yarn_factor", "Llama", {"rope_parameters": {**YARN, "attention_factor": 1.25}}),
    Case("yarn_mscale", "Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}),
    *(
        Case(
            f"group_{n}", "Llama", {"num_attention_heads": n * kv, "num_key_value_heads": kv, "hidden_size": 4 * n * kv}
        )
        for n, kv in ((1, 5), (2, 3), (3, 3), (4, 2), (5, 1), (6, 1), (7, 2), (8, 2), (16, 1))
    ),
]
OTHERS = [
    Case("qwen2", "Qwen2"),
    Case("qwen2_tied", "Qwen2", {"tie_word_embeddings": True}),
    Case("qwen2_window", "Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    Case("qwen3", "Qwen3", {"head_dim": 12}),
    Case("qwen3_bias", "Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    Case(
        "qwen3_window",
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    Case("qwen3_yarn", "Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    Case("mistral", "Mistral", {"sliding_window": None, "head_dim": 10}),
    Case("mistral_window", "Mistral", {"sliding_window": 5}),
    Case("mistral_wide_window", "Mistral", {"sliding_window": 4096}),
]


def config_of(model: Any) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def build(config: Mapping[str, Any]) -> Graph:
    return find_model(config).build(config)


def tokens(vocab: int) -> Any:
    return torch.randint(0, vocab, (TOKENS,), generator=torch.Generator().manual_seed(7))


def error(graph: Graph, model: Any) -> float:
    """Relative error of the graph's logits."""
    weights = model.state_dict()
    ids = tokens(model.config.vocab_size)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    got = graph.interpret(weights.__getitem__, ids)["logits"]
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", [*LLAMA, *OTHERS], ids=lambda c: c.name)
def test_logits_equal_transformers(case: Case) -> None:
    model = case.model()
    assert error(build(config_of(model)), model) <= LIMIT


@pytest.mark.parametrize("case", [*LLAMA, *OTHERS], ids=lambda c: c.name)
def test_saved_config_builds_the_same_graph(case: Case) -> None:
    """config.json as transformers writes it leaves out what equals the defaults."""
    model = case.model()
    saved = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    assert build(saved) == build(config_of(model))


@pytest.mark.parametrize("case", [*LLAMA, *OTHERS], ids=lambda c: c.name)
def test_every_parameter_is_used(case: Case) -> None:
    model = case.model()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert parameter_shapes(build(config_of(model))) == shapes


MUTATIONS: list[tuple[str, Case, dict[str, Any]]] = [
    ("theta", LLAMA[0], {"rope_parameters": {"rope_type": "default", "rope_theta": 10100.0}}),
    ("eps", LLAMA[0], {"rms_norm_eps": 1.2e-4}),
    ("linear factor", LLAMA[9], {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.51}}),
    ("llama3 factor", LLAMA[11], {"rope_parameters": {**LLAMA3, "factor": 8.1}}),
    ("llama3 low", LLAMA[11], {"rope_parameters": {**LLAMA3, "low_freq_factor": 1.1}}),
    ("llama3 high", LLAMA[11], {"rope_parameters": {**LLAMA3, "high_freq_factor": 4.1}}),
    ("llama3 context", LLAMA[11], {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 33}}),
    ("yarn factor", LLAMA[12], {"rope_parameters": {**YARN, "factor": 4.1}}),
    ("yarn context", LLAMA[12], {"rope_parameters": {**YARN, "original_max_position_embeddings": 512}}),
    ("yarn beta", LLAMA[13], {"rope_parameters": {**BETAS, "beta_fast": 15.0}}),
    ("yarn truncate", LLAMA[13], {"rope_parameters": {**BETAS, "truncate": True}}),
    ("attention factor", LLAMA[14], {"rope_parameters": {**YARN, "attention_factor": 1.251}}),
    ("activation", LLAMA[6], {"hidden_act": "gelu"}),
    ("window", OTHERS[8], {"sliding_window": 6}),
    ("window layers", OTHERS[2], {"max_window_layers": 0, "layer_types": None}),
]


@pytest.mark.parametrize(("case", "change"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_the_comparison_goes_red(case: Case, change: dict[str, Any]) -> None:
    model = case.model()
    assert error(build({**config_of(model), **change}), model) > LIMIT


@pytest.mark.parametrize("op", ["attention", "rms_norm", "rope"])
def test_one_wrong_node_goes_red(op: str) -> None:
    """A wrong scale, epsilon or head width in one place alone."""
    model = LLAMA[0].model()
    graph = build(config_of(model))
    change = {"attention": {"scale": 0.36}, "rms_norm": {"eps": 1e-3}, "rope": {"heads": 3, "head_dim": 16}}[op]
    index = next(i for i, node in enumerate(graph.nodes) if node.op == op)
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], attrs=MappingProxyType({**nodes[index].attrs, **change}))
    broken = replace(graph, nodes=tuple(nodes)).validate()
    assert error(graph, model) <= LIMIT < error(broken, model)


@pytest.mark.parametrize("case", [LLAMA[11], OTHERS[2], OTHERS[8]], ids=lambda c: c.name)
def test_step_by_step_equals_the_whole_sequence(case: Case) -> None:
    model = case.model()
    graph = build(config_of(model))
    weights = model.state_dict().__getitem__
    ids = tokens(SIZES["vocab_size"])
    whole = graph.interpret(weights, ids)["logits"]
    runner = Interpreter(graph, weights)
    parts = [runner.step(ids[a:b])["logits"] for a, b in ((0, 20), (20, 21), (21, 22), (22, 60), (60, TOKENS))]
    assert float((torch.cat(parts) - whole).norm() / whole.norm()) <= LIMIT
    runner.reset()
    again = runner.step(ids[:20])["logits"]
    assert torch.equal(again, parts[0])


def interleave(weight: Any, heads: int) -> Any:
    """Rows of a q or k projection reordered for interleaved pairs."""
    out, k = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, k).transpose(1, 2).reshape(out, k)


def test_interleaved_pairing_is_a_permutation_of_half_pairing() -> None:
    model = LLAMA[0].model()
    weights = dict(model.state_dict())
    for name in list(weights):
        if "q_proj" in name or "k_proj" in name:
            weights[name] = interleave(weights[name], 6 if "q_proj" in name else 2)
    halves = build(config_of(model))
    nodes = [
        replace(n, attrs=MappingProxyType({**n.attrs, "spec": replace(n.attrs["spec"], interleaved=True)}))
        if n.op == "rope" else n for n in halves.nodes
    ]  # fmt: skip
    graph = replace(halves, nodes=tuple(nodes)).validate()
    ids = tokens(SIZES["vocab_size"])
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    got, other = (g.interpret(weights.__getitem__, ids)["logits"] for g in (graph, halves))
    assert float((got - expected).norm() / expected.norm()) <= LIMIT < float((other - expected).norm())


BASE = {**SIZES, "architectures": ["LlamaForCausalLM"]}


def test_older_spelling_of_rope() -> None:
    old = {**BASE, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**BASE, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}
    assert build(old) == build(new)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("unknown field", {"use_alibi": True}, "use_alibi = True"),
    ("quantized", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("two unknown", {"qk_layernorm": True, "logit_scale": 2.0}, "logit_scale = 2.0, qk_layernorm = True"),
    ("rope type", {"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
    ("longrope", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
    ("rope field", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("rope factor", {"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
    ("rope words", {"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor: expected a number"),
    ("partial", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("contradiction", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta"),
    ("nested rope", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    ("activation", {"hidden_act": "mish"}, "hidden_act"),
    ("heads", {"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of the 6"),
    ("head_dim", {"num_attention_heads": 5, "num_key_value_heads": 5}, "head_dim"),
    ("odd head_dim", {"head_dim": 7}, "7 elements"),
    ("no size", {"hidden_size": None}, "hidden_size: expected a whole number above 0, got None"),
    ("words", {"vocab_size": "131"}, "vocab_size"),
    ("negative", {"num_hidden_layers": -1}, "num_hidden_layers"),
    ("flag", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
    ("eps", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("qwen2 bias", {"architectures": ["Qwen2ForCausalLM"], "attention_bias": False}, "attention_bias"),
    ("qwen2 layers", {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3 window", {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "use_sliding"),
    ("mistral bias", {"architectures": ["MistralForCausalLM"], "mlp_bias": True}, "mlp_bias"),
]


@pytest.mark.parametrize(("change", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_config_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        build({**BASE, **change})
    assert words in str(caught.value)


def test_harmless_fields_are_accepted() -> None:
    harmless = {
        "pretraining_tp": 4,
        "_name_or_path": "x",
        "torch_dtype": "float16",
        "unknown": None,
        "use_cache": False,
    }
    assert build({**BASE, **harmless}) == build(BASE)
