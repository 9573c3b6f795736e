"""The timeline of the kernel for AMD targets, run on the host: one lane of a workgroup writes, no record is missing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program, make_plan
from megakernel.flow import timeline_of
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.tasks.record import OPCODE_END
from megakernel.timeline import TIMES
from tests.hip.emulated import EmulatedHip
from tests.unit.test_hip_build import TINY


@pytest.mark.slow
def test_a_workgroup_records_every_record_once(tmp_path: Path) -> None:
    device, options = EmulatedHip("gfx942", 2), {"dtype": "f32", "max_slots": 2, "max_context": 200}
    program = build_program(TINY, device.target, device, cache=tmp_path, trace=True, **options)  # type: ignore[arg-type]
    run = Runtime(program, device, random_weights(build_graph(TINY)).read, spin_budget_ns=60_000_000_000)
    ids = list(range(20))
    try:
        quiet = forced_logits(run, ids, 17)
        run.reset()
        run.start_recording(6)
        again = forced_logits(run, ids, 17)
        assert (again.view(np.uint32) == quiet.view(np.uint32)).all()
        recording = run.stop_recording()
    finally:
        run.close()
    plan = make_plan(TINY, device.target, **options)
    timeline = timeline_of(recording, program, plan, model="tiny", device="emulated", options=options)
    assert len(timeline.complete_steps) >= 2 and timeline.meta.alignment.clock_hz == 1e9
    scheduled = Counter(
        (worker, int(r["node"]), int(r["tile_begin"]), int(r["tile_count"]))
        for worker, row in enumerate(program.records)
        for r in row[: int(np.argmax(row["opcode"] == OPCODE_END))]
    )
    for step in timeline.complete_steps:
        of_step = timeline.tasks[timeline.tasks["step"] == step]
        names = ("worker", "node", "tile_begin", "tile_count")
        assert Counter(tuple(int(e[n]) for n in names) for e in of_step) == scheduled
    for before, after in pairwise(TIMES):
        assert (timeline.events[before] <= timeline.events[after]).all()
