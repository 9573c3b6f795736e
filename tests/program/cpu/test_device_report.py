"""`megakernel report` on the processor: every part of the file, and what is in it when a part fails."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megakernel import cli, device_report
from megakernel.device.cpu import CpuDevice
from megakernel.device.device import Availability
from megakernel.devices import open_device
from megakernel.errors import DeviceFault, FaultReport, InvalidRequest
from megakernel.timeline import Timeline, TimelineFault
from tests.program.cpu.conftest import write_checkpoint

pytestmark = pytest.mark.timeout(300)
TESTS = """<testsuites><testsuite>
<testcase classname="tests.a" name="good" time="1.5"/>
<testcase classname="tests.a" name="bad" time="0.5"><failure message="no">E assert 1 == 2</failure></testcase>
<testcase classname="tests.b" name="none" time="0"><skipped message="no GPU: none" type="pytest.skip"/></testcase>
</testsuite></testsuites>"""


def run(folder: Path, cache: Path, *more: str) -> tuple[Result, dict[str, Any]]:
    out = folder / "report.json"
    given = ["report", "-o", str(out), "--json", "--context", "8", "--tokens", "4", "--rounds", "1", *more]
    result = CliRunner().invoke(cli.app, given, env={"MEGAKERNEL_CACHE": str(cache), "MEGAKERNEL_WORKERS": "2"})
    return result, json.loads(out.read_text()) if out.exists() else {}


def test_a_whole_report(tiny: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(TESTS)
    (tmp_path / "timeline.json").write_text('{"events": []}')
    result, made = run(
        tmp_path, cache, "--model", str(tiny), "--tests", str(tmp_path / "tests.xml"), "--attach",
        str(tmp_path / "timeline.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert made["format"] == device_report.FORMAT and made["failed"] == []
    assert made["system"]["python"] and made["system"]["packages"]["numpy"]
    assert made["device"]["name"] == "cpu" and made["device"]["target"]["workers"] == 2
    assert {d["name"] for d in made["devices"]} >= {"cpu"}
    found = made["check"]
    assert found["largest relative error"] == 0.0 and found["same bits twice"] and found["same token"] == 1.0
    timed = made[f"time {tiny}"]
    (row,) = timed["measured"]
    assert row["context"] == 8 and row["us_per_token"] > 0 and row["launches_per_token"]
    assert timed["predicted"][0]["us_per_token"] > 0 and timed["predicted"][0]["figures"]
    recorded = made[f"timeline {tiny}"]
    assert recorded["context"] == 8 and recorded["summary"]["steps"] == device_report.RECORDED_STEPS
    timeline = Timeline.from_json(recorded["timeline"])
    assert timeline.meta.workers == 2 and len(timeline.events) > 20 and timeline.meta.fault is None
    assert made["tests"] == {
        "run": 3, "seconds": 2.0, "failed": {"tests.a::bad": "E assert 1 == 2"}, "skipped": {"no GPU: none": 1},
    }  # fmt: skip
    assert made["attached"] == [{"name": "timeline.json", "text": '{"events": []}'}]
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["tests"] == "3 run, 1 failed" and "us at 8" in line[f"time {tiny}"]
    assert line[f"timeline {tiny}"].startswith("2 steps of ") and line[f"timeline {tiny}"].endswith(" events")


@pytest.mark.slow
def test_a_report_of_two_devices(cache: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "even", num_attention_heads=8, num_key_value_heads=4, intermediate_size=192)
    result, made = run(tmp_path, cache, "--model", str(path), "--tp", "2", "--dtype", "f32")
    assert result.exit_code == 0, result.output
    found = made["check"]
    assert found["devices"] == 2 and found["largest relative error"] < 1e-2 and found["same bits twice"]
    assert made[f"time {path}"]["measured"][0]["us_per_token"] > 0
    timeline = Timeline.from_json(made[f"timeline {path}"]["timeline"])
    assert timeline.meta.workers == 2 * made["device"]["target"]["workers"] and timeline.meta.fault is None
    result, made = run(tmp_path / "even", cache, "--tp", "9")
    assert result.exit_code == 1 and "tp: expected an integer from 1 to 8, got 9" in result.output and not made


def test_the_commit_is_that_of_the_package_alone(tmp_path: Path) -> None:
    """Not of a repository around the folder that the package is installed in."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert device_report.commit(package) is None
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    assert device_report.commit(package) is None
    git("add", ".")
    git("commit", "-m", "second")
    made = device_report.commit(package)
    assert made is not None and re.fullmatch("[0-9a-f]{40}", made)
    (package / "__init__.py").write_text("changed")
    assert device_report.commit(package) == f"{made}-dirty"


def test_a_device_that_cannot_be_used_has_a_report_that_says_why(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests.xml").write_text(TESTS)
    why = Availability(False, "it has no clock")
    monkeypatch.setattr(CpuDevice, "availability", lambda _self: why)
    result, made = run(tmp_path, cache, "--tests", str(tmp_path / "tests.xml"))
    assert result.exit_code == 1 and made["failed"] == ["device"] and "check" not in made
    assert made["device"]["message"] == "device cpu: it has no clock" and made["tests"]["run"] == 3
    assert made["devices"][0]["what"] == "it has no clock" and made["system"]["python"]


def test_where_the_file_goes_is_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_report, "collect", lambda *_: pytest.fail("ran"))
    result = CliRunner().invoke(cli.app, ["report", "-o", "/proc/nowhere/report.json"])
    assert result.exit_code == 1 and "--output /proc/nowhere/report.json" in result.output


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--tokens", "1"], "--tokens 1: expected at least 2"),
        (["--tokens", "-4"], "--tokens -4: expected at least 2"),
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
        (["--context", "32", "--context", "0"], "--context 0: expected at least 1"),
        (["--dtype", "int3"], "--dtype int3: expected one of f32, bf16, f16"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(
    given: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_report, "collect", lambda *_: pytest.fail("ran"))
    result = CliRunner().invoke(cli.app, ["report", "-o", str(tmp_path / "new.json"), *given])
    assert result.exit_code == 1 and why in result.output and not (tmp_path / "new.json").exists()


def test_a_report_that_is_there_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_report, "collect", lambda *_: pytest.fail("ran"))
    (tmp_path / "old.json").write_text("precious")
    for path in (tmp_path / "old.json", tmp_path):
        result = CliRunner().invoke(cli.app, ["report", "-o", str(path)])
        assert result.exit_code == 1 and "exists; give a new file or remove it" in " ".join(result.output.split())
    assert (tmp_path / "old.json").read_text() == "precious"


def test_a_fault_in_a_recording_is_an_error_beside_its_timeline(
    tiny: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = device_report.profile.record

    def faulty(*given: Any) -> Timeline:
        made = whole(*given)
        fault = TimelineFault("wait budget", "qkv", "matmul", 3, 1, "worker", 7, "worker 1 waited in vain")
        return replace(made, meta=replace(made.meta, fault=fault))

    monkeypatch.setattr(device_report.profile, "record", faulty)
    monkeypatch.setenv("MEGAKERNEL_CACHE", str(cache))
    monkeypatch.setenv("MEGAKERNEL_WORKERS", "2")
    found = device_report._timeline(str(tiny), open_device("cpu"), device_report.Wanted("cpu", contexts=(8,)))
    assert (found["error"], found["message"]) == ("DeviceFault", "worker 1 waited in vain")
    assert Timeline.from_json(found["timeline"]).meta.fault is not None


def test_a_part_that_fails_is_in_the_file_and_the_others_too(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FaultReport("wait budget", "matmul", "layer 0 qkv", 3, 1, "worker", 7, 2, 3, 1, ("who",), "what")

    def broken(*_args: Any) -> Any:
        raise DeviceFault(fault)

    def odd(*_args: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(device_report, "check", broken)
    monkeypatch.setattr(device_report, "_predicted", odd)
    result, made = run(tmp_path, cache, "--model", str(tiny))
    assert result.exit_code == 1
    assert made["failed"] == ["check", f"time {tiny}"]
    assert made["check"]["error"] == "DeviceFault" and "counter 7" in made["check"]["message"]
    assert made[f"time {tiny}"]["error"] == "ZeroDivisionError" and "odd" in made[f"time {tiny}"]["where"][-1]
    assert made["device"]["name"] == "cpu" and made["tests"] is None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--tests .*: expected the file of pytest --junitxml"):
        device_report.read_tests(tmp_path / "none.xml")
    (tmp_path / "bad.xml").write_text("<testsuite>")
    with pytest.raises(InvalidRequest, match="--junitxml"):
        device_report.read_tests(tmp_path / "bad.xml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match=r"--attach .*: expected a text file"):
        device_report._attachment(tmp_path / "binary")
