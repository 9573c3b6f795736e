"""Several streams, and prompts: step times by batch size, times to the first token by length of the prompt.

    python -m bench.batch --shape llama-3.2-1b --batch 1 8 16 32 64 --prompt 512 2048 --against graph prompt products
    python -m bench.batch --batch 8 --prompt --beside 16384 --streams 8 --max-step-ms 10

Random weights of the published shape, bf16, one program with room for `--rows` rows a step. A batch decodes `--steps`
tokens with `--context` tokens in the cache of each stream; the figure is the median time between steps by the device's
clock. A prompt's time is by the host's clock, from the launch to the end of the step that made the first token, and
its matrix rate is that of the layers' products in that time. `--beside N`: a prompt of N tokens comes while streams
decode; the figures are the times between tokens of a stream before it and until its first token. `--against`, on the
same device in the same run: graph and compile (steps of transformers on a static cache), prompt (its first token with
torch's attention), products (torch's products of the layers' matrices alone). A JSON object a line, tables at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import batch_torch
from bench.device_session import admit, loaded, randomise, tunable_values
from bench.ending import run
from megakernel.architectures import shape_config
from megakernel.builder.build import build_graph, build_program
from megakernel.device.cuda import CudaDevice
from megakernel.device.cuda_compiler import Tunables
from megakernel.devices import open_device
from megakernel.engine import Engine
from megakernel.errors import InvalidRequest
from megakernel.request import Request
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.show import table

WARM_STEPS = 6
ROUNDS = 5  # of a prompt
ALONE = 50  # tokens of a stream before the long prompt comes
AGAINST = ("graph", "compile", "prompt", "products")
LAUNCH_S = 600.0  # longest that a launch may take: processors are slow
Line = Mapping[str, Any]


def opened(
    config: Line, device: str, slots: int, rows: int, context: int, tunables: Sequence[str], **options: Any
) -> Runtime:
    """`options` of build_program."""
    chosen = Tunables(**tunable_values(tunables))
    where = open_device(device)
    if isinstance(where, CudaDevice):
        where.tunables = chosen
    elif tunables:
        raise InvalidRequest(f"--tunable: expected none, device {device} has no tunables; got {', '.join(tunables)}")
    program = build_program(
        config, where.target, where, cache=Path(tempfile.gettempdir()) / "megakernel", dtype="bf16", max_slots=slots,
        max_rows=rows, max_context=context, **options,
    )  # fmt: skip
    run = loaded(config, where, program)
    run.spin_budget_ns = 1_000_000_000
    return run


def decode(run: Runtime, batch: int, context: int, steps: int) -> Line:
    """One stream in each of the first `batch` slots."""
    run.reset()
    randomise(run)
    for slot in range(batch):
        admit(run, slot, [1 + slot], context + steps + 1, start=context)
    run.launch(steps)
    run.finish(LAUNCH_S)
    events = run.events()
    ends = [int(events["time_ns"][events["step"] == step].max()) for step in np.unique(events["step"])]
    gaps = np.diff(ends)[WARM_STEPS:] / 1000.0
    us = float(np.median(gaps))
    return {
        "batch": batch, "context": context, "us": us, "least_us": float(gaps.min()), "most_us": float(gaps.max()),
        "tokens_s": batch * 1e6 / us, "steps": len(gaps),
    }  # fmt: skip


def some_tokens(vocab: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(length).integers(0, vocab, length)]


def prefill(run: Runtime, length: int, flops: float) -> Line:
    times = []
    for _ in range(ROUNDS):
        run.reset()
        randomise(run)
        admit(run, 0, some_tokens(run.manifest.vocab, length), length + 1)
        began = time.perf_counter()
        while not len(run.events()):  # a launch is bounded, a long prompt may take several
            run.launch(10_000)
            report = run.finish(LAUNCH_S)
        times.append((time.perf_counter() - began) * 1e3)
    ms = statistics.median(times)
    return {"prompt": length, "ms": ms, "least_ms": min(times), "tflops": flops / ms / 1e9, "steps": report.steps_run}


def beside(run: Runtime, length: int, streams: int, max_step_ms: float | None) -> Line:
    """Times between tokens of `streams` streams before a prompt of `length` tokens comes, and until its first token.

    The runtime is closed with the engine."""
    m = run.manifest
    run.reset()
    randomise(run)
    with Engine(run, share_prefixes=False, max_step_ms=max_step_ms) as engine:
        endless = SamplingParams(max_tokens=m.max_context, ignore_eos=True)
        running = [engine.submit([1 + slot], endless) for slot in range(streams)]
        for request in running:
            for _ in zip(range(ALONE), request):
                pass
        counts = [len(r.poll(0)[0]) for r in running]
        long = engine.submit(some_tokens(m.vocab, length), SamplingParams(max_tokens=1, ignore_eos=True))
        first_ns = long.result(600.0).tokens[0].time_ns
        alone = _gaps_ms([(r, 0, count) for r, count in zip(running, counts)], first_ns)
        gaps = _gaps_ms([(r, count, 1 << 30) for r, count in zip(running, counts)], first_ns)
        for request in running:
            request.cancel()
    return {
        "beside": length, "streams": streams, "max_step_ms": max_step_ms, "ttft_ms": long.timings().first_token_s * 1e3,
        "alone_p50_ms": float(np.percentile(alone, 50)), "alone_p99_ms": float(np.percentile(alone, 99)),
        "p50_ms": float(np.percentile(gaps, 50)), "p99_ms": float(np.percentile(gaps, 99)),
        "most_ms": float(max(gaps)), "tokens": len(gaps),
    }  # fmt: skip


def _gaps_ms(parts: Sequence[tuple[Request, int, int]], until_ns: int) -> list[float]:
    """Between tokens `first` to `end` of each request, as far as they came before a moment of the device's clock."""
    gaps: list[float] = []
    for request, first, end in parts:
        times = [token.time_ns for token in request.poll(0)[0][first:end]]
        gaps += (np.diff([t for t in times if t <= until_ns]) / 1e6).tolist()
    return gaps


def measure(args: argparse.Namespace) -> Iterator[Line]:
    config = shape_config(args.shape)
    graph = build_graph(config)
    longest = max([args.context + args.steps + 2, *(n + 2 for n in args.prompt), *(2 * n + 200 for n in args.beside)])
    slots = max([*args.batch, args.streams + 1] if args.beside else args.batch or [1])
    began = time.perf_counter()
    options = {"kv_dtype": args.kv_dtype, "paced": args.max_step_ms is not None}
    run = opened(config, args.device, slots, args.rows, longest, args.tunable, **options)
    if args.batch and run.max_steps(args.steps) < args.steps:
        most = run.max_steps(args.steps)
        run.close()
        raise InvalidRequest(f"--steps: expected at most {most}, a launch's with {slots} slots, got {args.steps}")
    yield {
        "shape": args.shape, "rows": args.rows, "kv_dtype": args.kv_dtype, "tunables": args.tunable,
        "ready_s": time.perf_counter() - began,
    }  # fmt: skip
    try:
        for batch in args.batch:
            yield decode(run, batch, args.context, args.steps)
        for length in args.prompt:
            yield prefill(run, length, batch_torch.product_flops(graph, length))
        for length in args.beside[:1]:
            yield beside(run, length, args.streams, args.max_step_ms)
    finally:
        run.close()
    for kind in args.against:
        if kind == "prompt":
            yield from batch_torch.prefill(config, args.device, args.prompt)
        elif kind == "products":
            yield from batch_torch.products(config, args.device, args.prompt)
        else:
            compiled = kind == "compile"
            yield from batch_torch.decode(config, args.device, args.batch, args.context, args.steps, compiled)


def show(lines: Sequence[Line]) -> None:
    """Step times beside those of one stream and of torch; prompts beside torch's, rates beside its bare products'."""
    steps = [line for line in lines if "batch" in line]
    first = {line.get("torch"): line["us"] for line in steps if line["batch"] == 1}
    rows = [
        (line.get("torch", "megakernel"), line["batch"], f"{line['us']:,.1f}",
         f"{line['us'] / first[line.get('torch')]:.2f}" if line.get("torch") in first else "",
         f"{line['tokens_s']:,.0f}") for line in steps
    ]  # fmt: skip
    if rows:
        table(("program", "batch", "us a step", "x batch 1", "tokens/s"), rows, title="steps")
    prompts = [line for line in lines if "prompt" in line]
    rates = {line["prompt"]: line["tflops"] for line in prompts if line.get("torch") == "products"}
    made = [
        (line.get("torch", "megakernel"), line["prompt"], f"{line['ms']:,.1f}",
         f"{line['tflops']:.3g}" if "tflops" in line else "",
         f"{line['tflops'] / rates[line['prompt']]:.2f}" if "tflops" in line and line["prompt"] in rates else "")
        for line in prompts
    ]  # fmt: skip
    if made:
        table(("program", "prompt", "ms", "TFLOP/s", "of products"), made, title="to the first token")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 16, 32, 64], help="streams; none: leave out")
    parser.add_argument("--prompt", type=int, nargs="*", default=[512, 2048], help="lengths; none: leave out")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--beside", type=int, nargs=1, default=[], help="length of a prompt that comes to streams")
    parser.add_argument("--streams", type=int, default=8, help="that decode beside it")
    parser.add_argument("--max-step-ms", type=float, help="bound of their steps")
    parser.add_argument("--kv-dtype", choices=("bf16", "f8"), default="bf16", help="of the KV pages")
    parser.add_argument("--against", nargs="*", default=[], choices=AGAINST, help="of torch, on the same device")
    parser.add_argument("--tunable", nargs="*", default=[], help="of the kernel: NAME=VALUE")
    given = parser.parse_args(argv)
    for name in ("batch", "prompt", "beside"):
        if bad := [n for n in getattr(given, name) if n < 1]:
            parser.error(f"--{name}: expected numbers of at least 1, got {bad[0]}")
    for name, least in (("rows", 1), ("streams", 1), ("context", 0)):
        if getattr(given, name) < least:
            parser.error(f"--{name}: expected a number of at least {least}, got {getattr(given, name)}")
    if not (given.batch or given.prompt or given.beside):
        parser.error("--batch, --prompt, --beside: expected a number for one of them, got none")
    if given.steps <= WARM_STEPS + 1:
        parser.error(f"--steps: expected more than {WARM_STEPS + 1}, of which {WARM_STEPS} are warm, got {given.steps}")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    lines = []
    for line in measure(arguments(argv)):
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}), flush=True)
        lines.append(line)
    show(lines)


if __name__ == "__main__":
    run(main)
