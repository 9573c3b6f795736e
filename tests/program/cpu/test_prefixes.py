"""Shared prefixes on the CPU device: the same bits with and without a hit, a full pool, keys and values as tensors."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from dataclasses import replace
from queue import Queue

import numpy as np
import pytest

from megakernel.engine import Engine
from megakernel.errors import CapacityError, InvalidRequest
from megakernel.kv_tensors import Kv
from megakernel.llm import LLM
from megakernel.request import Request
from megakernel.sampling import SamplingParams

from .conftest import TINY, Open
from .test_batches import alone, answer, params, prompt

PAGE = 32
pytestmark = pytest.mark.timeout(200)


def hits(engine: Engine) -> int:
    return engine.stats().prefix.hit_tokens


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("same", [0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 79, 96, 100])
def test_a_hit_changes_no_bits(opened: Open, dtype: str, same: int) -> None:
    """Prompts that differ from a known one before, at and after the edges of a page, and inside one."""
    stem = prompt(1, 100)
    other = [*stem[:same], *((t + 1) % TINY["vocab_size"] for t in stem[same:]), 5, 6, 7]
    want = alone(opened(dtype=dtype, share_prefixes=False), other, params(40))
    llm = opened(dtype=dtype)
    alone(llm, stem, params(4))
    assert alone(llm, other, params(40)) == want
    whole, part = divmod(same, PAGE)
    assert hits(llm.engine) == whole * PAGE + (part if part * 4 >= PAGE else 0)
    assert alone(llm, other, params(40)) == want  # now nearly all of it is known
    assert hits(llm.engine) > 90


def test_a_conversation_goes_on_where_it_was(opened: Open) -> None:
    """The second turn holds the first turn's prompt and answer: only what is new is computed."""
    plain, llm = opened(share_prefixes=False), opened()
    ids = prompt(2, 50)
    for turn in range(4):
        got = alone(llm, ids, params(21))
        assert got == alone(plain, ids, params(21))
        before = hits(llm.engine)
        ids = [*ids, *(token for token, _, _ in got), *prompt(30 + turn, 9)]
        whole, part = divmod(len(ids) - 9 - 1, PAGE)  # the last token of the answer was never computed
        known = whole * PAGE + (part if part * 4 >= PAGE else 0)
        alone(llm, [*ids, 1], params(1))
        assert hits(llm.engine) - before == known


def test_requests_of_one_prefix_run_together(opened: Open) -> None:
    plain = opened(share_prefixes=False, max_slots=8)
    llm = opened(max_slots=8)
    stem = prompt(3, 150)
    alone(llm, stem, params(1))
    work = [(stem[: 40 + 13 * i] + prompt(40 + i, 5), params(25, seed=i)) for i in range(8)]
    requests = [llm.engine.submit(*item) for item in work]
    assert [answer(r) for r in requests] == [alone(plain, *item) for item in work]
    assert hits(llm.engine) > 8 * 32
    load = llm.engine.load()
    assert load.free_pages == load.pages and load.running == 0


def test_a_running_request_shares_its_prompt(opened: Open) -> None:
    llm = opened(max_slots=2)
    ids = prompt(4, 70)
    want = alone(opened(share_prefixes=False), ids, params(3))
    stream = llm.engine.submit(ids, params(400))
    next(iter(stream))
    assert alone(llm, ids, params(3)) == want and hits(llm.engine) == 64 and not stream.done
    stream.cancel()


def test_penalties_count_the_whole_prompt_after_a_hit(opened: Open) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, repetition_penalty=1.7, logprobs=0)
    ids = prompt(5, 80)
    llm = opened()
    first = answer(llm.engine.submit(ids, sampling))
    assert answer(llm.engine.submit(ids, sampling)) == first and hits(llm.engine) == 79


def test_a_full_pool_makes_requests_wait_and_disturbs_nobody(opened: Open) -> None:
    llm = opened(max_slots=4, kv_pages=6, max_context=190)
    running = llm.engine.submit(prompt(6, 60), params(100))  # 5 of 6 pages
    next(iter(running))
    waiting = llm.engine.submit(prompt(7, 60), params(30))
    small = llm.engine.submit(prompt(8, 5), params(5))  # would fit, but came later
    plain = opened(share_prefixes=False)
    assert [answer(r) for r in (running, waiting, small)] == [
        alone(plain, prompt(6, 60), params(100)), alone(plain, prompt(7, 60), params(30)),
        alone(plain, prompt(8, 5), params(5)),
    ]  # fmt: skip
    with pytest.raises(CapacityError, match="a request of 190 tokens needs 6 KV pages; the engine has 5"):
        LLM.generate(opened(max_slots=4, kv_pages=5, max_context=190), [prompt(9, 180)], params(50))


def test_many_prefixes_in_a_small_pool(opened: Open) -> None:
    """What was used longest ago makes room, and everything stays right."""
    llm = opened(max_slots=2, kv_pages=12, max_context=190)
    plain = opened(share_prefixes=False)
    stems = [prompt(50 + i, 90) for i in range(5)]
    for turn, stem in enumerate(itertools.chain(stems, reversed(stems), stems)):
        ids = [*stem, *prompt(turn, 4)]
        assert alone(llm, ids, params(6)) == alone(plain, ids, params(6))
    stats = llm.engine.stats().prefix
    assert stats.evictions > 10 and stats.hits > 0 and stats.queries == 15
    assert llm.engine.load().free_pages == 12


def test_a_cancelled_prompt_leaves_what_it_computed(opened: Open) -> None:
    llm = opened(max_rows=16, max_context=2000)
    ids = prompt(10, 1800)
    request = llm.engine.submit(ids, params(3))
    while request.slot is None:
        time.sleep(0.001)
    time.sleep(0.02)
    request.cancel()
    want = alone(opened(share_prefixes=False, max_context=2000), ids, params(3))
    assert alone(llm, ids, params(3)) == want


def test_looking_at_logits_forgets_prefixes(opened: Open) -> None:
    llm = opened()
    ids = prompt(11, 70)
    want = alone(llm, ids, params(3))
    llm.logits(prompt(12, 100), 98)  # writes pages of its own choice
    assert alone(llm, ids, params(3)) == want and hits(llm.engine) == 0


# ---------------------------------------------------------------------------------------------- tensors
def sequence(llm: LLM, ids: list[int], count: int) -> Kv:
    """K and V of a prompt and `count` tokens after it, but for those of the last."""
    request = llm.engine.submit(ids, params(count), keep_kv=True)
    request.result(60)
    assert request.kv is not None and len(request.kv.tokens) == len(ids) + count - 1
    return request.kv


def test_keys_and_values_of_what_runs(opened: Open) -> None:
    """By slot and by request, while it runs; no others' when it has ended."""
    llm = opened()
    ids = prompt(17, 40)
    whole = sequence(llm, ids, 300)
    for ask in (lambda r: r.slot, lambda r: r):
        for _ in range(50):  # a busy machine may look when it has ended
            request = llm.engine.submit(ids, params(300))
            next(iter(request))
            with suppress(InvalidRequest):
                kv = llm.engine.kv(ask(request))
                break
        else:
            raise AssertionError("it had ended 50 times")
        size = len(kv.tokens)
        assert 40 <= size <= 339 and kv.tokens == whole.tokens[:size]
        assert kv.keys.tobytes() == whole.keys[:, :size].tobytes()
        assert kv.values.tobytes() == whole.values[:, :size].tobytes()
        request.result(60)
    other = llm.engine.submit(prompt(18, 30), params(300))  # may get the slot of the one that ended
    with pytest.raises(InvalidRequest, match=rf"kv: request {request.number} holds no slot.*keep_kv=True"):
        llm.engine.kv(request)
    other.cancel()


def test_a_cancelled_request_keeps_nothing(opened: Open) -> None:
    made: Queue[Request] = Queue()
    request = opened().engine.submit(prompt(19, 30), params(300), listen=lambda: made.get().cancel(), keep_kv=True)
    made.put(request)  # cancelled at its first token
    made.put(request)  # and told of its end
    assert request.result(60).finish_reason == "cancelled" and request.kv is None


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", pytest.param("f16", marks=pytest.mark.slow)])
def test_keys_and_values_are_in_place(opened: Open, kv_dtype: str) -> None:
    ids = prompt(13, 75)
    kv = sequence(opened(kv_dtype=kv_dtype), ids, 1)
    assert kv.tokens == tuple(ids) and kv.keys.shape == (3, 75, 2, 16)
    # Rotation keeps the length of each pair, so keys of one token at two places have one length.
    twin = prompt(13, 75)
    twin[1:] = [ids[0]] * 74
    other = sequence(opened(kv_dtype=kv_dtype), twin, 1)
    first = np.linalg.norm(np.asarray(other.keys[0, :75], np.float32), axis=-1)
    assert np.allclose(first, first[:1], rtol=2e-2)
    values = np.asarray(other.values[0, :75], np.float32)
    assert (values == values[:1]).all() and np.abs(values).max() > 0
    assert (np.asarray(kv.values[0, 0], np.float32) == values[0]).all()


@pytest.mark.parametrize("count", [1, 15, 30])  # to inside a page, to its end, to inside the next
def test_exported_and_imported_elsewhere(opened: Open, count: int) -> None:
    ids = prompt(14, 50)
    kv = sequence(opened(), ids, count)
    after = [*kv.tokens, 9]
    want = alone(opened(share_prefixes=False), after, params(30))
    two = opened(max_slots=3, workers=1)
    two.engine.put_kv(kv)
    assert alone(two, after, params(30)) == want and hits(two.engine) == len(kv.tokens)
    other = sequence(two, after, 1)
    assert other.tokens[: len(kv.tokens)] == kv.tokens
    assert other.keys[:, : len(kv.tokens)].tobytes() == kv.keys.tobytes()
    assert other.values[:, : len(kv.tokens)].tobytes() == kv.values.tobytes()


def test_imported_numbers_are_used(opened: Open) -> None:
    """Other values in the pages give other tokens: nothing is computed again in secret."""
    ids = prompt(15, 64)
    kv = sequence(opened(), ids, 1)
    wrong = opened()
    wrong.engine.put_kv(replace(kv, values=-kv.values))
    assert alone(wrong, [*ids, 3], params(5)) != alone(opened(share_prefixes=False), [*ids, 3], params(5))


def test_bad_tensors_are_refused(opened: Open) -> None:
    llm = opened(kv_pages=20)
    kv = sequence(llm, prompt(16, 40), 1)
    with pytest.raises(InvalidRequest, match="no request holds slot 7; there are slots 0 to 7"):
        llm.engine.kv(7)
    with pytest.raises(InvalidRequest, match=r"kv: expected keys of shape \[3, \d+, 2, 16\].*got \[2, "):
        llm.engine.put_kv(replace(kv, keys=kv.keys[:2]))
    with pytest.raises(InvalidRequest, match=r"expected values of shape.*in f32, got .* float16"):
        llm.engine.put_kv(replace(kv, values=kv.values.astype(np.float16)))
    with pytest.raises(InvalidRequest, match="token ids from 0 to 330"):
        llm.engine.put_kv(replace(kv, tokens=(*kv.tokens[:-1], 331)))
    with pytest.raises(CapacityError, match="sharing is off"):
        opened(share_prefixes=False).engine.put_kv(kv)
    assert alone(llm, prompt(16, 40), params(2))
