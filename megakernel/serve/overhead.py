"""What the server adds to a token, at one stream, and its speed beside the engine's own.

    python -m megakernel.serve.overhead llama-3.2-1b --device cuda:0

One process has the model, its engine and its server; the client is a process of its own. In alternation: the engine
alone, then the same request over HTTP. "added" is the time from the moment at which the engine hands a token to its
reader until the client has read it from its socket and parsed it; both clocks are the system's monotonic one.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megakernel.llm import LLM
from megakernel.request import Processor, Request
from megakernel.sampling import SamplingParams
from megakernel.serve import load
from megakernel.serve.host import Host
from megakernel.serve.main import listen, make_server
from megakernel.serve.options import ServeOptions

WARM = 8  # first tokens of a request that are not counted
CLOCK_S = 1e-6  # nothing is told apart below this


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
    added_p50_us: float
    added_p99_us: float


class Stamped:
    """An engine's `submit` that notes when each token was handed out."""

    def __init__(self, llm: LLM) -> None:
        self.times: list[float] = []
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

        self.times = []
        return self._submit(prompt_ids, params, told, processor, **more)


def measure(llm: LLM, prompt_tokens: int, tokens: int, rounds: int) -> Added:
    """Serve `llm` on a free port and compare."""
    host = Host(lambda: llm, ServeOptions(port=0))
    sock = listen(host.options)
    server = make_server(host)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while host.state == "loading":
        time.sleep(0.01)
    try:
        return _rounds(llm, f"http://127.0.0.1:{sock.getsockname()[1]}", prompt_tokens, tokens, rounds)
    finally:
        server.should_exit = True
        thread.join(60)


def _rounds(llm: LLM, url: str, prompt_tokens: int, tokens: int, rounds: int) -> Added:
    stamped, vocab = Stamped(llm), llm.program.manifest.vocab
    rng = random.Random(0)
    alone: list[float] = []
    served: list[float] = []
    added: list[float] = []
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for turn in range(rounds + 1):  # the first warms up
        ids = [rng.randrange(vocab) for _ in range(prompt_tokens)]
        for _ in llm.engine.submit(ids, params):
            pass
        own = stamped.times[:tokens]
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        command = [sys.executable, "-m", "megakernel.serve.load", "--url", url, "--one"]
        told = json.loads(subprocess.run(command, input=json.dumps(body), capture_output=True, text=True).stdout)
        if turn:
            alone.append((tokens - 1) / max(own[-1] - own[0], CLOCK_S))
            served.append((tokens - 1) / max(told[-1] - told[0], CLOCK_S))
            added += [1e6 * (there - here) for here, there in list(zip(stamped.times, told))[WARM:]]
    own_rate, rate = statistics.median(alone), statistics.median(served)
    return Added(
        llm.name, f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {llm.program.manifest.target}", tokens,
        rounds, own_rate, rate, rate / own_rate, load.percentile(added, 0.5), load.percentile(added, 0.99),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megakernel.serve.overhead", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--max-slots", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    with LLM(
        chosen.model, device=chosen.device, dtype=chosen.dtype, workers=chosen.workers, max_slots=chosen.max_slots
    ) as llm:
        made = measure(llm, chosen.prompt_tokens, chosen.output_tokens, chosen.rounds)
    sys.stdout.write(
        json.dumps(asdict(made)) + "\n" if chosen.json else
        f"{made.model} on {made.machine}: engine {made.engine_tokens_per_s:.1f} tokens/s, over HTTP "
        f"{made.http_tokens_per_s:.1f} ({made.ratio:.1%}); added to a token {made.added_p50_us:.0f} / "
        f"{made.added_p99_us:.0f} us (p50 / p99 of {made.rounds} x {made.tokens - WARM})\n"
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
