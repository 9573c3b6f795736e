"""Two GPUs as one: are the results right and the same each time, how long is a hop, how long a step.

    python -m bench.tp --file tp.jsonl                      two GPUs, about four minutes
    python -m bench.tp --part peers --part hop --part step --shape llama-3.1-70b
    python -m bench.tp --one-gpu --file tp.jsonl            both ranks on one GPU with half of its processors each: a
                                                            stand-in for checks; its times say nothing about two GPUs

One JSON object a line, as each part ends: peers, hop (and what the GPUs' timers differ by), check, step (of each shape
one device and two, and whether the steps give the same bits again), timeline (what the exchanges of a recording took),
torch (tensor parallel with NCCL inside a CUDA graph, same shapes). A part that fails leaves a line with its error.
"""

from __future__ import annotations

import argparse
import gzip
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

from bench import ending
from bench.device_session import TINY, admit, generate, random_pack
from bench.hop import hop_us
from bench.tp_timeline import exchanges_of_steps
from megakernel import runtime as runtime_module
from megakernel.architectures import random_weights, shape_config
from megakernel.bench import step_bytes
from megakernel.builder.build import build_graph, build_program, make_plan, rank_program
from megakernel.device.cuda import CudaDevice
from megakernel.device.device import Device
from megakernel.flow import timeline_of
from megakernel.probe import forced_logits
from megakernel.ranks import LocalRank, Ranks
from megakernel.runtime import Runtime

SHAPES = ("llama-3.1-8b", "qwen3-8b", "llama-3.1-70b")
PARTS = ("peers", "hop", "check", "step", "timeline", "torch")
LARGE = ("llama-3.1-70b",)  # which one GPU cannot hold: 141 GB in bf16
CONTEXT, STEPS, WARM_STEPS = 512, 120, 10
REPEATED, REPEATED_LARGE = 1000, 100  # steps that are run twice
RECORDED = 4  # steps of a timeline
DEVIATIONS = 6.0  # of the difference of two numberings, by which the best tokens of both may be apart
TORCH_SECONDS = 60
BUDGET_NS = 2_000_000_000
# The comparison uses no multicast either: this project's kernels may not.
TORCH_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
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
    """Two devices against one: logits of a sequence, tokens of a batch, and of the first token of each sequence that is
    another one how much better the other was, in deviations of the logits of two devices from those of one."""
    out: dict[str, Any] = {}
    for name, config in TINY.items():
        weights = random_weights(build_graph(config), seed=3, dtype="bf16")
        rng = np.random.default_rng(0)
        prompts = [[int(i) for i in rng.integers(0, config["vocab_size"], n)] for n in (5, 17, 40, 1)]
        ids = [int(i) for i in rng.integers(0, config["vocab_size"], 300)]
        runs = [
            opened(config, several, weights.read, 1024, max_slots=4, **(options if len(several) > 1 else {}))
            for several in (list(devices[:1]), list(devices))
        ]
        try:
            tokens = [generate(run, prompts, 24) for run in runs]
            logits = [logits_of(run, ids, 290) for run in runs]
            again, alone = logits_of(runs[1], ids, 290), [generate(runs[1], [p], 24)[0] for p in prompts]
            gaps = [gap_of(runs, p, *both) for p, *both in zip(prompts, *tokens)]
        finally:
            for run in runs:
                run.close()
        error = float(np.linalg.norm(logits[0] - logits[1]) / np.linalg.norm(logits[0]))
        found = [g for g in gaps if g is not None]
        out[name] = {
            "logits_error": error, "tokens_equal": tokens[0] == tokens[1],
            "first_other_tokens": len(found), "worst_gap_deviations": max(found, default=0.0),
            "tokens_agree_within_error": max(found, default=0.0) <= DEVIATIONS,
            "repeats": digest(logits[1]) == digest(again), "batch_as_alone": alone == tokens[1],
        }  # fmt: skip
    return out


def logits_of(run: Runtime, ids: Sequence[int], start: int) -> np.ndarray:
    run.reset()
    return forced_logits(run, ids, start)


def gap_of(runs: Sequence[Runtime], prompt: Sequence[int], one: Sequence[int], two: Sequence[int]) -> float | None:
    """At the first place where two devices chose another token than one did: by how much that token was worse on one
    device, over the root mean square difference of the logits. Rounding explains a few; a wrong term does not stay
    there. None: there is no such place."""
    at = next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), None)
    if at is None:
        return None
    ids = [*prompt, *one[:at]]
    a, b = (logits_of(run, ids, len(ids) - 1)[0] for run in runs)
    return float((a[one[at]] - a[two[at]]) / np.sqrt(np.mean((a - b) ** 2)))


def step(devices: Sequence[CudaDevice], shape: str, options: Mapping[str, Any], say: Say, alone: bool = True) -> None:
    """Step times on one device (if `alone` and it has the memory) and on all; on these whether bits come again."""
    repeated = REPEATED_LARGE if shape in LARGE else REPEATED
    us: dict[int, float] = {}
    for several in (list(devices[:1]), list(devices)) if alone and shape not in LARGE else (list(devices),):
        tp, began = len(several), time.perf_counter()
        room = CONTEXT + max(STEPS, repeated) + WARM_STEPS + 8
        run = opened(shape_config(shape), several, None, room, max_slots=1, **(options if tp > 1 else {}))
        opened_s = time.perf_counter() - began
        try:
            tokens, gaps = decoded(run, CONTEXT, STEPS + WARM_STEPS)
            gaps = gaps[WARM_STEPS:]
            us[tp] = float(np.median(gaps))
            m = run.manifest
            moved = step_bytes(m, CONTEXT + WARM_STEPS + STEPS // 2) // m.ranks
            floor = moved / several[0].target.stream_gbps / 1e3
            say({
                "part": "step", "shape": shape, "tp": tp, "context": CONTEXT, "us": us[tp],
                "least_us": float(gaps.min()), "most_us": float(gaps.max()), "steps": len(gaps),
                "bytes": moved, "floor_us": floor, "of_floor": us[tp] / floor,
                "exchanges": len(m.exchanges), "of_one": us[tp] / us[1] if 1 in us else None,
                "tokens": digest(tokens), "opened_s": opened_s,
            })  # fmt: skip
            if tp > 1:
                found = set()
                for _ in range(2):
                    tokens, _ = decoded(run, CONTEXT, repeated)
                    found.add(digest(tokens, *(r.tensor("logits")[0] for r in of_ranks(run))))
                say({"part": "repeat", "shape": shape, "tp": tp, "steps": repeated, "runs": 2,
                     "same_bits": len(found) == 1})  # fmt: skip
        finally:
            run.close()


def recorded(
    devices: Sequence[CudaDevice], shape: str, options: Mapping[str, Any], file: Path | None
) -> dict[str, Any]:
    """What the exchanges of recorded steps took."""
    chosen = {"max_slots": 1, **options}
    steps = WARM_STEPS + RECORDED + 2
    room, target = CONTEXT + steps + 8, chosen.get("target", devices[0].target)
    run = opened(shape_config(shape), devices, None, room, trace=True, **chosen)
    try:
        run.reset()
        randomise(run)
        admit(run, 0, [1], CONTEXT + steps + 1, start=CONTEXT)
        run.start_recording(RECORDED, skip=WARM_STEPS)
        run.launch(steps)
        run.finish(60.0)
        recording, program = run.stop_recording(), run.program
    finally:
        run.close()
    sizes = {"dtype": "bf16", "max_context": room, "max_slots": 1, "tp": len(devices)}
    plan = make_plan(shape_config(shape), target, **sizes)
    timeline = timeline_of(recording, program, plan, model=shape, device=devices[0].info.name, options=sizes)
    if file is not None:
        last = timeline.meta.last_step
        file.write_bytes(gzip.compress(timeline.of_steps(last - 1, last).to_json().encode()))
    return {"shape": shape, "tp": len(devices), "context": timeline.meta.context, **exchanges_of_steps(timeline)}


def torch_nccl(shape: str, world: int) -> list[dict[str, Any]]:
    """What bench.tp_torch says of this shape, also when its processes have to be ended."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "bench.tp_torch", shape, str(world), str(CONTEXT), str(STEPS), f"{folder}/store"]
        ranks = [
            subprocess.Popen(
                [*line, str(r)], stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL, text=True,
                env={**os.environ, **TORCH_ENVIRONMENT},
            )
            for r in range(world)
        ]  # fmt: skip
        said, ended = said_by(ranks[0], TORCH_SECONDS)
        for process in ranks:
            process.kill()
            process.wait()
    rows = [json.loads(text) for text in said.splitlines() if text.startswith("{")]
    if not rows:
        raise RuntimeError(f"bench.tp_torch {shape}: no row within {TORCH_SECONDS} s, rank 0 {ended}")
    return [{**row, "rank_0": ended} for row in rows]


def said_by(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """What a process has written until it ended, or was ended after so many seconds; and which of the two."""
    try:
        return process.communicate(timeout=seconds)[0], f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0], "was ended"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="append the lines to this file as well")
    parser.add_argument("--one-gpu", action="store_true", help="both ranks on one GPU: a stand-in")
    parser.add_argument("--shape", action="append", help=f"default: {', '.join(SHAPES)}")
    parser.add_argument("--not-alone", action="store_true", help="no steps on one device")
    parser.add_argument("--timeline", type=Path, help="keep two steps of the recording in this file, as JSON, gzipped")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
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
    gpus = ending.nvidia_gpus(1 if args.one_gpu else 2, "bench.tp", "" if args.one_gpu else "--one-gpu needs one")
    devices = [gpus[0], CudaDevice(gpus[0].info)] if args.one_gpu else gpus
    options: dict[str, Any] = {}
    if args.one_gpu:
        whole = gpus[0].target
        options["target"] = replace(whole, workers=whole.workers // 2, stream_gbps=whole.stream_gbps / 2)
    chosen, shapes = args.part or PARTS, args.shape or SHAPES
    once: Mapping[str, Callable[[], Any]] = {
        "peers": lambda: peers(devices), "hop": lambda: hop_us(devices[0], devices[1]),
        "check": lambda: check(devices, options),
    }  # fmt: skip
    each: Mapping[str, Callable[[str], Any]] = {
        "step": lambda shape: step(devices, shape, options, say, not args.not_alone),
        "timeline": lambda shape: recorded(devices, shape, options, args.timeline),
        "torch": lambda shape: None if args.one_gpu else torch_nccl(shape, len(devices)),
    }
    for name, run in once.items():
        if name in chosen:
            part(name, run)
    for shape in shapes:
        for name, of_shape in each.items():
            if name in chosen and (shape not in LARGE or name == "step"):
                part(name, lambda of_shape=of_shape, shape=shape: of_shape(shape))


if __name__ == "__main__":
    ending.run(main)
