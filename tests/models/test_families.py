"""Every family against transformers in float32: the reference interpreter, and the kernel on the CPU device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megakernel import LLM, SamplingParams
from megakernel.architectures import find_model, parameter_shapes
from tests.models.conftest import Subject
from tests.models.families import CASES, DECODED, LIMIT, PROMPT, relative_error

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


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_equals_transformers(subject: Find, opened: Open, name: str) -> None:
    """A prompt in chunks of 16 rows, then 64 tokens one by one; and the tokens that greedy sampling chooses."""
    s = subject(name)
    llm = opened(s.path)
    got = llm.logits(s.ids, PROMPT - 1)
    error = relative_error(got, s.expected[PROMPT - 1 :])
    print(f"{name}: prompt of {PROMPT}, {DECODED} decoded, relative error {error:.1e}")
    assert got.shape == (DECODED + 1, s.expected.shape[1]) and error <= LIMIT
    prompts = [s.ids[: n + 1] for n in (0, 15, PROMPT - 1, 99)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1))
    best = [int(np.argmax(s.expected[n])) for n in (0, 15, PROMPT - 1, 99)]
    assert [o.token_ids[0] for o in outputs] == best
