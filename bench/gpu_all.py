"""Everything that must hold on a GPU, in one call: tests, sanitizers, times, the recording's cost, batches.

    python -m bench.gpu_all --output results --minutes 9
    python -m bench.gpu_all --only tiny wide times

The programs of all parts are compiled first, as many at a time as there are processors; the sanitizers, which take
long and leave the GPU nearly idle, run meanwhile. Then the other parts run one after the other, for one kernel fills
the GPU. Each has a limit of its own and a log in the folder; what the minutes do not allow is said to be left out.
Exit status 1 when a part failed, ran out of its time, or was left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ending import nvidia_gpus, run
from megakernel.architectures import shape_config
from megakernel.builder.build import build_program
from megakernel.device.cuda_compiler import Tunables
from megakernel.devices import open_device

PYTEST = ("-m", "pytest", "-q", "--maxfail", "3", "-p", "no:cacheprovider")
COMPILE_S, GRACE_S = 240, 10
SANITIZERS = ("memcheck", "racecheck")
SHOWN = 12  # lines of a part's end


@dataclass(frozen=True)
class Build:
    """A program that a part opens: a tiny model of the tests, or a published shape."""

    name: str
    options: Mapping[str, Any]
    workers: int | None = None
    tunables: Tunables | None = None


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: int
    command: tuple[str, ...]
    builds: tuple[Build, ...] = ()


def of_tests(names: Iterable[str], **options: Any) -> tuple[Build, ...]:
    """As tests.gpu.machine.opened does."""
    chosen = {"dtype": "bf16", "max_context": 1024, "max_slots": 4, "max_rows": 16, **options}
    return tuple(Build(name, chosen) for name in names)


def of_shape(name: str, context: int, **options: Any) -> Build:
    return Build(name, {"dtype": "bf16", "max_context": context, **options})


def parts(models: Sequence[str], sanitizer: str | None) -> tuple[Part, ...]:
    """In the order in which they run: what proves first, then what measures, then what takes long."""
    tiny = ("tiny-llama", "tiny-qwen3")
    few = tuple(Build(n, b.options, w) for n in tiny for b in of_tests([n]) for w in (1, 7, 66, 100))
    broad = tuple(Build("tiny-broad", of_tests(["tiny-broad"])[0].options, w) for w in (None, 100, 66, 40, 25))
    wide = (*of_tests(models, max_rows=16), *of_tests(models, max_rows=64, max_slots=64))
    delayed = of_tests(["tiny-llama"], max_rows=64, max_slots=64, chaos=True)
    left_out = tuple(Build("tiny-llama", of_tests(["tiny-llama"])[0].options, w) for w in (128, 100, 66))
    one = of_shape("llama-3.2-1b", 160, max_slots=1)
    recorded = Build(one.name, {**one.options, "trace": True})
    sixteen = of_shape("llama-3.2-1b", 554, max_rows=16, max_slots=16)
    batches = of_shape("llama-3.2-1b", 2050, max_rows=64, max_slots=64)
    return (
        Part("tiny", 150, (*PYTEST, "tests/gpu/test_tiny.py"),
             (*of_tests(tiny), *few, *broad, *of_tests(["tiny-llama"], chaos=True),
              *of_tests(["tiny-llama"], inputs=True, hidden=True))),
        Part("wide", 150, (*PYTEST, "tests/gpu/test_wide.py"), (*wide, *delayed)),
        Part("acceptance", 150, (*PYTEST, "tests/gpu/test_acceptance.py", "-k", "not sanitizer and not demo_model"),
             (*of_tests(models, keep_tensors=True, max_slots=1), *left_out,
              *of_tests(["tiny-llama"], max_context=2047, max_slots=1))),
        Part("repeats", 120, (*PYTEST, "tests/gpu/test_repeats.py"),
             tuple(of_shape("llama-3.2-1b", 1024, max_slots=rows, max_rows=rows) for rows in (16, 64))),
        Part("times", 60, ("-m", "bench.device_session", "time", "llama-3.2-1b", "32", "512", "4096", "16384"),
             (of_shape("llama-3.2-1b", 16384 + 240, max_slots=1),)),
        Part("times-qwen3-0.6b", 40, ("-m", "bench.device_session", "time", "qwen3-0.6b", "32", "512"),
             (of_shape("qwen3-0.6b", 512 + 240, max_slots=1),)),
        Part("times-qwen3-8b", 60, ("-m", "bench.device_session", "time", "qwen3-8b", "512"),
             (of_shape("qwen3-8b", 512 + 240, max_slots=1),)),
        Part("recording", 60, ("-m", "bench.timeline", "cuda", "llama-3.2-1b", "32", "{output}/timeline.json"),
             (one, recorded)),
        Part("batches", 90, ("-m", "bench.batch", "--rows", "16", "--batch", "1", "2", "4", "8", "16", "--prompt",
                             "512", "--against", "graph", "prompt"), (sixteen,)),
        Part("batches-64", 120, ("-m", "bench.batch", "--rows", "64", "--against", "products"), (batches,)),
        *(Part(tool, 200, (sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m",
                           "tests.gpu.few_steps"),
               (Build("tiny-llama", {**of_tests(["tiny-llama"])[0].options, "max_context": 128}, 4,
                      Tunables(every_lane=1)),))
          for tool in SANITIZERS if sanitizer),
    )  # fmt: skip


def compile_one(job: Build) -> tuple[str, float]:
    from tests.gpu.machine import MODELS

    device = open_device("cuda")
    if job.tunables is not None:
        device.tunables = job.tunables  # type: ignore[attr-defined]
    target = device.target if job.workers is None else device.target.with_workers(job.workers)
    began = time.perf_counter()
    config = MODELS[job.name] if job.name in MODELS else shape_config(job.name)
    build_program(config, target, device, cache=Path(tempfile.gettempdir()) / "megakernel", **job.options)
    return job.name, time.perf_counter() - began


def compile_all(wanted: Sequence[Part]) -> None:
    began = time.perf_counter()
    jobs = list({repr(job): job for part in wanted for job in part.builds}.values())  # parts have some in common
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        done = [f.result(COMPILE_S) for f in [pool.submit(compile_one, job) for job in jobs]]
    slowest = max(done, key=lambda d: d[1])
    took = time.perf_counter() - began
    print(f"compiled {len(done)} programs in {took:.0f} s; the slowest, {slowest[0]}, {slowest[1]:.0f} s", flush=True)


def run_part(part: Part, folder: Path, limit_s: float) -> str:
    """Its ending in a word; its log is in the folder. What runs out of its time is ended with all it started."""
    command = [word.replace("{output}", str(folder)) for word in part.command]
    line = command if command[0].startswith("/") else [sys.executable, *command]
    with (folder / f"{part.name}.log").open("w") as log:
        made = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = made.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(made.pid, signal.SIGTERM)
            try:
                made.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(made.pid, signal.SIGKILL)
                made.wait()
            return f"ran out of its {limit_s:g} s"
    return "passed" if status == 0 else f"failed with status {status}"


def run_and_show(part: Part, folder: Path, end: float) -> bool:
    """Whether it passed, before `end`; its ending and the last lines of its log are printed."""
    began = time.perf_counter()
    left = end - began
    said = run_part(part, folder, round(min(part.limit_s, left))) if left > GRACE_S else "left out: no time"
    log = folder / f"{part.name}.log"
    lines = log.read_text().splitlines()[-SHOWN:] if left > GRACE_S else []
    shown = [
        f"== {part.name}: {said} after {time.perf_counter() - began:.0f} s",
        *(f"   {text[:220]}" for text in lines),
    ]
    print("\n".join(shown), flush=True)
    return said == "passed"


def arguments(known: Sequence[str], argv: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_all", description=__doc__, formatter_class=form)
    parser.add_argument("--output", type=Path, default=Path("gpu_all"), help="folder of the logs")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it")
    parser.add_argument("--only", nargs="*", choices=known, default=list(known), help="these parts")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    from tests.gpu.machine import MODELS

    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    known = parts(sorted(MODELS), sanitizer)
    given = arguments([p.name for p in known], argv)
    nvidia_gpus(1, "bench.gpu_all")
    wanted = [part for part in known if part.name in given.only]
    given.output.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + given.minutes * 60
    early = [part for part in wanted if part.name in SANITIZERS]
    others = [part for part in wanted if part.name not in SANITIZERS]
    compile_all(early)
    with ThreadPoolExecutor(1) as thread:
        tools = thread.submit(lambda: sum(not run_and_show(part, given.output, end) for part in early))
        compile_all(others)
    bad = int(tools.result()) + sum(not run_and_show(part, given.output, end) for part in others)
    if not sanitizer:
        print("== memcheck, racecheck: left out: no compute-sanitizer in PATH or /usr/local/cuda/bin")
    raise SystemExit(1 if bad or not sanitizer else 0)


if __name__ == "__main__":
    run(main)
