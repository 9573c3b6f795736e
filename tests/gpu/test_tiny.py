"""Tiny models on the GPU: numbers against float32, equal bits in every batch and every run, faults, many openings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.device_session import TINY, generate
from megakernel.engine import Engine
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from tests.gpu.machine import needs_device, opened, prompts

pytestmark = [needs_device, pytest.mark.alone]


@pytest.fixture(scope="module", params=sorted(TINY))
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Runtime, Any, Any]]:
    run, graph, weights = opened(request.param)
    yield run, graph, weights
    run.close()


@pytest.mark.parametrize(("length", "start"), [(1, 0), (20, 0), (40, 32), (300, 290), (700, 690)])
def test_logits(model: tuple[Runtime, Any, Any], length: int, start: int) -> None:
    run, graph, weights = model
    ids = prompts(run.manifest.vocab, (length,))[0]
    run.reset()
    got = forced_logits(run, ids, start)
    want = graph.interpret(weights, ids)["logits"].numpy()[start:]
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 0.02, error


def test_equal_alone_and_in_a_batch(model: tuple[Runtime, Any, Any]) -> None:
    run = model[0]
    given = prompts(run.manifest.vocab, (5, 17, 40, 1))
    assert generate(run, given, 24) == [generate(run, [p], 24)[0] for p in given]


def test_equal_from_run_to_run(model: tuple[Runtime, Any, Any]) -> None:
    run = model[0]
    given = prompts(run.manifest.vocab, (17,))
    assert len({tuple(generate(run, given, 100)[0]) for _ in range(20)}) == 1


@pytest.mark.parametrize("workers", [1, 7, 66, 100])
def test_equal_with_fewer_workers(model: tuple[Runtime, Any, Any], workers: int) -> None:
    whole = model[0]
    name = next(n for n in TINY if TINY[n]["vocab_size"] == whole.manifest.vocab)
    given = prompts(whole.manifest.vocab, (17, 3))
    few = opened(name, workers=workers)[0]
    try:
        assert generate(few, given, 24) == generate(whole, given, 24)
    finally:
        few.close()


@pytest.fixture(scope="module")
def of_a_broad_model() -> list[list[list[int]]]:
    return []


@pytest.mark.parametrize("workers", [None, 100, 66, 40, 25])
def test_shares_of_any_size(workers: int | None, of_a_broad_model: list[list[list[int]]]) -> None:
    """One tile of a product or many, one unit or several: each row alone as in a batch, on any number of workers."""
    run = opened("tiny-broad", workers=workers)[0]
    given = prompts(run.manifest.vocab, (5, 3, 1))
    try:
        together = generate(run, given, 12)
        assert together == [generate(run, [p], 12)[0] for p in given]
    finally:
        run.close()
    of_a_broad_model.append(together)
    assert together == of_a_broad_model[0]


def test_random_delays_change_nothing() -> None:
    run = opened("tiny-llama")[0]
    slow = opened("tiny-llama", chaos=True)[0]
    slow.chaos_seed = 5
    given = prompts(run.manifest.vocab, (17, 3))
    try:
        assert generate(slow, given, 24) == generate(run, given, 24)
    finally:
        run.close()
        slow.close()


def test_a_lost_signal_is_a_fault_and_the_next_launch_works() -> None:
    """Random sampling waits for the logits by counter; the largest logit needs none."""
    run = opened("tiny-llama", chaos=True)[0]
    given = prompts(run.manifest.vocab, (3,))
    drawn = {"temperature": 0.7}
    records = run.program.records.reshape(-1)
    waited = {int(w["counter"]) for r in records for w in r["waits"][: int(r["wait_count"])]}
    run.spin_budget_ns = 200_000_000
    try:
        run.drop_signal = min(waited & {int(r["signal"]) for r in records})
        with pytest.raises(DeviceFault, match=r"(wait|header) budget"):
            generate(run, given, 4, drawn)
        run.drop_signal = 0xFFFFFFFF
        assert len(generate(run, given, 4, drawn)[0]) == 4
    finally:
        run.close()


def test_rows_of_the_host_in_and_out() -> None:
    """The table's own rows give the tokens' answer; what comes out is what the head multiplies."""
    run, _, weights = opened("tiny-llama", inputs=True, hidden=True)
    ids = prompts(run.manifest.vocab, (37,))[0]
    table = np.asarray(weights.read("model.embed_tokens.weight", "f32", slice(None)), np.float32)  # also of the head
    logits = forced_logits(run, ids, 36)[0]
    run.reset()
    with Engine(run) as engine:
        want = engine.submit(ids, SamplingParams(max_tokens=20)).result(60)
        made = engine.submit([-1] * 37, SamplingParams(max_tokens=20), embeddings=table[ids], hidden=True)
        assert made.result(60).token_ids == want.token_ids
        first = made.result().tokens[0].hidden
    assert first is not None and made.prompt_hidden is not None and made.prompt_hidden.shape == (37, table.shape[1])
    assert np.linalg.norm(table @ first - logits) / np.linalg.norm(logits) < 0.02


def test_open_and_close_many_times() -> None:
    results = set()
    for _ in range(10):
        run = opened("tiny-llama")[0]
        results.add(tuple(generate(run, prompts(run.manifest.vocab, (3,)), 4)[0]))
        run.close()
    assert len(results) == 1
