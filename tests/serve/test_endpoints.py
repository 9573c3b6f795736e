"""What each endpoint answers, on a tiny model whose tokens are bytes."""

from __future__ import annotations

import json

import pytest

from megakernel.sampling import SamplingParams
from tests.serve.server import Running

pytestmark = pytest.mark.timeout(180)
HELLO = [{"role": "user", "content": "Hello"}]


def direct(server: Running, ids: list[int], count: int, **more: object) -> tuple[int, ...]:
    """Greedy tokens from the engine itself."""
    assert server.host.model is not None
    params = SamplingParams(max_tokens=count, **more)  # type: ignore[arg-type]
    return server.host.model.engine.submit(ids, params).result(60).token_ids


def decode(server: Running, ids: tuple[int, ...]) -> str:
    assert server.host.model is not None and server.host.model.tokenizer is not None
    return server.host.model.tokenizer.decode(ids)


def ids_of(server: Running, **body: object) -> list[int]:
    found = server.post("/tokenize", **body).json()["tokens"]
    assert isinstance(found, list)
    return found


def test_models_health_ready_metrics(tiny: Running) -> None:
    assert tiny.client.get("/health").json() == {"status": "ok"}
    assert tiny.client.get("/ready").status_code == 200
    for path in ("/health", "/ready"):
        head = tiny.client.head(path)
        assert head.status_code == 200 and head.content == b""
    model = tiny.client.get("/v1/models").json()["data"][0]
    assert model["id"] == "talking" and model["max_model_len"] == 512
    assert tiny.client.get("/v1/models/talking").json() == model
    missing = tiny.client.get("/v1/models/other/one")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    tiny.post("/v1/completions", prompt="count me", max_tokens=5, ignore_eos=True, temperature=0)
    text = tiny.client.get("/metrics").text
    for name in ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "generation_tokens_total",
                 "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_steps_total",
                 "engine_faults_total", "weight_read_bytes_total", "http_requests_total"):  # fmt: skip
        assert f"megakernel_{name}" in text, name
    page = tiny.client.get("/")
    assert "<title>megakernel</title>" in page.text and "default-src 'none'" in page.headers["content-security-policy"]


def test_a_chat_answer(tiny: Running) -> None:
    answer = tiny.post("/v1/chat/completions", model="talking", messages=HELLO, max_tokens=20, temperature=0).json()
    ids = ids_of(tiny, messages=HELLO)
    assert ids[0] == 256 and 257 in ids  # the template's special tokens are single ids
    want = direct(tiny, ids, 20)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == decode(tiny, want) and choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == ("stop" if want[-1] == 257 else "length")
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": len(want), "total_tokens": len(ids) + len(want)
    }  # fmt: skip
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "talking"


def test_a_stream_adds_up_to_the_whole(tiny: Running) -> None:
    body = {"messages": HELLO, "max_completion_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = tiny.post("/v1/chat/completions", **body).json()
    chunks = list(tiny.events("/v1/chat/completions", **body, stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    told = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert told == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1]) and len({c["id"] for c in chunks}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    plain = list(tiny.events("/v1/chat/completions", **body))
    assert all("usage" not in c for c in plain) and plain[-1]["choices"][0]["finish_reason"] == "length"


def test_completions_of_texts_and_ids(tiny: Running) -> None:
    text = tiny.post("/v1/completions", prompt="abc", max_tokens=9, temperature=0, ignore_eos=True).json()
    ids = ids_of(tiny, prompt="abc")
    same = tiny.post("/v1/completions", prompt=ids, max_tokens=9, temperature=0, ignore_eos=True).json()
    want = decode(tiny, direct(tiny, ids, 9, ignore_eos=True))
    assert text["choices"][0]["text"] == same["choices"][0]["text"] == want
    many = tiny.post("/v1/completions", prompt=["abc", "xyz"], n=2, max_tokens=9, temperature=0, ignore_eos=True).json()
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == many["choices"][1]["text"] == text["choices"][0]["text"]
    assert many["usage"]["prompt_tokens"] == 2 * len(ids) and many["usage"]["completion_tokens"] == 36
    nested = tiny.post("/v1/completions", prompt=[ids, ids], max_tokens=3, temperature=0).json()
    assert len(nested["choices"]) == 2
    default = tiny.post("/v1/completions", prompt="abc", ignore_eos=True).json()
    assert default["usage"]["completion_tokens"] == 16


def test_echo(tiny: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    plain = tiny.post("/v1/completions", **body).json()["choices"][0]["text"]
    assert tiny.post("/v1/completions", **body, echo=True).json()["choices"][0]["text"] == "ab" + plain
    told = "".join(c["choices"][0]["text"] for c in tiny.events("/v1/completions", **body, echo=True))
    assert told == "ab" + plain
    body["prompt"] = ids_of(tiny, prompt="ab")
    assert tiny.post("/v1/completions", **body, echo=True).json()["choices"][0]["text"] == "ab" + plain


def test_stop_texts_over_token_boundaries(tiny: Running) -> None:
    body = {"prompt": "stop", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    whole = tiny.post("/v1/completions", **body).json()["choices"][0]["text"]
    for length in (1, 2, 5):
        stop = whole[30 : 30 + length]
        cut = whole[: whole.index(stop)]
        answer = tiny.post("/v1/completions", **body, stop=["never seen", stop]).json()["choices"][0]
        assert answer["text"] == cut and answer["finish_reason"] == "stop"
        chunks = list(tiny.events("/v1/completions", **body, stop=stop))
        assert "".join(c["choices"][0]["text"] for c in chunks) == cut
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    tiny.wait(tiny.idle)


def test_stop_token_ids_and_end_tokens(tiny: Running) -> None:
    want = direct(tiny, ids_of(tiny, prompt="q"), 40, ignore_eos=True)
    answer = tiny.post(
        "/v1/completions", prompt="q", max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=[want[7]]
    ).json()
    assert answer["usage"]["completion_tokens"] == want.index(want[7]) + 1
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_seeds_and_choices(tiny: Running) -> None:
    body = {"prompt": "dice", "max_tokens": 30, "temperature": 1.0, "top_p": 0.95, "top_k": 50, "min_p": 0.001,
            "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.05, "seed": -5,
            "ignore_eos": True, "n": 3}  # fmt: skip
    first, again = (tiny.post("/v1/completions", **body).json()["choices"] for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in again] and len({c["text"] for c in first}) == 3
    texts = {0: "", 1: "", 2: ""}
    for chunk in tiny.events("/v1/completions", **body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert [texts[i] for i in range(3)] == [c["text"] for c in first]


def test_log_probabilities(tiny: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": True,
            "top_logprobs": 3}  # fmt: skip
    told = tiny.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert len(told) == 6
    for entry in told:
        best = entry["top_logprobs"]
        assert len(best) == 3 and best[0]["bytes"] == entry["bytes"] and best[0]["logprob"] == entry["logprob"] <= 0
    parts = [c["choices"][0]["logprobs"] for c in tiny.events("/v1/chat/completions", **body)]
    assert [entry for part in parts if part for entry in part["content"]] == told
    body.pop("top_logprobs")
    bare = tiny.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert bare == [{**e, "top_logprobs": []} for e in told]
    old = tiny.post("/v1/completions", prompt="a", max_tokens=4, temperature=0, ignore_eos=True, logprobs=2).json()
    table = old["choices"][0]["logprobs"]
    assert [len(table[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [4] * 4
    assert table["text_offset"][0] == 0 and table["token_logprobs"][0] == max(table["top_logprobs"][0].values())


def test_templates_tools_and_their_values(tiny: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    made = tiny.post("/tokenize", messages=messages, tools=tools, chat_template_kwargs={"start": "Well"}).json()
    text = tiny.post("/detokenize", tokens=made["tokens"]).json()["prompt"]
    assert json.dumps(tools, ensure_ascii=False) in text and "system\na\nb<|im_end|>" in text
    assert 'f({"x": 1})' in text and text.endswith("<|im_start|>assistant\nWell")
    answer = tiny.post("/v1/chat/completions", messages=messages, tools=tools, max_tokens=2, tool_choice="auto").json()
    assert answer["usage"]["prompt_tokens"] == made["count"] - len("Well")
    none = tiny.post("/v1/chat/completions", messages=HELLO, tools=tools, max_tokens=2, tool_choice="none").json()
    assert none["usage"]["prompt_tokens"] == len(ids_of(tiny, messages=HELLO))


def test_tokenize_and_back(tiny: Running) -> None:
    text = "naïve 中文 👩‍🚀 <|im_end|>"
    made = tiny.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["tokens"][-1] == 257
    assert tiny.post("/detokenize", tokens=made["tokens"]).json() == {"prompt": text}
    assert tiny.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_prompts_up_to_the_context(tiny: Running) -> None:
    longest = tiny.post("/v1/completions", prompt=[5] * 511, max_tokens=1, temperature=0)
    assert longest.status_code == 200 and longest.json()["usage"]["total_tokens"] == 512
    for body in ({"prompt": [5] * 512}, {"prompt": [5] * 500, "max_tokens": 13}):
        refused = tiny.post("/v1/completions", **body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    short = tiny.post("/v1/completions", prompt=[5] * 508, ignore_eos=True).json()
    assert short["usage"]["completion_tokens"] == 4  # no limit asked for: what fits
