"""Clients that leave, stall and crowd; faults; shutdown."""

from __future__ import annotations

import gc
import json
import logging
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megakernel.errors import CheckpointError, RankLost
from megakernel.llm import LLM
from megakernel.runtime import Runtime
from megakernel.serve import main as serve_main
from megakernel.serve.answer import as_api_error
from megakernel.tasks.record import NONE
from tests.program.cpu.test_faults import set_chaos, waited_counters
from tests.serve.server import Running, serving, spread

pytestmark = pytest.mark.timeout(180)
LONG = {"prompt": "a long story", "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}


def connect(url: str, body: dict[str, Any], path: str = "/v1/completions", buffer: int | None = None) -> socket.socket:
    """A socket on which a request was sent."""
    host, port = url.removeprefix("http://").split(":")
    made = socket.socket()
    if buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect((host, int(port)))
    made.settimeout(30)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


def send(server: Running, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
    return connect(server.url, body, buffer=buffer)


@pytest.fixture
def slow(open_tiny: Callable[..., LLM]) -> Iterator[Running]:
    """A server of its own, two slots, little room to wait."""
    with serving(lambda: open_tiny(max_slots=2), max_queue=2) as running:
        yield running


@pytest.mark.alone
def test_100_disconnects_then_a_request_within_a_second(tiny: Running) -> None:
    rng = random.Random(1)
    for i in range(100):
        client = send(tiny, {**LONG, "n": 1 + i % 3, "stream": i % 5 != 0})
        for _ in range(rng.randrange(4)):
            if i % 5 != 0:
                client.recv(1 + rng.randrange(400))
        if i % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
        client.close()
    started = time.perf_counter()
    assert tiny.post("/v1/completions", prompt="now", max_tokens=2).status_code == 200
    assert time.perf_counter() - started < 1.0
    assert tiny.wait(tiny.idle) < 1.0
    assert tiny.host.model is not None and tiny.host.model.engine.load().waiting == 0


def test_a_client_that_leaves_frees_its_slot_at_once(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before its answer would have ended, in tokens: they take as much longer as a machine is busy."""
    tiny.wait(tiny.idle)
    spread(tiny, 0.01, monkeypatch, ahead=4)
    before = tiny.host.model.engine.stats().tokens  # type: ignore[union-attr]
    client = send(tiny, LONG)
    assert client.recv(100)
    client.close()
    tiny.wait(tiny.idle, 60)
    assert 1 <= tiny.host.model.engine.stats().tokens - before < LONG["max_tokens"] / 4  # type: ignore[union-attr]


def test_a_half_closed_socket_ends_the_request(tiny: Running) -> None:
    client = send(tiny, LONG)
    assert client.recv(10)
    client.shutdown(socket.SHUT_WR)
    tiny.wait(tiny.idle)
    client.close()


def test_requests_that_are_never_finished(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither headers nor a body may take for ever; one after the other on a connection counts anew."""
    monkeypatch.setattr(serve_main, "HEADER_S", 0.3)
    monkeypatch.setitem(tiny.host.options.__dict__, "request_timeout_s", 0.3)
    for begun in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"):
        host, port = tiny.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(begun)
            told = b""
            while part := client.recv(1000):
                told += part
            assert told.count(b'{"status":"ok"}') == begun.count(b"\r\n\r\n")
    client = send(tiny, LONG)  # a whole one is none of them
    assert client.recv(10)
    client.close()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(head)
        told = client.recv(1000)
        assert told.startswith(b"HTTP/1.1 408") and b"the body was not complete after 0.3 s" in told


def test_a_slow_reader_gets_everything_and_holds_up_nobody(tiny: Running) -> None:
    body = {**LONG, "logprobs": 20}
    want = tiny.post("/v1/completions", **{**body, "stream": False}).json()["choices"][0]["text"]
    client = send(tiny, body, buffer=4096)
    tiny.wait(lambda: tiny.host.outstanding == 0 or not tiny.host.model.engine.load().running, 30)  # type: ignore[union-attr]
    assert tiny.post("/v1/completions", prompt="other", max_tokens=5).status_code == 200
    data = b""
    while b"[DONE]" not in data:
        time.sleep(0.001)
        data += client.recv(65536)
    client.close()
    told = [json.loads(part.removeprefix(b"data: ")) for part in dechunked(data).split(b"\n\n") if part[6:7] == b"{"]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == want
    tiny.wait(tiny.idle)


def dechunked(data: bytes) -> bytes:
    """The body of an answer in chunks, as far as it came."""
    out, left = b"", data.split(b"\r\n\r\n", 1)[1]
    while left:
        size, _, left = left.partition(b"\r\n")
        out, left = out + left[: int(size, 16)], left[int(size, 16) + 2 :]
    return out


def test_a_full_queue_is_429_and_a_deadline_504(slow: Running) -> None:
    clients = [send(slow, LONG) for _ in range(4)]
    slow.wait(lambda: slow.host.outstanding == 4)
    refused = slow.post("/v1/completions", prompt="a", max_tokens=1)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    for client in clients:
        client.close()
    slow.wait(slow.idle)
    assert slow.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    object.__setattr__(slow.host.options, "request_timeout_s", 0.002)  # less than any answer takes
    try:
        late = slow.post("/v1/completions", **{**LONG, "stream": False})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline"
        with slow.client.stream("POST", "/v1/completions", json=LONG) as answer:
            told = answer.read().decode()
        assert '"code":"deadline"' in told and "[DONE]" not in told
        slow.wait(slow.idle)
    finally:
        object.__setattr__(slow.host.options, "request_timeout_s", 600.0)


def test_keys_and_origins(open_tiny: Callable[..., LLM]) -> None:
    keys = {"api_keys": ("secret", "other"), "allowed_origins": ("https://app.example",), "model_names": ("a", "b")}
    with serving(open_tiny, **keys) as server:
        for header in (None, "secret", "Bearer", "Bearer wrong", "Bearer secret2", "Basic secret"):
            headers = {"authorization": header} if header else {}
            answer = server.client.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        for header in ("Bearer secret", "bearer other"):
            found = server.client.get("/v1/models", headers={"authorization": header}).json()
            assert [m["id"] for m in found["data"]] == ["a", "b"]
        assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200
        good = server.client.get("/health", headers={"origin": "https://app.example"})
        assert good.headers["access-control-allow-origin"] == "https://app.example"
        assert server.client.get("/health", headers={"origin": "http://localhost:3000"}).status_code == 200
        for bad in (
            "https://app.example.evil",
            "http://localhost.evil:80",
            "http://127.0.0.1.evil",
            "null",
            "http://[x:y",
        ):
            assert server.client.get("/health", headers={"origin": bad}).status_code == 403, bad
        asked = server.client.options("/v1/chat/completions", headers={
            "origin": "http://127.0.0.1:5", "access-control-request-method": "POST"})  # fmt: skip
        assert asked.status_code == 204 and "authorization" in asked.headers["access-control-allow-headers"]


def test_nothing_that_a_user_typed_is_logged(
    tiny: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)  # as a library may
    tiny.client.close()  # connections look at the logger when they are made
    tiny.client = type(tiny.client)(base_url=tiny.url, timeout=60)
    tiny.post("/v1/completions", prompt="my-secret", max_tokens=3)
    tiny.post("/v1/completions", prompt="a", temperature="my-secret", model="my-secret")
    tiny.post("/v1/chat/completions", model="my-secret", messages=[{"role": "user", "content": "my-secret"}])
    tiny.client.get("/my-secret?my-secret=my-secret")
    own = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert own and not any("my-secret" in r.getMessage() for r in own)


@pytest.mark.alone
def test_a_fault_fails_what_runs_and_the_next_request_succeeds(open_tiny: Callable[..., LLM]) -> None:
    with serving(lambda: open_tiny(chaos=True, workers=3)) as server:
        engine = server.host.model.engine  # type: ignore[union-attr]
        body = {"prompt": "fault", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        want = server.post("/v1/completions", **body).json()["choices"][0]["text"]
        counter = waited_counters(engine.runtime)[3]
        states: list[int] = []
        healthy = engine.runtime.reset

        def slowly() -> None:
            time.sleep(0.3)
            healthy()

        engine.exclusive(lambda runtime: set_chaos(runtime, 0, counter))
        engine.runtime.reset = slowly  # type: ignore[method-assign]  # long enough for /health to be asked
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                states.append(server.client.get("/health").status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        failed = server.post("/v1/completions", **body)
        assert failed.status_code == 500
        error = failed.json()["error"]
        assert error["code"] == "device_fault" and f"counter {counter} has" in error["message"]
        set_chaos(engine.runtime, 0)
        started = time.perf_counter()
        assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == want
        assert time.perf_counter() - started < 1.0
        over.set()
        asking.join()
        assert 503 in states and states[0] == 200 and server.client.get("/health").status_code == 200
        assert "megakernel_engine_faults_total 1.0" in server.client.get("/metrics").text


@pytest.mark.alone
def test_a_fault_in_the_middle_of_a_stream_is_told_in_it(open_tiny: Callable[..., LLM]) -> None:
    with serving(lambda: open_tiny(chaos=True, workers=3)) as server:
        engine = server.host.model.engine  # type: ignore[union-attr]
        counter = waited_counters(engine.runtime)[0]
        launch = engine.runtime.launch

        def second(steps: int) -> None:  # the first launch is well, the second loses a signal
            set_chaos(engine.runtime, 0, counter if engine._launches == 2 else NONE)
            launch(steps)

        engine.steps_per_launch = 20
        engine.runtime.launch = second  # type: ignore[method-assign]
        with server.client.stream("POST", "/v1/completions", json=LONG) as answer:
            told = answer.read().decode()
        assert answer.status_code == 200 and told.count("data: ") > 10
        assert '"code":"device_fault"' in told.rsplit("data: ", 1)[1]
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_an_engine_that_ended_is_opened_again(open_tiny: Callable[..., LLM]) -> None:
    with serving(open_tiny) as server:
        engine = server.host.model.engine  # type: ignore[union-attr]

        def broken(_: Runtime) -> None:
            engine.runtime.launch = None  # type: ignore[assignment, method-assign]

        engine.exclusive(broken)
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code >= 500
        server.wait(
            lambda: server.client.get("/health").status_code == 200 and server.host.model.engine is not engine, 60
        )  # type: ignore[union-attr]
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
        assert "megakernel_model_reloads_total 1.0" in server.client.get("/metrics").text


def test_a_device_that_is_gone_while_nothing_runs(open_tiny: Callable[..., LLM]) -> None:
    """/health says so without a request, until the model is open again. Of real devices: tests/program."""
    gate, opened = threading.Event(), 0

    def at_the_gate() -> LLM:
        nonlocal opened
        opened += 1
        assert opened == 1 or gate.wait(30)
        return open_tiny()

    def lost() -> None:
        raise RankLost(1, "rank 1 (cpu, process 7) is gone, exit status -9")

    body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    with serving(at_the_gate) as server:
        runtime = server.host.model.engine.runtime  # type: ignore[union-attr]
        runtime.__class__ = type("Several", (Runtime,), {"check_s": 0.1})
        assert server.post("/v1/completions", **body).status_code == 200
        time.sleep(0.3)
        assert server.client.get("/health").status_code == 200
        runtime.check = lost  # type: ignore[method-assign]
        server.wait(lambda: server.client.get("/health").json() == {"status": "recovering"}, 30)
        for answer in (server.client.get("/ready"), server.post("/v1/completions", **body)):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "megakernel_up 0.0" in server.client.get("/metrics").text
        gate.set()
        server.wait(lambda: server.client.get("/health").status_code == 200, 60)
        assert server.post("/v1/completions", **body).status_code == 200


def test_what_runs_when_a_drain_ends_is_told(open_tiny: Callable[..., LLM]) -> None:
    """An error event in a stream, a status for who waits for a whole answer; then the server is gone."""
    with serving(open_tiny, drain_timeout_s=0.4) as server:
        slots = server.host.model.engine._slots  # type: ignore[union-attr]
        deliver = slots._deliver

        def slowly(*event: Any) -> None:
            time.sleep(0.02)
            deliver(*event)

        slots._deliver = slowly  # type: ignore[method-assign]
        stream, whole = send(server, LONG), send(server, {**LONG, "stream": False})
        told = b""
        while told.count(b"data: ") < 6:
            told += stream.recv(65536)
        server.wait(lambda: server.host.outstanding == 2)
        began = time.perf_counter()
        server.server.handle_exit(signal.SIGTERM, None)
        while part := stream.recv(65536):
            told += part
        assert 0.3 < time.perf_counter() - began < 6  # all of it would take 480 times 0.02 s
        slots._deliver = deliver  # type: ignore[method-assign]
        *_, last = dechunked(told).strip().split(b"\n\n")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "shutting_down" and "had not ended 0.4 s later" in error["message"]
        assert told.count(b"data: ") > 5 and told.endswith(b"0\r\n\r\n")
        answer = whole.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer and b"shutting_down" in answer
        stream.close()
        whole.close()


def test_an_engine_that_is_ending_takes_no_request(open_tiny: Callable[..., LLM]) -> None:
    """Its memory may take a while to be free, as that of a rank's process that does not answer."""
    with serving(open_tiny) as server:
        engine, gate = server.host.model.engine, threading.Event()  # type: ignore[union-attr]
        close = engine.runtime.close

        def slowly() -> None:
            gate.wait(60)
            close()

        def broken(_: Runtime) -> None:
            engine.runtime.launch = None  # type: ignore[assignment, method-assign]
            engine.runtime.close = slowly  # type: ignore[method-assign]

        engine.exclusive(broken)
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code >= 500
        server.wait(lambda: engine.failed)
        assert not engine.closed and server.client.get("/health").json() == {"status": "recovering"}
        refused = server.post("/v1/completions", prompt="a", max_tokens=2)
        assert refused.status_code == 503 and refused.json()["error"]["message"] == "the model is not ready: recovering"
        gate.set()
        server.wait(lambda: server.client.get("/health").status_code == 200, 60)
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_before_the_model_is_ready(open_tiny: Callable[..., LLM]) -> None:
    gate = threading.Event()

    def late() -> LLM:
        gate.wait(30)
        return open_tiny()

    with serving(late, ready=False, model_names=("m",)) as server:
        server.wait(lambda: _up(server))
        for answer in (server.client.get("/health"), server.client.get("/ready")):
            assert answer.status_code == 503 and answer.json() == {"status": "loading"}
        refused = server.post("/v1/completions", prompt="a")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert server.client.get("/v1/models").status_code == 503 and server.client.get("/metrics").status_code == 200
        gate.set()
        server.wait(lambda: server.client.get("/health").status_code == 200, 60)
        assert gc.get_freeze_count() > 10_000  # a search for garbage would hold up tokens
    assert gc.get_freeze_count() == 0


def _up(server: Running) -> bool:
    try:
        server.client.get("/health")
    except OSError:
        return False
    return True


def test_a_model_that_does_not_load_is_said(open_tiny: Callable[..., LLM]) -> None:
    def never() -> LLM:
        raise CheckpointError("no such file")

    with serving(never, ready=False) as server:
        server.wait(lambda: server.host.failure is not None)
        assert server.client.get("/health").json() == {"status": "failed"}


def test_a_rank_that_is_gone_is_a_fault_of_the_device() -> None:
    told = as_api_error(RankLost(2, "rank 2 (cpu, process 7) is gone, exit status -9"))
    assert told.status == 500 and told.code == "device_fault" and "rank 2" in str(told)
