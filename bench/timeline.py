"""What recording the timeline costs: a kernel that records and one that cannot, in alternation; and a timeline.

python -m bench.timeline cpu SmolLM2-135M
python -m bench.timeline cuda llama-3.2-1b 32 512 timeline.json            # timeline-32.json, timeline-512.json
python -m bench.timeline cuda llama-3.2-1b 32 rows=8 timeline.json         # eight sequences in every step
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.device_session import admit, build, loaded, randomise
from bench.ending import run
from megakernel.architectures import shape_config
from megakernel.builder.build import make_plan
from megakernel.flow import timeline_of
from megakernel.llm import LLM
from megakernel.recording import Recording
from megakernel.sampling import SamplingParams
from megakernel.timeline import Timeline

ROUNDS = 9
STEPS = 64
KEPT = 16  # steps in a file

Figures = tuple[float, float, tuple[int, ...]]  # microseconds of a step, of a core's time, and the tokens
Run = Callable[[], Figures]


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


class OnGpu:
    """A model that cannot record and one that can, both with the same random weights."""

    def __init__(self, name: str, most: int, rows: int = 1) -> None:
        self.name, self.config, self.rows = name, shape_config(name), rows
        self.options = {"dtype": "bf16", "max_context": most + 2 * STEPS, "max_slots": rows}
        self.runs = []
        for trace in (False, True):
            self.device, self.program = build(self.config, **self.options, trace=trace)
            self.runs.append(loaded(self.config, self.device, self.program))
            randomise(self.runs[-1])

    def run(
        self, record: bool, context: int, steps: int = STEPS, read: bool = False
    ) -> tuple[Figures, Recording | None]:
        """`steps`: the last ones that are recorded. `read`: also bring the recording here, which takes its time."""
        r = self.runs[record]
        r.reset()
        for slot in range(self.rows):
            admit(r, slot, [1 + slot], context + STEPS + 8, start=context)
        if record:
            r.start_recording(steps, skip=4 + STEPS - steps)
        cores = time.process_time()
        r.launch(STEPS + 8)
        r.finish(30.0)
        cores = time.process_time() - cores
        events = r.events()
        recording = r.stop_recording() if record and read else None
        if record and not read:
            r.drop_recording()
        gaps = np.diff(events["time_ns"][events["slot"] == 0].astype(np.int64))[10:] / 1e3
        tokens = tuple(int(t) for t in events["token"])
        return (float(np.median(gaps)), max(cores * 1e6 / STEPS, 1e-3), tokens), recording

    def timeline(self, context: int) -> Timeline:
        """Of the last KEPT steps."""
        _, recording = self.run(True, context, KEPT, read=True)
        assert recording is not None
        m = self.program.manifest
        plan = make_plan(self.config, self.device.target.with_workers(m.workers), **self.options)
        options = {**self.options, "kv_dtype": None, "max_rows": m.max_rows, "policy": plan.schedule.policy}
        return timeline_of(
            recording, self.program, plan, model=self.name, device=self.device.availability().description,
            options={**options, "workers": m.workers},
        )  # fmt: skip

    def close(self) -> None:
        for r in self.runs:
            r.close()


def of_gpu(name: str, contexts: Sequence[int], output: Path, rows: int = 1) -> None:
    gpu = OnGpu(name, max(contexts), rows)
    for context in contexts:
        print(f"context {context}:")
        alternate(lambda c=context: gpu.run(False, c)[0], lambda c=context: gpu.run(True, c)[0])
        timeline = gpu.timeline(context)
        a = timeline.meta.alignment
        print(
            f"  {len(timeline.events)} events of {len(timeline.complete_steps)} complete steps; "
            f"{sum(timeline.meta.overflow)} lost"
        )
        print(f"  clock {a.clock}: drift at most {max(a.drift_ns):.0f} ns, shortest hop {a.worst_hop_ns} ns")
        path = output if len(contexts) == 1 else output.with_stem(f"{output.stem}-{context}")
        print(f"  {timeline.save(path)}: {path.stat().st_size / 1e6:.1f} MB")
    gpu.close()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.timeline", description=__doc__)
    devices = parser.add_subparsers(dest="device", required=True)
    devices.add_parser("cpu").add_argument("model")
    gpu = devices.add_parser("cuda")
    gpu.add_argument("shape")
    gpu.add_argument("context", type=int, nargs="+")
    gpu.add_argument("output", type=Path)
    gpu.add_argument("--rows", type=int, default=1, help="sequences in every step; rows=N says the same")
    given = parser.parse_args([f"--{word}" if word.startswith("rows=") else word for word in argv])
    if given.device == "cpu":
        of_cpu(given.model)
    else:
        of_gpu(given.shape, given.context, given.output, given.rows)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
