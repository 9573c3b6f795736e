"""The process: signals, death, what it says. Each server here is a child process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serve.test_life import LONG, connect

pytestmark = pytest.mark.timeout(180)


class Child:
    """`megakernel serve` in a child process; what it prints is read all the time."""

    def __init__(self, model: Path, cache: Path, *more: str, **environ: str) -> None:
        command = [sys.executable, "-m", "megakernel", "serve", str(model), "--port", "0", "--dtype", "f32",
                   "--max-slots", "4", "--max-model-len", "512", "--workers", "2", "--web", *more]  # fmt: skip
        env = {**os.environ, "MEGAKERNEL_CACHE": str(cache), **environ}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.lines: list[str] = []
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        """Waits until it listens."""
        self.until(lambda: "listening on http" in self.said)
        found = re.search(r"listening on (http\S+)", self.said)
        assert found is not None
        return found[1]

    def healthy(self) -> str:
        url = self.url()
        self.until(lambda: httpx.get(f"{url}/health").status_code == 200)
        return url

    def until(self, condition: object) -> None:
        started = time.perf_counter()
        while not condition():  # type: ignore[operator]
            assert self.process.poll() is None, self.said
            assert time.perf_counter() - started < 90, self.said
            time.sleep(0.02)

    def ended(self) -> int:
        code = self.process.wait(60)
        self.reading.join(10)
        return code


@contextmanager
def child(model: Path, cache: Path, *more: str, **environ: str) -> Iterator[Child]:
    made = Child(model, cache, *more, **environ)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(30)


def test_sigterm_lets_running_requests_end(talking: Path, serve_cache: Path) -> None:
    with child(talking, serve_cache, MEGAKERNEL_API_KEY="from-the-environment") as server:
        url = server.healthy()
        headers = {"authorization": "Bearer from-the-environment"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=headers, timeout=60) as answer:
            parts = answer.iter_bytes()
            told = next(parts)
            server.process.send_signal(signal.SIGTERM)
            told += b"".join(parts)
        assert told.endswith(b"[DONE]\n\n") and told.count(b'"finish_reason":"length"') == 1
        assert server.ended() == 0, server.said
        assert "from-the-environment" not in server.said and "long story" not in server.said
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_drain_has_an_end(talking: Path, serve_cache: Path) -> None:
    with child(talking, serve_cache, "--drain-timeout", "1") as server:
        address = server.healthy().removeprefix("http://").split(":")
        idle = socket.create_connection((address[0], int(address[1])))  # a client that never asks anything
        started = time.perf_counter()
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 0 and time.perf_counter() - started < 15
        idle.close()


@pytest.mark.alone
def test_kill_9_under_load_then_start_again(talking: Path, serve_cache: Path) -> None:
    """A build that is killed has a test of its own, in tests/program."""
    body = {"prompt": "a", "max_tokens": 8, "temperature": 0}
    with child(talking, serve_cache) as server:
        url = server.healthy()
        want = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        clients = [connect(url, LONG) for _ in range(6)]  # more than there are slots
        assert clients[0].recv(100).startswith(b"HTTP/1.1 200")
        server.process.kill()
        server.ended()
        for client in clients:
            client.close()
    port = url.rsplit(":", 1)[1]
    with child(talking, serve_cache, "--port", port) as server:
        assert server.healthy() == url
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] == want


def test_what_keeps_it_from_serving_is_said(talking: Path, tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    with child(tmp_path / "nothing", tmp_path) as absent, child(talking, tmp_path, "--port", port) as second:
        assert absent.ended() == second.ended() == 1
        assert "error:" in absent.said and "nothing" in absent.said and "Traceback" not in absent.said
        assert "cannot listen" in second.said and "Traceback" not in second.said
    taken.close()
