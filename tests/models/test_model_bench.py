"""The table of published shapes, on the CPU device with tiny ones: the same code as on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from bench import models
from bench.device_session import TINY
from megakernel.architectures import find_model, shape_config, shape_names
from megakernel.interpret import Interpreter
from tests.models.quick import QuickDevice

CONFIGS: Mapping[str, Mapping[str, Any]] = {name: {**TINY[name], "vocab_size": 203} for name in ("tiny-llama",)}


def test_a_row_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, device = tmp_path / "models.jsonl", QuickDevice()
    (row,) = models.run_shapes(["tiny-llama"], device, file, 60.0, CONFIGS)
    assert not row.note, row.note
    assert 1e-4 < row.error <= row.torch_error < 3e-2, "the kernel rounds less than torch in bfloat16"
    assert row.contexts == (32, 512) and all(u > 0 for u in (*row.us, *row.floor_us))
    assert models.run_shapes(["tiny-llama"], device, file, 60.0, CONFIGS) == []
    assert models.read(file) == [row]
    capsys.readouterr()
    models.main(["--table", "--file", str(file)])
    assert capsys.readouterr().out.count("| tiny-llama |") == 2
    assert models.run_shapes(["other"], device, file, -1.0, CONFIGS) == []


def test_an_error_is_a_row_that_says_so(tmp_path: Path) -> None:
    bad = {"x": {**TINY["tiny-llama"], "spiral": 1}}
    (row,) = models.run_shapes(["x"], QuickDevice(), tmp_path / "f", 60.0, bad)
    assert "spiral = 1" in row.note and "spiral" in models.table([row])


def test_every_published_shape_builds_and_has_weights() -> None:
    experts = {"qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"}
    assert {n for n in shape_names() if not models.size(n)} == experts, "mixtures of experts have no model file"
    for name in (n for n in shape_names() if models.size(n)):
        config = shape_config(name)
        weights = models.Weights(find_model(config).build(config), "cpu")
        vector = next(n for n, shape in weights._shapes.items() if len(shape) == 1)
        part = weights.read(vector, "f32", slice(0, 5))
        assert np.abs(part).max() < 2 and np.isfinite(part).all()


def test_the_interpreter_forgets_and_rounds() -> None:
    config = CONFIGS["tiny-llama"]
    graph = find_model(config).build(config)
    weights = models.Weights(graph, "cpu")
    asked: list[str] = []

    def counted(name: str) -> Any:
        asked.append(name)
        return weights(name)

    ids = list(range(9))
    whole = Interpreter(graph, weights).step(ids)["logits"]
    thin = Interpreter(graph, counted, forget=True)
    assert thin.step(ids)["logits"].equal(whole) and not thin._stored
    assert len(asked) == len(set(asked)), "a weight that two nodes read is made once"
    rounded = Interpreter(graph, weights, dtype="bfloat16").step(ids)["logits"].float()
    assert 1e-3 < float((rounded - whole).norm() / whole.norm()) < 5e-2
