"""What the server adds to a token, at one stream, and its speed beside the engine's own.

    python -m megakernel.serve.overhead llama-3.2-1b --device cuda:0

One process has the model, its engine and its server; the client is a process of its own. In alternation: the engine
alone, then the same request over HTTP. All clocks are the system's monotonic one. Both times of a token begin at the
moment at which the engine hands it to its reader:
    written  until the server gives its bytes to the connection: text, JSON, the way from thread to thread
    arrived  until a client has received them (see arrivals.py; it parses nothing): the above and the system's sockets
With 8 processors or more the client asks its socket without a pause; with fewer it sleeps, and the time to wake it is
in `arrived`. A model without a tokenizer gets one of made-up words, so that text is made of its tokens too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from megakernel.checkpoint import Tokenizer
from megakernel.errors import CapacityError
from megakernel.llm import LLM
from megakernel.request import Processor, Request
from megakernel.sampling import SamplingParams
from megakernel.serve import arrivals, load
from megakernel.serve.command import reported, whole
from megakernel.serve.host import Host
from megakernel.serve.main import listen, make_server
from megakernel.serve.options import ServeOptions
from megakernel.serve.wire import Wire

WARM = 8  # first tokens of a request that are not counted
CLOCK_S = 1e-6  # nothing is told apart below this
SPINS_FROM = 8  # processors; with fewer, a client that never sleeps would take one from the server


@dataclass(frozen=True)
class Added:
    """Medians over the rounds of tokens/s, and percentiles over all tokens in microseconds."""

    model: str
    machine: str
    tokens: int
    rounds: int
    engine_tokens_per_s: float
    http_tokens_per_s: float
    ratio: float
    written_p50_us: float
    written_p99_us: float
    arrived_p50_us: float
    arrived_p99_us: float
    client: str  # "spins" or "sleeps"


class Stamped:
    """An engine's `submit` that notes when each token of the last request was handed out."""

    def __init__(self, llm: LLM) -> None:
        self.times: list[float] = []
        self.written: list[tuple[float, bytes]] = []
        self._submit = llm.engine.submit
        llm.engine.submit = self.submit  # type: ignore[method-assign, assignment]

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        listen: Callable[[], None] | None = None,
        processor: Processor | None = None,
        **more: Any,
    ) -> Request:
        def told() -> None:
            self.times.append(time.perf_counter())
            if listen is not None:
                listen()

        self.times, self.written = [], []
        return self._submit(prompt_ids, params, told, processor, **more)

    @contextmanager
    def writes(self) -> Iterator[None]:
        """Note what is written on every wire, too, when it is about to be."""
        write, send, stamped = Wire.write, Wire.send, self

        def written(self: Wire, body: bytes) -> None:
            stamped.written.append((time.perf_counter(), body))
            write(self, body)

        def sent(self: Wire, body: bytes) -> bool:
            stamped.written.append((time.perf_counter(), body))
            return send(self, body)

        Wire.write, Wire.send = written, sent  # type: ignore[method-assign]
        try:
            yield
        finally:
            Wire.write, Wire.send = write, send  # type: ignore[method-assign]


def measure(llm: LLM, prompt_tokens: int, tokens: int, rounds: int) -> Added:
    """Serve `llm` on a free port and compare. Raises CapacityError when a request does not fit its context."""
    limit = llm.program.manifest.max_context
    if prompt_tokens + tokens > limit:
        raise CapacityError(f"{prompt_tokens} tokens of prompt and {tokens} of output: the context is {limit} tokens")
    if llm.tokenizer is None:
        llm.tokenizer = made_up(llm.program.manifest.vocab)
    host = Host(lambda: llm, ServeOptions(port=0))
    sock = listen(host.options)
    server = make_server(host)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while host.state == "loading":
        time.sleep(0.01)
    try:
        return _rounds(llm, sock.getsockname()[1], prompt_tokens, tokens, rounds)
    finally:
        server.should_exit = True
        thread.join(60)


def made_up(vocab: int) -> Tokenizer:
    """A tokenizer with a word of letters for every id."""
    raw = RawTokenizer(models.BPE({_word(number): number for number in range(vocab)}, []))
    raw.decoder = decoders.ByteLevel()
    return Tokenizer(raw)


def _word(number: int) -> str:
    return "\u0120" + "".join(chr(97 + number // 26**place % 26) for place in range(4))  # a blank before it


def _rounds(llm: LLM, port: int, prompt_tokens: int, tokens: int, rounds: int) -> Added:
    stamped, vocab = Stamped(llm), llm.program.manifest.vocab
    spin = len(os.sched_getaffinity(0)) >= SPINS_FROM
    rng = random.Random(0)
    alone: list[float] = []
    served: list[float] = []
    written: list[float] = []
    arrived: list[float] = []
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for turn in range(rounds + 1):  # the first warms up
        ids = [rng.randrange(vocab) for _ in range(prompt_tokens)]
        for _ in llm.engine.submit(ids, params):
            pass
        own = stamped.times[:tokens]
        with stamped.writes():
            there = _over_http(port, ids, tokens, spin)
        if turn:
            alone.append((tokens - 1) / max(own[-1] - own[0], CLOCK_S))
            served.append((tokens - 1) / max(there[-1] - there[0], CLOCK_S))
            arrived += _behind(stamped.times, there)
            written += _behind(stamped.times, arrivals.token_times(stamped.written))
    own_rate, rate = statistics.median(alone), statistics.median(served)
    return Added(
        llm.name, f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {llm.program.manifest.target}", tokens,
        rounds, own_rate, rate, rate / own_rate, *_ends(written), *_ends(arrived), "spins" if spin else "sleeps",
    )  # fmt: skip


def _over_http(port: int, ids: Sequence[int], tokens: int, spin: bool) -> list[float]:
    """When each token arrived at a process of its own. Raises SystemExit when it failed."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "stream": True}  # fmt: skip
    command = [sys.executable, "-m", "megakernel.serve.arrivals", "127.0.0.1", str(port), *(["--spin"] * spin)]
    made = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True)
    times: list[float] = json.loads(made.stdout) if made.returncode == 0 else []
    if len(times) != tokens:
        raise SystemExit(f"expected {tokens} tokens over HTTP, got {len(times)}\n{made.stderr[-2000:]}")
    return times


def _behind(here: Sequence[float], there: Sequence[float]) -> list[float]:
    """Microseconds from one to the other, without the first tokens."""
    return [1e6 * (b - a) for a, b in list(zip(here, there))[WARM:]]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return load.percentile(values, 0.5), load.percentile(values, 0.99)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megakernel.serve.overhead", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--workers", type=whole(1))
    parser.add_argument("--max-slots", type=whole(1), default=16)
    parser.add_argument("--max-context", type=whole(1))
    parser.add_argument("--max-rows", type=whole(1))
    parser.add_argument("--prompt-tokens", type=whole(1), default=128)
    parser.add_argument("--output-tokens", type=whole(WARM + 2), default=256)
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--json", action="store_true")
    return reported(lambda: _run(parser.parse_args(arguments)))


def _run(chosen: argparse.Namespace) -> int:
    with LLM(
        chosen.model, device=chosen.device, dtype=chosen.dtype, workers=chosen.workers, max_slots=chosen.max_slots,
        max_context=chosen.max_context, max_rows=chosen.max_rows,
    ) as llm:  # fmt: skip
        made = measure(llm, chosen.prompt_tokens, chosen.output_tokens, chosen.rounds)
    sys.stdout.write(
        json.dumps(asdict(made)) + "\n" if chosen.json else
        f"{made.model} on {made.machine}: engine {made.engine_tokens_per_s:.1f} tokens/s, over HTTP "
        f"{made.http_tokens_per_s:.1f} ({made.ratio:.1%}); a token is written after {made.written_p50_us:.0f} / "
        f"{made.written_p99_us:.0f} us, arrives after {made.arrived_p50_us:.0f} / {made.arrived_p99_us:.0f} us "
        f"(p50 / p99 of {made.rounds} x {made.tokens - WARM}; the client {made.client})\n"
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
