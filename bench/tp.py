"""Two GPUs as one: are the results right and the same each time, how long is a hop, how long a step.

    python -m bench.tp --file tp.jsonl                      two GPUs, under four minutes
    python -m bench.tp --one-gpu --file tp.jsonl            both ranks on one GPU with half of its processors each: a
                                                            stand-in for checks; its times say nothing about two GPUs

One JSON object a line, as each part ends: peers, hop, check, repeat, step (of each shape, one device and two), torch
(tensor parallel with NCCL inside a CUDA graph, same shapes). A part that fails leaves a line with its error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.device_session import TINY, admit, generate, random_pack
from bench.hop import hop_us
from megakernel import runtime as runtime_module
from megakernel.architectures import random_weights, shape_config
from megakernel.builder.build import build_graph, build_program, rank_program
from megakernel.device.cuda import CudaDevice
from megakernel.device.device import Device
from megakernel.devices import list_devices
from megakernel.errors import DeviceUnavailable
from megakernel.probe import forced_logits
from megakernel.ranks import LocalRank, Ranks
from megakernel.runtime import Runtime

SHAPES = ("llama-3.1-8b", "qwen3-8b")
CONTEXT, STEPS, WARM_STEPS, REPEATED = 512, 120, 10, 1000
TORCH_SECONDS = 90
BUDGET_NS = 2_000_000_000
Say = Callable[[Mapping[str, Any]], None]


# ---------------------------------------------------------------------------------------------- programs
def opened(config: Mapping[str, Any], devices: Sequence[Device], read: Any, context: int, **options: Any) -> Runtime:
    """A runtime of one device or of several; `read` None: matrices of random numbers, made on the devices."""
    target = options.pop("target", devices[0].target)
    program = build_program(
        config, target, devices[0], cache=Path(tempfile.gettempdir()) / "megakernel", dtype="bf16",
        max_context=context, tp=len(devices), **options,
    )  # fmt: skip
    original = runtime_module.pack_weights
    source = read or random_weights(build_graph(config), seed=0, dtype="bf16").read
    runtime_module.pack_weights = original if read else random_pack
    try:
        if len(devices) == 1:
            return Runtime(program, devices[0], source, spin_budget_ns=BUDGET_NS)
        first = Ranks(program, devices[0], source, spin_budget_ns=BUDGET_NS)
        others = [
            Runtime(rank_program(program, config, target, r), d, source, spin_budget_ns=BUDGET_NS)
            for r, d in enumerate(devices[1:], 1)
        ]
        first.join([LocalRank(o, f"rank {r} ({o.device.name})") for r, o in enumerate(others, 1)])
        return first
    finally:
        runtime_module.pack_weights = original


def of_ranks(run: Runtime) -> list[Runtime]:
    others = run.others if isinstance(run, Ranks) else []
    return [run, *(o.runtime for o in others if isinstance(o, LocalRank))]


def randomise(run: Runtime) -> None:
    """Matrices and pages of each rank its own numbers; what every rank has, the same."""
    import torch

    for rank, one in enumerate(of_ranks(run)):
        assert isinstance(one.device, CudaDevice)
        where = torch.device("cuda", one.device.info.index)
        with torch.cuda.device(where):
            for name in ("weights", "kv"):
                buffer = one.buffer(name)
                holder = type("Holder", (), {})()
                holder.__cuda_array_interface__ = {
                    "shape": (buffer.bytes // 2,), "typestr": "<i2", "data": (buffer.address, False), "version": 3,
                }  # fmt: skip
                data = torch.as_tensor(holder, device=where).view(torch.bfloat16)
                torch.manual_seed(100 + rank)
                if name == "kv":
                    data.normal_(0.0, 1.0)
                    continue
                for w in one.manifest.weights:
                    if w.kind in ("matrix", "interleaved", "table"):
                        torch.manual_seed(1 if w.kind == "table" else 2 + rank)
                        data[w.offset // 2 : (w.offset + w.bytes) // 2].normal_(0.0, 0.02)
            torch.cuda.synchronize()


def decoded(run: Runtime, context: int, steps: int) -> tuple[list[int], np.ndarray]:
    """Tokens and microseconds between them, from a cache of random numbers."""
    run.reset()
    randomise(run)
    admit(run, 0, [1], context + steps + 1, start=context)
    tokens: list[int] = []
    times: list[int] = []
    while len(tokens) < steps:
        run.launch(steps - len(tokens))
        run.finish(60.0)
        events = run.events()
        tokens += [int(t) for t in events["token"]]
        times += [int(t) for t in events["time_ns"]]
    return tokens, np.diff(np.asarray(times)) / 1e3


def digest(*parts: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- parts
def peers(devices: Sequence[CudaDevice]) -> dict[str, Any]:
    for one in devices:
        for other in devices:
            one.reach(other)
    return {"devices": [f"{d.name} {d.info.name}" for d in devices], "distinct": len({d.name for d in devices})}


def check(devices: Sequence[Device], options: Mapping[str, Any]) -> dict[str, Any]:
    """Two devices against one: tokens of a batch, logits of a sequence."""
    out: dict[str, Any] = {}
    for name, config in TINY.items():
        weights = random_weights(build_graph(config), seed=3, dtype="bf16")
        rng = np.random.default_rng(0)
        prompts = [[int(i) for i in rng.integers(0, config["vocab_size"], n)] for n in (5, 17, 40, 1)]
        ids = [int(i) for i in rng.integers(0, config["vocab_size"], 300)]
        found = []
        for several in (list(devices[:1]), list(devices)):
            run = opened(config, several, weights.read, 1024, max_slots=4, **(options if len(several) > 1 else {}))
            try:
                tokens = generate(run, prompts, 24)
                run.reset()
                logits = forced_logits(run, ids, 290)
                run.reset()
                same = digest(logits) == digest(forced_logits(run, ids, 290))
                alone = [generate(run, [p], 24)[0] for p in prompts]
                found.append((tokens, logits, same, alone == tokens))
            finally:
                run.close()
        (one, a, _, _), (two, b, same, alone_same) = found
        error = float(np.linalg.norm(a - b) / np.linalg.norm(a))
        agree = sum(x == y for p, q in zip(one, two) for x, y in zip(p, q)) / sum(map(len, one))
        out[name] = {"tokens_equal": one == two, "tokens_agree": agree, "logits_error": error, "repeats": same,
                     "batch_as_alone": alone_same}  # fmt: skip
    return out


def step(devices: Sequence[CudaDevice], shape: str, options: Mapping[str, Any], say: Say) -> None:
    """Step times on one device and on all, and on all whether a thousand steps give the same bits again."""
    config = shape_config(shape)
    us: dict[int, float] = {}
    for several in (list(devices[:1]), list(devices)):
        tp = len(several)
        room = CONTEXT + max(STEPS, REPEATED) + 8
        run = opened(config, several, None, room, max_slots=1, **(options if tp > 1 else {}))
        try:
            tokens, gaps = decoded(run, CONTEXT, STEPS + WARM_STEPS)
            gaps = gaps[WARM_STEPS:]
            us[tp] = float(np.median(gaps))
            m = run.manifest
            say({
                "part": "step", "shape": shape, "tp": tp, "context": CONTEXT, "us": us[tp],
                "least_us": float(gaps.min()), "most_us": float(gaps.max()), "steps": len(gaps),
                "stream_bytes": m.stream_bytes, "exchanges": len(m.exchanges), "of_one": us[tp] / us[1],
                "tokens": digest(tokens),
            })  # fmt: skip
            if tp > 1:
                found = set()
                for _ in range(2):
                    tokens, _ = decoded(run, CONTEXT, REPEATED)
                    found.add(digest(tokens, *(r.tensor("logits")[0] for r in of_ranks(run))))
                say(
                    {
                        "part": "repeat",
                        "shape": shape,
                        "tp": tp,
                        "steps": REPEATED,
                        "runs": 2,
                        "same_bits": len(found) == 1,
                    }
                )
        finally:
            run.close()


def torch_nccl(shape: str, world: int) -> list[dict[str, Any]]:
    """What bench.tp_torch says of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "bench.tp_torch", shape, str(world), str(CONTEXT), str(STEPS), f"{folder}/store"]
        ranks = [
            subprocess.Popen([*line, str(r)], stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL, text=True)
            for r in range(world)
        ]
        try:
            said = ranks[0].communicate(timeout=TORCH_SECONDS)[0]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return [json.loads(text) for text in (said or "").splitlines() if text.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="append the lines to this file as well")
    parser.add_argument("--one-gpu", action="store_true", help="both ranks on one GPU: a stand-in")
    parser.add_argument("--shape", action="append", help=f"default: {', '.join(SHAPES)}")
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()

    def say(row: Mapping[str, Any]) -> None:
        mark = {"stand_in": True} if args.one_gpu else {}
        text = json.dumps({**row, **mark, "after_s": round(time.perf_counter() - began, 1)})
        print(text, flush=True)
        if args.file:
            with args.file.open("a") as file:
                file.write(text + "\n")

    def part(name: str, run: Callable[[], Any]) -> None:
        try:
            found = run()
        except Exception as e:  # the other parts still say something
            say({"part": name, "error": f"{type(e).__name__}: {e}"})
            return
        for row in found if isinstance(found, list) else [found] if found is not None else []:
            say({"part": name, **row})

    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # nothing may wait for a kernel that waits for another
    gpus = [d for d in list_devices() if isinstance(d, CudaDevice) and d.availability().usable]
    if len(gpus) < (1 if args.one_gpu else 2):
        raise DeviceUnavailable(f"bench.tp: expected two GPUs, got {len(gpus)}; --one-gpu is a stand-in on one")
    devices = [gpus[0], CudaDevice(gpus[0].info)] if args.one_gpu else gpus[:2]
    options: dict[str, Any] = {}
    if args.one_gpu:
        whole = gpus[0].target
        options["target"] = replace(whole, workers=whole.workers // 2, stream_gbps=whole.stream_gbps / 2)
    part("peers", lambda: peers(devices))
    part("hop", lambda: hop_us(devices[0], devices[1]))
    part("check", lambda: check(devices, options))
    for shape in args.shape or SHAPES:
        part("step", lambda shape=shape: step(devices, shape, options, say))
        if not args.no_torch and not args.one_gpu:
            part("torch", lambda shape=shape: torch_nccl(shape, len(devices)))


if __name__ == "__main__":
    main()
