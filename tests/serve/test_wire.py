"""Chunks that go straight to the connection: by which thread, whole and in order whatever the connection takes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megakernel.errors import MegakernelError
from megakernel.llm import LLM
from megakernel.request import Request, Token
from megakernel.sampling import SamplingParams
from megakernel.serve.generation import DIRECT, Bell, Generation
from megakernel.serve.wire import Wire
from tests.serve.server import Running, serving
from tests.serve.test_life import dechunked, send

pytestmark = pytest.mark.timeout(120)
BODY: dict[str, Any] = {"prompt": "a wire", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def streamed(server: Running, **more: Any) -> list[str]:
    """The text of each choice of a stream; checks that the ids of all tokens came, in order."""
    asked = {**BODY, **more}
    texts, ids = [""] * asked.get("n", 1), [[] for _ in range(asked.get("n", 1))]
    for event in server.events("/v1/completions", **asked, return_token_ids=True):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            ids[choice["index"]] += choice["token_ids"]
    whole = server.post("/v1/completions", **asked, return_token_ids=True).json()["choices"]
    assert [c["token_ids"] for c in whole] == ids and [c["text"] for c in whole] == texts
    return texts


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How many chunks were made by which method on which thread."""
    made: Counter[tuple[str, str]] = Counter()
    for name in ("write", "send"):
        monkeypatch.setattr(Wire, name, counted(name, getattr(Wire, name), made))
    return made


def counted(name: str, before: Any, made: Counter[tuple[str, str]]) -> Any:
    def call(self: Wire, body: bytes) -> Any:
        made[name, threading.current_thread().name] += 1
        return before(self, body)

    return call


@pytest.mark.usefixtures("unhurried")
def test_few_sequences_are_sent_by_the_engines_thread(tiny: Running, threads: Counter[tuple[str, str]]) -> None:
    streamed(tiny)
    assert threads["send", "megakernel-engine"] >= 10
    assert {thread for name, thread in threads if name == "write"} != {"megakernel-engine"}


@pytest.mark.usefixtures("unhurried")
def test_many_are_written_by_the_loop(tiny: Running, threads: Counter[tuple[str, str]]) -> None:
    streamed(tiny, n=DIRECT + 2, max_tokens=20)
    assert sum(count for (name, _), count in threads.items() if name == "write") >= 20
    assert not any(thread == "megakernel-engine" for name, thread in threads if name == "write")


class Reluctant:
    """A socket that takes all, a part or nothing of what is sent."""

    def __init__(self, real: Any) -> None:
        self.real, self.rng, self.close = real, random.Random(4), real.close

    def send(self, data: bytes) -> int:
        part = self.rng.choice((0, 1, 7, len(data) - 1, len(data), len(data)))
        if part == 0:
            raise BlockingIOError
        return int(self.real.send(data[:part]))


def reluctantly(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every wire has such a socket."""
    before = Wire.prepare

    def prepare(self: Wire) -> bool:
        assert before(self)
        if not isinstance(self._socket, Reluctant):
            self._socket = Reluctant(self._socket)  # type: ignore[assignment]
        return True

    monkeypatch.setattr(Wire, "prepare", prepare)


@pytest.mark.usefixtures("unhurried")
def test_a_connection_that_takes_parts(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    want = streamed(tiny)[0]
    reluctantly(monkeypatch)
    for n in (1, 2, DIRECT):
        assert streamed(tiny, n=n) == [want] * n
    assert streamed(tiny, stop=want[20:23])[0] == want[: want.index(want[20:23])]


def test_a_reader_that_is_slower_than_the_model(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the transport keeps is not overtaken by what is sent past it."""
    before = Wire.prepare

    def prepare(self: Wire) -> bool:
        assert before(self) and self._socket is not None
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        return True

    monkeypatch.setattr(Wire, "prepare", prepare)
    body = {**BODY, "max_tokens": 150, "logprobs": 20}
    want = tiny.post("/v1/completions", **body).json()["choices"][0]["text"]
    client, data = send(tiny, {**body, "stream": True}, buffer=2048), b""
    while b"[DONE]" not in data:
        data += client.recv(3000)
        time.sleep(0.0003)
    client.close()
    told = [json.loads(part[6:]) for part in dechunked(data).split(b"\n\n") if part.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in told) == want


def test_nothing_is_sent_past_what_waits(
    tiny: Running, threads: Counter[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = SimpleNamespace(is_closing=lambda: False, get_write_buffer_size=lambda: 1)
    wire = Wire(waits, SimpleNamespace(write_paused=False))  # type: ignore[arg-type]
    assert wire.open and not wire.empty
    monkeypatch.setattr(Wire, "empty", False)
    streamed(tiny)
    assert not any(name == "send" for name, _ in threads)


@pytest.mark.usefixtures("unhurried")
def test_without_a_descriptor(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: int) -> int:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", none)
        streamed(tiny, max_tokens=20)


def test_a_failure_right_behind_a_token_is_told() -> None:
    """Both before the loop looks: one wake-up stands for the two."""

    async def told() -> tuple[list[int], str]:
        made: list[Request] = []

        def submit(ids: Any, params: Any, listen: Any, _: Any) -> Request:
            made.append(Request(1, tuple(ids), params, 50, (), lambda request: None, listen))
            return made[0]

        generation, ids = Generation(Bell(asyncio.get_running_loop())), []
        generation.submit(SimpleNamespace(submit=submit), None, [([1], SamplingParams())], [None])  # type: ignore[arg-type]
        made[0].put(Token(7), None)
        made[0].fail(MegakernelError("it broke"))
        try:
            async for updates in generation.updates():
                ids += [token.id for update in updates for token in update.tokens]
        except MegakernelError as error:
            return ids, str(error)
        raise AssertionError("no error")

    assert asyncio.run(asyncio.wait_for(told(), 5)) == ([7], "it broke")


@pytest.mark.usefixtures("unhurried")
def test_a_whole_answer_wakes_the_loop_at_its_end_only(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[int] = []
    before = Bell.ring

    def ring(self: Bell, wake: Any) -> None:
        rung.append(1)
        before(self, wake)

    monkeypatch.setattr(Bell, "ring", ring)
    assert tiny.post("/v1/completions", **BODY).json()["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert 1 <= len(rung) < 10


@pytest.mark.usefixtures("unhurried")
def test_an_error_while_text_is_made_is_told(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the engine's thread, which it must not end."""

    def broken(self: Wire, body: bytes) -> bool:
        raise ZeroDivisionError("in a send")

    with monkeypatch.context() as patched:
        patched.setattr(Wire, "send", broken)
        with tiny.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            told = answer.read().decode()
    assert "ZeroDivisionError in the server" in told and "[DONE]" not in told
    tiny.wait(tiny.idle)
    streamed(tiny)


def test_descriptors_are_given_back(tiny: Running) -> None:
    streamed(tiny)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        streamed(tiny, max_tokens=12)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_without_a_wire(open_tiny: Callable[..., LLM], tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other HTTP parser, which has none."""
    want = streamed(tiny)
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    with serving(open_tiny) as server:
        assert streamed(server) == want
