"""Wrong values for a running engine: a sentence for who gave them, and nothing for the others."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megakernel import llm as llm_module
from megakernel.engine import Engine
from megakernel.errors import CapacityError, InvalidRequest, MegakernelError
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams

from .conftest import Open

GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("slot", [1.5, "0", None, -1, 99])
def test_a_slot_that_is_none(opened: Open, slot: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"kv: no request holds slot {slot!r}; there are slots 0 to 7"):
        opened().engine.kv(slot)


def test_keys_and_values_that_are_none(opened: Open) -> None:
    """What is no number would be a fault for everybody."""
    llm = opened()
    request = llm.engine.submit([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
    next(iter(request))
    kv = llm.engine.kv(request.slot or 0)
    request.cancel()
    spoiled = kv.values.copy()
    spoiled[1, 2, 0, 3] = np.nan
    bad: list[tuple[Any, str]] = [
        (None, "kv: expected a Kv, as `Engine.kv` gives it, got None"),
        (replace(kv, values=None), "kv: expected values as a numpy array, got NoneType"),
        (replace(kv, tokens=()), "kv: expected 1 to 600 tokens, got 0"),
        (replace(kv, tokens=(1.5,) * len(kv.tokens)), r"kv: expected token ids, got \(1.5, "),
        (replace(kv, values=spoiled), r"kv: expected finite values, got nan at \[1, 2, 0, 3\]"),
    ]
    for value, words in bad:
        with pytest.raises(InvalidRequest, match=words):
            llm.engine.put_kv(value)
    llm.engine.put_kv(kv)
    assert llm.stats().faults == 0


def test_logits_of_wrong_tokens_disturb_nobody(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    """They are refused at once, beside a request that runs, and known prefixes stay."""
    llm = opened()
    want = llm.generate([[5] * 40], GREEDY)[0].token_ids
    running = llm.engine.submit([7], SamplingParams(max_tokens=590, ignore_eos=True))
    bad: list[tuple[Any, int, type[Exception], str]] = [
        ([], 0, CapacityError, "logits: expected 0 <= start < tokens < 600"),
        ([1, 2], 0.5, CapacityError, "logits: expected 0 <= start"),
        ([1, 331], 0, InvalidRequest, "logits: expected token ids from 0 to 330, got 331 at place 1"),
        ([1.5], 0, InvalidRequest, r"logits: expected token ids, got \[1.5\]"),
        ("abc", 0, InvalidRequest, "logits: expected token ids, got 'abc'"),
    ]
    for ids, start, kind, words in bad:
        with pytest.raises(kind, match=words):
            llm.logits(ids, start)
    assert len(running.result(100).token_ids) == 590
    before = llm.stats().prefix.hits
    assert llm.generate([[5] * 40], GREEDY)[0].token_ids == want
    assert llm.stats().prefix.hits == before + 1 and not caplog.records


@pytest.mark.parametrize("ids", [[1.5], ["1"], [None], 5, "12"])
def test_a_prompt_of_no_ids(opened: Open, ids: Any) -> None:
    """Nothing is made a token that is none: 1.5 is not 1."""
    with pytest.raises(InvalidRequest, match=r"prompt: expected token ids, got"):
        opened().engine.submit(ids)


def test_what_had_the_engine_to_itself_is_no_kernel_that_ended(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError):
        opened().engine.exclusive(lambda _runtime: 1 // 0)
    words, end = "what had the engine to itself failed", time.monotonic() + 30
    while words not in caplog.text and time.monotonic() < end:  # the engine's thread says so behind the error
        time.sleep(0.01)
    assert words in caplog.text and "the kernel ended" not in caplog.text


def test_memory_is_given_back_when_the_engine_does_not_start(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Runtime] = []
    close = Runtime.close

    def count(self: Runtime) -> None:
        closed.append(self)
        close(self)

    def fail(self: Engine, *_: Any, **__: Any) -> None:
        raise MegakernelError("no thread is left")

    monkeypatch.setattr(Runtime, "close", count)
    monkeypatch.setattr(llm_module.Engine, "__init__", fail)
    with pytest.raises(MegakernelError, match="no thread"):
        opened()
    assert len(closed) == 1
