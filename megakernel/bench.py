"""Timing decode steps: this kernel, a plain read of the same bytes, and other programs, in alternation."""

from __future__ import annotations

import hashlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megakernel.builder.program import Manifest
from megakernel.errors import InvalidRequest, MissingExtra
from megakernel.llm import LLM
from megakernel.origin import Progress, open_origin
from megakernel.sampling import SamplingParams
from megakernel.settings import read_settings
from megakernel.tasks.attention import token_bytes
from megakernel.tasks.task import DType


@dataclass(frozen=True)
class Row:
    """Decode speed of one program at one context length, medians. `bytes_per_token`: weights and KV that a step must
    read; `of_plain_read`: its rate as a fraction of reading the same bytes and doing nothing else."""

    program: str
    context: int
    dtype: str
    us_per_token: float
    tokens_per_s: float
    bytes_per_token: int
    gbps: float
    of_plain_read: float
    launches_per_token: float | None
    tokens_hash: str
    note: str = ""


@dataclass(frozen=True)
class Run:
    """One timed run: seconds between tokens, and the tokens."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    launches_per_token: float | None = None


Contender = Callable[[list[int], int], Run]  # (prompt, tokens to time) -> run


def step_bytes(m: Manifest, context: int) -> int:
    """Bytes that one decode step at `context` cached tokens must read, all ranks together: weights once, the KV of its
    sequence once."""
    token = m.kv_layers * m.kv_heads * token_bytes(m.head_dim, DType(m.kv_dtype))
    return m.ranks * (m.stream_bytes + context * token)


def plain_read_gbps(nbytes: int, threads: int, repeats: int = 5) -> float:
    """Measured rate of reading `nbytes` of memory once with `threads` threads, GB/s; the best of `repeats`."""
    count = max(threads, nbytes // 8)
    data = np.ones(count, np.uint64)
    parts = np.array_split(data, threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = min(best, time.perf_counter() - start)
    return count * 8 / best / 1e9


def compare(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    contexts: Sequence[int] = (32, 512),
    tokens: int = 64,
    rounds: int = 3,
    workers: int | None = None,
    against: Sequence[str] | None = None,
    also: Callable[[LLM], Mapping[str, Contender]] | None = None,
    tp: int = 1,
    tp_processes: bool = False,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """A row for each program and context; `also` adds programs. Raises MissingExtra for a program asked for that is
    not installed."""
    if tokens < 2 or rounds < 1 or not contexts or min(contexts) < 1:
        raise InvalidRequest(
            f"bench: expected tokens >= 2, rounds >= 1, contexts >= 1, got {tokens}, {rounds}, {list(contexts)}"
        )
    with LLM(
        model, device=device, dtype=dtype, kv_dtype=kv_dtype, max_slots=1, max_context=max(contexts) + tokens + 1,
        workers=workers, tp=tp, tp_processes=tp_processes, progress=progress,
    ) as llm:  # fmt: skip
        m = llm.program.manifest
        contenders: dict[str, Contender] = {"megakernel": lambda prompt, count: _megakernel(llm, prompt, count)}
        contenders |= _others(model, dtype, against, m.workers * m.ranks, device)
        contenders |= also(llm) if also else {}
        for context in contexts:
            prompt = np.random.default_rng(context).integers(0, m.vocab, context).tolist()
            runs: dict[str, list[Run]] = {name: [] for name in contenders}
            for _ in range(rounds):
                for name, run in contenders.items():
                    if progress:
                        progress(f"{name} at {context}", 0, 0)
                    runs[name].append(run(prompt, tokens))
            bytes_ = step_bytes(m, context + tokens // 2)
            ceiling = plain_read_gbps(bytes_, m.workers * m.ranks) if m.backend == "cpu" else 0.0
            yield from (_row(name, context, m.dtype, runs[name], bytes_, ceiling) for name in contenders)


def _row(name: str, context: int, dtype: str, runs: list[Run], bytes_: int, ceiling: float) -> Row:
    seconds = statistics.median(s for run in runs for s in run.seconds)
    gbps = bytes_ / seconds / 1e9
    digest = hashlib.sha256(repr(runs[0].tokens).encode()).hexdigest()[:12]
    same = all(run.tokens == runs[0].tokens for run in runs)
    return Row(
        name, context, dtype, seconds * 1e6, 1 / seconds, bytes_, gbps, gbps / ceiling if ceiling else 0.0,
        runs[0].launches_per_token, digest, "" if same else "its runs gave different tokens",
    )  # fmt: skip


def _megakernel(llm: LLM, prompt: list[int], count: int) -> Run:
    before = llm.stats()
    request = llm.engine.submit(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
    done = request.result()
    stamps = [t.time_ns for t in done.tokens]
    llm.engine.exclusive(lambda _runtime: None)  # the launch has ended: the counts are final
    after = llm.stats()
    launches = (after.launches - before.launches) / max(1, after.tokens - before.tokens)
    return Run(tuple((b - a) * 1e-9 for a, b in pairwise(stamps)), done.token_ids, launches)


def _others(
    model: str, dtype: str, against: Sequence[str] | None, threads: int, device: str = "cpu"
) -> dict[str, Contender]:
    """Other programs on the same kind of device; what is installed unless `against` names them."""
    makers: dict[str, tuple[str, Callable[[str, str, int, str], Contender]]] = {
        "transformers": ("transformers", _transformers),
    }
    wanted = [n for n in against if n != "none"] if against is not None else list(makers)
    found: dict[str, Contender] = {}
    for name in wanted:
        if name not in makers:
            raise InvalidRequest(f"bench: unknown program {name!r}; known: {', '.join(makers)}, none")
        module, make = makers[name]
        installed = all(importlib.util.find_spec(part) for part in (module, "torch"))
        where = _torch_device(device) if installed else None
        if where is not None:
            found[name] = make(model, dtype, threads, where)
        elif against is not None and installed:
            raise MissingExtra(f"bench: the torch that is installed has no device {device}, so {name} cannot run there")
        elif against is not None:
            raise MissingExtra(f"bench: {name} is not installed; pip install torch {module}")
    return found


def _torch_device(device: str) -> str | None:
    """What torch calls a device of ours ("cuda" for GPUs of either vendor); None when it has none of the kind."""
    import torch

    kind, _, number = device.partition(":")
    if kind == "cpu":
        return "cpu"
    vendor = {"cuda": torch.version.cuda, "hip": torch.version.hip}.get(kind)
    return f"cuda:{number or 0}" if vendor is not None and torch.cuda.is_available() else None


def _transformers(model: str, dtype: str, threads: int, where: str) -> Contender:
    """The same weights in transformers on torch's device `where`, greedy with its own KV cache."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    origin = open_origin(model, dtype=dtype, cache=read_settings().cache)
    values = {k: v for k, v in origin.config.items() if k not in ("transformers_version",)}
    factory: Any = AutoModelForCausalLM
    network = factory.from_config(AutoConfig.for_model(**values)).to(kind).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            data = origin.read(name, "f32", slice(None))
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(data)).to(kind))
    network = network.to(where)
    origin.close()

    def run(prompt: list[int], count: int) -> Run:
        stamps, tokens = [], []
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one release renames what the one before it calls past_key_values
            out = network(torch.tensor([prompt], device=where), use_cache=True)
            for _ in range(count):
                token = int(out.logits[0, -1].argmax())
                stamps.append(time.perf_counter())
                tokens.append(token)
                if len(tokens) < count:
                    out = network(
                        torch.tensor([[token]], device=where), past_key_values=out.past_key_values, use_cache=True
                    )
        return Run(tuple(b - a for a, b in pairwise(stamps)), tuple(tokens))

    return run
