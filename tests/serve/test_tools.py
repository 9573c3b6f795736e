"""Tool calls: read back from an answer in each form, whole and streamed; forced by a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.device.cpu import CpuDevice
from megakernel.llm import LLM
from megakernel.request import Processor
from megakernel.serve import app as serve_app
from megakernel.serve.calls import CallParser, Piece
from megakernel.serve.tools import form_of
from megakernel.settings import Settings
from tests.serve.server import CHAT, SPECIAL, Running, serving, talking_checkpoint

pytestmark = pytest.mark.timeout(180)
HELLO = [{"role": "user", "content": "Weather?"}]
PARAMETERS = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"], "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMES = ("weather", "now")
A = '{"city": "Rome", "days": 1}'
ODD = '{"city": "a \\"}] b", "days": [1, {"x": "{"}]}'
Calls = list[tuple[str, str]]

# form, text, content, calls
TEXTS: dict[str, tuple[str, str, str, Calls]] = {
    "no call": ("hermes", "It rains.\n", "It rains.\n", []),
    "one": ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>', "", [("weather", A)]),
    "behind text": ("hermes", f'Let me see.\n\n<tool_call>{{"name": "weather", "arguments": {A}}}</tool_call>\n',
                    "Let me see.", [("weather", A)]),
    "two": ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>\n<tool_call>\n'
            '{"name": "now", "arguments": {}}\n</tool_call>', "", [("weather", A), ("now", "{}")]),
    "text between": ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call> and <tool_call>{"name": "now",'
                     '"arguments": {}}</tool_call>', "and", [("now", "{}"), ("now", "{}")]),
    "brackets in strings": ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ODD}}}</tool_call>', "",
                            [("weather", ODD)]),
    "arguments first": ("hermes", f'<tool_call>{{"arguments": {A}, "name": "weather"}}</tool_call>', "",
                        [("weather", A)]),
    "arguments as text": ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(A)}}}</tool_call>', "",
                          [("weather", A)]),
    "more keys": ("hermes", f'<tool_call>{{"name": "weather", "arguments": {A}, "id": "}}"}}</tool_call>!', "!",
                  [("weather", A)]),
    "no arguments": ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    "unknown name": ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
                     '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    "no JSON": ("hermes", "<tool_call>\nweather(Rome)</tool_call>", "<tool_call>\nweather(Rome)</tool_call>", []),
    "broken JSON": ("hermes", '<tool_call>{"name" "now"}</tool_call>', '<tool_call>{"name" "now"}</tool_call>', []),
    "cut off in the head": ("hermes", 'a <tool_call>{"name": "wea', 'a <tool_call>{"name": "wea', []),
    "cut off in the arguments": ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "R', "",
                                 [("weather", '{"city": "R')]),
    "half a mark": ("hermes", "a < b <tool", "a < b <tool", []),
    "llama": ("llama3", f'{{"name": "weather", "parameters": {A}}}', "", [("weather", A)]),
    "llama with a tag": ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {A}}}', "", [("weather", A)]),
    "llama, several": ("llama3", f'{{"name": "weather", "parameters": {A}}}; {{"name": "now", "parameters": {{}}}}', "",
                       [("weather", A), ("now", "{}")]),
    "llama, text": ("llama3", "{braces} are text", "{braces} are text", []),
    "llama, JSON that is no call": ("llama3", '{"answer": 1} yes', '{"answer": 1} yes', []),
    "llama, a tag behind text": ("llama3", 'Hm.\n<|python_tag|>{"name": "now", "parameters": {}}', "Hm.",
                                 [("now", "{}")]),
    "llama, code": ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "mistral": ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {A}}}]', "", [("weather", A)]),
    "mistral, two": ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {A}}}, {{"name": "now", "arguments": '
                     "{}}]", "", [("weather", A), ("now", "{}")]),
    "mistral, named": ("mistral", f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{{}}", "",
                       [("weather", A), ("now", "{}")]),
    "mistral, text": ("mistral", "Hello [TOOL_", "Hello [TOOL_", []),
    "mistral, unknown": ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
}  # fmt: skip


def gathered(pieces: list[Piece]) -> tuple[str, Calls]:
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.name is not None:
            assert piece.call == len(calls) and piece.id
            calls.append([piece.name, ""])
        if piece.call is not None:
            calls[piece.call][1] += piece.text
    return "".join(p.text for p in pieces if p.call is None), [(name, text) for name, text in calls]


@pytest.mark.parametrize("name", TEXTS)
def test_calls_of_a_text_however_it_is_cut(name: str) -> None:
    form, text, content, calls = TEXTS[name]
    for size in (1, 2, 3, 7, len(text)):
        parser = CallParser(form, NAMES)
        pieces = [p for at in range(0, len(text), size) for p in parser.push(text[at : at + size])]
        pieces += parser.finish()
        assert gathered(pieces) == (content, calls), size
        assert all(p.text or p.name for p in pieces)


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser("hermes", NAMES)
    assert parser.push('ab <tool_call>{"name": "weather", "arguments": {"ci')[:1] == [Piece("ab")]
    assert parser.push('ty": "Ro') == [Piece('ty": "Ro', 0)]
    assert parser.push('me"}}</tool_call>') == [Piece('me"}', 0)]
    first = CallParser("hermes", NAMES, one_only=True)
    assert len(gathered(first.push(TEXTS["two"][1]) + first.finish())[1]) == 1


def test_the_form_is_that_of_the_template() -> None:
    assert form_of("... <tool_call>\n{{ tools }}") == "hermes"
    assert form_of("{{ tools }} [TOOL_CALLS]") == "mistral"
    assert form_of("{{ tools }} <|python_tag|>") == form_of("""{{ tools }} '"parameters": '""") == "llama3"
    assert form_of("{% for m in messages %}") is None and form_of("{{ tools }}") == "hermes"
    assert form_of("<tool_call>", "mistral") == "mistral" and form_of("<tool_call>", "none") is None


MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


@pytest.fixture(scope="module", params=["hermes", "llama3", "mistral", "named", "plain"])
def caller(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serve_cache: Path
) -> Iterator[Any]:
    """A server whose template has the form; the marks are special tokens in all but the last."""
    hint = {
        "hermes": "{# <tool_call> #}", "llama3": "{# <|python_tag|> #}", "mistral": "{# [TOOL_CALLS] #}",
        "named": "{# [TOOL_CALLS] [ARGS] #}", "plain": "{# <tool_call> #}",
    }[request.param]  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param) / "caller"
    talking_checkpoint(folder, hint + CHAT, () if request.param == "plain" else MARKS)

    def make() -> LLM:
        return LLM(
            folder, device=CpuDevice(), settings=Settings(cache=serve_cache), dtype="f32", workers=2, max_context=1536,
            max_slots=4, trace=True,
        )  # fmt: skip

    with serving(make) as server:
        yield request.param, server


def streamed(server: Running, **body: Any) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in server.events("/v1/chat/completions", **body):
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(message["tool_calls"]) and part["type"] == "function"
                message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
        message["finish_reason"] = chunk["choices"][0]["finish_reason"]
    return message


def test_a_call_that_must_come(caller: tuple[str, Running]) -> None:
    form, server = caller
    temperature = 0.0 if form == "hermes" else 1.0
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 120, "temperature": temperature, "seed": 3}
    for choice, names in (("required", NAMES), ({"type": "function", "function": {"name": "weather"}}, NAMES[:1])):
        answer = server.post("/v1/chat/completions", **body, tool_choice=choice).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        (call,) = answer["message"]["tool_calls"]
        assert call["type"] == "function" and call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2) and len(arguments) == 2
        else:
            assert arguments == {}
        told = streamed(server, **body, tool_choice=choice)
        assert told == {"content": "", "tool_calls": [call["function"]], "finish_reason": "tool_calls"}
        again = [*HELLO, answer["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        assert server.post("/v1/chat/completions", **{**body, "messages": again}).status_code == 200


def said(server: Running, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every answer is this text, then the end."""
    tokenizer = server.host.model.tokenizer  # type: ignore[union-attr]
    vocab = server.host.model.program.manifest.vocab  # type: ignore[union-attr]
    ids = [*tokenizer.encode(text, add_special=False), SPECIAL.index("<|im_end|>") + 256]

    def script(tokens: Any) -> Any:
        row = np.full(vocab, -np.inf, np.float32)
        row[ids[len(tokens)]] = 0.0
        return row

    async def processors(*asked: Any) -> list[Processor]:
        return [script] * asked[3]

    monkeypatch.setattr(serve_app.Endpoints, "_processors", processors)


def test_calls_that_a_model_makes_by_itself(caller: tuple[str, Running], monkeypatch: pytest.MonkeyPatch) -> None:
    form, server = caller
    text, calls = {
        "hermes": (TEXTS["two"][1], TEXTS["two"][3]), "plain": (TEXTS["two"][1], TEXTS["two"][3]),
        "llama3": (TEXTS["llama, several"][1], TEXTS["llama, several"][3]),
        "mistral": (TEXTS["mistral, two"][1], TEXTS["mistral, two"][3]),
        "named": (f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]now[ARGS]{{}}", [("weather", A), ("now", "{}")]),
    }[form]  # fmt: skip
    said(server, text, monkeypatch)
    body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "max_tokens": 400, "temperature": 0}
    answer = server.post("/v1/chat/completions", **body).json()
    made = answer["choices"][0]
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in made["message"]["tool_calls"]]
    assert found == calls and made["finish_reason"] == "tool_calls" and made["message"]["content"] is None
    assert len({c["id"] for c in made["message"]["tool_calls"]}) == 2
    assert form not in ("mistral", "named") or all(len(c["id"]) == 9 for c in made["message"]["tool_calls"])
    told = streamed(server, **body, logprobs=True)
    assert told["finish_reason"] == "tool_calls"
    assert [(c["name"], c["arguments"]) for c in told["tool_calls"]] == calls
    one = server.post("/v1/chat/completions", **body, parallel_tool_calls=False).json()["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    none = server.post("/v1/chat/completions", **body, tool_choice="none").json()["choices"][0]
    assert "tool_calls" not in none["message"] and none["finish_reason"] == "stop"
    cut = server.post("/v1/chat/completions", **{**body, "max_tokens": 3}).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    said(server, "It rains.", monkeypatch)
    plain = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert plain["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert plain["finish_reason"] == "stop" and streamed(server, **body)["content"] == "It rains."


def test_what_cannot_be_kept_is_refused(caller: tuple[str, Running]) -> None:
    _, server = caller
    wrong = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "no"}}}
    for more, says in (
        ({"tool_choice": "required"}, "tool_choice: expected only with tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool 'x'"),
        ({"tools": TOOLS, "response_format": {"type": "regex", "regex": "a"}}, "response_format: expected text, json"),
        ({"tools": TOOLS, "response_format": wrong}, "response_format: "),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
          "tool_choice": "required"}, "tools: "),
    ):  # fmt: skip
        refused = server.post("/v1/chat/completions", messages=HELLO, **more)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"], refused.text


def begins(server: Running, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every answer begins with this text; what follows is the model's, as far as its processor lets it."""
    tokenizer = server.host.model.tokenizer  # type: ignore[union-attr]
    vocab = server.host.model.program.manifest.vocab  # type: ignore[union-attr]
    ids = tokenizer.encode(text, add_special=False)
    before = serve_app.Endpoints._processors

    def led(own: Processor | None) -> Processor:
        def processor(tokens: Any) -> Any:
            row = np.zeros(vocab, np.float32) if own is None else own(tokens)
            if len(tokens) < len(ids):
                assert row is not None and row[ids[len(tokens)]] == 0.0, "the grammar does not take what is said"
                row = np.full(vocab, -np.inf, np.float32)
                row[ids[len(tokens)]] = 0.0
            return row

        return processor

    async def processors(*asked: Any) -> list[Processor]:
        return [led(made) for made in await before(*asked)]

    monkeypatch.setattr(serve_app.Endpoints, "_processors", processors)


BEGINNINGS = {
    "hermes": ("It rains. <tool_call>", '<tool_call>\n{"name": "weather", "arguments":{'),
    "plain": ("It rains. <tool_call>", '<tool_call>\n\n{ "name" : "weather",\n "arguments":{"ci'),
    "llama3": ('{"name": "', '{"name":"weather", "parameters": {"city":'),
    "mistral": ("[TOOL_CALLS] [{", '[TOOL_CALLS][{"name":"now","arguments":{}}, {"name": "w'),
    "named": ("[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS]"),
}


@pytest.mark.parametrize("which", [0, 1])
def test_a_strict_call_that_a_model_makes_by_itself(
    caller: tuple[str, Running], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, server = caller
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
    begins(server, BEGINNINGS[form][which], monkeypatch)
    blanks = server.post("/tokenize", prompt=" \t\r\n").json()["tokens"]
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 110, "temperature": 1.0, "ignore_eos": True,
                            "logit_bias": {str(i): -100 for i in blanks}}  # fmt: skip
    seen = 0
    for seed in range(1 + (form == "plain")):
        message = server.post("/v1/chat/completions", **body, tools=strict, seed=seed).json()["choices"][0]["message"]
        assert message.get("tool_calls"), message
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "weather":
                seen += 1
                assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2) and len(arguments) == 2
            else:
                assert arguments == {}
    assert seen or which == 0
    if form != "hermes":
        return
    free = server.post("/v1/chat/completions", **body, tools=TOOLS, seed=0).json()["choices"][0]["message"]
    assert not free.get("tool_calls") or '"days"' not in free["tool_calls"][-1]["function"]["arguments"]


def test_strict_leaves_text_alone(caller: tuple[str, Running], monkeypatch: pytest.MonkeyPatch) -> None:
    _, server = caller
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "tools": strict}
    kept = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    wrong = [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}, "strict": True}}]
    refused = server.post("/v1/chat/completions", **{**body, "tools": wrong})
    assert refused.status_code == 400 and "tools: " in refused.json()["error"]["message"]

    async def none(*asked: Any) -> list[None]:
        return [None] * asked[3]

    monkeypatch.setattr(serve_app.Endpoints, "_processors", none)
    assert server.post("/v1/chat/completions", **body).json()["choices"][0]["message"] == kept and kept["content"]


def test_an_answer_of_a_schema_or_a_call(caller: tuple[str, Running]) -> None:
    form, server = caller
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "max_tokens": 120, "response_format": wanted, "seed": 5}
    text = {"hermes": "<tool_call>", "plain": "<", "llama3": "n"}.get(form, "[TOOL_CALLS]")  # only a call has it
    (token,) = server.post("/tokenize", prompt=text).json()["tokens"]
    for bias in (100, -100):
        answer = server.post("/v1/chat/completions", **body, logit_bias={str(token): bias}).json()["choices"][0]
        message = answer["message"]
        if bias < 0:
            assert json.loads(message["content"])["rain"] in (True, False) and answer["finish_reason"] == "stop"
            continue
        (call,) = message["tool_calls"]
        assert message["content"] is None and answer["finish_reason"] == "tool_calls"
        want = {"city", "days"} if call["function"]["name"] == "weather" else set()
        assert json.loads(call["function"]["arguments"]).keys() == want
