"""Embeddings into the kernel, hidden states out of it, the event loop's way to both; with a tiny random Llama."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import megakernel
from megakernel.errors import InvalidRequest
from megakernel.llm import LLM
from megakernel.sampling import SamplingParams
from tests.program.cpu.conftest import Open, reference
from tests.program.cpu.test_generate import VOCAB, greedy, prompt

pytestmark = pytest.mark.timeout(240)
OPEN = {"inputs": True, "hidden": True}


@pytest.fixture
def llm(opened: Open) -> LLM:
    return opened(**OPEN)


def table(tiny: Path) -> np.ndarray:
    _, weights = reference(tiny)
    return np.asarray(weights("model.embed_tokens.weight"), np.float32)


def test_the_tables_own_rows_give_the_tokens_answer(llm: LLM, opened: Open, tiny: Path) -> None:
    """Bitwise, whole prompts and single places, over several chunks of a prompt; and as without any of this."""
    ids, rows = prompt(1, 41), table(tiny)
    params = greedy(20, logprobs=3)
    (want,) = opened().generate([ids], params)
    mixed = megakernel.Embedded([i if at % 3 else -1 for at, i in enumerate(ids)], rows[ids[::3]])
    for given in (ids, rows[ids], mixed):
        (got,) = llm.generate(given, params)
        assert got.token_ids == want.token_ids and got.logprobs is not None and want.logprobs is not None
        assert [(t.logprob, t.top) for t in got.logprobs] == [(t.logprob, t.top) for t in want.logprobs]
    together = llm.generate([rows[ids], ids, mixed], params)
    assert [o.token_ids for o in together] == [want.token_ids] * 3


def test_other_rows_give_another_answer(llm: LLM, tiny: Path) -> None:
    ids, rows = prompt(2, 9), table(tiny)
    first = llm.generate(rows[ids], greedy(12))[0].token_ids
    assert llm.generate(rows[ids] + np.float32(0.5), greedy(12))[0].token_ids != first
    assert llm.generate(rows[ids], greedy(12))[0].token_ids == first  # a slot forgets its last request's rows


def test_embedded_places_are_not_counted_as_tokens(llm: LLM, tiny: Path) -> None:
    rows = table(tiny)
    params = greedy(30, repetition_penalty=1.3, presence_penalty=0.5)
    seen = llm.generate(prompt(3, 8), params)[0].token_ids
    given = llm.generate(rows[prompt(3, 8)], params)[0].token_ids
    assert len(seen) == len(given) == 30 and seen != given
    assert len(set(given[:8])) > 1


def test_hidden_states_are_what_the_head_multiplies(llm: LLM, tiny: Path) -> None:
    """Of every token of prompt and output; the same alone, in a batch and at other worker counts."""
    ids = prompt(4, 37)
    (out,) = llm.generate(ids, greedy(6), hidden=True)
    _, weights = reference(tiny)
    head = np.asarray(weights("lm_head.weight"), np.float32)
    assert out.prompt_hidden is not None and out.prompt_hidden.shape == (37, 88)
    assert len(out.hidden) == len(out.token_ids) == 6 and (out.hidden[0] == out.prompt_hidden[-1]).all()
    states = np.concatenate([out.prompt_hidden, np.stack(out.hidden)[1:]])
    logits = llm.logits([*ids, *out.token_ids[:-1]])
    assert np.abs(states @ head.T - logits).max() < 2e-5 * np.abs(logits).max()
    assert [int(i) for i in (np.stack(out.hidden) @ head.T).argmax(1)] == list(out.token_ids)
    for again in llm.generate([prompt(5, 20), ids, prompt(6, 3)], greedy(6), hidden=True)[1:2]:
        assert again.prompt_hidden.tobytes() == out.prompt_hidden.tobytes()
        assert np.stack(again.hidden).tobytes() == np.stack(out.hidden).tobytes()
    (plain,) = llm.generate(ids, greedy(6))
    assert plain.token_ids == out.token_ids and plain.hidden == () and plain.prompt_hidden is None


def test_hidden_states_at_other_worker_counts(llm: LLM, opened: Open) -> None:
    ids = prompt(7, 20)
    want = llm.generate(ids, greedy(4), hidden=True)[0]
    got = opened(workers=3, hidden=True).generate(ids, greedy(4), hidden=True)[0]
    assert got.prompt_hidden is not None and want.prompt_hidden is not None
    assert got.prompt_hidden.tobytes() == want.prompt_hidden.tobytes()


def test_a_stream_of_states(llm: LLM) -> None:
    got = [o.hidden[-1] for o in llm.generate(prompt(8, 5), greedy(7), stream=True, hidden=True)]
    want = llm.generate(prompt(8, 5), greedy(7), hidden=True)[0].hidden
    assert np.stack(got).tobytes() == np.stack(want).tobytes()


def test_what_a_program_was_not_built_for_is_refused(llm: LLM, opened: Open) -> None:
    plain = opened()
    with pytest.raises(InvalidRequest, match="open the model with inputs=True"):
        plain.generate(np.zeros((3, 88), np.float32))
    with pytest.raises(InvalidRequest, match="open the model with hidden=True"):
        plain.generate([1, 2], hidden=True)
    for rows in (np.zeros((3, 87)), np.full((3, 88), np.nan)):
        with pytest.raises(InvalidRequest, match=r"embeddings: expected finite numbers \[3, 88\]"):
            llm.generate(rows.astype(np.float32))
    with pytest.raises(InvalidRequest, match=r"expected finite numbers \[1, 88\], one row for each id below 0"):
        llm.generate(megakernel.Embedded([1, -1], np.zeros((2, 88), np.float32)))
    with pytest.raises(InvalidRequest, match="prompt: expected token ids from 0"):
        llm.generate([1, -1])


def test_a_processor_steers_every_prompt(llm: LLM) -> None:
    def up(tokens: object) -> np.ndarray:
        row = np.full(VOCAB, -np.inf, np.float32)
        row[5 + len(tokens)] = 0.0  # type: ignore[arg-type]
        return row

    outputs = llm.generate([[1], [2, 3]], greedy(4), processor=up)
    assert [o.token_ids for o in outputs] == [(5, 6, 7, 8)] * 2


def test_in_an_event_loop(llm: LLM, tiny: Path) -> None:
    """Streams beside each other, and a task whose cancelling frees the slot."""
    prompts = [prompt(9, 3), prompt(10, 30)]
    want = [o.token_ids for o in llm.generate(prompts, greedy(25))]

    async def stream(ids: list[int]) -> tuple[int, ...]:
        last: tuple[int, ...] = ()
        async for output in llm.astream(ids, greedy(25)):
            assert output.token_ids[: len(last)] == last and len(output.token_ids) == len(last) + 1
            last = output.token_ids
        return last

    def unhurried(_ids: Sequence[int]) -> np.ndarray:
        time.sleep(0.01)  # so that it runs for seconds, however late this test looks at it
        return np.zeros(VOCAB, np.float32)

    async def both() -> None:
        assert list(await asyncio.gather(*map(stream, prompts))) == want
        assert [o.token_ids for o in await llm.agenerate(prompts, greedy(25))] == want
        (embedded,) = await llm.agenerate(table(tiny)[prompts[0]], greedy(25), hidden=True)
        assert embedded.token_ids == want[0] and len(embedded.hidden) == 25
        many = SamplingParams(max_tokens=500, ignore_eos=True)
        endless = asyncio.ensure_future(llm.agenerate(prompts, many, processor=unhurried))
        while llm.engine.load().running == 0:
            await asyncio.sleep(0.001)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        reader = llm.astream(prompts[0], many, processor=unhurried)
        assert (await anext(reader)).token_ids == want[0][:1]
        await reader.aclose()  # type: ignore[attr-defined]
        for _ in range(2000):
            if llm.engine.load().running == 0:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("a cancelled request holds its slot")

    asyncio.run(both())
    assert llm.engine.load().free_pages == llm.engine.load().pages
