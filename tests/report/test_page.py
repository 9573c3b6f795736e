"""The page: written, and opened and clicked in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megakernel.builder.build import make_plan
from megakernel.errors import TimelineError
from megakernel.opening import planned_target
from megakernel.origin import open_origin
from megakernel.report import write_html
from megakernel.report.analysis import analyse
from megakernel.report.page import html, payload
from megakernel.report.steps import steps_of
from megakernel.scheduler.calibration import Calibration
from megakernel.settings import read_settings
from megakernel.tasks.record import Role
from megakernel.timeline import Timeline, TimelineFault
from tests.fake_timeline import FIRST_STEP, cut, split, timeline_of
from tests.report.browser import opened, started
from tests.report.test_analysis import PLAIN, chain
from tests.report.test_fit import noisy
from tests.report.test_operators import recorded


@pytest.fixture(scope="module")
def smol() -> Timeline:
    """Five simulated steps of SmolLM2's shapes on two workers."""
    settings = read_settings()
    target = planned_target("cpu-avx2", None, 2, settings)
    config = open_origin("smollm2-135m", dtype="bf16", cache=settings.cache).config
    made = make_plan(config, target, max_slots=1, max_context=128).schedule
    return timeline_of(
        made, target, 64, steps=5, name="SmolLM2-135M", data_share=0.1, calibration=lambda _s: Calibration(step_us=1.0)
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as made:
        yield made


def faulty() -> Timeline:
    line = recorded()
    fault = TimelineFault(
        "WAIT_BUDGET", "layer 1 down", "fake", 3, 1, "WORKER", FIRST_STEP + 5, "node layer 1 down hangs"
    )
    events = cut(line, steps_of(line)[-1].begin + steps_of(line)[-1].length // 2)
    return replace(line, events=events, meta=replace(line.meta, fault=fault))


# ---------------------------------------------------------------------------------------------- the file
def test_the_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    path = write_html(recorded(), tmp_path / "report.html")
    text = path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert "default-src 'none'" in text and "@@" not in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", text) and "@import" not in text and "url(" not in text
    assert not re.findall(r"\b(?:fetch|XMLHttpRequest|WebSocket|importScripts)\b", text)


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="cannot write the report"):
        write_html(recorded(), tmp_path / "none" / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_what_the_page_is_given_is_what_the_analysis_found() -> None:
    line = recorded()
    a, said = analyse(line), payload(line)["analysis"]
    json.loads(json.dumps(said, allow_nan=False))
    b = said["breakdown"]
    assert sum(s["work"] + s["data"] + s["others"] for s in b["operators"]) + b["header"] + b["idle"] == pytest.approx(
        b["total"]
    )
    assert b["total"] == b["rows"] * b["length"]
    assert sum(ns for _, ns in said["path"]["by"]) == a.step.length
    assert sum(t["hop"] + t["data"] + t["work"] for t in said["path"]["tasks"]) == a.step.length
    came = [t["from"] for t in said["path"]["tasks"] if t["hop"] == 500]
    assert came and None not in came  # the hop that was simulated, and who published


def test_names_cannot_end_the_script_that_holds_them() -> None:
    line = recorded()
    evil = "</script><script>alert(1)</script><!--"
    made = replace(line, meta=replace(line.meta, program=evil))
    assert html(made).count("<script") == html(line).count("<script") and evil not in html(made)


@pytest.mark.parametrize(
    "make", [lambda: replace(recorded(), events=recorded().events[:0]), faulty, lambda: split(recorded())]
)
def test_every_timeline_has_a_page(make: Any) -> None:
    assert payload(make())["timeline"]["events"]["count"] == len(make().tasks)
    assert (("steps", "none") in payload(make())["facts"]) == (not len(make().events))


def test_lost_events_and_a_ceiling_that_is_too_low_are_said() -> None:
    line = recorded()
    made = payload(replace(line, meta=replace(line.meta, overflow=(0, 5, 0, 0))), ceiling_gbps=0.5)
    assert any("worker 1: 5" in n for n in made["notes"]) and any("faster than the ceiling" in n for n in made["notes"])
    assert payload(line)["notes"] == []


def test_workers_that_had_to_wait_for_a_core_are_said() -> None:
    made = payload(noisy(1, steps=8, hop_us=12.0))
    assert any("A hop by counter took 12.0 us at the median, where 0.3 us are usual" in n for n in made["notes"])
    assert payload(noisy(1, steps=8, hop_us=0.7))["notes"] == []


def test_the_measured_ceiling_is_in_the_timeline() -> None:
    """A page that is written again from the file has the same ceiling."""
    line = recorded()
    measured = replace(line, meta=replace(line.meta, ceiling_gbps=123.0))
    again = Timeline.from_json(measured.to_json())
    assert (
        payload(again)["analysis"]["rates"]["ceiling"] == 123.0
        and payload(line)["analysis"]["rates"]["ceiling"] == 20.0
    )
    older = json.loads(line.to_json())
    del older["meta"]["ceiling_gbps"]
    assert Timeline.from_json(json.dumps(older)).meta == line.meta


# ---------------------------------------------------------------------------------------------- in a browser
def canvas_point(page: Any, index: int) -> dict[str, float]:
    return dict(page.evaluate(f"picture.place({index})"))


def find(page: Any, node: str, worker: int, step: int) -> int:
    return int(
        page.evaluate(
            """([node, worker, step]) => { const e = picture.events, n = data.timeline.nodes; let found = -1;
            for (let i = 0; i < picture.count; i++)
              if (n[e.node[i]][0] === node && e.worker[i] === worker && e.step[i] === step) found = i;
            return found; }""",
            [node, worker, step],
        )
    )


def click(page: Any, index: int) -> str:
    """Click the record on the canvas, as a person would, and what is said of it."""
    page.locator("#canvas").click(position=canvas_point(page, index))
    return str(page.inner_text("#selected"))


def test_a_record_is_clicked_and_its_waits_followed(browser: Any, smol: Timeline, tmp_path: Path) -> None:
    path = write_html(smol, tmp_path / "report.html")
    with opened(browser, path) as page:
        assert page.inner_text("h1") == "SmolLM2-135M"
        step = page.evaluate("data.timeline.typical")
        index = find(page, "layers.3.glu", 1, step)
        page.evaluate(f"picture.show(picture.events.start[{index}] - 2e5, picture.events.start[{index}] + 4e5)")
        said = click(page, index)
        assert "layers.3.glu 48+48" in said and "48 to 95 of 96" in said and f"step {step}" in said
        assert "Waited for (2)" in said and "Signals (2)" in said
        assert "layers.3.attention_residual 0+9" in said and "layers.3.mlp_residual 9+9" in said
        event = smol.tasks[(smol.tasks["step"] == step) & (smol.tasks["worker"] == 1)][22]
        assert smol.nodes[event["node"]].name == "layers.3.glu"
        worked = (int(event["end"]) - int(event["first_data"])) / 1e3
        assert f"{worked:,.2f} us" in said or f"{worked:,.1f} us" in said
        page.click("#selected a.record >> nth=0")  # a producer
        assert page.inner_text("#selected h3 >> nth=0").startswith("layers.3.attention_residual")
        page.focus("#canvas")
        page.keyboard.press(".")
        assert page.inner_text("#selected h3 >> nth=0").startswith("layers.3.glu")


def test_the_picture_zooms_moves_and_filters(browser: Any, smol: Timeline, tmp_path: Path) -> None:
    path = write_html(smol, tmp_path / "report.html")
    with opened(browser, path) as page:

        def span() -> tuple[float, float]:
            return tuple(page.evaluate("[picture.view.from, picture.view.to]"))

        def pixels() -> str:
            return str(page.evaluate("document.getElementById('canvas').toDataURL()"))

        length = next(s.length for s in steps_of(smol) if s.number == page.evaluate("data.timeline.typical"))
        before = span()
        assert before[1] - before[0] == pytest.approx(length * 1.04, rel=0.01)
        box = page.locator("#canvas").bounding_box()
        page.mouse.move(box["x"] + 600, box["y"] + 50)
        page.mouse.wheel(0, -300)
        near = span()
        assert before[0] < near[0] < near[1] < before[1]
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 50, steps=4)
        page.mouse.up()
        assert span()[0] > near[0] and page.inner_text("#selected") == ""  # a drag is no click
        page.click("#zoom-all")
        assert span()[0] == 0
        plain = pixels()
        for change in (lambda: page.check("#show-path"), lambda: page.fill("#find", "glu")):
            change()
            assert pixels() != plain
        page.uncheck("#show-path")
        page.fill("#find", "")
        assert pixels() == plain
        page.click("#legend button >> nth=5")
        assert pixels() != plain
        page.select_option("#step", str(FIRST_STEP))
        assert span()[0] < steps_of(smol)[0].end


def test_all_figures_are_on_the_page(browser: Any, smol: Timeline, tmp_path: Path) -> None:
    a = analyse(smol)
    with opened(browser, write_html(smol, tmp_path / "report.html")) as page:
        text = page.inner_text("main")
        for head in (
            "Where a step's time goes", "Bytes a second", "Critical path", "Hop latencies", "Imbalance", "Slack",
            "Queue look-ahead", "Roofline", "Simulated and measured",
        ):  # fmt: skip
            assert head in text
        assert f"{a.step.length / 1e3:,.1f} us" in page.inner_text("#figures")
        for place in ("by-operator", "by-layer", "rates", "path-by", "what-if", "hops", "roofline"):
            box = page.locator(f"#{place} svg >> nth=0").bounding_box()
            assert box["width"] > 200 and box["height"] > 40, place
        assert page.locator("#path-by rect").count() == len(a.path_by)
        assert page.locator("#slack tbody tr").count() == len(smol.nodes)
        assert a.prediction and f"{a.prediction.measured_us:,.1f}" in page.inner_text("#prediction")
        page.click("details summary")
        page.click("#path-tasks a.record >> nth=0")
        assert "critical path\tyes" in page.inner_text("#selected")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_recording_that_a_fault_ended_opens_at_the_fault(browser: Any, tmp_path: Path) -> None:
    line = faulty()
    with opened(browser, write_html(line, tmp_path / "report.html")) as page:
        assert "node layer 1 down hangs" in page.inner_text("#fault")
        shown = page.evaluate("document.getElementById('step').value")
        assert int(shown) == FIRST_STEP + 5
        index = page.evaluate(
            """(() => { let i = picture.count - 1, cut = data.timeline.flags.cut;
            while (i >= 0 && !(picture.events.flags[i] & cut)) i--;
            return i; })()"""
        )
        assert index >= 0
        page.evaluate(f"picture.select({index}, true)")
        assert "never: cut by the fault" in page.inner_text("#selected")


def test_a_page_without_a_whole_step_shows_the_timeline_alone(browser: Any, tmp_path: Path) -> None:
    line = timeline_of(chain(), PLAIN, steps=1)
    line = replace(line, events=cut(line, 2000))
    with opened(browser, write_html(line, tmp_path / "report.html")) as page:
        assert "no complete step" in page.inner_text("#notes") and page.locator("#figures").count() == 0
        assert "make" in click(page, find(page, "make", 0, FIRST_STEP))


def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    line = recorded()
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    nodes = tuple(replace(n, name=f"{evil}{i}", operator=evil) for i, n in enumerate(line.nodes))
    made = replace(line, nodes=nodes, meta=replace(line.meta, program=evil, model=evil))
    with opened(browser, write_html(made, tmp_path / "report.html")) as page:
        assert page.inner_text("h1") == evil and evil in page.inner_text("#by-operator")
        assert evil in click(page, find(page, f"{evil}0", 0, page.evaluate("data.timeline.typical")))


def test_three_roles_have_rows_and_a_lead(browser: Any, tmp_path: Path) -> None:
    line = split(recorded())
    with opened(browser, write_html(line, tmp_path / "report.html")) as page:
        assert page.evaluate("data.timeline.rows.length") == 12
        assert "had read ahead" in page.inner_text("#lookahead")
        count = page.evaluate(
            """(() => { const e = picture.events, t = data.timeline, out = {};
            for (let i = 0; i < picture.count; i++) {
              if (e.step[i] !== t.typical || e.worker[i] || t.nodes[e.node[i]][0] !== "layer 1 qkv") continue;
              const waits = picture.neighbours(i, false).map((n) => e.role[n[0]]);
              out[e.role[i]] = [waits, picture.neighbours(i, true).length];
            }
            return out; })()"""
        )
        assert count[str(int(Role.PRODUCER))] == [[], 0]
        assert count[str(int(Role.CONSUMER))] == [[Role.STORER] * 4, 4]  # all of four workers, each once
        assert count[str(int(Role.STORER))] == [[], 4]


def test_the_watch_over_a_page_can_go_red(browser: Any, tmp_path: Path) -> None:
    asks, fails = tmp_path / "asks.html", tmp_path / "fails.html"
    asks.write_text('<img src="http://127.0.0.1:9/x.png" onerror="">')
    fails.write_text("<script>nothing()</script>")
    for path, words in ((asks, "asked for more"), (fails, "nothing is not defined")):
        with pytest.raises(AssertionError, match=words), opened(browser, path) as page:
            page.wait_for_load_state()
