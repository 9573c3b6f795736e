"""A server on a thread of the test's process, models for it, and the smallest possible HTTP client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from megakernel.serve.host import Host, Model
from megakernel.serve.main import Server, listen, make_server
from megakernel.serve.options import ServeOptions
from tests.program.cpu.conftest import write_checkpoint

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHAT = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' and refuse_tools %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if divide %}{{ 1 // 0 }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ start or '' }}{% endif %}"
)


class Running:
    """A server that runs; `url` is its address."""

    def __init__(self, host: Host, server: Server, url: str) -> None:
        self.host = host
        self.server = server
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def events(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """Data of each server-sent event of a stream; checks that the last is [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            last = ""
            for line in answer.iter_lines():
                if line:
                    assert line.startswith("data: ")
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        yield json.loads(last)
            assert last == "[DONE]"

    def wait(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
        """Seconds until `condition` held."""
        started = time.perf_counter()
        while not condition():
            assert time.perf_counter() - started < timeout_s, "it did not come to pass in time"
            time.sleep(0.002)
        return time.perf_counter() - started

    def idle(self) -> bool:
        load = self.host.model.engine.load() if self.host.model else None
        return self.host.outstanding == 0 and load is not None and load.running == 0 and load.free_pages == load.pages


@contextmanager
def serving(open_model: Callable[[], Model], ready: bool = True, **options: Any) -> Iterator[Running]:
    """Closes the server and its model at the end."""
    chosen = ServeOptions(port=0, **{"drain_timeout_s": 2.0, **options})
    sock = listen(chosen)
    host = Host(open_model, chosen)
    server = make_server(host)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    running = Running(host, server, f"http://127.0.0.1:{sock.getsockname()[1]}")
    try:
        if ready:
            running.wait(lambda: host.state == "ok", 120)
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


def spread(server: Running, apart_s: float, monkeypatch: pytest.MonkeyPatch, ahead: int = 256) -> None:
    """Tokens come at least `apart_s` apart until the test ends; the kernel is at most `ahead` of them."""
    engine = server.host.model.engine  # type: ignore[union-attr]
    monkeypatch.setattr(engine, "steps_per_launch", min(ahead, engine.steps_per_launch))
    slots = engine._slots
    before = slots._deliver

    def later(*event: Any) -> None:
        time.sleep(apart_s)
        before(*event)

    monkeypatch.setattr(slots, "_deliver", later)


def byte_tokenizer(special: tuple[str, ...] = SPECIAL) -> RawTokenizer:
    """One token for every byte, and special ones: ids 0 to 258 with those of SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in special])
    return raw


def talking_checkpoint(folder: Path, chat: str = CHAT, more: tuple[str, ...] = ()) -> Path:
    """A tiny random model over bytes, with a chat template and `more` special tokens."""
    special = (*SPECIAL, *more)
    write_checkpoint(folder, vocab_size=256 + len(special), eos_token_id=257)
    byte_tokenizer(special).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": chat, "eos_token": SPECIAL[1], "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder
