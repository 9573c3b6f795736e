"""Bias and grammars: what may come is decided before every token, by a mask that the kernel reads."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import pytest

from megakernel.sampling import SamplingParams
from megakernel.serve import grammar
from tests.serve.server import Running

pytestmark = pytest.mark.timeout(180)
GREEDY = {"prompt": "bias", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip


def ids(server: Running, **body: Any) -> list[int]:
    """Token ids of a greedy completion."""
    assert server.host.model is not None
    params = SamplingParams(max_tokens=12, ignore_eos=True, **body)
    return list(server.host.model.engine.submit([1, 2, 3], params).result(30).token_ids)


def test_a_bias_bans_and_forces(tiny: Running) -> None:
    plain = ids(tiny)
    assert plain[0] not in ids(tiny, logit_bias={plain[0]: -1e4})
    assert ids(tiny, logit_bias={65: 1000.0}) == [65] * 12
    assert ids(tiny, logit_bias={65: 0.0}) == ids(tiny) == plain  # and a slot forgets its last request's bias
    wanted = ids(tiny, logit_bias={65: 1000.0, 66: 1000.0}, temperature=1.0, seed=3)
    assert set(wanted) == {65, 66}


def test_a_bias_is_added_to_the_logits(tiny: Running) -> None:
    model = tiny.host.model
    assert model is not None
    bias = {i: float(b) for i, b in enumerate(np.random.default_rng(1).normal(size=259) * 2)}
    got = ids(tiny, logit_bias=bias, repetition_penalty=1.2)
    logits = model.logits([1, 2, 3, *got[:-1]], 2)  # type: ignore[attr-defined]
    seen = {1, 2, 3}
    for row, token in zip(logits, got):
        y = row + np.array([bias[i] for i in range(259)], np.float32)
        for i in seen:
            y[i] = y[i] / np.float32(1.2) if y[i] > 0 else y[i] * np.float32(1.2)
        assert int(y.argmax()) == token
        seen.add(token)


def test_the_api_takes_a_bias(tiny: Running) -> None:
    alphabet = tiny.post("/tokenize", prompt="Z").json()["tokens"]
    answer = tiny.post("/v1/completions", **GREEDY, logit_bias={str(alphabet[0]): 100}, logprobs=1).json()["choices"][0]
    assert answer["text"] == "Z" * 12
    assert all(p < -1 for p in answer["logprobs"]["token_logprobs"])  # of the model, before the bias


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_a_schema(tiny: Running, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 60, "response_format": form, "n": 3}
    answer = tiny.post("/v1/chat/completions", **body, temperature=temperature, seed=5).json()
    for choice in answer["choices"]:
        made = json.loads(choice["message"]["content"])
        assert made["a"] in ("x", "yy") and isinstance(made["b"], bool) and len(made) == 2
        assert choice["finish_reason"] == "stop"
    chunks = tiny.events("/v1/chat/completions", **{**body, "n": 1}, temperature=temperature, seed=5)
    told = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert told == answer["choices"][0]["message"]["content"]
    tiny.wait(tiny.idle)


def test_other_forms(tiny: Running) -> None:
    form: dict[str, Any] = {"type": "regex", "regex": "[0-9]{3}-[a-f]{2}"}
    text = tiny.post("/v1/completions", **GREEDY, response_format=form).json()["choices"][0]["text"]
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)
    form = {"type": "grammar", "grammar": 'start: "yes" | "no"'}
    assert tiny.post("/v1/completions", **GREEDY, response_format=form).json()["choices"][0]["text"] in ("yes", "no")
    cut = tiny.post("/v1/completions", **GREEDY, response_format={"type": "json_object"}).json()["choices"][0]
    assert cut["text"].startswith("{") and cut["finish_reason"] in ("length", "stop")
    assert tiny.post("/v1/completions", **GREEDY, response_format={"type": "text"}).status_code == 200


def test_a_grammar_beside_others_changes_none_of_them(tiny: Running) -> None:
    body = {**GREEDY, "max_tokens": 200}
    alone = tiny.post("/v1/completions", **body).json()["choices"][0]["text"]
    form = {"type": "regex", "regex": "[a-z]{40}"}
    guided = {**body, "response_format": form, "presence_penalty": 0.5}
    want = tiny.post("/v1/completions", **guided).json()["choices"][0]["text"]
    found: list[tuple[str, str]] = []

    def ask(more: dict[str, Any], expected: str) -> None:
        found.append((tiny.post("/v1/completions", **more).json()["choices"][0]["text"], expected))

    threads = [threading.Thread(target=ask, args=pair) for pair in ((body, alone), (guided, want)) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(got == expected for got, expected in found)


@pytest.mark.parametrize(
    ("regex", "says"),
    [("(a{500}){500}", "takes more than 0 s"), ("(a{1000}){1000}", "the grammar stopped: lexer error")],
)
def test_a_grammar_that_takes_too_much_is_refused(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, regex: str, says: str
) -> None:
    """With 400 and one line: it is the client's."""
    monkeypatch.setattr(grammar, "MASK_S", 0 if "takes" in says else 10)
    form = {"type": "regex", "regex": regex}
    answer = tiny.post("/v1/completions", **GREEDY, response_format=form)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "response_format" and "\n" not in error["message"]
    assert says in error["message"], error
    tiny.wait(tiny.idle)
    assert tiny.post("/v1/completions", **GREEDY).status_code == 200


def test_a_processor_of_ones_own(tiny: Running) -> None:
    assert tiny.host.model is not None
    engine = tiny.host.model.engine
    calls: list[int] = []

    def up(tokens: Any) -> Any:
        """Token after token, and an end after five."""
        calls.append(len(tokens))
        if len(tokens) == 5:
            return None
        row = np.full(259, -np.inf, np.float32)
        row[10 + len(tokens)] = 0.0
        return row

    done = engine.submit([1, 2], SamplingParams(max_tokens=50), processor=up).result(30)
    assert done.token_ids == (10, 11, 12, 13, 14) and done.finish_reason == "stop" and calls == [0, 1, 2, 3, 4, 5]
    short = engine.submit([1, 2], SamplingParams(max_tokens=3), processor=up).result(30)
    assert short.token_ids == (10, 11, 12) and short.finish_reason == "length"

    def broken(tokens: Any) -> Any:
        if tokens:
            raise ZeroDivisionError("mine")
        return np.zeros(259, np.float32)

    with pytest.raises(ZeroDivisionError, match="mine"):
        engine.submit([1, 2], SamplingParams(max_tokens=3), processor=broken).result(30)
    tiny.wait(tiny.idle)
    assert engine.submit([1, 2], SamplingParams(max_tokens=3)).result(30).finish_reason
