"""What a session on a GPU runs: checks of tiny models against float32, and step times of published shapes.

python -m bench.device_session check
python -m bench.device_session time llama-3.2-1b 32 512 4096
python -m bench.device_session models qwen3-0.6b llama-3.2-1b --file models.jsonl
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from bench.ending import run
from megakernel import runtime as runtime_module
from megakernel.architectures import random_weights, shape_config
from megakernel.bench import step_bytes
from megakernel.builder.build import build_graph, build_program
from megakernel.builder.program import Manifest, Program
from megakernel.device.cuda import CudaDevice, Tunables
from megakernel.devices import open_device
from megakernel.errors import DeviceFault, InvalidRequest
from megakernel.probe import FORCED, forced_logits
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.tasks.record import SAMPLING, SLOT, CommandKind, SlotStatus

CEILING_GBPS = 4556.0
TUNABLES: dict[str, int] = {}  # of the kernel, from the command line: name=value
TINY: Mapping[str, Mapping[str, Any]] = {
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 544,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1003,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "tiny-qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 320, "intermediate_size": 768,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 517,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "attention_bias": False,
    },
}  # fmt: skip


def tunable_values(words: Sequence[str]) -> dict[str, int]:
    """The kernel's tunables from NAME=VALUE. Raises InvalidRequest."""
    known = [f.name for f in fields(Tunables)]
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not value.strip().isdecimal():
            raise InvalidRequest(f"tunable: expected NAME=NUMBER with a name of {', '.join(known)}, got {word!r}")
        found[name] = int(value)
    return found


def build(config: Mapping[str, Any], **options: Any) -> tuple[Any, Program]:
    device = open_device("cuda")
    assert isinstance(device, CudaDevice)
    device.tunables = Tunables(**TUNABLES)
    target = device.target.with_workers(options.pop("workers", device.target.workers))
    began = time.perf_counter()
    program = build_program(config, target, device, cache=Path(tempfile.gettempdir()) / "megakernel", **options)
    print(
        f"  built in {time.perf_counter() - began:.1f} s: {program.manifest.queue_length} records a worker", flush=True
    )
    return device, program


def admit(
    run: Runtime, slot: int, prompt: Sequence[int], limit: int, start: int = 0, params: Mapping[str, Any] | None = None
) -> None:
    """Put a sequence into a slot; with `start` its first tokens count as computed."""
    m = run.manifest
    pages = m.pages_per_slot
    run.set_pages(slot, range(slot * pages, slot * pages + -(-min(limit + 1, m.max_context) // m.page_tokens)))
    run.set_prompt(slot, prompt)
    sampling = np.frombuffer(SAMPLING.pack(SamplingParams(**(params or {})).fields(seed=7)), SAMPLING.dtype)[0]
    state = {
        "status": SlotStatus.ACTIVE, "request": FORCED - slot, "prompt_length": max(start, len(prompt)), "limit": limit,
        "position": start, "last_token": prompt[-1], "sampling": sampling,
    }  # fmt: skip
    packed = np.frombuffer(SLOT.pack(state), SLOT.dtype)[0]
    run.post({"kind": CommandKind.ADMIT, "slot": slot, "request": FORCED - slot, "state": packed})


def generate(
    run: Runtime, prompts: Sequence[Sequence[int]], count: int, params: Mapping[str, Any] | None = None,
    limit_s: float = 60.0,
) -> list[list[int]]:  # fmt: skip
    """Tokens of several sequences at once; greedy unless `params` says otherwise. `limit_s`: for all of them."""
    run.reset()
    for slot, prompt in enumerate(prompts):
        admit(run, slot, prompt, len(prompt) + count, params=params)
    out: list[list[int]] = [[] for _ in prompts]
    run.launch(10_000)
    run.finish(limit_s)
    for e in run.events():
        out[int(e["slot"])].append(int(e["token"]))
    return out


def check_one(name: str) -> None:
    config = TINY[name]
    print(f"{name}:")
    device, program = build(config, dtype="bf16", max_context=1024, max_slots=4)
    graph = build_graph(config)
    weights = random_weights(graph, seed=3, dtype="bf16")
    run = Runtime(program, device, weights.read, spin_budget_ns=2_000_000_000)
    rng = np.random.default_rng(0)
    try:
        for length, start in ((1, 0), (20, 0), (40, 32), (300, 290), (700, 690)):
            ids = [int(i) for i in rng.integers(0, program.manifest.vocab, length)]
            run.reset()
            got = forced_logits(run, ids, start)
            want = graph.interpret(weights, ids)["logits"].numpy()[start:]
            error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
            print(
                f"  tokens {length} from {start}: error {error.max():.2e} (mean {error.mean():.2e}), "
                f"nan {np.isnan(got).any()}",
                flush=True,
            )
            if error.max() > 0.05:
                print("    WRONG; tests/gpu/test_acceptance.py names the first task that is off", flush=True)
        prompts = [[int(i) for i in rng.integers(0, program.manifest.vocab, n)] for n in (5, 17, 40, 1)]
        alone = [generate(run, [p], 24)[0] for p in prompts]
        print(
            "  in a batch:", "equal" if generate(run, prompts, 24) == alone else "DIFFERENT", alone[0][:8], flush=True
        )
        again = {tuple(generate(run, [prompts[1]], 100)[0]) for _ in range(20)}
        print(f"  20 runs of 100 tokens: {len(again)} different", flush=True)
    except DeviceFault as e:
        print("  FAULT", e)
    finally:
        run.close()


def random_pack(manifest: Manifest, target: Any, read: Any, write: Any, progress: Any = None) -> None:
    """Small vectors and tables as they should be; the matrices are filled by `randomise`."""
    from megakernel.builder.weights import _slabs

    for weight in manifest.weights:
        if weight.kind in ("vector", "cos", "sin"):
            at = weight.offset
            for data in _slabs(weight, manifest, target, read):
                write(at, data)
                at += data.nbytes


def view(run: Runtime, name: str) -> Any:
    """A buffer of the runtime as a tensor of bfloat16, where it is."""
    import torch

    b = run.buffer(name)
    if b.host is not None:
        return torch.from_numpy(b.host[: b.bytes // 2 * 2]).view(torch.bfloat16)
    holder = type("Holder", (), {})()
    holder.__cuda_array_interface__ = {
        "shape": (b.bytes // 2,),
        "typestr": "<i2",
        "data": (b.address, False),
        "version": 3,
    }
    return torch.as_tensor(holder, device="cuda").view(torch.bfloat16)


def randomise(run: Runtime, weights: bool = True) -> None:
    """Fill matrices and tables, unless they are to stay, and KV pages with normal numbers, the same every time."""
    import torch

    torch.manual_seed(1)
    if weights:
        data = view(run, "weights")
        for w in run.manifest.weights:
            if w.kind in ("matrix", "interleaved", "table"):
                data[w.offset // 2 : (w.offset + w.bytes) // 2].normal_(0.0, 0.02)
    if run.manifest.kv_dtype == "f8":  # a page has codes and exponents: any of these bytes may be either
        view(run, "kv").view(torch.uint8).random_(0x30, 0x40)
    else:
        view(run, "kv").normal_(0.0, 1.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loaded(config: Mapping[str, Any], device: Any, program: Program) -> Runtime:
    """A runtime whose matrices `randomise` fills."""
    original, runtime_module.pack_weights = runtime_module.pack_weights, random_pack
    try:
        weights = random_weights(build_graph(config), seed=0, dtype="bf16")
        return Runtime(program, device, weights.read, spin_budget_ns=1_000_000_000)
    finally:
        runtime_module.pack_weights = original


def time_shape(name: str, contexts: Sequence[int], steps: int = 120, **options: Any) -> None:
    config = shape_config(name)
    print(f"{name}:")
    device, program = build(config, dtype="bf16", max_context=max(contexts) + 2 * steps, max_slots=1, **options)
    run, m = loaded(config, device, program), program.manifest
    try:
        for context in contexts:
            run.reset()
            randomise(run)
            admit(run, 0, [1], context + steps, start=context)
            began = time.perf_counter()
            run.launch(steps + 8)
            report = run.finish(30.0)
            wall = time.perf_counter() - began
            events = run.events()
            gaps = np.diff(events["time_ns"].astype(np.int64))[10:] / 1000.0
            floor = step_bytes(m, context) / CEILING_GBPS / 1e3
            us = float(np.median(gaps))
            print(
                f"  context {context}: {us:.1f} us ({gaps.min():.1f} to {gaps.max():.1f}), floor {floor:.1f}, "
                f"{us / floor:.3f} of it; {report.tokens_out} tokens, "
                f"wall {wall * 1e6 / max(1, len(events)):.1f} us each, "
                f"hash {hash(tuple(int(t) for t in events['token'])) & 0xFFFFFF:06x}", flush=True,
            )  # fmt: skip
    except DeviceFault as e:
        print("  FAULT", e)
    finally:
        run.close()


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] == "models":
        from bench import models

        return models.main(argv[1:])
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.device_session", description=__doc__, formatter_class=form)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("check").add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(TINY)}")
    times = what.add_parser("time")
    times.add_argument("shape")
    times.add_argument("contexts", nargs="*", type=int, default=[32, 512])
    what.add_parser("models", help="see python -m bench.models --help")
    for word in [a for a in argv if "=" in a]:
        TUNABLES.update(tunable_values([word]))
    given = parser.parse_args([a for a in argv if "=" not in a])
    if given.what == "time":
        return time_shape(given.shape, given.contexts)
    unknown = sorted(set(given.names) - set(TINY))
    if unknown:
        parser.error(f"check: unknown {', '.join(unknown)}; known: {', '.join(TINY)}")
    for name in given.names or TINY:
        check_one(name)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
