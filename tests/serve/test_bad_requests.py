"""Every bad request is a 4xx that names what is wrong, and the server answers the next one."""

from __future__ import annotations

import gzip
import json
import threading
import time
from typing import Any

import httpx
import pytest

from megakernel.errors import SettingsError
from megakernel.serve.options import ServeOptions
from megakernel.serve.parse import FORMS
from megakernel.serve.schema import CONTENT, PROMPT, STOP, TOOL_CHOICE
from tests.serve.server import Running

pytestmark = pytest.mark.timeout(180)
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
DEEP = "[" * 100_000 + "]" * 100_000


def chat(**fields: Any) -> str:
    return json.dumps({"messages": HELLO, "max_tokens": 2, **fields})


def complete(**fields: Any) -> str:
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields})


def message(**fields: Any) -> str:
    return json.dumps({"messages": [fields], "max_tokens": 2})


def called(arguments: Any, **more: Any) -> str:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    return json.dumps({"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]})


# path, body, status, what the message or param says
BAD: dict[str, tuple[str, str | bytes, int, str]] = {
    "empty body": (CHAT, "", 400, "body"),
    "not JSON": (CHAT, "hello", 400, "JSON"),
    "half a JSON": (CHAT, '{"messages": [', 400, "JSON"),
    "a list": (CHAT, "[]", 400, "object"),
    "a number": (COMPLETE, "1", 400, "object"),
    "null": (COMPLETE, "null", 400, "object"),
    "deep list": (CHAT, DEEP, 400, "body"),
    "deep content": (CHAT, '{"messages": ' + DEEP + "}", 400, "body"),
    "deep template value": (CHAT, '{"messages": [], "chat_template_kwargs": {"a": ' + DEEP + "}}", 400, "body"),
    "bad UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "body"),
    "lone surrogate": (COMPLETE, '{"prompt": "\\ud800"}', 400, "body"),
    "NaN": (CHAT, '{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, "temperature"),
    "infinity": (COMPLETE, '{"prompt": "a", "top_p": Infinity}', 400, "top_p"),
    "huge number": (COMPLETE, '{"prompt": "a", "max_tokens": 1' + "0" * 400 + "}", 400, "max_tokens"),
    "huge float": (COMPLETE, '{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    "unknown field": (CHAT, chat(tempersture=1), 400, "tempersture"),
    "unknown field of stream_options": (CHAT, chat(stream=True, stream_options={"x": 1}), 400, "stream_options.x"),
    "unknown model": (CHAT, chat(model="gpt-9"), 404, "gpt-9"),
    "empty model name": (COMPLETE, complete(model=""), 404, "model"),
    "model is a number": (CHAT, chat(model=3), 400, "model"),
    "no messages": (CHAT, "{}", 400, "messages"),
    "messages null": (CHAT, chat(messages=None), 400, "messages"),
    "messages empty": (CHAT, chat(messages=[]), 400, "messages"),
    "messages a text": (CHAT, chat(messages="hi"), 400, "messages"),
    "message a text": (CHAT, chat(messages=["hi"]), 400, "messages.0"),
    "message empty": (CHAT, message(), 400, "messages.0.role"),
    "no role": (CHAT, message(content="a"), 400, "messages.0.role"),
    "no content": (CHAT, message(role="user"), 400, "content"),
    "unsupported role": (CHAT, message(role="function", content="a"), 400, "messages.0.role"),
    "role a number": (CHAT, message(role=1, content="a"), 400, "messages.0.role"),
    "content a number": (CHAT, message(role="user", content=1), 400, f"messages.0.content: expected {CONTENT}"),
    "content an empty list": (CHAT, message(role="user", content=[]), 400, "messages.0.content"),
    "an image": (CHAT, message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]), 400,
                 "messages.0.content.0.type: Input should be 'text'"),
    "unknown field of a message": (CHAT, message(role="user", content="a", mood="x"), 400, "messages.0.mood"),
    "template refuses": (
        CHAT, chat(messages=[{"role": "tool", "content": "a"}], chat_template_kwargs={"refuse_tools": 1}), 400,
        "no tools here",
    ),
    "template fails": (CHAT, chat(chat_template_kwargs={"divide": True}), 400, "ZeroDivisionError"),
    "template value that is taken": (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    "template values a list": (CHAT, chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs"),
    "arguments not JSON": (CHAT, called("{"), 400, "messages.1.tool_calls.0.function.arguments"),
    "arguments an object": (CHAT, called({}), 400, "arguments"),
    "a call of another kind": (CHAT, called("{}", type="custom"), 400, "tool_calls.0.type"),
    "tools an object": (CHAT, chat(tools={}), 400, "tools"),
    "tool without function": (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function"),
    "tool without name": (CHAT, chat(tools=[{"type": "function", "function": {}}]), 400, "name"),
    "tool of another kind": (CHAT, chat(tools=[{"type": "browser", "function": {"name": "f"}}]), 400, "tools.0.type"),
    "tool_choice required": (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    "a named tool that is not there": (
        CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice={
            "type": "function", "function": {"name": "g"}}), 400, "no tool 'g'",
    ),
    "a named tool of no tools": (
        CHAT, chat(tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice",
    ),
    "tool_choice of another kind": (CHAT, chat(tool_choice={"type": "allowed_tools"}), 400,
                                    "tool_choice.type: Input should be 'function'"),
    "tool_choice another word": (CHAT, chat(tool_choice="any"), 400, f"tool_choice: expected {TOOL_CHOICE}"),
    "tools beside a form": (
        CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}], response_format={"type": "regex"}),
        400, "response_format",
    ),
    "return_token_ids a text": (CHAT, chat(return_token_ids="yes"), 400, "return_token_ids"),
    "continue_final_message": (CHAT, chat(continue_final_message=True), 400, "continue_final_message: not supported"),
    "temperature a text": (CHAT, chat(temperature="1"), 400, "temperature"),
    "temperature true": (CHAT, chat(temperature=True), 400, "temperature"),
    "temperature negative": (CHAT, chat(temperature=-0.1), 400, "temperature"),
    "temperature too large": (CHAT, chat(temperature=2.1), 400, "temperature"),
    "top_p zero": (CHAT, chat(top_p=0), 400, "top_p"),
    "top_p above one": (COMPLETE, complete(top_p=1.01), 400, "top_p"),
    "top_k negative": (COMPLETE, complete(top_k=-2), 400, "top_k"),
    "top_k a fraction": (COMPLETE, complete(top_k=1.5), 400, "top_k"),
    "min_p above one": (COMPLETE, complete(min_p=2), 400, "min_p"),
    "presence_penalty": (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty"),
    "frequency_penalty": (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty"),
    "repetition_penalty zero": (COMPLETE, complete(repetition_penalty=0), 400, "repetition_penalty"),
    "seed a text": (COMPLETE, complete(seed="7"), 400, "seed"),
    "seed too large": (COMPLETE, complete(seed=1 << 64), 400, "seed"),
    "n zero": (CHAT, chat(n=0), 400, "n"),
    "n a fraction": (CHAT, chat(n=1.5), 400, "n"),
    "n above the server's limit": (CHAT, chat(n=17), 400, "n"),
    "n far too large": (CHAT, chat(n=1 << 40), 400, "n"),
    "max_tokens zero": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "max_tokens negative": (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    "max_tokens a text": (COMPLETE, complete(max_tokens="5"), 400, "max_tokens"),
    "max_tokens over the context": (COMPLETE, complete(max_tokens=513), 400, "context"),
    "max_completion_tokens": (CHAT, chat(max_completion_tokens=-5), 400, "max_completion_tokens"),
    "stop a number": (COMPLETE, complete(stop=5), 400, f"stop: expected {STOP}"),
    "stop a number in a list": (COMPLETE, complete(stop=["a", 5]), 400, "stop.1: Input should be a valid str"),
    "stop empty text in a list": (COMPLETE, complete(stop=["a", ""]), 400, "stop.1: String should have at least 1"),
    "too many stops": (COMPLETE, complete(stop=["a"] * 17), 400, "stop: List should have at most 16"),
    "stop_token_ids negative": (COMPLETE, complete(stop_token_ids=[-1]), 400, "stop_token_ids"),
    "stream a text": (CHAT, chat(stream="yes"), 400, "stream"),
    "stream_options without stream": (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    "ignore_eos a number": (CHAT, chat(ignore_eos=1), 400, "ignore_eos"),
    "logprobs of a chat a number": (CHAT, chat(logprobs=5), 400, "logprobs"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=5), 400, "top_logprobs"),
    "top_logprobs too many": (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    "logprobs of a completion true": (COMPLETE, complete(logprobs=True), 400, "logprobs"),
    "logprobs too many": (COMPLETE, complete(logprobs=21), 400, "logprobs"),
    "logprobs with echo": (COMPLETE, complete(logprobs=1, echo=True), 400, "logprobs"),
    "best_of above n": (COMPLETE, complete(best_of=2), 400, "best_of"),
    "suffix": (COMPLETE, complete(suffix="x"), 400, "suffix: not supported"),
    "functions": (CHAT, chat(functions=[]), 400, "functions: not supported"),
    "guided_json": (CHAT, chat(guided_json={}), 400, "guided_json: not supported"),
    "reasoning_effort": (CHAT, chat(reasoning_effort="high"), 400, "reasoning_effort"),
    "audio": (CHAT, chat(modalities=["audio"]), 400, "modalities"),
    "logit_bias a list": (CHAT, chat(logit_bias=[1]), 400, "logit_bias"),
    "logit_bias out of range": (CHAT, chat(logit_bias={"5": 101}), 400, "logit_bias"),
    "response_format unknown": (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type"),
    "logit_bias of no id": (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias"),
    "logit_bias beyond the vocabulary": (CHAT, chat(logit_bias={"259": 1}), 400, "logit_bias"),
    "json_schema missing": (CHAT, chat(response_format={"type": "json_schema"}), 400, "json_schema"),
    "json_schema not valid": (
        CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}), 400,
        "response_format",
    ),
    "regex not valid": (CHAT, chat(response_format={"type": "regex", "regex": "("}), 400, "response_format"),
    "grammar not valid": (CHAT, chat(response_format={"type": "grammar", "grammar": "x"}), 400, "response_format"),
    "grammar too large": (
        CHAT, chat(response_format={"type": "grammar", "grammar": 'start: "a"' + ' | "a"' * 30_000}), 400,
        "response_format: expected at most 131072 characters",
    ),
    "no prompt": (COMPLETE, "{}", 400, "prompt"),
    "prompt a number": (COMPLETE, complete(prompt=1), 400, f"prompt: expected {PROMPT}"),
    "prompt an object": (COMPLETE, complete(prompt={}), 400, "prompt"),
    "prompt empty": (COMPLETE, complete(prompt=""), 400, "prompt"),
    "prompt an empty list": (COMPLETE, complete(prompt=[]), 400, "prompt: List should have at least 1"),
    "prompt of an empty list": (COMPLETE, complete(prompt=[[]]), 400, "prompt.0: List should have at least 1"),
    "prompt lists of a text": (COMPLETE, complete(prompt=[[1], ["a"]]), 400, "prompt.1.0: Input should be a valid int"),
    "prompt of an empty text": (COMPLETE, complete(prompt=["a", ""]), 400, "prompt"),
    "prompt of mixed kinds": (COMPLETE, complete(prompt=["a", 1]), 400, f"prompt: expected {PROMPT}"),
    "prompt id too large": (COMPLETE, complete(prompt=[259]), 400, "prompt"),
    "prompt id negative": (COMPLETE, complete(prompt=[-1]), 400, "prompt.0: Input should be greater than or equal"),
    "prompt id true": (COMPLETE, complete(prompt=[True]), 400, "prompt"),
    "huge prompt": (COMPLETE, complete(prompt="a" * 100_000), 400, "context"),
    "too many prompts": (COMPLETE, complete(prompt=["a"] * 300), 400, "at most"),
    "too large": (COMPLETE, complete(prompt="a" * (9 << 20)), 413, "larger"),
    "tokenize nothing": ("/tokenize", "{}", 400, "prompt"),
    "tokenize both": ("/tokenize", json.dumps({"prompt": "a", "messages": HELLO}), 400, "prompt"),
    "tokenize another model": ("/tokenize", json.dumps({"prompt": "a", "model": "x"}), 404, "x"),
    "tokenize a number": ("/tokenize", json.dumps({"prompt": 5}), 400, "prompt"),
    "detokenize nothing": ("/detokenize", "{}", 400, "tokens"),
    "detokenize a text": ("/detokenize", json.dumps({"tokens": "abc"}), 400, "tokens"),
    "detokenize an unknown id": ("/detokenize", json.dumps({"tokens": [5, 100000]}), 400, "tokens.1"),
    "detokenize a negative id": ("/detokenize", json.dumps({"tokens": [-5]}), 400, "tokens"),
}  # fmt: skip


def check(answer: Any, status: int, says: str) -> None:
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert says in f"{error['param']}: {error['message']}", error
    assert len(error["message"]) < 3000 and "/tmp" not in error["message"]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name(tiny: Running, name: str) -> None:
    path, body, status, says = BAD[name]
    check(tiny.client.post(path, content=body, headers={"content-type": "application/json"}), status, says)


MANY = 20_000


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (COMPLETE, {"prompt": [-1] * MANY}, "prompt.0: Input should be greater than or equal to 0"),
        (COMPLETE, {"prompt": ["a", 1] * MANY}, f"prompt: expected {PROMPT}"),
        (CHAT, {"messages": [{"role": "user", "content": ["x"] * MANY}]}, "messages.0.content.0: Input should be an"),
        (CHAT, {"messages": HELLO, "logit_bias": {str(i): "a" for i in range(MANY)}}, "expected at most 16384 tokens"),
        (CHAT, {"messages": HELLO, **{f"f{i}": 1 for i in range(MANY)}}, "expected at most 256 fields"),
        ("/detokenize", {"tokens": ["a"] * MANY}, "tokens.0: Input should be a valid integer"),
    ],
)
def test_what_is_wrong_many_times_is_told_once(tiny: Running, path: str, fields: dict[str, Any], says: str) -> None:
    """To list it all would take minutes for a body of the largest size, in which nobody else would be served."""
    answer = tiny.client.post(path, json=fields)
    check(answer, 400, says)
    assert "more" not in answer.json()["error"]["message"]


@pytest.mark.alone
def test_a_long_text_holds_up_nobody(tiny: Running) -> None:
    """Others are answered while one far over the context is encoded."""
    worst, over = [0.0], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=tiny.url, timeout=60) as client:  # to make one takes long on a busy machine
            while not over.is_set():
                started = time.perf_counter()
                client.get("/health")
                worst[0] = max(worst[0], time.perf_counter() - started)

    asking = threading.Thread(target=ask)
    asking.start()
    started = time.perf_counter()
    check(tiny.client.post(COMPLETE, json={"prompt": "a long text " * 40_000}), 400, "context")
    took = time.perf_counter() - started
    over.set()
    asking.join()
    assert worst[0] < max(0.3, 0.6 * took), f"{worst[0]} s of {took} s"


def test_limits_of_the_server_are_written_out() -> None:
    with pytest.raises(SettingsError, match="max_queue: expected 0 to 1,048,576, got -1"):
        ServeOptions(max_queue=-1)


def test_every_field_of_several_forms_says_which() -> None:
    assert set(FORMS) == {"content", "stop", "prompt", "tool_choice"} and all(FORMS.values())


def test_wrong_ways_to_ask(tiny: Running) -> None:
    assert len(BAD) >= 60
    check(tiny.client.post(CHAT, content=chat(), headers={"content-type": "text/plain"}), 415, "content-type")
    check(tiny.client.post(CHAT, data={"a": "b"}), 415, "content-type")
    check(tiny.client.get(CHAT), 405, "Method")
    assert tiny.client.get(CHAT).json()["error"]["code"] == "method_not_allowed"
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check(tiny.client.post(CHAT, content=gzip.compress(chat().encode()), headers=headers), 415, "content-encoding")
    check(tiny.client.post("/v1/embeddings", json={}), 404, "Not Found")
    check(tiny.client.get("/v1/chat/completions/"), 404, "Not Found")
    check(tiny.client.post(CHAT, content=chat(), headers={
        "content-type": "application/json", "origin": "http://evil.example"}), 403, "origin")  # fmt: skip
    assert tiny.client.get("/health", headers={"x-filler": "a" * (1 << 20)}).status_code in (400, 431)


def test_the_server_is_well_after_all_of_them(tiny: Running) -> None:
    answer = tiny.post(CHAT, messages=HELLO, max_tokens=3, temperature=0)
    assert answer.status_code == 200 and tiny.client.get("/health").json() == {"status": "ok"}
    tiny.wait(tiny.idle)
    assert 'status="500"' not in tiny.client.get("/metrics").text
