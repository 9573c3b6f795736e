"""The commands over timelines: what they print, keep, and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megakernel import cli
from megakernel.report.commands import names_of
from megakernel.scheduler.calibration import Calibration
from tests.report.test_fit import noisy, recorded


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "160"})


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded().save(tmp_path_factory.mktemp("trace") / "timeline.json")


def test_calibrate_shows_and_keeps_the_figures(trace: Path, tmp_path: Path) -> None:
    kept = tmp_path / "c.json"
    result = run("calibrate", trace, "-o", kept)
    assert result.exit_code == 0, result.output
    assert "measured, median of 4 steps" in result.stdout and "fitted to every other step" in result.stdout
    assert Calibration.load(kept).hop_us == pytest.approx(0.7, abs=1e-3)
    (said,) = lines(run("calibrate", trace, "--json"))
    assert said["calibration"]["hop_us"] == pytest.approx(0.7, abs=1e-3) and said["saved"] is None
    assert abs(said["prediction"]["error"]) < 0.01 and said["prediction"]["operators"]


def test_figures_of_one_trace_are_checked_against_another(trace: Path, tmp_path: Path) -> None:
    kept = tmp_path / "c.json"
    run("calibrate", trace, "-o", kept)
    slower = recorded(hop_us=20.0).save(tmp_path / "slower.json")
    (said,) = lines(run("calibrate", slower, "--check", kept, "--json"))
    assert said["calibration"] is None and said["prediction"]["error"] < -0.05


def test_schedule_uses_a_calibration(trace: Path, tmp_path: Path) -> None:
    kept = tmp_path / "c.json"
    plain = lines(run("schedule", "smollm2-135m", "--target", "cpu-avx2", "--workers", "2", "--json"))[-1]
    Calibration(target="cpu-avx2", stream_gbps=40.0, source="a test").save(kept)
    arguments = ("schedule", "smollm2-135m", "--workers", "2", "--calibration", kept, "--json")
    fast = lines(run(*arguments, "--target", "cpu-avx2"))[-1]
    assert fast["makespan_us"] < 0.6 * plain["makespan_us"] and fast["figures"] == "a test"
    refused = run(*arguments, "--target", "cpu-avx512")
    assert refused.exit_code == 1 and "measured on cpu-avx2 (a test), not on cpu-avx512" in refused.stderr


def test_compare_prints_what_changed(tmp_path: Path) -> None:
    a = noisy(1).save(tmp_path / "a.json")
    b = noisy(2, scale={"layer 1 gate_up": 1.3}).save(tmp_path / "b.json")
    result = run("profile", "--compare", a, b)
    assert result.exit_code == 0, result.output
    assert "medians of 40 and 40 steps" in result.stdout and "99% interval" in result.stdout
    row = next(line for line in result.stdout.splitlines() if "layer 1 gate_up" in line)
    assert "yes" in row and "+" in row
    (said,) = lines(run("profile", "--compare", a, b, "--json"))
    assert {c["name"] for c in said["changes"] if c["kind"] == "operator" and c["changed"]} >= {"layer 1 gate_up"}


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ("x/a.json", "x/b.json", ("a.json", "b.json")),
        ("x/timeline.json", "y/timeline.json", ("x/timeline.json", "y/timeline.json")),
        ("/1/p/timeline.json", "/2/p/timeline.json", ("1/p/timeline.json", "2/p/timeline.json")),
        ("timeline.json", "/old/timeline.json", ("timeline.json", "old/timeline.json")),
        ("t.json", "t.json", ("t.json (A)", "t.json (B)")),
    ],
)
def test_compared_files_are_told_apart(a: str, b: str, names: tuple[str, str]) -> None:
    assert names_of(Path(a), Path(b)) == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"), ("{}", "not a timeline"), ('{"format": "megakernel timeline", "schema": 0}', "version 0"),
        ("cut", "truncated"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_timeline_is_refused(trace: Path, tmp_path: Path, text: str, words: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(trace.read_text()[:-1000] if text == "cut" else text)
    for arguments in (("calibrate", bad), ("profile", "--compare", trace, bad), ("profile", "--compare", bad, trace)):
        result = run(*arguments)
        assert result.exit_code == 1 and words in result.stderr and "Traceback" not in result.output


def test_what_does_not_fit_together_is_refused(trace: Path, tmp_path: Path) -> None:
    for arguments in (("profile",), ("profile", "demo", "--compare", trace, trace)):
        result = run(*arguments)
        assert result.exit_code == 1 and "either MODEL or --compare" in result.stderr
    assert run("profile", "--compare", trace).exit_code == 2
    nowhere = run("calibrate", trace, "-o", tmp_path / "none" / "c.json")
    assert nowhere.exit_code == 1 and "cannot write the calibration" in nowhere.stderr
    assert run("calibrate", trace, "--check", tmp_path / "none.json").exit_code == 1
