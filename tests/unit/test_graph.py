"""Graph, GraphBuilder and the operators of the interpreter against plain formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megakernel.errors import GraphError, InvalidRequest, MissingExtra
from megakernel.graph import Graph, GraphBuilder, ModelConfig, Node, RopeSpec, Tensor, WeightSlice
from megakernel.interpret import Interpreter

torch = pytest.importorskip("torch")

CONFIG = ModelConfig(
    "Tiny", vocab=11, hidden=8, intermediate=6, layers=1, heads=2, kv_heads=1, head_dim=4, max_positions=32, tied=True
)
SPEC = RopeSpec(4)


def weights(seed: int = 0) -> Any:
    """Any weight by name; seeded by its name."""
    shapes = {
        "table": (11, 8),
        "gamma": (8,),
        "beta": (8,),
        "qkv": (16, 8),
        "qkv_bias": (16,),
        "mlp": (12, 8),
        "down": (8, 6),
    }

    def read(name: str) -> np.ndarray[Any, Any]:
        generator = np.random.default_rng([seed, len(name), ord(name[0])])
        return generator.normal(size=shapes[name]).astype(np.float32)

    return read


def small() -> Graph:
    """Every operator once, with fused checkpoint tensors."""
    b = GraphBuilder(CONFIG)
    table = b.weight("table", 11, 8)
    x = b.embedding("embedding", table, scale=2.0)
    with b.layer(0):
        normed = b.layer_norm("norm", x, b.weight("gamma", 8), b.weight("beta", 8), eps=1e-5)
        b.weight("qkv", 16, 8)
        b.weight("qkv_bias", 16)
        q, k, v = (
            b.linear(name, normed, b.weight_slice("qkv", *rows), b.weight_slice("qkv_bias", *rows))
            for name, rows in (("q", (0, 8)), ("k", (8, 12)), ("v", (12, 16)))
        )
        q = b.rope("q_rope", q, heads=2, head_dim=4, spec=SPEC)
        k = b.rope("k_rope", k, heads=1, head_dim=4, spec=SPEC)
        mixed = b.attention("attention", q, k, v, heads=2, kv_heads=1, head_dim=4, scale=0.5, window=3, softcap=5.0)
        x = b.add("residual", x, b.scale("scaled", mixed, 0.5))
        b.weight("mlp", 12, 8)
        gate, up = b.linear("gate", x, b.weight_slice("mlp", 0, 6)), b.linear("up", x, b.weight_slice("mlp", 6, 12))
        x = b.linear("down", b.glu("glu", gate, up, activation="gelu_tanh"), b.weight("down", 8, 6))
    x = b.rms_norm("final", x, "gamma", eps=1e-6, offset=1.0)
    b.softcap("logits", b.linear("head", x, table), 30.0)
    return b.finish()


def numpy_reference(tokens: list[int]) -> np.ndarray[Any, Any]:
    """`small` written out in float64, without any of the package's code but the rotary table."""
    w = {n: weights()(n).astype(np.float64) for n in ("table", "gamma", "beta", "qkv", "qkv_bias", "mlp", "down")}
    x = w["table"][tokens] * 2.0
    centred = x - x.mean(1, keepdims=True)
    normed = centred / np.sqrt(x.var(1, keepdims=True) + 1e-5) * w["gamma"] + w["beta"]
    qkv = normed @ w["qkv"].T + w["qkv_bias"]
    angles = np.arange(len(tokens))[:, None] * 10000.0 ** -np.array([0.0, 0.5])

    def turn(head: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        a, b = head[:, :2], head[:, 2:]
        return np.hstack((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)))

    k, v = turn(qkv[:, 8:12]), qkv[:, 12:]
    heads = []
    for q in (turn(qkv[:, :4]), turn(qkv[:, 4:8])):
        scores = np.tanh(q @ k.T * 0.5 / 5.0) * 5.0
        row, column = np.indices(scores.shape)
        p = np.where((column <= row) & (column > row - 3), np.exp(scores), 0.0)
        heads.append(p / p.sum(1, keepdims=True) @ v)
    x = x + np.hstack(heads) * 0.5
    gate, up = x @ w["mlp"][:6].T, x @ w["mlp"][6:].T
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    x = (gelu * up) @ w["down"].T
    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * (1 + w["gamma"])
    return np.asarray(np.tanh(x @ w["table"].T / 30.0) * 30.0)


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_every_operator_against_float64() -> None:
    got = small().interpret(weights(), TOKENS)["logits"].numpy()
    np.testing.assert_allclose(got, numpy_reference(TOKENS), rtol=2e-5, atol=2e-5)


def test_steps_equal_the_whole() -> None:
    runner = Interpreter(small(), weights())
    parts = [runner.step(TOKENS[a:b])["logits"] for a, b in ((0, 3), (3, 4), (4, 8))]
    np.testing.assert_allclose(torch.cat(parts).numpy(), numpy_reference(TOKENS), rtol=2e-5, atol=2e-5)
    assert runner.position == 8


def test_long_sequences_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel.interpret.QUERY_BLOCK", 3)
    got = small().interpret(weights(), TOKENS)["logits"].numpy()
    np.testing.assert_allclose(got, numpy_reference(TOKENS), rtol=2e-5, atol=2e-5)


def test_bf16_and_torch_weights_are_taken() -> None:
    read = weights()
    whole = small().interpret(read, TOKENS)["logits"]
    assert torch.equal(small().interpret(lambda n: torch.from_numpy(read(n)), TOKENS)["logits"], whole)
    half = small().interpret(lambda n: torch.from_numpy(read(n)).to(torch.bfloat16), TOKENS)["logits"]
    rounded = lambda n: torch.from_numpy(read(n)).to(torch.bfloat16).float().numpy()  # noqa: E731
    assert torch.equal(small().interpret(rounded, TOKENS)["logits"], half)


def test_keep() -> None:
    graph = small()
    assert set(graph.interpret(weights(), TOKENS)) == {"logits"}
    some = graph.interpret(weights(), TOKENS, keep=["layers.0.q_rope"])
    assert set(some) == {"logits", "layers.0.q_rope"} and some["layers.0.q_rope"].shape == (8, 8)
    every = graph.interpret(weights(), TOKENS, keep="all")
    assert set(every) == {"tokens", *(n.output for n in graph.nodes)}
    with pytest.raises(GraphError, match="no tensor 'nothing'"):
        graph.interpret(weights(), TOKENS, keep=["nothing"])


@pytest.mark.parametrize(
    ("tokens", "words"), [([], "no token"), ([11], "0 to 10"), ([-1], "ids -1"), ([0] * 33, "limit is 32")]
)
def test_bad_tokens(tokens: list[int], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        small().interpret(weights(), tokens)


def test_bad_weight() -> None:
    def read(name: str) -> np.ndarray[Any, Any]:
        return np.zeros((12, 8), np.float32) if name == "table" else weights()(name)

    with pytest.raises(GraphError, match="'table'"):
        small().interpret(read, TOKENS)


def test_torch_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'megakernel-decode\[torch\]'"):
        small().interpret(weights(), TOKENS)


def test_weights_and_slices() -> None:
    graph = small()
    assert graph.tensor("qkv[8:12]").source == WeightSlice("qkv", 8, 12)
    assert graph.tensor("qkv_bias[8:12]").shape == (4,)
    assert [w.name for w in graph.weights][:5] == ["table", "gamma", "beta", "qkv[0:8]", "qkv_bias[0:8]"]
    producer = graph.producer("layers.0.q")
    assert producer is not None and producer.op == "linear" and graph.producer("table") is None
    assert [n.name for n in graph.consumers("table")] == ["embedding", "head"]
    assert [n.layer for n in graph.nodes if n.op in ("embedding", "glu", "softcap")] == [-1, 0, -1]


def test_json_and_text() -> None:
    graph = small()
    raw = json.loads(graph.to_json())
    assert raw["config"]["vocab"] == 11 and len(raw["nodes"]) == len(graph.nodes)
    rope = next(n for n in raw["nodes"] if n["op"] == "rope")
    assert RopeSpec(**rope["attrs"]["spec"]) == SPEC
    assert "layers.0.glu [rows, 6] = glu(layers.0.gate, layers.0.up, activation=gelu_tanh)" in str(graph)


def builder() -> tuple[GraphBuilder, str]:
    b = GraphBuilder(CONFIG)
    return b, b.embedding("x", b.weight("table", 11, 8))


def attend(b: GraphBuilder, x: str, **change: Any) -> str:
    return b.attention("a", x, x, x, **{"heads": 2, "kv_heads": 2, "head_dim": 4, "scale": 0.5, **change})


BAD: list[tuple[str, Any]] = [
    ("unknown tensor 'y'", lambda b, x: b.add("a", x, "y")),
    ("exists already", lambda b, x: b.embedding("x", "table")),
    ("weight \\(11, 8\\) already", lambda b, x: b.weight("table", 11, 9)),
    ("a weight matrix of 8 columns", lambda b, x: b.linear("a", x, b.weight("w", 4, 7))),
    ("a weight matrix of 8 columns", lambda b, x: b.linear("a", x, b.weight("w", 8))),
    ("bias vector of 4", lambda b, x: b.linear("a", x, b.weight("w", 4, 8), b.weight("c", 5))),
    ("gamma vector of 8", lambda b, x: b.rms_norm("a", x, b.weight("g", 4), eps=1e-5)),
    ("gamma vector of 4", lambda b, x: b.rms_norm("a", x, b.weight("g", 8), eps=1e-5, group=4)),
    ("multiple of group 3", lambda b, x: b.rms_norm("a", x, b.weight("g", 3), eps=1e-5, group=3)),
    ("attribute eps", lambda b, x: b.rms_norm("a", x, b.weight("g", 8), eps=0.0)),
    ("norm vector of 8", lambda b, x: b.layer_norm("a", x, b.weight("g", 4), eps=1e-5)),
    ("3 heads x 4 = 12", lambda b, x: b.rope("a", x, heads=3, head_dim=4, spec=SPEC)),
    ("at most 2 elements", lambda b, x: b.rope("a", x, heads=4, head_dim=2, spec=SPEC)),
    ("multiple of 3 KV heads", lambda b, x: attend(b, x, kv_heads=3)),
    ("q of 4 x 4 columns", lambda b, x: attend(b, x, heads=4)),
    ("k and v of 1 x 4", lambda b, x: attend(b, x, kv_heads=1)),
    ("attribute window", lambda b, x: attend(b, x, window=0)),
    ("attribute scale", lambda b, x: attend(b, x, scale=float("nan"))),
    ("one of silu", lambda b, x: b.glu("a", x, x, activation="mish")),
    ("equal columns", lambda b, x: b.add("a", x, b.linear("y", x, b.weight("w", 4, 8)))),
    ("expected activations", lambda b, x: b.add("a", x, "table")),
    ("rows \\[4, 4\\)", lambda b, x: b.weight_slice("table", 4, 4)),
    ("rows \\[0, 12\\)", lambda b, x: b.weight_slice("table", 0, 12)),
    ("a part of a weight", lambda b, x: b.weight_slice("x", 0, 1)),
    ("no node makes the output", lambda b, x: b.finish()),
    ("logits: expected 11 columns", lambda b, x: (b.softcap("logits", x, 1.0), b.finish())),
]


@pytest.mark.parametrize(("words", "act"), BAD, ids=[b[0] for b in BAD])
def test_builder_refuses(words: str, act: Any) -> None:
    b, x = builder()
    with pytest.raises(GraphError, match=words):
        act(b, x)


def test_a_failed_layer_leaves_the_layer() -> None:
    b, x = builder()
    with pytest.raises(GraphError), b.layer(0):
        b.add("a", x, "missing")
    assert b.scale("outside", x, 2.0) == "outside"


def edited(graph: Graph, index: int, **change: Any) -> Graph:
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **change)
    return replace(graph, nodes=tuple(nodes))


def test_validate_refuses() -> None:
    graph = small()
    assert graph.validate() is graph
    swapped = replace(graph, nodes=(graph.nodes[1], graph.nodes[0], *graph.nodes[2:]))
    twice = edited(graph, 3, output=graph.nodes[2].output)
    cols = {**graph.tensors, "embedding": Tensor("embedding", "activation", 9)}
    for broken, words in (
        (swapped, "used before it is made"),
        (twice, "made twice"),
        (edited(graph, 0, inputs=("tokens", "nowhere")), "unknown input tensor 'nowhere'"),
        (edited(graph, 0, op="fly"), "unknown operator 'fly'"),
        (edited(graph, 0, inputs=("tokens",)), "expected 2 to 3 inputs"),
        (edited(graph, 0, output="nowhere"), "no tensor 'nowhere'"),
        (replace(graph, tensors=cols), r"expected \(8,\), got activation \(9,\)"),
        (replace(graph, nodes=graph.nodes[:-1]), "no node makes the output"),
    ):
        with pytest.raises(GraphError, match=words):
            broken.validate()


def test_graphs_compare_by_value() -> None:
    assert small() == small()
    assert small() != edited(small(), 0, attrs={"scale": 3.0})
    assert Node("a", "add", ("x", "x"), "a") == Node("a", "add", ("x", "x"), "a")
