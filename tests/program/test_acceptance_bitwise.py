"""Bitwise equality on the real model: workers, batches, chunks of the prompt, runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megakernel.llm import LLM
from megakernel.sampling import SamplingParams
from tests.program.conftest import Subject
from tests.program.tiny import random_ids, same_bits

pytestmark = pytest.mark.timeout(300)
FORCED = 10  # tokens whose logits are compared one by one
Trace = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def trace(llm: LLM, prompt: list[int], count: int, **more: Any) -> Trace:
    """Tokens with their log-probabilities and the 20 likeliest, which have every bit of the logits in them."""
    return traces(llm, [prompt], count, **more)[0]


def traces(llm: LLM, prompts: list[list[int]], count: int, **more: Any) -> list[Trace]:
    params = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=20, **more)
    outputs = llm.generate(prompts, params)
    return [[(t.id, t.logprob or 0.0, t.top) for t in o.logprobs or ()] for o in outputs]


@pytest.fixture(scope="module")
def forced(subject: Subject) -> tuple[list[int], int]:
    """A sequence and where its comparison starts: across a page, and past a chunk of the prompt."""
    ids = (subject.prompts[2] + subject.prompts[4] + subject.prompts[6])[: 24 + FORCED]
    return ids, len(ids) - FORCED


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_one_two_three_and_eight_workers(subject: Subject, forced: tuple[list[int], int], dtype: str) -> None:
    found = []
    for workers in (1, 2, 3, 8):
        with LLM(subject.path, dtype=dtype, workers=workers, max_slots=1, max_context=128) as llm:
            found.append((llm.logits(*forced), trace(llm, subject.prompts[0], 8)))
    for logits, tokens in found[1:]:
        assert same_bits(logits, found[0][0]) and tokens == found[0][1]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "sampled"])
def test_alone_and_in_a_batch(subject: Subject, subject_bf16: LLM, sampling: dict[str, Any]) -> None:
    prompts = [subject.prompts[i] for i in (0, 2, 5, 6)]
    together = traces(subject_bf16, prompts, 24, **sampling)
    for prompt, batched in zip(prompts, together):
        assert trace(subject_bf16, prompt, 24, **sampling) == batched


def test_twenty_runs(subject: Subject, subject_bf16: LLM) -> None:
    runs = [trace(subject_bf16, subject.prompts[3], 6) for _ in range(20)]
    assert all(run == runs[0] for run in runs)


def test_chunks_of_the_prompt(tiny_path: Path) -> None:
    """Prompts over several pages and pieces, one token a step against chunks of 4 and 16."""
    prompt = random_ids(300, seed=4)
    found = []
    for rows in (1, 4, 16):
        with LLM(tiny_path, dtype="bf16", max_rows=rows, max_slots=2, max_context=400) as llm:
            found.append((llm.logits(prompt, len(prompt) - 3), trace(llm, prompt, 12)))
    for logits, tokens in found[1:]:
        assert same_bits(logits, found[0][0]) and tokens == found[0][1]


def test_a_batch_that_changes_at_every_step(tiny_path: Path) -> None:
    """Requests that come and go at random places leave each other alone."""
    prompts = [random_ids(1 + 17 * i % 40, seed=i) for i in range(12)]
    params = [SamplingParams(max_tokens=3 + 11 * i % 29, ignore_eos=True, temperature=i % 2, seed=i) for i in range(12)]
    with LLM(tiny_path, dtype="f32", workers=3, max_slots=5, max_context=128) as llm:
        alone = [llm.engine.submit(p, s).result(60).token_ids for p, s in zip(prompts, params)]
        for order in (range(12), range(11, -1, -1), (5, 0, 7, 3, 11, 1, 9, 2, 10, 4, 8, 6)):
            results: dict[int, tuple[int, ...]] = {}
            threads = [threading.Thread(target=_run(llm, prompts, params, i, results)) for i in order]
            for t in threads:
                t.start()
            for t in threads:
                t.join(60)
            assert [results[i] for i in range(12)] == alone


def _run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], i: int, results: dict[int, tuple[int, ...]]
) -> Callable[[], None]:
    def run() -> None:
        results[i] = llm.engine.submit(prompts[i], params[i]).result(60).token_ids

    return run
