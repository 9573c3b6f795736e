"""What recording the timeline costs: a kernel that records and one that cannot, in alternation; and a timeline.

python -m bench.timeline cpu SmolLM2-135M
python -m bench.timeline cuda llama-3.2-1b 32 timeline.json
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.device_session import admit, build, loaded, randomise
from megakernel.architectures import shape_config
from megakernel.builder.build import make_plan
from megakernel.flow import timeline_of
from megakernel.llm import LLM
from megakernel.recording import Recording
from megakernel.sampling import SamplingParams

ROUNDS = 9
STEPS = 64
KEPT = 16  # of them, in the file

Run = Callable[[], tuple[float, float, tuple[int, ...]]]  # microseconds of a step, of a core's time, and the tokens


def alternate(without: Run, with_it: Run) -> None:
    """Print the ratio of the two. Wall clock is what counts; time of the cores is what other load moves least."""
    without(), with_it()
    rows = np.array([[(*without()[:2], *with_it()[:2])] for _ in range(ROUNDS)]).reshape(ROUNDS, 4)
    for what, off, on in (("step", 0, 2), ("cores", 1, 3)):
        ratios = rows[:, on] / rows[:, off]
        print(
            f"  {what}: without {np.median(rows[:, off]):.1f} us, with {np.median(rows[:, on]):.1f} us; ratio "
            f"{np.median(ratios):.4f} ({ratios.min():.3f} to {ratios.max():.3f} in {ROUNDS} rounds)"
        )
    print(f"  same tokens: {without()[2] == with_it()[2]}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def of_cpu(model: str) -> None:
    """One worker, so that nothing but recording differs."""
    prompt = list(range(1, 33))

    def run(llm: LLM) -> tuple[float, float, tuple[int, ...]]:
        if llm.program.manifest.trace:
            llm.engine.start_recording(STEPS, skip=2)
        cores = time.process_time()
        done = llm.engine.submit(prompt, SamplingParams(max_tokens=STEPS, ignore_eos=True)).result()
        llm.engine.exclusive(lambda _runtime: None)
        cores = time.process_time() - cores
        if llm.program.manifest.trace:
            llm.engine.stop_recording()
        gaps = [b.time_ns - a.time_ns for a, b in pairwise(done.tokens)]
        return float(np.median(gaps)) / 1e3, cores * 1e6 / STEPS, done.token_ids

    with LLM(model, workers=1, max_slots=1, max_context=128) as off, LLM(
        model, workers=1, max_slots=1, max_context=128, trace=True
    ) as on:  # fmt: skip
        alternate(lambda: run(off), lambda: run(on))


def of_gpu(name: str, context: int, output: Path) -> None:
    config = shape_config(name)
    options = {"dtype": "bf16", "max_context": context + 2 * STEPS, "max_slots": 1}
    runs = []
    for trace in (False, True):
        device, program = build(config, **options, trace=trace)
        runs.append(loaded(config, device, program))
        randomise(runs[-1])

    def run(which: int) -> tuple[float, float, tuple[int, ...]]:
        r = runs[which]
        r.reset()
        admit(r, 0, [1], context + STEPS + 8, start=context)
        if which:
            r.start_recording(STEPS, skip=4)
        cores = time.process_time()
        r.launch(STEPS + 8)
        r.finish(30.0)
        cores = time.process_time() - cores
        events = r.events()
        if which:
            kept.append(r.stop_recording())
        gaps = np.diff(events["time_ns"].astype(np.int64))[10:] / 1e3
        return float(np.median(gaps)), max(cores * 1e6 / STEPS, 1e-3), tuple(int(t) for t in events["token"])

    kept: list[Recording] = []
    alternate(lambda: run(0), lambda: run(1))
    plan = make_plan(config, device.target.with_workers(program.manifest.workers), **options)
    timeline = timeline_of(
        kept[-1], program, plan, model=name, device=device.availability().description,
        options={**options, "kv_dtype": None, "max_rows": program.manifest.max_rows, "policy": plan.schedule.policy,
                 "workers": program.manifest.workers},
    )  # fmt: skip
    a = timeline.meta.alignment
    print(
        f"  {len(timeline.events)} events of {len(timeline.complete_steps)} complete steps; "
        f"{sum(timeline.meta.overflow)} lost"
    )
    print(f"  clock {a.clock}: drift at most {max(a.drift_ns):.0f} ns, shortest hop {a.worst_hop_ns} ns")
    last = timeline.meta.last_step
    print(f"  {timeline.of_steps(last - KEPT + 1, last).save(output)}")
    for r in runs:
        r.close()


def main(argv: Sequence[str]) -> None:
    if argv[0] == "cpu":
        of_cpu(argv[1])
    else:
        of_gpu(argv[1], int(argv[2]), Path(argv[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
