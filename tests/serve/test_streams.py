"""Many streams at once: every finished answer equals the same prompt alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megakernel.engine import EngineStats
from megakernel.llm import LLM
from megakernel.sampling import SamplingParams
from megakernel.serve import arrivals, load, overhead
from megakernel.serve.generation import DIRECT
from megakernel.serve.wire import Wire
from tests.serve.server import Running, serving
from tests.serve.test_wire import counted, reluctantly

STREAMS = 32
LATE_S = 60.0  # how much longer a busy machine may take
pytestmark = pytest.mark.timeout(240)


def a_request(rng: random.Random, prompts: int) -> tuple[tuple[int, ...], int]:
    """One of `prompts` prompts of 1 to 162 tokens, and a length."""
    number = rng.randrange(prompts) * (24 // prompts)
    prompt = random.Random(number).choices(range(256), k=1 + 7 * number)
    return tuple(prompt), 1 + rng.randrange(40)


def answers(done: dict[tuple[int, ...], dict[int, set[str]]]) -> int:
    return sum(len(by_count) for by_count in done.values())


async def client(
    url: str,
    number: int,
    until: float,
    done: dict[tuple[int, ...], dict[int, set[str]]],
    pause_s: float,
    prompts: int,
    least: int,
) -> list[str]:
    """Streams one request after another; leaves some at a random token. Returns what went wrong."""
    rng, wrong = random.Random(1000 + number), []
    while (now := time.monotonic()) < until or (now < until + LATE_S and answers(done) <= least):
        await asyncio.sleep(rng.random() * pause_s)
        ids, count = a_request(rng, prompts)
        body: dict[str, Any] = {"prompt": list(ids), "max_tokens": count, "temperature": 0, "ignore_eos": True}
        if rng.random() < 0.3:
            reader, writer, status, headers = await load.request(url, "/v1/completions", {**body, "stream": True})
            left = rng.randrange(count)
            async for _ in load.events(reader, headers):
                left -= 1
                if left <= 0:
                    break
            writer.close()
            wrong += [] if status == 200 else [f"status {status}"]
            continue
        made = await load.stream(url, "/v1/completions", body)
        if made.error or made.completion_tokens != count or made.finish_reason != "length":
            wrong.append(f"{made.status} {made.finish_reason} {made.completion_tokens} of {count}: {made.error}")
        else:
            done.setdefault(ids, {}).setdefault(count, set()).add(made.text)
    return wrong


def test_32_streams_with_random_lengths_and_disconnects(open_tiny: Callable[..., LLM]) -> None:
    with serving(lambda: open_tiny(max_slots=8)) as server:
        soak(server, 4.0, 30)


@pytest.mark.usefixtures("unhurried")
def test_streams_that_come_and_go(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and many of them in turn, on connections that take parts: two threads share the work in either way."""
    reluctantly(monkeypatch)
    made: Counter[tuple[str, str]] = Counter()
    for name in ("send", "write"):
        monkeypatch.setattr(Wire, name, counted(name, getattr(Wire, name), made))
    for _ in range(6):  # on a machine that does much else it can take several
        soak(tiny, 2.0, 3, streams=DIRECT + 1, pause_s=0.3)
        if made["send", "megakernel-engine"] and any(name == "write" for name, _ in made):
            return
    raise AssertionError(f"both ways were not taken: {made}")


@pytest.mark.parametrize("seconds", [20.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_32_streams_of_a_real_model(demo: Running, seconds: float) -> None:
    soak(demo, seconds, 30, prompts=6)


def soak(
    server: Running, span_s: float, least: int, streams: int = STREAMS, pause_s: float = 0.0, prompts: int = 24
) -> None:
    """More than `least` different answers in `span_s`, or in as long as a busy machine takes.

    Each is the begin of what the engine makes of its prompt alone: its tokens do not depend on how many more are
    wanted."""
    done: dict[tuple[int, ...], dict[int, set[str]]] = {}
    before = settled(server)

    async def crowd() -> list[str]:
        until = time.monotonic() + span_s
        clients = (client(server.url, i, until, done, pause_s, prompts, least) for i in range(streams))
        found = await asyncio.gather(*clients)
        return [text for wrong in found for text in wrong]

    assert asyncio.run(crowd()) == []
    server.wait(server.idle)
    assert answers(done) > least
    model = server.host.model
    assert model is not None and model.tokenizer is not None
    for ids, by_count in done.items():
        params = SamplingParams(max_tokens=max(by_count), ignore_eos=True)
        alone = model.engine.submit(list(ids), params).result(60).token_ids
        for count, texts in by_count.items():
            assert texts == {model.tokenizer.decode(alone[:count])}
    after = settled(server)
    assert after.faults == before.faults
    # What the kernel counted is what was delivered; other tests of the server used it without the engine.
    assert after.kernel_tokens - before.kernel_tokens == after.tokens - before.tokens


def settled(server: Running) -> EngineStats:
    """Counts when the last launch is over."""
    assert server.host.model is not None
    engine = server.host.model.engine
    return engine.exclusive(lambda _: engine.stats())


def test_the_load_generator(tiny: Running, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [
        "--url",
        tiny.url,
        "--streams",
        "1,3",
        "--requests",
        "6",
        "--prompt-tokens",
        "20",
        "--output-tokens",
        "10",
    ]
    assert load.main(chosen) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("0 of 6 failed" in line for line in lines)
    report = asyncio.run(load.measure(tiny.url, 2, 4, 20, 10, None, 256, 0))
    assert report.failed == 0 and report.ttft_p99_ms >= report.ttft_p50_ms > 0 and report.tokens_per_s > 0
    assert load.main(["--url", "http://127.0.0.1:9", "--streams", "1", "--requests", "1"]) == 1


@pytest.mark.parametrize(
    ("tool", "line", "status", "says"),
    [
        (load, "--streams 1,a", 2, "expected an integer of at least 1, got 'a'"),
        (load, "--streams 0", 2, "expected an integer of at least 1, got '0'"),
        (load, "--vocab 0", 2, "--vocab"),
        (load, "--url 127.0.0.1:8000", 2, "expected an address such as http"),
        (load, "--url http://[::1", 2, "expected an address such as http"),
        (load, "--streams 3 --requests 3 --url http://127.0.0.1:9", 1, "all 3 requests failed: ConnectionRefusedError"),
        (overhead, "demo --rounds 0", 2, "--rounds"),
        (overhead, "demo --output-tokens 9", 2, "expected an integer of at least 10"),
        (overhead, "demo --device nothing:0", 1, "error: no device 'nothing:0'"),
        (overhead, "/no/model", 1, "error: there is no such checkpoint"),
        (arrivals, "127.0.0.1 70000", 2, "expected an integer from 1 to 65535"),
        (arrivals, "127.0.0.1 9", 1, "error: no connection to 127.0.0.1 port 9"),
    ],
)
def test_tools_say_what_is_wrong_in_a_sentence(
    tool: Any, line: str, status: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    try:
        found = tool.main(line.split())
    except SystemExit as end:  # argparse
        found = end.code
    told = capsys.readouterr()
    assert found == status and says in told.out + told.err


def test_the_load_generator_with_a_server_of_its_own(
    talking: Path, serve_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(serve_cache))
    own = ["--", "--dtype", "f32", "--max-slots", "4", "--max-model-len", "512", "--workers", "2", "--web"]
    few = ["--streams", "2", "--requests", "2", "--prompt-tokens", "5", "--output-tokens", "5", "--json"]
    assert load.main(["--serve", str(talking), *few, *own]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == 0
    monkeypatch.setattr(sys, "executable", "false")  # a server that ends at once
    with pytest.raises(SystemExit, match="serve no such model --port 0 --dtype f32 ended"):
        load.main(["--serve", "no such model", *few, "--", "--dtype", "f32"])


def test_the_time_that_the_server_adds(open_tiny: Callable[..., LLM]) -> None:
    before = sys.getswitchinterval()
    made = overhead.measure(open_tiny(), 20, 60, 1)
    assert 0 < made.written_p50_us <= made.written_p99_us and made.ratio > 0 and made.rounds == 1
    assert made.written_p50_us < made.arrived_p50_us <= made.arrived_p99_us
    assert made.http_tokens_per_s / made.engine_tokens_per_s == pytest.approx(made.ratio)
    assert sys.getswitchinterval() == pytest.approx(before, abs=2e-6)


def test_threads_give_way_within_a_token(tiny: Running) -> None:
    assert sys.getswitchinterval() <= 50.1e-6
