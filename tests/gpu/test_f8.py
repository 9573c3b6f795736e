"""8-bit pages on the GPU: the bits of wider pages that hold the same values, and the same bits in every batch, run and
chunk of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.device_session import generate
from megakernel.devices import open_device
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from tests.f8_pages import check_pages
from tests.gpu.machine import EMULATED, NAME, needs_device, opened, prompts

pytestmark = [needs_device, pytest.mark.alone]


MODELS = ("tiny-llama", "tiny-qwen3", "tiny-gemma2", "tiny-broad")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Runtime, Any, Any]]:
    made = opened(request.param, kv_dtype="f8")
    yield made
    made[0].close()


@pytest.mark.skipif(EMULATED, reason="tests/cuda does it")
@pytest.mark.parametrize("config", [{}, {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}], ids=str)
def test_the_bits_of_wider_pages(config: dict[str, Any], tmp_path: Path) -> None:
    check_pages(open_device(NAME), tmp_path, **config)


def test_logits(model: tuple[Runtime, Any, Any]) -> None:
    """8-bit pages cost some percent."""
    run, graph, weights = model
    ids = prompts(run.manifest.vocab, (300,))[0]
    run.reset()
    got = forced_logits(run, ids, 290)
    want = graph.interpret(weights, ids)["logits"].numpy()[290:]
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 0.1, error


def test_the_same_bits_in_chunks_and_token_by_token(model: tuple[Runtime, Any, Any]) -> None:
    run = model[0]
    ids = prompts(run.manifest.vocab, (300,))[0]
    found = []
    for start in (290, 277, 10):
        run.reset()
        found.append(forced_logits(run, ids, start)[290 - start :].tobytes())
    assert found[0] == found[1] == found[2]


def test_equal_alone_and_in_a_batch(model: tuple[Runtime, Any, Any]) -> None:
    run = model[0]
    given = prompts(run.manifest.vocab, (5, 17, 300, 1))
    assert generate(run, given, 24) == [generate(run, [p], 24)[0] for p in given]


def test_equal_from_run_to_run(model: tuple[Runtime, Any, Any]) -> None:
    run = model[0]
    given = prompts(run.manifest.vocab, (300,))
    assert len({tuple(generate(run, given, 30)[0]) for _ in range(10)}) == 1


def test_many_rows_a_step(model: tuple[Runtime, Any, Any], request: pytest.FixtureRequest) -> None:
    """Of a program with room for 64: a prompt's rows together, and beside other sequences."""
    narrow, name = model[0], request.node.callspec.params["model"]
    wide = opened(name, kv_dtype="f8", max_rows=64, max_slots=64)[0]
    given = prompts(narrow.manifest.vocab, (300, 70, 5, 1, *[3 + i * 7 % 40 for i in range(16)]))
    try:
        narrow.reset()
        got, want = forced_logits(wide, given[0], 277), forced_logits(narrow, given[0], 277)
        assert (got.view(np.uint32) == want.view(np.uint32)).all()
        wide.reset()
        together = generate(wide, given, 12)
        for first in range(0, len(given), 4):
            assert together[first : first + 4] == generate(narrow, given[first : first + 4], 12)
    finally:
        wide.close()
