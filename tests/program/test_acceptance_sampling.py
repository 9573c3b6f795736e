"""Sampling, stop tokens and limits inside the kernel, on models whose logits are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.errors import CapacityError, DeviceFault, InvalidRequest
from megakernel.llm import LLM
from megakernel.sampling import SamplingParams
from megakernel.tasks.sample import Params, reference
from tests.program.tiny import Array, directions, successor_model, table_model

pytestmark = pytest.mark.timeout(120)
VOCABS = (5, 31, 33, 1003)
Opened = Callable[..., LLM]


@pytest.fixture
def opened() -> Iterator[Opened]:
    with ExitStack() as stack:
        yield lambda path, **more: stack.enter_context(
            LLM(path, **{"dtype": "f32", "workers": 1, "max_slots": 8, "max_context": 64, **more})
        )


def greedy(count: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, **more)


def walk(llm: LLM, start: int, count: int, **more: Any) -> list[int]:
    return list(llm.generate([start], greedy(count, ignore_eos=True, **more))[0].token_ids)


# ---------------------------------------------------------------------------------------------- the largest logit
@pytest.mark.parametrize("negative", [False, True], ids=["plain", "all_negative"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_id_can_win(vocab: int, negative: bool, tmp_path: Path, opened: Opened) -> None:
    """A walk over the whole vocabulary. Rows of the head that pad its last tile are zero: with every logit negative
    they would win if they were looked at."""
    e = directions(vocab)
    head = np.roll(e, 1, axis=0) * 0.25
    if negative:
        e[:, 0], head[:, 0] = 4.0, -100.0
    llm = opened(table_model(tmp_path, e, head), max_context=1024)
    assert (llm.logits([0])[0].max() < -100.0) == negative
    want = [*range(1, vocab), 0]
    assert walk(llm, 0, vocab) == want
    assert walk(llm, 0, vocab, temperature=1e-3, seed=3) == want
    assert walk(llm, 0, vocab, temperature=1.0, top_k=1, seed=3) == want


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_lowest_id_of_equal_logits_wins(vocab: int, tmp_path: Path, opened: Opened) -> None:
    """Ids in a random order are equal by threes: after any of group g comes the lowest of group g + 1."""
    order = np.random.default_rng(1).permutation(vocab)
    groups = [sorted(order[i : i + 3].tolist()) for i in range(0, vocab, 3)]
    place = {token: g for g, tokens in enumerate(groups) for token in tokens}
    e = directions(len(groups))
    index = np.array([place[t] for t in range(vocab)])
    llm = opened(table_model(tmp_path, e[index], np.roll(e, 1, axis=0)[index] * 0.25), max_context=1024)
    want = [tokens[0] for tokens in groups[1:]]
    assert walk(llm, groups[0][-1], len(want)) == want
    (output,) = llm.generate([groups[0][0]], greedy(logprobs=3))
    assert output.logprobs is not None
    found = [i for i, p in output.logprobs[0].top if p == output.logprobs[0].top[0][1]]
    assert found == groups[1][:3]


def test_equal_logits_everywhere(tmp_path: Path, opened: Opened) -> None:
    e = directions(1003)
    llm = opened(table_model(tmp_path, e, np.zeros_like(e)), max_context=1024)
    assert walk(llm, 5, 5) == [0] * 5
    ids = walk(llm, 1, 600, temperature=1.0, seed=1)
    assert 400 < len(set(ids)) < 500 and min(ids) < 30 and max(ids) > 970  # expected: 452 different ones


def test_a_logit_that_is_no_number_is_a_fault(tmp_path: Path, opened: Opened) -> None:
    """Token 7 overflows the logit of id 3; every other token is harmless. Afterwards the engine goes on."""
    e = directions(33)
    e[:, 0] = 0.0
    e[7, 0] = 8.0
    head = np.roll(e, 1, axis=0) * 0.25
    head[:, 0] = 0.0
    head[3, 0] = 3e38
    llm = opened(table_model(tmp_path, e, head))
    assert llm.generate([1], greedy(5))[0].token_ids == (2, 3, 4, 5, 6)
    with pytest.raises(DeviceFault, match=r"nan logits.*sample.*worker") as caught:
        llm.generate([1], greedy(9))
    assert caught.value.report.task == "sample"
    with pytest.raises(DeviceFault):
        llm.generate([7], greedy(temperature=1.0, seed=1))
    assert llm.generate([8], greedy(5))[0].token_ids == (9, 10, 11, 12, 13)
    assert llm.stats().faults == 2


# ---------------------------------------------------------------------------------------------- where output ends
@pytest.mark.parametrize(
    ("generation", "config", "last"),
    [
        ({"eos_token_id": 9}, {}, 9),
        ({"eos_token_id": [30, 12, 8]}, {}, 8),
        ({}, {"eos_token_id": 11}, 11),
        ({"eos_token_id": [30, 12]}, {"eos_token_id": 10}, 10),  # any of the files may name one
        ({"eos_token_id": None}, {"eos_token_id": None}, None),
        (None, {}, None),
    ],
    ids=["int", "list", "config", "both", "null", "absent"],
)
def test_end_tokens(
    generation: Any, config: dict[str, Any], last: int | None, tmp_path: Path, opened: Opened
) -> None:  # fmt: skip
    llm = opened(successor_model(tmp_path, 33, generation=generation, **config))
    output = llm.generate([3], greedy(20))[0]
    want = list(range(4, 24 if last is None else last + 1))
    assert list(output.token_ids) == want
    assert output.finish_reason == ("length" if last is None else "stop")
    llm.close()
    stats = llm.stats()
    assert stats.steps == stats.kernel_tokens == stats.tokens == len(want), "a step ran after the end"


def test_the_first_of_several_stops_ends_it(tmp_path: Path, opened: Opened) -> None:
    llm = opened(successor_model(tmp_path, 33, generation={"eos_token_id": 20}))
    stops = greedy(25, stop_token_ids=[15, 9, 11])
    assert llm.generate([5], stops)[0].token_ids == (6, 7, 8, 9)
    assert llm.generate([9], stops)[0].token_ids == (10, 11)
    assert llm.generate([15], stops)[0].token_ids == (16, 17, 18, 19, 20)
    assert len(llm.generate([15], greedy(25, ignore_eos=True))[0].token_ids) == 25
    llm.close()
    stats = llm.stats()
    assert stats.steps == stats.kernel_tokens == stats.tokens == 4 + 2 + 5 + 25


def test_steps_equal_tokens_in_a_batch(tmp_path: Path, opened: Opened) -> None:
    """Four sequences that end at different tokens: never a step more than the longest needs."""
    llm = opened(successor_model(tmp_path, 33), steps_per_launch=7)
    requests = [llm.engine.submit([1], greedy(n)) for n in (3, 9, 14, 5)]
    assert [len(r.result(30).token_ids) for r in requests] == [3, 9, 14, 5]
    llm.close()
    stats = llm.stats()
    assert stats.kernel_tokens == stats.tokens == 31 and 14 <= stats.steps <= 14 + 3 * 2


@pytest.mark.parametrize("length", [1, 61, 62, 63])
def test_across_the_limit_of_the_context(length: int, tmp_path: Path, opened: Opened) -> None:
    llm = opened(successor_model(tmp_path, 131))
    prompt = list(range(length))
    output = llm.generate([prompt], greedy(100))[0]
    assert output.finish_reason == "length"
    assert list(output.token_ids) == list(range(length, 64))
    assert llm.generate([[1]], greedy(2))[0].token_ids == (2, 3)


@pytest.mark.parametrize("length", [64, 65, 500])
def test_a_prompt_of_the_whole_context_is_refused(length: int, tmp_path: Path, opened: Opened) -> None:
    llm = opened(successor_model(tmp_path, 131))
    with pytest.raises(CapacityError, match=f"fewer than 64 tokens.*got {length}"):
        llm.generate([[1] * length], greedy())
    with pytest.raises(InvalidRequest, match="at least one token"):
        llm.generate([[]], greedy())
    assert llm.generate([[1]], greedy(2))[0].token_ids == (2, 3)


# ---------------------------------------------------------------------------------------------- against a reference
MODES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition_below_one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.35},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.3},
    "temperature": {"temperature": 0.8, "seed": 5},
    "top_k": {"temperature": 1.0, "top_k": 7, "seed": 1 << 40},
    "top_p": {"temperature": 1.2, "top_p": 0.9, "seed": 9},
    "min_p": {"temperature": 1.0, "min_p": 0.05, "seed": (1 << 64) - 1},
    "all": {
        "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 77,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose logits after each token are random and of spread 3."""
    rng = np.random.default_rng(6)
    folder = table_model(tmp_path_factory.mktemp("spread"), directions(333), rng.normal(size=(333, 64)) * 3 / 8)
    with LLM(folder, dtype="f32", workers=1, max_slots=8, max_context=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def after(spread: LLM) -> Array:
    """The kernel's logits after every token, [vocab, vocab]."""
    return np.concatenate([spread.logits(list(range(first, min(first + 111, 333)))) for first in (0, 111, 222)])


def replay(prompt: list[int], after: Array, mode: dict[str, Any], count: int) -> list[int]:
    """What sample.py's reference gives from the kernel's logits."""
    seen = np.zeros(333, np.uint16)
    seen[prompt] |= 0x8000
    sequence = list(prompt)
    for _ in range(count):
        token = reference(after[sequence[-1]], Params(**mode), seen, len(sequence))
        seen[token] += 1
        sequence.append(token)
    return sequence[len(prompt) :]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_sampling_equals_its_reference(spread: LLM, after: Array, mode: dict[str, Any]) -> None:
    prompt = [5, 17, 17, 200, 3]
    output = spread.generate([prompt], greedy(100, ignore_eos=True, **mode))[0]
    assert list(output.token_ids) == replay(prompt, after, mode, 100)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_penalties_and_filters_mean_what_transformers_means(
    spread: LLM, after: Array, mode: dict[str, Any]
) -> None:  # fmt: skip
    """Repetition penalty, temperature, top-k, top-p and min-p of transformers leave every token that we drew."""
    torch = pytest.importorskip("torch")
    made = pytest.importorskip("transformers.generation.logits_process")
    prompt = [9, 9, 40]
    sequence = [*prompt, *spread.generate([prompt], greedy(60, ignore_eos=True, **mode))[0].token_ids]
    for at in range(len(prompt), len(sequence)):
        scores = torch.from_numpy(after[sequence[at - 1]][None].copy())
        ids = torch.tensor([sequence[:at]])
        if mode.get("repetition_penalty", 1.0) != 1.0:
            scores = made.RepetitionPenaltyLogitsProcessor(mode["repetition_penalty"])(ids, scores)
        count = np.bincount(sequence[len(prompt) : at], minlength=333)
        scores = scores - torch.from_numpy(
            mode.get("presence_penalty", 0.0) * (count > 0) + mode.get("frequency_penalty", 0.0) * count
        )
        if "temperature" not in mode:
            assert sequence[at] == int(scores.argmax())
            continue
        scores = scores / mode["temperature"]
        for name, key in (("TopK", "top_k"), ("TopP", "top_p"), ("MinP", "min_p")):
            if key in mode:
                scores = getattr(made, f"{name}LogitsWarper")(mode[key])(ids, scores)
        assert torch.isfinite(scores[0, sequence[at]]), f"token {sequence[at]} at {at} should have been left out"


@pytest.mark.parametrize("mode", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.12}], ids=["all", "k", "p", "min_p"])
def test_draws_have_the_right_frequencies(mode: dict[str, Any], tmp_path: Path, opened: Opened) -> None:
    """4,000 draws from one distribution: every frequency within five standard deviations."""
    rng = np.random.default_rng(2)
    e = np.repeat(directions(1), 5, axis=0)
    llm = opened(table_model(tmp_path, e, rng.normal(size=(5, 64)) / 8), max_context=1024)
    z = llm.logits([2])[0].astype(np.float64) / 0.8
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    order, keep = np.argsort(-p), np.ones(5, bool)
    keep[order[mode.get("top_k", 5) :]] = False
    keep[order[int(np.searchsorted(np.cumsum(p[order]), mode.get("top_p", 1.0))) + 1 :]] = False
    keep &= p >= mode.get("min_p", 0.0) * p.max()
    assert keep.all() == (not mode)
    p = np.where(keep, p, 0.0) / p[keep].sum()
    draws = [t for seed in range(4) for t in walk(llm, 2, 1000, temperature=0.8, seed=seed, **mode)]
    count = np.bincount(draws, minlength=5)
    sigma = np.sqrt(4000 * p * (1 - p))
    assert (np.abs(count - 4000 * p) <= 5 * sigma + 1e-9).all(), (count, 4000 * p)


def test_a_seed_gives_the_same_tokens_in_any_batch(spread: LLM) -> None:
    params = [greedy(40, temperature=1.0, seed=s, ignore_eos=True) for s in (1, 2, 3, 4, 5, 6, 7)]
    alone = [spread.engine.submit([4, 5], p).result(30).token_ids for p in params]
    assert len(set(alone)) == 7
    together = [spread.engine.submit([4, 5], p) for p in reversed(params)]
    assert [r.result(30).token_ids for r in together] == alone[::-1]
    unseeded = [spread.engine.submit([4, 5], greedy(40, temperature=1.0, ignore_eos=True)) for _ in range(4)]
    assert len({r.result(30).token_ids for r in unseeded}) == 4


def test_log_probabilities(spread: LLM, after: Array) -> None:
    output = spread.generate([[8]], greedy(20, logprobs=20, ignore_eos=True, temperature=1.0, seed=4))[0]
    previous = 8
    for token in output.logprobs or ():
        row = after[previous].astype(np.float64)
        p = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert token.logprob == pytest.approx(p[token.id], abs=1e-5)
        assert [i for i, _ in token.top] == np.argsort(-p, kind="stable")[:20].tolist()
        assert [v for _, v in token.top] == pytest.approx(np.sort(p)[::-1][:20].tolist(), abs=1e-5)
        previous = token.id
