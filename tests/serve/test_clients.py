"""Clients that others wrote, and a real model."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import Any

import pytest

from megakernel.serve.schema import REQUESTS
from tests.serve.server import Running, spread

pytestmark = pytest.mark.timeout(300)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def test_the_openai_client(tiny: Running) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["talking"]
    more = {"extra_body": {"ignore_eos": True, "top_k": 1}}
    answer = client.chat.completions.create(
        model="talking",
        messages=HELLO,
        max_completion_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        n=2,
        **more,
    )
    text = answer.choices[0].message.content
    assert answer.choices[1].message.content == text and answer.usage.completion_tokens == 24
    assert len(answer.choices[0].logprobs.content) == 12
    told, used = "", None
    for chunk in client.chat.completions.create(
        model="talking", messages=HELLO, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True}, **more,
    ):  # fmt: skip
        used = chunk.usage or used
        told += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert told == text and used.completion_tokens == 12
    plain = client.completions.create(model="talking", prompt="abc", max_tokens=3, stop=["\n"])
    assert plain.object == "text_completion"
    again = [*HELLO, answer.choices[0].message, *HELLO]  # an answer goes back as it came
    assert client.chat.completions.create(model="talking", messages=again, max_tokens=2).usage.completion_tokens <= 2
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="talking", messages=HELLO, temperature=9)
    assert caught.value.param == "temperature"


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                       "additionalProperties": False},
    },
}  # fmt: skip


def test_the_openai_client_calls_tools(tiny: Running) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "talking", "messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 80}
    answer = client.chat.completions.create(**asked, temperature=0).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(**asked, temperature=0) as stream:  # puts the parts together by itself
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"
    again = [*HELLO, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model="talking", messages=again, max_tokens=2).usage.completion_tokens <= 2


def test_langchain(tiny: Running) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"{tiny.url}/v1", api_key="none", model="talking", temperature=0, max_tokens=80, max_retries=0
    )
    answer = model.invoke("Hello")
    assert answer.usage_metadata["output_tokens"] <= 80 and answer.content
    assert "".join(part.content for part in model.stream("Hello")) == answer.content
    bound = model.bind_tools([WEATHER], tool_choice="weather")
    (call,) = bound.invoke("Weather?").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    parts = list(bound.stream("Weather?"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [c["args"] for c in whole.tool_calls] == [call["args"]]
    form = {"title": "Place", "description": "d", **WEATHER["function"]["parameters"]}  # type: ignore[index, dict-item]
    for method in ("function_calling", "json_schema"):
        made = model.with_structured_output(form, method=method).invoke("Where?")
        assert made["city"] in ("Rome", "Oslo")
    assert [a.content for a in asyncio.run(model.abatch(["Hello", "Hello"]))] == [answer.content] * 2


def test_curl(tiny: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")

    def ask(*more: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> str:
        command = [curl, "-sS", *more, "-H", "Content-Type: application/json", "-d", json.dumps(body), tiny.url + path]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    body = {"messages": HELLO, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    text = json.loads(ask(body=body))["choices"][0]["message"]["content"]
    lines = ask("-N", body={**body, "stream": True}).split("\n\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in told) == text
    assert lines[-2:] == ["data: [DONE]", ""]
    assert ask("-w", "%{http_code}", "-o", "/dev/null", body={"messages": []}) == "400"


def test_a_stream_that_is_closed_early(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    tiny.wait(tiny.idle)
    spread(tiny, 0.01, monkeypatch, ahead=4)
    before = tiny.host.model.engine.stats().tokens  # type: ignore[union-attr]
    with client.completions.create(
        model="talking", prompt="a", max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    tiny.wait(tiny.idle, 60)
    assert 1 <= tiny.host.model.engine.stats().tokens - before < 200  # type: ignore[union-attr]


def test_the_description_covers_every_request(tiny: Running) -> None:
    made = tiny.client.get("/openapi.json").json()
    assert {body.__name__ for body in REQUESTS} <= made["components"]["schemas"].keys()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        operation = made["paths"][path]["post"]
        assert "400" in operation["responses"] and "422" not in operation["responses"]
    text = json.dumps(made)
    for part in text.split('"$ref": "')[1:]:
        name = part.split('"', 1)[0].rsplit("/", 1)[1]
        assert name in made["components"]["schemas"], name


def test_requests_made_from_the_description(tiny: Running) -> None:
    """schemathesis: whatever the description allows is answered without a 500 and in the form it says."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    for result in schema.get_all_operations():
        try_operation(result.ok())
    tiny.wait(tiny.idle, 30)


def try_operation(operation: Any) -> None:
    from hypothesis import HealthCheck, Phase, given, settings

    known = set(operation.definition.raw["responses"])

    @settings(
        max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        answer = case.call(timeout=60)
        assert answer.status_code < 500, answer.text
        assert str(answer.status_code) in known, answer.status_code
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    check()


def test_a_real_model_answers(demo: Running) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    answer = demo.post("/v1/chat/completions", messages=question, temperature=0, max_tokens=20).json()
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text and answer["choices"][0]["finish_reason"] == "stop"
    told = [
        c["choices"][0]["delta"].get("content", "")
        for c in demo.events("/v1/chat/completions", messages=question, temperature=0, max_tokens=20)
    ]
    assert "".join(told) == text
    both = demo.post("/v1/completions", prompt=["The capital of France is", "2 + 2 ="], max_tokens=8, temperature=0)
    alone = [
        demo.post("/v1/completions", prompt=p, max_tokens=8, temperature=0).json()["choices"][0]["text"]
        for p in ("The capital of France is", "2 + 2 =")
    ]
    assert [c["text"] for c in both.json()["choices"]] == alone
    smile = demo.post("/tokenize", prompt="👩‍🚀 ½ 中文").json()["tokens"]
    echoed = demo.post("/v1/completions", prompt=smile, echo=True, max_tokens=1, temperature=0).json()
    assert echoed["choices"][0]["text"].startswith("👩‍🚀 ½ 中文")
