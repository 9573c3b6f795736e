"""The GPU benchmark, on the processor with a tiny model: the programs run, the figures are what they say."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

from bench.device_session import TINY
from bench.gpu import SHAPES, _rows, compare, peers, plot
from bench.gpu_programs import Steps
from bench.tp import said_by
from megakernel import bench as decoding
from megakernel.architectures import find_model, shape_config, shape_names
from megakernel.builder.shard import shard
from megakernel.errors import InvalidRequest, MissingExtra


def test_the_programs_run_and_agree_with_themselves(tmp_path: Path) -> None:
    rows = list(
        compare(TINY["tiny-llama"], "llama-3.2-1b", [32, 70], ["graph", "read"], device="cpu", steps=6, rounds=2)
    )
    assert [(r.program, r.context) for r in rows] == [(p, c) for c in (32, 70) for p in ("megakernel", "graph", "read")]
    assert [(r.steps, r.note) for r in rows] == [(12, "")] * 6
    ours = [r for r in rows if r.program == "megakernel"]
    assert all(0 < r.launches_per_token < 0.1 for r in ours) and ours[0].bytes_per_step < ours[1].bytes_per_step
    plot(rows, tmp_path / "latency.svg")
    assert (tmp_path / "latency-llama-3.2-1b.svg").read_text().count("<svg") == 1


def test_the_floor_is_the_steps_bytes_at_the_rate_of_the_read() -> None:
    runs = {
        "megakernel": [Steps((10.0, 12.0, 14.0), (1, 2)), Steps((12.0, 12.0), (1, 3))],
        "read": [Steps((4.0, 5.0, 6.0), (), None, 1000)],
    }
    ours, read = _rows("x", 32, 2000, runs)
    assert (ours.us, ours.floor_us, ours.of_floor, ours.steps) == (12.0, 10.0, 1.2, 5)
    assert ours.note == "its rounds gave different tokens" and ours.gbps == pytest.approx(2000 / 12e-6 / 1e9)
    assert (read.of_floor, read.gbps) == (0.0, pytest.approx(1000 / 5e-6 / 1e9))


def test_a_context_that_the_model_has_not() -> None:
    said: list[str] = []
    rows = compare(TINY["tiny-llama"], "tiny", [4096, 32], [], device="cpu", steps=6, rounds=1, say=said.append)
    assert [r.context for r in rows] == [32]
    assert said[0] == "tiny: its 2048 positions are too few for contexts 4096, which are left out"
    with pytest.raises(InvalidRequest, match="tiny allows contexts of 1 to 2041"):
        list(compare(TINY["tiny-llama"], "tiny", [4096], [], device="cpu", steps=6))


def test_the_shapes_and_the_recorded_peers() -> None:
    assert set(SHAPES) <= set(shape_names())
    assert peers("llama-3.2-1b")["hazy_megakernels_7309cec"]["512"] == 936 and peers("smollm2-135m") == {}


def test_other_programs_run_on_the_same_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor's time beside a GPU's would say nothing."""
    torch = pytest.importorskip("torch")
    asked: list[str] = []
    monkeypatch.setattr(decoding, "_transformers", lambda _model, _dtype, _threads, where: asked.append(where))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decoding._others("m", "bf16", None, 2, "cuda") == {}
    with pytest.raises(MissingExtra, match="has no device cuda:1, so transformers cannot run there"):
        decoding._others("m", "bf16", ["transformers"], 2, "cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    for device in ("cpu", "cuda", "cuda:1", "hip"):
        decoding._others("m", "bf16", None, 2, device)
    assert asked == ["cpu", "cuda:0", "cuda:1"]


def test_a_row_is_read_of_a_process_that_does_not_end() -> None:
    """As torch ranks that hang in the end of their process group."""
    code = "import time; print('{\"us\": 3}', flush=True); time.sleep({})"
    line = [sys.executable, "-c", code.replace("{}", "60")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and select.select([process.stdout], [], [], 60)[0]
        assert said_by(process, 0.5) == ('{"us": 3}\n', "was ended")
    line = [sys.executable, "-c", code.replace("{}", "0")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert said_by(process, 20.0) == ('{"us": 3}\n', "ended with status 0")


def test_the_large_shape_is_the_published_one_and_fits_two_devices() -> None:
    config = shape_config("llama-3.1-70b")
    graph = shard(find_model(config).build(config), 0, 2)
    matrices = [t for t in graph.tensors.values() if t.kind == "weight" and t.rows is not None]
    layer = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672)  # q, k and v, o, MLP
    half = (80 * layer + 128256 * 8192) // 2  # and the head; the embedding table is on both
    assert sum(t.rows * t.cols for t in matrices if t.rows) == half + 128256 * 8192
    assert 2 * (half + 128256 * 8192) < 80e9  # bytes of bf16
