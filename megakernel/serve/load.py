"""A load generator: streams against a running server, times as vLLM's users know them.

    python -m megakernel.serve.load --url http://127.0.0.1:8000 --streams 1,4,16 --prompt-tokens 512 --output-tokens 128
    python -m megakernel.serve.load --serve llama-3.2-1b --streams 1,4,16,64 -- --device cuda:0 --max-slots 64

The second starts a server of the model for as long as it measures; what is behind -- are options of `megakernel serve`.
TTFT: from sending to the first token.
ITL: between events with tokens.
TPOT: (end - first token) / (tokens - 1) of a request.
Prompts are random token ids and ignore_eos is set, so that every request has the lengths asked for; return_token_ids,
so that a token without text, and a model without a tokenizer, is timed too. One process, one connection a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from megakernel.serve.command import reported, whole, wholes


@dataclass
class Timeline:
    """One request: seconds of perf_counter. `status` 0: it did not get an answer."""

    started: float = 0.0
    times: list[float] = field(default_factory=list)  # of each event with text or tokens
    tokens: list[int] = field(default_factory=list)  # that it brought, as far as their ids are given
    ended: float = 0.0
    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Report:
    """Milliseconds and rates of one level of concurrency."""

    streams: int
    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    error: str = ""  # of the first request that failed


async def request(
    url: str, path: str, body: dict[str, Any] | None, key: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, dict[str, str]]:
    """Send one request and read the answer's head. The caller reads the body and closes the writer."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=ssl.create_default_context() if secure else None
    )
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}",
             "Connection: close", "Content-Type: application/json", f"Content-Length: {len(data)}"]  # fmt: skip
    if key:
        lines.append(f"Authorization: Bearer {key}")
    writer.write("\r\n".join((*lines, "", "")).encode() + data)
    status = int((await reader.readline()).split()[1])
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return reader, writer, status, headers


async def body_parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it comes."""
    if headers.get("transfer-encoding") != "chunked":
        yield await reader.read()
        return
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def events(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
    """JSON of each server-sent event."""
    held = b""
    async for part in body_parts(reader, headers):
        *lines, held = (held + part).split(b"\n\n")
        for line in lines:
            if line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


async def stream(url: str, path: str, body: dict[str, Any], key: str | None = None) -> Timeline:
    """One streamed completion or chat. Never raises for a failed request; `error` says what happened."""
    made = Timeline(started=time.perf_counter())
    try:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        reader, writer, made.status, headers = await request(url, path, {**body, **options}, key)
        try:
            if made.status != 200:
                made.error = b"".join([part async for part in body_parts(reader, headers)]).decode("utf-8", "replace")
                return made
            async for event in events(reader, headers):
                _take(made, event)
        finally:
            writer.close()
    except (OSError, ValueError, IndexError, asyncio.IncompleteReadError) as e:
        made.error = f"{type(e).__name__}: {e}"
    made.ended = time.perf_counter()
    return made


def _take(made: Timeline, event: dict[str, Any]) -> None:
    if "error" in event:
        made.error = str(event["error"].get("message"))
        return
    if event.get("usage"):
        made.completion_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        ids = choice.get("token_ids") or ()
        if text or ids:
            made.times.append(time.perf_counter())
            made.tokens.append(len(ids))
            made.text += text or ""
        made.finish_reason = choice["finish_reason"] or made.finish_reason


def percentile(values: Sequence[float], part: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


async def measure(
    url: str,
    streams: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    key: str | None,
    vocab: int,
    seed: int,
) -> Report:
    """`requests` requests, `streams` of them at any time."""
    rng = random.Random(f"{seed} {streams}")  # prompts of another level would be found among kept prefixes
    left = list(range(requests))
    done: list[Timeline] = []

    async def client() -> None:
        while left:
            left.pop()
            ids = [rng.randrange(vocab) for _ in range(prompt_tokens)]
            body = {"prompt": ids, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True}  # fmt: skip
            done.append(await stream(url, "/v1/completions", body, key))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    span = time.perf_counter() - started
    good = [t for t in done if t.status == 200 and not t.error and t.times]
    first = [1000 * (t.times[0] - t.started) for t in good]
    between = [1000 * (b - a) for t in good for a, b in pairwise(t.times)]
    per_token = [1000 * (t.times[-1] - t.times[0]) / (t.completion_tokens - 1) for t in good if t.completion_tokens > 1]
    return Report(
        streams, requests, len(done) - len(good), prompt_tokens, output_tokens,
        sum(t.completion_tokens for t in good) / span, len(good) / span,
        percentile(first, 0.5), percentile(first, 0.99), percentile(between, 0.5), percentile(between, 0.99),
        percentile(per_token, 0.5), percentile(per_token, 0.99),
        next((t.error or f"status {t.status}" for t in done if t not in good), ""),
    )  # fmt: skip


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[str]:
    """The address of a server of `model` in a process of its own, ready. Raises SystemExit when it ends before."""
    command = [sys.executable, "-m", "megakernel", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    reading = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
    reading.start()
    try:
        while not (found := re.search(r"listening on (http\S+)", "".join(said))) or not _ready(found[1]):
            if process.poll() is not None:
                reading.join(5)
                raise SystemExit("".join(said) or f"{' '.join(command)} ended")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(120)


def _ready(url: str) -> bool:
    async def asked() -> int:
        _, writer, status, _ = await request(url, "/ready", None)
        writer.close()
        return status

    try:
        return asyncio.run(asked()) == 200
    except (OSError, ValueError, IndexError):
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """One line for each number of streams; 1 when a request failed."""
    parser = argparse.ArgumentParser(prog="python -m megakernel.serve.load", description=__doc__)
    parser.add_argument("--url", type=_address, default="http://127.0.0.1:8000")
    parser.add_argument(
        "--serve", metavar="MODEL", help="start a server of this model instead, with the options after --"
    )
    several = "requests at once; several numbers, with commas, are run in turn"
    parser.add_argument("--streams", type=wholes(1), default="1,4,16", help=several)
    parser.add_argument("--requests", type=whole(1), help="of each number of streams; default 4 a stream")
    parser.add_argument("--prompt-tokens", type=whole(1), default=512)
    parser.add_argument("--output-tokens", type=whole(1), default=128)
    parser.add_argument("--vocab", type=whole(1), default=256, help="prompts are random ids below it")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    chosen = parser.parse_args(given[:cut])
    return reported(lambda: _run(chosen, given[cut + 1 :]))


def _run(chosen: argparse.Namespace, options: Sequence[str]) -> int:
    with served(chosen.serve, options) if chosen.serve else nullcontext(chosen.url) as url:
        return _levels(chosen, url)


def _address(text: str) -> str:
    """For `type` of --url."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"expected an address such as http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/")


def _levels(chosen: argparse.Namespace, url: str) -> int:
    failed = 0
    for streams in chosen.streams:
        report = asyncio.run(
            measure(url, streams, chosen.requests or 4 * streams, chosen.prompt_tokens, chosen.output_tokens,
                    chosen.api_key, chosen.vocab, chosen.seed)
        )  # fmt: skip
        failed += report.failed
        r = report
        sys.stdout.write(
            json.dumps(asdict(report)) + "\n" if chosen.json else
            f"{r.streams:4d} streams: all {r.requests} requests failed: {r.error}\n" if r.failed == r.requests else
            f"{r.streams:4d} streams: {r.tokens_per_s:9.1f} tokens/s; "
            f"TTFT {r.ttft_p50_ms:.1f} / {r.ttft_p99_ms:.1f} ms; ITL {r.itl_p50_ms:.2f} / {r.itl_p99_ms:.2f} ms; "
            f"TPOT {r.tpot_p50_ms:.2f} / {r.tpot_p99_ms:.2f} ms "
            f"(p50 / p99); {r.failed} of {r.requests} failed{': ' + r.error if r.error else ''}\n"
        )  # fmt: skip
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
