"""Wide steps, of up to 64 rows: the bits of narrow ones, in every batch, chunking and slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.device_session import generate
from megakernel.builder import dealing
from megakernel.engine import Engine
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from tests.gpu.machine import MODELS, needs_device, opened, prompts

pytestmark = [needs_device, pytest.mark.alone]
ROWS = 64
Pair = tuple[Runtime, Runtime, Any, Any]


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same model with room for 16 rows in a step, and for 64."""
    narrow, graph, weights = opened(request.param, max_rows=16)
    wide = opened(request.param, max_rows=ROWS, max_slots=ROWS)[0]
    yield narrow, wide, graph, weights
    narrow.close()
    wide.close()


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


@pytest.mark.parametrize(("length", "start"), [(17, 16), (40, 32), (64, 63), (70, 64), (300, 296), (700, 697)])
def test_prompts(pair: Pair, length: int, start: int) -> None:
    narrow, wide, graph, weights = pair
    ids = prompts(narrow.manifest.vocab, (length,))[0]
    narrow.reset()
    wide.reset()
    got, want = forced_logits(wide, ids, start), forced_logits(narrow, ids, start)
    exact = graph.interpret(weights, ids)["logits"].numpy()[start:]
    error = np.linalg.norm(got - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error.max() < 0.02, error
    assert same_bits(got, want)


@pytest.mark.parametrize("batch", [3, 17, 33, 64])
def test_equal_alone_and_in_a_batch(pair: Pair, batch: int) -> None:
    """Ragged prompts that come in together; when the short ones end, steps are narrow again."""
    narrow, wide, _, _ = pair
    lengths = [1 + i * 13 % 61 for i in range(batch)]
    given = prompts(narrow.manifest.vocab, lengths)
    together = generate(wide, given, 12)
    for first in range(0, batch, 4):
        assert together[first : first + 4] == generate(narrow, given[first : first + 4], 12)


def test_a_long_prompt_beside_others(pair: Pair) -> None:
    narrow, wide, _, _ = pair
    given = prompts(narrow.manifest.vocab, (3, 600, 1, 40, *[5] * 20))
    together = generate(wide, given, 20)
    for first in range(0, len(given), 4):
        assert together[first : first + 4] == generate(narrow, given[first : first + 4], 20)


def test_drawn_tokens_are_the_same(pair: Pair) -> None:
    narrow, wide, _, _ = pair
    given, drawn = prompts(narrow.manifest.vocab, [5 + i for i in range(24)]), {"temperature": 0.8, "top_p": 0.9}
    together = generate(wide, given, 8, drawn)
    assert together == [generate(narrow, [p], 8, drawn)[0] for p in given]
    assert together == generate(wide, given, 8, drawn)


def test_requests_come_and_go() -> None:
    """Through the engine: more requests than slots, of all lengths, some cancelled, steps kept short."""
    wide = opened("tiny-llama", max_rows=ROWS, max_slots=40)[0]
    rng = np.random.default_rng(5)
    given = prompts(wide.manifest.vocab, [int(n) for n in rng.integers(1, 300, 90)])
    counts = [int(n) for n in rng.integers(1, 40, len(given))]
    try:
        with Engine(wide, max_step_ms=0.5, share_prefixes=False) as engine:
            asked = [engine.submit(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in zip(given, counts)]
            for request in asked[::7]:
                request.cancel()
            got = [None if i % 7 == 0 else r.result(60).token_ids for i, r in enumerate(asked)]
            for i in (1, 20, 44, 86):
                alone = engine.submit(given[i], SamplingParams(max_tokens=counts[i], ignore_eos=True)).result(60)
                assert got[i] == alone.token_ids
    finally:
        wide.close()


@pytest.mark.parametrize("chaos", [False, True])
def test_products_that_are_dealt_by_shares(chaos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product that may be; of sizes where it pays only `tiny-broad` has one. Nothing else opens a program of that
    context, so that none without them is in the cache."""
    narrow = opened("tiny-llama", max_rows=16)[0]
    monkeypatch.setattr(dealing, "pays", lambda *sizes: True)
    dealt = opened("tiny-llama", max_rows=ROWS, max_slots=ROWS, max_context=992, chaos=chaos)[0]
    assert sum(v.count("dealt = true") for v in dealt.manifest.variants) >= 2
    given = prompts(narrow.manifest.vocab, [1 + i * 7 % 61 for i in range(50)])
    ids = prompts(narrow.manifest.vocab, (100,))[0]
    try:
        for length in (17, 33, 50, 64, 100):
            narrow.reset()
            dealt.reset()
            got, want = (forced_logits(run, ids[:length], length - 1) for run in (dealt, narrow))
            assert same_bits(got, want)
        together = generate(dealt, given, 12)
        for first in range(0, len(given), 4):
            assert together[first : first + 4] == generate(narrow, given[first : first + 4], 12)
    finally:
        narrow.close()
        dealt.close()


@pytest.mark.parametrize("workers", [1, 7, 100])
def test_equal_with_fewer_workers(workers: int) -> None:
    whole = opened("tiny-llama", max_rows=ROWS, max_slots=ROWS)[0]
    few = opened("tiny-llama", max_rows=ROWS, max_slots=ROWS, workers=workers)[0]
    given = prompts(whole.manifest.vocab, [3 + i for i in range(30)])
    try:
        assert generate(few, given, 8) == generate(whole, given, 8)
    finally:
        few.close()
        whole.close()


def test_random_delays_change_nothing() -> None:
    run = opened("tiny-llama", max_rows=ROWS, max_slots=ROWS)[0]
    slow = opened("tiny-llama", max_rows=ROWS, max_slots=ROWS, chaos=True)[0]
    given = prompts(run.manifest.vocab, [3 + i * 7 % 90 for i in range(50)])
    want = generate(run, given, 16)
    try:
        for seed in range(20):
            slow.chaos_seed = seed
            assert generate(slow, given, 16) == want
    finally:
        run.close()
        slow.close()
