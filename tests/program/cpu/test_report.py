"""The report of real recordings: what must hold of it whatever the machine's load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from megakernel.device.cpu import CpuDevice
from megakernel.llm import LLM
from megakernel.profile import record
from megakernel.report import write_html
from megakernel.report.analysis import analyse
from megakernel.report.compare import compare
from megakernel.report.critical import critical_path, what_if
from megakernel.report.fit import calibrate, predict
from megakernel.report.graph import Kind
from megakernel.report.graph_build import graph_of
from megakernel.report.rebuild import schedule_of
from megakernel.report.steps import steps_of
from megakernel.scheduler.calibration import Calibration
from megakernel.settings import Settings
from megakernel.timeline import Timeline

pytestmark = pytest.mark.timeout(300)
CLOCK_ERROR_NS = 5_000  # what the alignment of two cores may be wrong by on a virtual machine


@pytest.fixture(scope="module")
def model(tiny: Path, cache: Path) -> Iterator[LLM]:
    settings = Settings(cache=cache, spin_ms=60_000)
    with LLM(tiny, device=CpuDevice(), settings=settings, dtype="f32", workers=3, max_context=200, trace=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def line(model: LLM) -> Timeline:
    return record(model, 12, 40)


def test_all_time_is_accounted_for(line: Timeline) -> None:
    a = analyse(line)
    b = a.breakdown
    assert b.steps == 12 and b.rows == 3 and b.total == 3 * sum(s.length for s in a.steps)
    for shares in (b.operators, b.layers):
        assert sum(s.total for s in shares) + b.header + b.idle == b.total
    assert {s.name for s in b.operators} == {n.operator for n in line.nodes} and b.idle >= 0
    assert sum(a.rates.gbps) * a.rates.bin_ns == pytest.approx(sum(n.stream_bytes for n in line.nodes))


def test_every_step_is_as_long_as_its_critical_path(line: Timeline) -> None:
    """Where a worker was held up for long, its own records may be all of a step's path."""
    kinds: set[Kind] = set()
    for step in steps_of(line):
        g = graph_of(line, step)
        assert tuple(g.replay()) == g.time
        parts = critical_path(g)
        assert sum(p.end - p.begin for p in parts) == step.length
        assert all(left.end == right.begin for left, right in pairwise(parts))
        assert Kind.WORK in {p.kind for p in parts}
        kinds |= {p.kind for p in parts}
        assert all(0 <= w.saved <= step.length for w in what_if(line, g))
        assert min(g.slack) >= 0
    assert Kind.COUNTER in kinds


def test_hops_take_time(line: Timeline) -> None:
    found = {h.kind: h for h in analyse(line).hops}
    assert found["counter"].ns and found["counter"].ns[0] > -CLOCK_ERROR_NS and found["counter"].median > 0


def test_the_schedule_that_ran_is_in_the_timeline(model: LLM, line: Timeline) -> None:
    made = schedule_of(line, steps_of(line)[0])
    records = model.program.records
    for worker, queue in enumerate(made.queues):
        ran = [(e.node, e.first, e.count) for e in queue]
        assert ran == [
            (int(r["node"]), int(r["tile_begin"]), int(r["tile_count"])) for r in records[worker][: len(queue)]
        ]


def test_figures_are_fitted_and_kept(line: Timeline, tmp_path: Path) -> None:
    figures = calibrate(line)
    assert figures.target == line.meta.target and figures.hop_us is not None and figures.stream_gbps is not None
    assert set(figures.task_scale) >= {n.operator for n in line.nodes}
    assert Calibration.load(figures.save(tmp_path / "c.json")) == figures
    assert predict(line, figures).measured_us > 0 and predict(line).steps == 6


def test_two_recordings_are_compared_and_shown(model: LLM, line: Timeline, tmp_path: Path) -> None:
    c = compare(line, record(model, 12, 40))
    assert {x.name for x in c.changes if x.kind == "operator"} == {n.operator for n in line.nodes}
    assert all(x.low is not None for x in c.changes if x.kind in ("step", "operator", "worker"))
    assert write_html(line, tmp_path / "report.html").stat().st_size > 50_000
