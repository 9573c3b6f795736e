"""Figures that a timeline was made with come back out of it, and predict it; a comparison finds what was changed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megakernel.errors import TargetError, TimelineError
from megakernel.report.compare import CONFIDENCE, Comparison, compare
from megakernel.report.fit import calibrate, predict
from megakernel.report.rebuild import schedule_of
from megakernel.report.steps import steps_of
from megakernel.scheduler.calibration import Calibration, operator_name
from megakernel.scheduler.schedule import Schedule
from megakernel.scheduler.simulate import simulate
from megakernel.target import TARGETS, Target
from megakernel.timeline import Timeline
from tests.fake_timeline import split, timeline_of
from tests.report.test_analysis import chain, layers

REAL = TARGETS["cpu-avx2"].with_workers(3)  # `calibrate` looks a target up by its name
MADE = Calibration(stream_gbps=6.0, hop_us=0.7, task_us=0.4, step_us=3.0)


def recorded(steps: int = 8, **changed: Any) -> Timeline:
    return timeline_of(layers(REAL), REAL, steps=steps, calibration=lambda _s: replace(MADE, **changed))


def noisy(seed: int, steps: int = 40, **changed: Any) -> Timeline:
    """Each operator of each step takes 0.9 to 1.1 times as long."""
    made = layers(REAL)
    rng = random.Random(seed)

    def figures(_step: int) -> Calibration:
        scale = {n.name: rng.uniform(0.9, 1.1) * changed.get("scale", {}).get(n.name, 1.0) for n in made.nodes}
        return replace(MADE, task_scale=scale, hop_us=changed.get("hop_us", MADE.hop_us))

    return timeline_of(made, REAL, steps=steps, calibration=figures)


# ---------------------------------------------------------------------------------------------- calibrate
def test_the_figures_that_it_was_made_with_come_back() -> None:
    c = calibrate(recorded())
    assert c.hop_us == pytest.approx(0.7, abs=1e-3) and c.step_us == pytest.approx(3.0, abs=1e-3)
    assert c.target == "cpu-avx2" and c.task_us == pytest.approx(0.0, abs=1e-3)  # it is in each operator's own time
    made = simulate(layers(REAL), REAL, 0, c).makespan_us
    assert made == pytest.approx(simulate(layers(REAL), REAL, 0, MADE).makespan_us, rel=0.01)


def test_a_prediction_is_of_steps_that_nothing_was_fitted_to() -> None:
    p = predict(recorded())
    assert p.steps == 4 and abs(p.error) < 0.01
    assert abs(p.target_us / p.measured_us - 1) > 0.3  # the target's own figures are far off here
    assert sum(o.measured_us for o in p.operators) < p.measured_us
    assert max(abs(o.difference_us) for o in p.operators) < 0.01 * p.measured_us


def test_a_prediction_of_noisy_steps_is_within_a_tenth() -> None:
    assert abs(predict(noisy(3)).error) < 0.1


def test_figures_of_one_recording_predict_another() -> None:
    figures = calibrate(recorded())
    p = predict(recorded(hop_us=20.0), figures)
    assert p.steps == 8 and p.error < -0.05  # they do not know of its slower hops
    assert abs(predict(recorded(), figures).error) < 0.01


def test_the_operator_that_differs_most_comes_first() -> None:
    scale = {n.name: 1.0 for n in layers(REAL).nodes}
    slow = recorded(task_scale=scale | {"layer 0 gate_up": 3.0})
    assert predict(slow, calibrate(recorded())).operators[0].operator == "layer 0 gate_up"


def test_a_calibration_of_split_roles_predicts_too() -> None:
    p = predict(split(recorded()))
    assert abs(p.error) < 0.01


def test_the_schedule_of_a_timeline_is_the_one_that_ran() -> None:
    line = recorded()
    made, again = layers(REAL), schedule_of(line, steps_of(line)[0])
    assert [[(e.node, e.first, e.count) for e in q] for q in again.queues] == [
        [(e.node, e.first, e.count) for e in q] for q in made.queues
    ]
    assert simulate(again, REAL, 0, MADE).makespan_us == pytest.approx(simulate(made, REAL, 0, MADE).makespan_us)


@pytest.mark.parametrize(("steps", "words"), [(0, "at least 4"), (3, "at least 4")])
def test_too_few_steps_are_an_error(steps: int, words: str) -> None:
    line = recorded()
    kept = [s.number for s in steps_of(line)[:steps]]
    few = replace(line, events=line.events[[int(s) in kept for s in line.events["step"]]])
    with pytest.raises(TimelineError, match=words):
        predict(few)
    if not steps:
        with pytest.raises(TimelineError, match="no complete step"):
            calibrate(few)


# ---------------------------------------------------------------------------------------------- the file
def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    c = calibrate(recorded())
    assert Calibration.load(c.save(tmp_path / "c.json")) == c
    c.check_target("cpu-avx2")
    with pytest.raises(TargetError, match="measured on cpu-avx2"):
        c.check_target("sm_90a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "x"}, "no calibration of version 1"), ({"schema": 2}, "no calibration"), ({"more": 1}, "more"),
        ({"stream_gbps": 0}, "stream_gbps"), ({"hop_us": -1}, "hop_us"), ({"task_scale": {"a": -1}}, "task_scale"),
        ({"step_us": None}, "step_us"), ({"task_us": "fast"}, "task_us"), ({"hop_us": True}, "hop_us"),
    ],
)  # fmt: skip
def test_a_bad_calibration_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(json.loads(MADE.to_json()) | change))
    with pytest.raises(TargetError, match=words):
        Calibration.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(TargetError, match="calibrat"):
        Calibration.load(path)
    with pytest.raises(TargetError, match="cannot read"):
        Calibration.load(tmp_path / "none.json")


def test_names_without_their_layer() -> None:
    assert operator_name("layers.3.glu", 3) == "glu" and operator_name("layers.3.glu", 4) == "layers.3.glu"
    assert operator_name("logits", -1) == "logits"


# ---------------------------------------------------------------------------------------------- compare
def changed(c: Comparison, kind: str) -> set[str]:
    return {x.name for x in c.changes if x.kind == kind and x.changed}


def test_a_recording_and_itself_do_not_differ() -> None:
    c = compare(noisy(1), noisy(1))
    assert not [x for x in c.changes if x.changed] and c.steps == (40, 40) and c.notes == ()
    assert {x.difference_us for x in c.changes} == {0.0}


def test_noise_alone_is_no_change() -> None:
    """99 % intervals of some 20 quantities in 3 comparisons: one may leave 0 out by chance."""
    wrong = [x.name for seed in range(3) for x in compare(noisy(seed), noisy(seed + 100)).changes if x.changed]
    assert len(wrong) <= 2 and CONFIDENCE == 0.99


def test_a_slower_operator_is_found() -> None:
    c = compare(noisy(1), noisy(2, scale={"layer 1 gate_up": 1.3}))
    assert "layer 1 gate_up" in changed(c, "operator") and len(changed(c, "operator")) <= 2
    assert changed(c, "step") == {"step"} and changed(c, "worker") == {"worker 0", "worker 1", "worker 2"}
    (found,) = (x for x in c.changes if x.name == "layer 1 gate_up")
    assert found.low is not None and found.high is not None and found.difference_us is not None
    assert 0 < found.low < found.difference_us < found.high


def test_a_slower_hop_is_found() -> None:
    c = compare(noisy(1), noisy(2, hop_us=12.0))
    assert "counter" in changed(c, "hop") and changed(c, "step") == {"step"}
    (found,) = (x for x in c.changes if x.name == "counter")
    assert found.a_us == pytest.approx(0.7) and found.b_us == pytest.approx(12.0)


def test_a_comparison_is_the_same_each_time() -> None:
    assert compare(noisy(1), noisy(2)) == compare(noisy(1), noisy(2))
    said = json.loads(compare(noisy(1), noisy(2)).to_json())
    assert all({"difference_us", "changed", "low", "high"} <= row.keys() for row in said["changes"])


def test_few_steps_give_no_verdict() -> None:
    c = compare(noisy(1, steps=5), noisy(2))
    assert all(x.low is None and not x.changed for x in c.changes)
    assert any("A has 5 steps" in note for note in c.notes)
    alone = compare(noisy(1, steps=1), noisy(2))  # no step follows another, so there is no hop of a header
    assert not [x.name for x in alone.changes if x.changed] and any(x.a_us is None for x in alone.changes)


def test_what_else_differs_is_said() -> None:
    other = timeline_of(chain(), _two(), steps=9, name="other")
    c = compare(noisy(1), other)
    assert {n.split(":")[0] for n in c.notes} >= {"program", "workers", "nodes"}
    assert any(x.name == "make" and x.a_us is None and x.changed for x in c.changes)
    empty = replace(other, events=other.events[:0])
    with pytest.raises(TimelineError, match="B has no complete step"):
        compare(noisy(1), empty)


def _two() -> Target:
    return TARGETS["cpu-avx2"].with_workers(2)


def test_fakes_have_the_workers_they_claim() -> None:
    made: Schedule = layers(REAL)
    assert made.workers == 3 == recorded().meta.workers
