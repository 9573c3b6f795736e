"""Several streams, and prompts: step times by batch size, times to the first token by length of the prompt.

    python -m bench.batch --shape llama-3.2-1b --batch 1 8 16 32 64 --prompt 512 2048 --torch

Random weights of the published shape, bf16, one program with room for `--rows` rows a step. A batch decodes `--steps`
tokens with `--context` tokens in the cache of each stream; the figure is the median time between steps by the device's
clock. A prompt's time is by the host's clock, from the launch to the end of the step that made the first token.
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

from bench.device_session import admit, loaded, randomise
from bench.ending import run
from megakernel.architectures import shape_config
from megakernel.builder.build import build_program
from megakernel.device.cuda import CudaDevice
from megakernel.device.cuda_compiler import Tunables
from megakernel.devices import open_device
from megakernel.runtime import Runtime

WARM_STEPS = 6
ROUNDS = 5  # of a prompt


def opened(
    config: Mapping[str, Any], device: str, slots: int, rows: int, context: int, tunables: Sequence[str]
) -> Runtime:
    where = open_device(device)
    if isinstance(where, CudaDevice):
        where.tunables = Tunables(**{name: int(value) for name, value in (t.split("=") for t in tunables)})
    program = build_program(
        config, where.target, where, cache=Path(tempfile.gettempdir()) / "megakernel", dtype="bf16", max_slots=slots,
        max_rows=rows, max_context=context,
    )  # fmt: skip
    run = loaded(config, where, program)
    run.spin_budget_ns = 1_000_000_000
    return run


def decode(run: Runtime, batch: int, context: int, steps: int) -> dict[str, Any]:
    """One stream in each of the first `batch` slots."""
    run.reset()
    randomise(run)
    for slot in range(batch):
        admit(run, slot, [1 + slot], context + steps + 1, start=context)
    run.launch(steps)
    run.finish(60.0)
    events = run.events()
    ends = [int(events["time_ns"][events["step"] == step].max()) for step in np.unique(events["step"])]
    gaps = np.diff(ends)[WARM_STEPS:] / 1000.0
    us = float(np.median(gaps))
    return {
        "batch": batch, "context": context, "us": us, "least_us": float(gaps.min()), "most_us": float(gaps.max()),
        "tokens_s": batch * 1e6 / us, "steps": len(gaps),
    }  # fmt: skip


def prefill(run: Runtime, length: int) -> dict[str, Any]:
    ids = [int(i) for i in np.random.default_rng(length).integers(0, run.manifest.vocab, length)]
    times = []
    for _ in range(ROUNDS):
        run.reset()
        randomise(run)
        admit(run, 0, ids, length + 1)
        began = time.perf_counter()
        run.launch(10_000)
        report = run.finish(60.0)
        times.append((time.perf_counter() - began) * 1e3)
        run.events()
    return {"prompt": length, "ms": statistics.median(times), "least_ms": min(times), "steps": report.steps_run}


def torch_prefill(config: Mapping[str, Any], lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """transformers' model with the attention of torch, bf16: the first token of a prompt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k != "transformers_version"}
    factory: Any = AutoModelForCausalLM
    with torch.device("cuda"):
        made = AutoConfig.for_model(**values)
        model = factory.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        for length in lengths:
            ids = torch.randint(0, config["vocab_size"], (1, length), device="cuda")
            times = []
            for _ in range(ROUNDS + 2):
                torch.cuda.synchronize()
                began = time.perf_counter()
                model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()
                times.append((time.perf_counter() - began) * 1e3)
            yield {"torch prompt": length, "ms": statistics.median(times[2:]), "least_ms": min(times)}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = shape_config(args.shape)
    longest = max([args.context + args.steps + 2, *(n + 2 for n in args.prompt)])
    began = time.perf_counter()
    run = opened(config, args.device, max(args.batch), args.rows, longest, args.tunable)
    yield {"shape": args.shape, "rows": args.rows, "tunables": args.tunable, "ready_s": time.perf_counter() - began}
    try:
        for batch in args.batch:
            yield decode(run, batch, args.context, args.steps)
        for length in args.prompt:
            yield prefill(run, length)
    finally:
        run.close()
    if args.torch:
        yield from torch_prefill(config, args.prompt)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tunable", nargs="*", default=[], help="of the kernel: NAME=VALUE")
    parser.add_argument("--torch", action="store_true", help="prompts with transformers on the same device too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    for line in measure(arguments(argv)):
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


if __name__ == "__main__":
    run(main)
