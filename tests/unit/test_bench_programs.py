"""The programs of bench/ say in one sentence what they lack and end with 2."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from bench import ending
from megakernel.device.cuda import CudaDevice
from megakernel.devices import list_devices
from megakernel.errors import DeviceUnavailable, InvalidRequest

pytest.importorskip("torch")
GPUS = sum(isinstance(d, CudaDevice) and d.availability().usable for d in list_devices())
NO_GPU = [
    "gpu --shape llama-3.2-1b", "batch --shape llama-3.2-1b", "device_session check", "device_session time qwen3-0.6b",
    "device_session models qwen3-0.6b", "models qwen3-0.6b", "timeline cuda llama-3.2-1b 32 timeline.json",
]  # fmt: skip
NO_TWO_GPUS = ["tp", "tp --shape llama-3.1-70b", "hop", "tp_torch llama-3.1-8b 2 512 100 store 0"]
WRONG = [
    ("device_session", "required: what"), ("device_session time qwen3-0.6b x", "invalid int value: 'x'"),
    *((f"batch --device cpu --shape smollm2-135m {options}", words) for options, words in (
        ("--batch --prompt", "--batch, --prompt, --beside: expected a number for one"),
        ("--context -1", "--context: expected a number of at least 0"), ("--rows 0", "--rows: expected a number"),
        ("--streams 0", "--streams: expected a number of at least 1, got 0"),
        ("--tunable lead", "tunable: expected NAME=NUMBER"), ("--tunable x=1", "got 'x=1'"),
    )),
    ("device_session check in_flight=x", "tunable: expected NAME=NUMBER"), ("device_session check x=1", "got 'x=1'"),
    ("gpu --json /nowhere/x", "--json /nowhere/x: expected a file in a folder that can be written"),
    ("gpu --plot /", "--plot /: expected a file in a folder"),
    ("device_session check tiny", "unknown tiny; known: tiny-llama, tiny-qwen3"), ("timeline", "required: device"),
    ("tp_torch", "required: shape, world"), ("llama_cpp", "required: file, threads, context"),
    ("gpu --shape nothing", "no published shape 'nothing'"),
    ("gpu --against nothing", "unknown nothing; known: megakernel, graph"),
    ("task nothing", "no task declares an operator 'nothing'"), ("cpu --model nothing", "there is no model 'nothing'"),
    ("kv_types nothing", "there is no model 'nothing'"),
]  # fmt: skip


def said(line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """What `python -m bench.LINE` writes to standard error. It ends with 2."""
    name, *words = line.split()
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.delitem(sys.modules, f"bench.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"bench.{name}", run_name="__main__")
    error = capfd.readouterr().err
    assert ended.value.code == ending.LACKING, error
    assert "Traceback" not in error
    return error


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
@pytest.mark.parametrize("line", [*NO_GPU, "tp --one-gpu"])
def test_without_a_gpu(
    line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = said(line, monkeypatch, capfd).splitlines()
    assert text.startswith("error: ") and "NVIDIA" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(GPUS > 1, reason="there are two GPUs")
@pytest.mark.parametrize("line", NO_TWO_GPUS)
def test_without_two_gpus(line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (text,) = said(line, monkeypatch, capfd).splitlines()
    assert f"expected 2 NVIDIA GPUs, got {GPUS}" in text


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_wrong_usage(line: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert words in said(line, monkeypatch, capfd)


def test_how_programs_end(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        raise InvalidRequest("a b c")

    monkeypatch.delenv("MEGAKERNEL_DEBUG", raising=False)
    ending.run(lambda: None)
    with pytest.raises(SystemExit, match="130"):
        ending.run(stop)
    with pytest.raises(SystemExit, match="2"):
        ending.run(fail)
    assert capfd.readouterr().err == "stopped\nerror: a b c\n"
    monkeypatch.setenv("MEGAKERNEL_DEBUG", "1")
    with pytest.raises(InvalidRequest):
        ending.run(fail)
    with pytest.raises(DeviceUnavailable, match=rf"^x: expected 99 NVIDIA GPUs, got {GPUS}.*; y$"):
        ending.nvidia_gpus(99, "x", "y")
