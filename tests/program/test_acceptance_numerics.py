"""Tokens and logits of a real model against transformers in float32 and bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megakernel.llm import LLM
from megakernel.sampling import SamplingParams
from tests.program.conftest import Subject
from tests.program.tiny import Array, reference_logits, relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOKENS = 128
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
F32_MARGIN, BF16_MARGIN, F32_ERROR = 0.01, 0.2, 2e-5


@pytest.fixture(scope="module")
def reference(subject: Subject) -> Any:
    return subject.reference()


@pytest.fixture(scope="module")
def generated(subject: Subject, subject_f32: LLM) -> list[list[int]]:
    """Prompt and greedy output of every prompt, f32."""
    outputs = subject_f32.generate(subject.prompts, GREEDY)
    assert all(len(o.token_ids) == TOKENS for o in outputs)
    return [[*o.prompt_token_ids, *o.token_ids] for o in outputs]


@pytest.fixture(scope="module")
def expected(reference: Any, generated: list[list[int]]) -> list[Array]:
    """Float32 logits of transformers along each of these sequences."""
    return [reference_logits(reference, ids) for ids in generated]


def partings(ids: list[int], logits: Array, start: int) -> Iterator[tuple[int, float]]:
    """Places from `start` on where the token is not the reference's, and how much the reference prefers its own.

    The reference sees the tokens so far, so this says of each place what a greedy run from there would say."""
    for at in range(start, len(ids)):
        row = logits[at - 1]
        if ids[at] != int(row.argmax()):
            yield at - start, float(row.max() - row[ids[at]])


def test_greedy_tokens_equal_transformers(
    subject: Subject, generated: list[list[int]], expected: list[Array], capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        (i, at, gap)
        for i, (ids, logits) in enumerate(zip(generated, expected))
        for at, gap in partings(ids, logits, len(subject.prompts[i]))
    ]
    with capsys.disabled():
        for i, at, gap in found:
            print(f"\nprompt {i}, token {at}: another token than transformers float32, whose top-2 margin is {gap:.6f}")
    assert all(gap < F32_MARGIN for _, _, gap in found), found


def test_greedy_tokens_equal_a_run_of_transformers(
    subject: Subject, reference: Any, generated: list[list[int]], expected: list[Array]
) -> None:
    """One prompt decoded by transformers itself, with its own cache, up to a place where the two may part."""
    prompt = subject.prompts[0]
    first = next((at for at, _ in partings(generated[0], expected[0], len(prompt))), 48)
    with torch.no_grad():
        run = reference.generate(
            torch.tensor([prompt]), max_new_tokens=first, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert run[0].tolist() == generated[0][: len(prompt) + first]


def test_logits_in_float32(
    subject: Subject, subject_f32: LLM, generated: list[list[int]], expected: list[Array],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    worst = 0.0
    for i in (0, 5, 6):
        start = len(subject.prompts[i]) - 1
        got = subject_f32.logits(generated[i][: start + 49], start)
        worst = max(worst, relative_error(got, expected[i][start : start + 49]))
    with capsys.disabled():
        print(f"\nf32 logits: relative error at most {worst:.2e}")
    assert worst <= F32_ERROR


def test_bfloat16(
    subject: Subject, subject_bf16: LLM, reference: Any, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """Tokens part only where float32 hardly prefers one, and logits are no worse than torch's own in bfloat16."""
    low = copy.deepcopy(reference).bfloat16()
    exact = copy.deepcopy(low).float()  # float32 arithmetic on weights rounded to bfloat16
    outputs = subject_bf16.generate(subject.prompts, GREEDY)
    ours, theirs, gaps = [], [], []
    for i, output in enumerate(outputs):
        ids, start = [*output.prompt_token_ids, *output.token_ids], len(output.prompt_token_ids)
        logits = reference_logits(exact, ids)
        gaps += [gap for _, gap in partings(ids, logits, start)]
        if i in (0, 5):
            count = start + 24
            exactly, theirs_now = logits[start - 1 : count], reference_logits(low, ids[:count])[start - 1 :]
            ours.append(relative_error(subject_bf16.logits(ids[:count], start - 1), exactly))
            theirs.append(relative_error(theirs_now, exactly))
    with capsys.disabled():
        print(
            f"\nbf16: {len(gaps)} of {len(outputs) * TOKENS} tokens differ, largest float32 margin "
            f"{max(gaps, default=0.0):.4f}; logits error {np.mean(ours):.2e}, torch's own {np.mean(theirs):.2e}"
        )
    assert all(gap < BF16_MARGIN for gap in gaps), gaps
    assert all(mine <= other for mine, other in zip(ours, theirs)), (ours, theirs)
