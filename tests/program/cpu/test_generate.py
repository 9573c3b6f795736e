"""The whole path on the CPU device with a tiny random Llama: numbers, bitwise equality, slots, limits."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from megakernel.errors import CapacityError
from megakernel.sampling import SamplingParams
from tests.program.cpu.conftest import Open, reference

pytestmark = pytest.mark.timeout(240)
VOCAB = 331


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(length)]


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=count, **more)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


# ---------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize("start", [0, 36])
def test_logits_equal_the_interpreters(opened: Open, tiny: Path, start: int) -> None:
    """start 0 decodes every token; start 36 computes 37 of them as prompt chunks of 16 rows."""
    pytest.importorskip("torch")
    ids = prompt(1, 40)
    graph, weights = reference(tiny)
    want = graph.interpret(weights, ids)["logits"].numpy()[start:]
    got = opened().logits(ids, start)
    assert got.shape == (40 - start, VOCAB) and relative_error(got, want) < 2e-5


def test_logits_across_pages_and_pieces(opened: Open, tiny: Path) -> None:
    pytest.importorskip("torch")
    ids = prompt(2, 530)
    graph, weights = reference(tiny)
    want = graph.interpret(weights, ids)["logits"].numpy()
    llm = opened()
    for start in (254, 255, 256, 257, 511, 512, 529):
        assert relative_error(llm.logits(ids[: start + 1], start), want[start : start + 1]) < 2e-5


def test_log_probabilities_are_of_the_logits(opened: Open) -> None:
    llm = opened()
    ids = prompt(3, 9)
    (output,) = llm.generate([ids], greedy(5, logprobs=4))
    logits = llm.logits([*ids, *output.token_ids], 8)[:5].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert output.logprobs is not None
    for row, token in zip(logs, output.logprobs):
        best = np.argsort(-row, kind="stable")[:4]
        assert token.id == best[0] and token.logprob == pytest.approx(row[token.id], abs=1e-4)
        assert [i for i, _ in token.top] == best.tolist()
        assert [p for _, p in token.top] == pytest.approx(row[best].tolist(), abs=1e-4)


# ---------------------------------------------------------------------------------------------- bitwise equality
def test_any_number_of_workers_gives_the_same_bits(opened: Open) -> None:
    ids = prompt(4, 300)
    found = [opened(workers=n).logits(ids[:40], 20).tobytes() for n in (1, 2, 3, 8)]
    assert len(set(found)) == 1
    streams = {opened(workers=n).generate([ids], greedy(40))[0].token_ids for n in (1, 3, 8)}
    assert len(streams) == 1


def test_prompt_chunks_do_not_change_bits(opened: Open) -> None:
    ids = prompt(5, 61)
    found = {opened(max_rows=rows).logits(ids, 60).tobytes() for rows in (1, 5, 16)}
    found |= {opened(max_rows=16).logits(ids, start)[-1:].tobytes() for start in (0, 17)}
    assert len(found) == 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "top_k": 40, "repetition_penalty": 1.2}])
def test_alone_or_in_a_batch(opened: Open, sampling: dict) -> None:
    llm = opened()
    prompts = [prompt(10 + i, n) for i, n in enumerate((3, 50, 17, 200))]
    alone = [llm.generate([p], greedy(30, logprobs=0, **sampling))[0] for p in prompts]
    together = llm.generate(prompts, greedy(30, logprobs=0, **sampling))
    for one, other in zip(alone, together):
        assert one.token_ids == other.token_ids
        assert [t.logprob for t in one.logprobs or ()] == [t.logprob for t in other.logprobs or ()]


def test_twenty_runs_are_equal(opened: Open) -> None:
    llm = opened()
    ids = prompt(6, 20)
    assert len({tuple(o.token_ids for o in llm.generate([ids, ids[:7]], greedy(24))) for _ in range(20)}) == 1


def test_seeds_decide_what_is_sampled(opened: Open) -> None:
    llm = opened()
    ids = prompt(7, 8)
    found = [llm.generate([ids], greedy(20, temperature=1.5, seed=s))[0].token_ids for s in (1, 1, 2, 3)]
    assert found[0] == found[1] and len(set(found)) == 3


# ---------------------------------------------------------------------------------------------- slots and limits
@pytest.mark.parametrize("steps", [1, 256])
def test_ragged_requests_admit_and_retire(opened: Open, steps: int) -> None:
    llm = opened(max_slots=3, steps_per_launch=steps)
    rng = random.Random(steps)
    work = [(prompt(100 + i, rng.choice((1, 2, 15, 16, 17, 40))), rng.randint(1, 25)) for i in range(14)]
    alone = [llm.generate([p], greedy(n))[0].token_ids for p, n in work]
    before = llm.engine.exclusive(lambda _: llm.stats())
    requests = [llm.engine.submit(p, greedy(n)) for p, n in work]
    assert [r.result(100).token_ids for r in requests] == alone
    after = llm.engine.exclusive(lambda _: llm.stats())
    assert after.tokens == after.kernel_tokens and after.tokens - before.tokens == sum(n for _, n in work)
    launches, ran = after.launches - before.launches, after.steps - before.steps
    assert launches >= ran if steps == 1 else launches <= 14


def test_a_tokens_stop_ends_the_sequence_at_once(opened: Open) -> None:
    llm = opened()
    ids = prompt(8, 6)
    whole = llm.generate([ids], greedy(30))[0].token_ids
    stop = whole[11]
    (output,) = llm.generate([ids], greedy(30, stop_token_ids=[stop]))
    assert output.finish_reason == "stop" and output.token_ids == whole[: whole.index(stop) + 1]
    many = [i for i in range(VOCAB) if i not in whole][:12]
    (output,) = llm.generate([ids], greedy(30, stop_token_ids=[*many, stop]))
    assert output.finish_reason == "stop" and output.token_ids == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize(("length", "tokens"), [(599, 1), (590, 10), (560, 12)])
def test_up_to_the_last_place_of_the_context(opened: Open, length: int, tokens: int) -> None:
    (output,) = opened().generate([prompt(9, length)], greedy(12))
    assert len(output.token_ids) == tokens and output.finish_reason == "length"


def test_a_prompt_as_long_as_the_context(opened: Open) -> None:
    llm = opened()
    for length in (600, 601):
        with pytest.raises(CapacityError, match="max_context"):
            llm.generate([prompt(9, length)], greedy(1))


def test_a_context_longer_than_the_model_allows(opened: Open) -> None:
    with pytest.raises(CapacityError, match="max_context 4097: the model allows 1 to 4096"):
        opened(max_context=4097)


def test_cancel_a_hundred_times(opened: Open) -> None:
    llm = opened(max_slots=2)
    ids = prompt(11, 5)
    want = llm.generate([ids], greedy(12))[0].token_ids
    rng = random.Random(3)
    for _ in range(100):
        request = llm.engine.submit(prompt(12, 4), greedy(500))
        for count, _token in enumerate(request):
            if count == rng.randrange(1, 6):
                request.cancel()
        request.cancel()
    assert llm.generate([ids], greedy(12))[0].token_ids == want
    assert llm.engine.submit(ids, greedy(3)).result(10).token_ids == want[:3]


# ---------------------------------------------------------------------------------------------- lifetimes
def test_two_models_in_one_process(opened: Open) -> None:
    one, two = opened(), opened(workers=3, dtype="bf16")
    ids = prompt(13, 12)
    want = [m.generate([ids], greedy(20))[0].token_ids for m in (one, two)]
    got: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        got[i] = (one, two)[i % 2].generate([ids], greedy(20))[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {i: want[i % 2] for i in range(8)}


def test_open_run_close_fifty_times(opened: Open) -> None:
    ids = prompt(14, 4)
    found = set()
    counts = []
    for _ in range(50):
        llm = opened(max_slots=1)
        found.add(llm.generate([ids], greedy(4))[0].token_ids)
        llm.close()
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    assert len(found) == 1
    assert counts[-1] < counts[0] + 10, counts  # a leak of one thread an engine would add 50; libraries may start one


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bf16", None), ("f16", "f32"), ("f32", "bf16")])
def test_other_types_stay_close(opened: Open, tiny: Path, dtype: str, kv_dtype: str | None) -> None:
    pytest.importorskip("torch")
    ids = prompt(15, 30)
    graph, weights = reference(tiny)
    want = graph.interpret(weights, ids)["logits"].numpy()
    assert relative_error(opened(dtype=dtype, kv_dtype=kv_dtype).logits(ids), want) < 0.03
