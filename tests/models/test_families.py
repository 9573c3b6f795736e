"""Every family against transformers in float32: the reference interpreter, and the kernel on the CPU device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megakernel import LLM, SamplingParams
from megakernel.architectures import find_model, parameter_shapes, random_weights
from megakernel.errors import CheckpointError
from megakernel.origin import open_origin
from tests.models.conftest import Subject
from tests.models.families import CASES, DECODED, LIMIT, PROMPT, find, reference, relative_error
from tests.models.quick import Kernel

NAMES = [case.name for case in CASES]
Find = Callable[[str], Subject]
Open = Callable[[Path], LLM]


@pytest.mark.parametrize("name", NAMES)
def test_the_interpreter_equals_transformers(subject: Find, name: str) -> None:
    s = subject(name)
    graph = find_model(s.full).build(s.full)
    got = graph.interpret(s.weights.__getitem__, s.ids)["logits"].numpy()
    assert relative_error(got, s.expected) <= LIMIT
    assert parameter_shapes(graph) == {name: tensor.shape for name, tensor in s.weights.items()}
    assert find_model(s.config).build(s.config) == graph, "config.json builds another graph than the full configuration"


@pytest.fixture(scope="module")
def kernel(subject: Find) -> Kernel:
    return Kernel([find_model(s.full).build(s.full) for s in map(subject, NAMES)], 256)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_equals_transformers(subject: Find, kernel: Kernel, name: str) -> None:
    """A prompt in chunks of 16 rows, then 64 tokens one by one."""
    s = subject(name)
    graph = find_model(s.config).build(s.config)
    got = kernel.logits(graph, lambda tensor, rows: np.array(s.weights[tensor][rows]), s.ids, PROMPT - 1)
    error = relative_error(got, s.expected[PROMPT - 1 :])
    print(f"{name}: prompt of {PROMPT}, {DECODED} decoded, relative error {error:.1e}")
    assert got.shape == (DECODED + 1, s.expected.shape[1]) and error <= LIMIT


PAIRED = ("llama", "llama3", "qwen3", "phi4_mini", "gpt_neox", "olmo2", "gemma3")  # biases, norms, fused, partial


ORDERS = {
    "pairs": {"rotary_multiple": 32},
    "padded": {"head_multiple": 24},
    "both": {"head_multiple": 32, "rotary_multiple": 32},
}


@pytest.fixture(scope="module", params=ORDERS)
def ordered(subject: Find, request: pytest.FixtureRequest) -> Kernel:
    graphs = [find_model(s.full).build(s.full) for s in map(subject, PAIRED)]
    return Kernel(graphs, 256, **ORDERS[request.param])


@pytest.mark.parametrize("name", PAIRED)
def test_heads_in_another_order_give_the_same_logits(subject: Find, ordered: Kernel, name: str) -> None:
    """Some targets want heads of certain sizes, and the two elements of a rotation side by side."""
    s = subject(name)
    graph = find_model(s.config).build(s.config)
    plan = ordered.plan(graph)
    assert any(p.head for w in plan.lowered.weights for p in w.parts)
    assert plan.lowered.head_dim % ordered.target.head_multiple == 0
    got = ordered.logits(graph, lambda tensor, rows: np.array(s.weights[tensor][rows]), s.ids, PROMPT - 1)
    assert relative_error(got, s.expected[PROMPT - 1 :]) <= LIMIT


@pytest.mark.parametrize("name", ["gemma3", "phi4_mini", "gpt2"])
def test_a_checkpoint_generates_the_likeliest_tokens(subject: Find, opened: Open, name: str) -> None:
    """From the files through the engine, several prompts in one batch."""
    s = subject(name)
    ends = (0, 15, PROMPT - 1, 99)
    outputs = opened(s.path).generate([s.ids[: n + 1] for n in ends], SamplingParams(max_tokens=1))
    assert [o.token_ids[0] for o in outputs] == [int(np.argmax(s.expected[n])) for n in ends]


def test_a_gpt2_folder_of_the_model_without_its_head(subject: Find, tmp_path: Path) -> None:
    """Names without "transformer.", the masks of old savers, and a head that is the embedding."""
    s = subject("gpt2")
    inner = {name.removeprefix("transformer."): data for name, data in s.weights.items()}
    assert "wte.weight" in inner
    masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 512, 512), np.float32)) for i in range(3)}
    (tmp_path / "config.json").write_text(json.dumps(dict(s.config)))
    save_file({**inner, **masks, "lm_head.weight": inner["wte.weight"].copy()}, tmp_path / "model.safetensors")
    origin = open_origin(tmp_path, cache=tmp_path)
    graph = find_model(origin.config).build(origin.config)
    got = graph.interpret(lambda name: origin.read(name, "f32", slice(None)), s.ids)["logits"].numpy()
    origin.close()
    assert relative_error(got, s.expected) <= LIMIT
    save_file({**inner, "lm_head.weight": inner["wte.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 left over: lm_head.weight"):
        open_origin(tmp_path, cache=tmp_path)


def test_longrope_takes_the_table_of_its_context(subject: Find) -> None:
    """Up to the original context of 64 tokens a program has the short table, as transformers has for short texts."""
    s = subject("phi4_mini")
    graph = find_model(s.full).build(s.full)
    short = Kernel([graph], 64)
    model = find("phi4_mini").model()
    got = short.logits(graph, lambda tensor, rows: np.array(s.weights[tensor][rows]), s.ids[:60], 50)
    assert relative_error(got, reference(model, s.ids[:60])[50:]) <= LIMIT
    assert relative_error(got, s.expected[50:60]) > 100 * LIMIT, "both tables give the same"


def test_heads_of_any_size(subject: Find) -> None:
    """Sizes that no vector holds; the reference is the interpreter, which is compared with transformers above."""
    base = subject("qwen3").full
    graphs = {d: find_model({**base, "head_dim": d}).build({**base, "head_dim": d}) for d in (2, 6, 10, 50, 130)}
    kernel = Kernel(graphs.values(), 128)
    for head_dim, graph in graphs.items():
        weights, ids = random_weights(graph, seed=head_dim), list(range(1, 60))
        got = kernel.logits(graph, lambda t, rows, w=weights: np.array(w.read(t, "f32", rows)), ids, 40)
        want = graph.interpret(weights.read, ids)["logits"].numpy()[40:]
        assert relative_error(got, want) <= LIMIT, head_dim
