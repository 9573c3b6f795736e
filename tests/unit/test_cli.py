"""The command line: help, JSON lines, errors and exit statuses. No compiler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from megakernel import bench as benchmarks
from megakernel import cli, show
from megakernel.errors import CheckpointError, MegakernelError
from tests.fake_device import FakeDevice, expected
from tests.unit.test_engine_llm import FakeLLM, letters_tokenizer, spelled

pytestmark = pytest.mark.timeout(120)
COMMANDS = (
    "devices", "build", "generate", "schedule", "source", "bench", "profile", "calibrate", "report",
    "fetch-demo",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def run(*arguments: str, env: dict[str, str] | None = None, text: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env=env, input=text)


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`LLM` in the command line is a FakeLLM; the returned dict has what it was asked for."""
    asked: dict[str, Any] = {}

    def make(model: str, **options: Any) -> FakeLLM:
        asked.update(options, model=model)
        return FakeLLM(FakeDevice(), None if model == "shape" else letters_tokenizer())

    monkeypatch.setattr(cli, "LLM", make)
    return asked


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(command: str) -> None:
    result = run(command, "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "--json" in result.stdout
    for parameter in get_command(cli.app).commands[command].params:
        assert parameter.name == "help" or len(getattr(parameter, "help", "").split()) > 2, parameter.name


def test_the_first_page_names_every_command() -> None:
    result = run("--help")
    assert all(command in result.stdout for command in COMMANDS)
    assert run().exit_code == 2


@pytest.mark.parametrize("arguments", [("nothing",), ("generate",), ("generate", "x", "y", "--top-k", "many")])
def test_wrong_usage_has_status_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


# ---------------------------------------------------------------------------------------------- generate
def test_generate_streams_text(fake: dict[str, Any]) -> None:
    result = run("generate", "some/model", "Ca", "--max-tokens", "5", "--dtype", "f32", "--workers", "3")
    assert result.exit_code == 0 and result.stdout == spelled(expected([2], 5)) + "\n"
    assert "5 tokens" in result.stderr and "1 launch" in result.stderr and "length" in result.stderr
    assert (fake["model"], fake["dtype"], fake["workers"], fake["max_slots"]) == ("some/model", "f32", 3, 1)


def test_generate_json_is_a_line_a_token_and_the_last_has_all(fake: dict[str, Any]) -> None:
    result = run("generate", "m", "Ca", "--max-tokens", "4", "--logprobs", "2", "--json")
    *tokens, last = lines(result)
    assert [t["token_id"] for t in tokens] == expected([2], 4) == last["token_ids"]
    assert "".join(t["text"] for t in tokens) == last["text"] == spelled(expected([2], 4))
    assert tokens[0]["logprob"] == -1.5 and tokens[0]["top"] == [[0, 0.0], [1, -1.0]]
    assert last["prompt_token_ids"] == [2] and last["finish_reason"] == "length"
    assert last["timings"]["total_s"] > 0 and last["launches"] == 1 and last["launches_per_token"] == 0.25


def test_generate_with_token_ids_and_no_text(fake: dict[str, Any]) -> None:
    result = run("generate", "shape", "--token-ids", "3, 4,5", "--max-tokens", "3")
    assert result.stdout.split() == [str(i) for i in expected([3, 4, 5], 3)]


def test_generate_reads_standard_input(fake: dict[str, Any]) -> None:
    assert run("generate", "m", "-", "--max-tokens", "2", text="Ca\n").stdout == spelled(expected([2], 2)) + "\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("x", "--temperature", "-1"), "InvalidRequest", "temperature: expected a number from 0 to 100, got -1.0"),
        (("x", "--token-ids", "1"), "InvalidRequest", "--token-ids"),
        (("--token-ids", "1,b"), "InvalidRequest", "expected integers"),
        (("--token-ids", "97"), "InvalidRequest", "from 0 to 96, got 97 at place 0"),
        (("--token-ids", ",".join(["1"] * 64)), "CapacityError", "fewer than 64 tokens"),
        (("",), "InvalidRequest", "at least one token"),
        (("x", "--chat"), "CheckpointError", "no chat template"),
        (("x", "--system", "y"), "InvalidRequest", "--system: expected --chat beside it"),
    ],
)
def test_a_bad_request_is_one_message_and_status_1(
    fake: dict[str, Any], arguments: tuple[str, ...], kind: str, words: str
) -> None:
    result = run("generate", "m", *arguments, "--json")
    assert result.exit_code == 1 and words in result.stderr and "Traceback" not in result.stderr
    assert lines(result)[-1]["error"] == kind and words in lines(result)[-1]["message"]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    cache = {"MEGAKERNEL_CACHE": str(tmp_path)}
    result = run("generate", "lama-3.2-1b", "hi", "--json", env=cache)
    assert result.exit_code == 1 and "llama-3.2-1b" in lines(result)[0]["message"]
    result = run("generate", str(tmp_path / "none"), "hi", env=cache)
    assert result.exit_code == 1 and "there is no such checkpoint" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bad_setting_is_reported(tmp_path: Path) -> None:
    result = run("fetch-demo", env={"MEGAKERNEL_DEBUG": "9"})
    assert result.exit_code == 1 and "MEGAKERNEL_DEBUG: expected an integer from 0 to 4" in result.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("build", str(tmp_path / "none"), env={"MEGAKERNEL_DEBUG": "1", "MEGAKERNEL_CACHE": str(tmp_path)})
    assert isinstance(result.exception, CheckpointError)


# ---------------------------------------------------------------------------------------------- without a device
def test_schedule_of_a_target_that_is_not_here() -> None:
    result = run("schedule", "smollm2-135m", "--target", "sm_90a", "--worker", "7", "--json")
    *entries, last = lines(result)
    assert result.exit_code == 0 and {e["worker"] for e in entries} == {7}
    assert {"node", "first", "count", "waits", "signal"} <= set(entries[0])
    assert last["target"] == "sm_90a" and 0 < last["floor_us"] < last["makespan_us"] and len(last["busy_us"]) == 132
    assert "queue of worker 1" in run("schedule", "smollm2-135m", "--target", "cpu-avx2", "--worker", "1").stdout
    wrong = run("schedule", "smollm2-135m", "--target", "cpu-avx2", "--worker", "2")
    assert wrong.exit_code == 1 and "--worker: expected 0 to 1, got 2" in wrong.stderr


def test_source_is_a_short_list_of_variants() -> None:
    result = run("source", "llama-3.2-1b", "--target", "cpu-generic")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) < 60
    assert "Matmul<MatmulConfig{" in result.stdout and "MEGAKERNEL_ENTRY" in result.stdout
    header = run("source", "llama-3.2-1b", "--target", "cpu-generic", "--header", "--json")
    assert "static_assert(sizeof(Record) == 128" in lines(header)[0]["source"]


@pytest.mark.parametrize("command", ["build", "schedule", "source"])
def test_a_target_and_a_device_of_another_kind(command: str) -> None:
    result = run(command, "smollm2-135m", "--target", "sm_90a", "--device", "cpu")
    assert result.exit_code == 1 and "target sm_90a is one of cuda, device cpu one of cpu" in result.stderr


def test_schedule_of_fewer_than_no_tokens() -> None:
    result = run("schedule", "smollm2-135m", "--target", "sm_90a", "--context", "-1")
    assert result.exit_code == 1 and "--context: expected 0 or more tokens, got -1" in result.stderr


def test_bench_prints_a_row_as_soon_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(_model: str, **_options: Any) -> Iterator[benchmarks.Row]:
        yield benchmarks.Row("megakernel", 32, "bf16", 9.0, 1e6 / 9, 8, 1.0, 0.0, 0.25, "abc")
        raise MegakernelError("the machine is gone")

    monkeypatch.setattr(benchmarks, "compare", rows)
    first, second = lines(run("bench", "m", "--json"))
    assert (first["context"], first["tokens_hash"], second["message"]) == (32, "abc", "the machine is gone")


def test_an_unknown_target_names_the_known_ones() -> None:
    result = run("schedule", "smollm2-135m", "--target", "sm_1")
    assert result.exit_code == 1 and "sm_90a" in result.stderr


# ---------------------------------------------------------------------------------------------- as a process
SLOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start its background jobs with it ignored
from megakernel import cli
from tests.fake_device import FakeDevice
from tests.unit.test_engine_llm import FakeLLM
cli.LLM = lambda model, **options: FakeLLM(FakeDevice(step_s=0.01), max_context=4000)
sys.argv = ["megakernel", "generate", "m", "--token-ids", "1", "--max-tokens", "3000"]
cli.main()
"""


def test_ctrl_c_ends_a_stream_cleanly() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.read(4)
    started = time.perf_counter()
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert child.returncode == show.INTERRUPTED and said.strip() == "stopped"
    assert time.perf_counter() - started < 10


def test_a_reader_that_goes_away() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.read(4)
    child.stdout.close()
    assert child.wait(timeout=30) == 1
    assert child.stderr is not None and "Traceback" not in child.stderr.read()


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megakernel", "--help"], cwd=ROOT, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0 and "generate" in done.stdout


def test_build_writes_the_report_of_the_code_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reporting(FakeDevice):
        def code_report(self, binary: Path) -> dict[str, Any]:
            return {"vgprs": 7, "occupancy": {"workgroups": 1}}

    device = Reporting()
    monkeypatch.setattr(cli, "target_and_compiler", lambda *_given: (device, device.target))
    given = ["build", "smollm2-135m", "-o", str(tmp_path / "program")]
    env = {"MEGAKERNEL_CACHE": str(tmp_path / "cache")}
    shown = run(*given, env=env)
    assert shown.exit_code == 0 and "code object" in shown.stdout and "vgprs" in shown.stdout
    written = json.loads((tmp_path / "program" / "report.json").read_text())
    assert written == {"vgprs": 7, "occupancy": {"workgroups": 1}}
    given[-1] = str(tmp_path / "again")
    assert lines(run(*given, "--json", env=env))[-1]["code"] == written


def test_schedule_of_several_devices() -> None:
    """A prediction, and where the figures of the links come from."""
    one, eight = (
        lines(run("schedule", "qwen3-0.6b", "--tp", tp, "--target", "sm_90a", "--workers", "8", "--json"))[-1]
        for tp in ("1", "8")
    )
    assert eight["tp"] == 8 and eight["exchanges"] == 57 and "tp" not in one
    assert "latency measured on two H200" in eight["link_figures"]
    assert eight["floor_us"] < 0.2 * one["floor_us"] and eight["share_of_hops"] > one["share_of_hops"]


@pytest.mark.parametrize(("tp", "words"), [("5", "1, 2, 4, 8"), ("9", "from 1 to 8, got 9")])
def test_a_number_of_devices_that_does_not_fit(tp: str, words: str) -> None:
    done = run("schedule", "qwen3-0.6b", "--tp", tp, "--target", "sm_90a", "--json")
    assert done.exit_code == 1 and words in lines(done)[-1]["message"]
