"""`megakernel profile`: decode, record some steps, write the timeline as JSON, as a Perfetto trace and as a page."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megakernel.bench import plain_read_gbps
from megakernel.errors import DeviceFault, InvalidRequest, TimelineError
from megakernel.llm import LLM
from megakernel.perfetto_file import write_perfetto
from megakernel.report import write_html
from megakernel.report.steps import alike, steps_of, typical
from megakernel.sampling import SamplingParams
from megakernel.tasks.record import Role
from megakernel.timeline import Timeline

WARM_STEPS = 8  # decoded before the recording


@dataclass(frozen=True)
class Profile:
    """What was written."""

    timeline: Timeline
    json: Path
    perfetto: Path
    report: Path


def room(steps: int, context: int) -> int:
    """Tokens of context that `record` needs."""
    return context + steps + WARM_STEPS + 2


def steps_in(step_range: str) -> tuple[int, int]:
    """The numbers of "FIRST:LAST". Raises InvalidRequest."""
    first, colon, last = step_range.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and len(step_range) < 40):
        raise InvalidRequest(f"--range: expected FIRST:LAST, two step numbers, got {step_range[:40]!r}")
    return int(first), int(last)


def part(timeline: Timeline, step_range: str | None) -> Timeline:
    """The steps "FIRST:LAST" of a timeline, all of them without a range. Raises InvalidRequest, TimelineError."""
    return timeline if step_range is None else timeline.of_steps(*steps_in(step_range))


def check_range(llm: LLM, step_range: str | None, steps: int, context: int) -> None:
    """Before `record`, with a model that computed nothing yet: raises InvalidRequest for steps it will not have."""
    if step_range is None:
        return
    (first, last), begin = steps_in(step_range), 1 + _skipped(llm, context, WARM_STEPS)
    if not begin <= first <= last < begin + steps:
        raise InvalidRequest(
            f"--range {step_range}: {steps} steps after a context of {context} are numbers {begin} to "
            f"{begin + steps - 1}; give a range inside them"
        )


def _skipped(llm: LLM, context: int, warm: int) -> int:
    """Steps before the first recorded one: the prompt's and `warm`."""
    return -(-context // llm.program.manifest.max_rows) + warm


def record(llm: LLM, steps: int, context: int, warm: int = WARM_STEPS) -> Timeline:
    """Decode one sequence after a prompt of `context` random tokens and record `steps` steps of one row each.

    A fault ends the recording: the timeline that comes back names it. So does Ctrl-C, once there is a complete step:
    what comes back then has fewer. Raises InvalidRequest, CapacityError, KeyboardInterrupt."""
    m = llm.program.manifest
    if steps < 1 or context < 1 or warm < 0:
        raise InvalidRequest(f"profile: expected steps >= 1 and context >= 1, got {steps} and {context}")
    prompt = np.random.default_rng(context).integers(0, m.vocab, context).tolist()
    llm.start_recording(steps, skip=_skipped(llm, context, warm))
    request = llm.engine.submit(prompt, SamplingParams(max_tokens=warm + steps + 1, ignore_eos=True))
    try:
        with contextlib.suppress(DeviceFault):  # it is in the recording
            request.result()
    except KeyboardInterrupt:
        request.cancel()
        timeline = llm.stop_recording()
        if not timeline.complete_steps:
            raise
        return timeline
    return llm.stop_recording()


def with_ceiling(timeline: Timeline) -> Timeline:
    """With the rate of a plain read of a step's bytes by as many threads, measured now; the same where this is not the
    device that ran it."""
    nbytes = sum(n.stream_bytes for n in timeline.nodes)
    if timeline.meta.backend != "cpu" or not nbytes:
        return timeline
    return replace(
        timeline, meta=replace(timeline.meta, ceiling_gbps=plain_read_gbps(int(nbytes), timeline.meta.workers))
    )


def check_folder(folder: Path) -> None:
    """Before anything runs: raises TimelineError when nothing can be written into `folder`, which need not be there."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise TimelineError(f"cannot make the folder {folder}: {there} is a file; choose another --output")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TimelineError(f"cannot write into {there}: permission denied; choose another --output")


def write(timeline: Timeline, folder: Path) -> Profile:
    """Write all forms of a timeline into `folder`, made if need be. Raises MissingExtra, TimelineError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise TimelineError(f"cannot make the folder {folder}: {e.strerror or e}; choose another --output") from e
    saved = timeline.save(folder / "timeline.json")  # first: it is what the others can be made of again
    page = write_html(timeline, folder / "report.html")
    return Profile(timeline, saved, write_perfetto(timeline, folder / "timeline.pftrace"), page)


def step_us(timeline: Timeline) -> float | None:
    """How long the typical step took, the page's figure; None without a complete one."""
    steps = alike(steps_of(timeline))
    return typical(steps).length / 1e3 if steps else None


def operator_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Of each operator, microseconds of a step and a worker: work, and waiting for others or for data. Of the complete
    steps with the commonest number of rows; empty without one."""
    steps = [s.number for s in alike(steps_of(timeline))]
    if not steps:
        return []
    tasks = timeline.tasks[np.isin(timeline.tasks["step"], steps)]
    tasks = tasks[np.isin(tasks["role"], [Role.WORKER, Role.CONSUMER])]
    share = 1e3 * len(steps) * timeline.meta.workers
    names = np.array([n.operator for n in timeline.nodes])
    of_event = names[tasks["node"]]
    rows = []
    for name in dict.fromkeys(names.tolist()):
        mine = tasks[of_event == name]
        wait = float((mine["ready"] - mine["start"]).sum()) / share
        data = float((mine["first_data"] - mine["ready"]).sum()) / share
        work = float((mine["published"] - mine["first_data"]).sum()) / share
        rows.append({"operator": name, "records": len(mine), "work_us": work, "wait_us": wait, "data_us": data})
    return rows


def summary(profile: Profile) -> dict[str, Any]:
    """The figures of a profile for programs."""
    t, m = profile.timeline, profile.timeline.meta
    return {
        "program": m.program, "model": m.model, "target": m.target, "workers": m.workers, "context": m.context,
        "first_step": m.first_step, "last_step": m.last_step, "complete_steps": len(t.complete_steps),
        "step_us": step_us(t), "events": len(t.events), "events_lost": sum(m.overflow),
        "clock": m.alignment.clock, "drift_ns": max(m.alignment.drift_ns, default=0.0),
        "worst_hop_ns": m.alignment.worst_hop_ns, "fault": m.fault.text if m.fault else None,
        "timeline": str(profile.json), "perfetto": str(profile.perfetto),
        "report": str(profile.report), "operators": operator_rows(t),
    }  # fmt: skip
