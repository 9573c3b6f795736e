"""A task that is two files in a folder of their own, run by everything that runs the package's tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "double_norm"


def python(*arguments: str, folder: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the tasks that there are decide every structure's hash."""
    path = {"MEGAKERNEL_TASKS": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, **path}, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_task_is_two_files() -> None:
    assert sorted(p.name for p in EXAMPLE.iterdir() if p.is_file()) == ["double_norm.cuh", "double_norm.py"]
    mentions = [p for p in (ROOT / "megakernel").rglob("*.[pch]*") if "double_norm" in p.read_text(errors="ignore")]
    assert not mentions, "the package knows nothing of the example"


def test_fused_and_unfused_agree_and_are_timed() -> None:
    """Fewer tasks, the same numbers. The times are printed, not judged: this machine does other things too."""
    pytest.importorskip("torch")
    done = python("-m", "bench.task", "double_norm", "--cols", "577", "--steps", "40", "--rounds", "3", "--json")
    assert done.returncode == 0, done.stderr
    unfused, fused = json.loads(done.stdout)
    print(f"unfused {unfused['us_per_step']:.1f} us a step, fused {fused['us_per_step']:.1f}")
    assert (unfused["tasks"], fused["tasks"]) == (3 + 16, 3 + 8)
    assert unfused["error"] <= 1e-6 and fused["error"] <= 1e-6
    assert unfused["us_per_step"] > 0 and fused["us_per_step"] > 0


CASES = """
import numpy as np
from tests.tasks.harness import Rows, blank, build, run_node
from megakernel.tasks.task import all_tasks
import sys
task = sys.modules[all_tasks()["double_norm"].__module__]
def made(case):
    return task.node("n", cols=case.cols, input="x", residual="r", output="y", first="a", second="b", eps=1e-5,
                     tile_cols=case.tile_cols)
nodes = tuple(made(c) for c in task.cases())
binary = build(nodes)
for case in task.cases():
    rng = np.random.default_rng(case.cols)
    x, r = (rng.standard_normal((case.rows, case.cols)).astype(np.float32) for _ in range(2))
    a, b = (rng.standard_normal(case.cols).astype(np.float32) for _ in range(2))
    rows = Rows(tuple((0, 0, i, 0) for i in range(case.rows)))
    out = [run_node(binary, nodes, made(case), rows, workers=w, weights={"a": a, "b": b},
                    tensors={"x": x, "r": r, "y": blank(*x.shape)})["y"] for w in (1, 3)]
    want = task.reference(x, r, a, b, 1e-5)
    assert np.abs(out[0] - want).max() <= 4e-6 * max(1.0, np.abs(want).max()), case
    assert out[0].tobytes() == out[1].tobytes(), case
print("ok")
"""


def test_its_cases_equal_its_reference() -> None:
    done = python("-c", CASES)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr


TORCH = """
import torch
from megakernel import from_module

@torch.library.custom_op("example::double_norm", mutates_args=())
def double_norm(x: torch.Tensor, residual: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
                eps: float) -> torch.Tensor:
    for gamma in (first, second):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gamma
    return residual + x

@double_norm.register_fake
def _(x, residual, first, second, eps):
    return torch.empty_like(x)

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(48, 48)
        self.first, self.second = (torch.nn.Parameter(torch.rand(48) + 0.5) for _ in range(2))

    def forward(self, x):
        return double_norm(self.linear(x), x, self.first, self.second, 1e-5)

module, x = Module().eval(), torch.randn(2, 5, 48)
with from_module(module, (x,)) as kernel, torch.no_grad():
    error = float((kernel(x) - module(x)).norm() / module(x).norm())
    assert [n.op for n in kernel.graph.nodes] == ["linear", "double_norm"]
print(error)
"""


def test_a_torch_operator_of_its_name_is_captured() -> None:
    pytest.importorskip("torch")
    done = python("-c", TORCH)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= 1e-6


CUDA = """
import torch
from bench.task import graph_of
from megakernel.builder.build import build_graph_program
from megakernel.opening import target_and_compiler
from megakernel.settings import read_settings
from megakernel.tasks.task import all_operators
settings = read_settings()
device, target = target_and_compiler("sm_90a", None, None, settings)
graph = graph_of(all_operators()["double_norm"], 512, True)
program = build_graph_program(graph, target, device, cache=settings.cache, dtype="bf16", max_context=64)
assert program.binary.read_bytes()[:4] == b"\\x7fELF"
"""


def test_the_same_files_compile_for_a_gpu() -> None:
    pytest.importorskip("torch")
    from megakernel.device import cuda_compiler
    from megakernel.errors import NoCompiler

    try:
        cuda_compiler.open_nvrtc()
    except NoCompiler:
        pytest.skip("the [cuda] wheels are not installed")
    done = python("-c", CUDA)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"lonely.cuh": "#pragma once\n"}, "has no Python half lonely.py"),
        ({"norm.py": "from megakernel.tasks.norm import *\n"}, ""),
    ],
)
def test_half_a_task_fails_loudly(tmp_path: Path, files: dict[str, str], words: str) -> None:
    """A device half alone is an error; a Python file without one is a helper of the folder's tasks."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = python("-c", "from megakernel.tasks.task import all_tasks; all_tasks()", folder=tmp_path)
    assert (done.returncode != 0) == bool(words) and words in done.stderr


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    done = python("-c", "from megakernel.tasks.task import all_tasks; all_tasks()", folder=tmp_path / "absent")
    assert done.returncode != 0 and "MEGAKERNEL_TASKS: expected folders separated by" in done.stderr


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    for half in ("py", "cuh"):
        text = (EXAMPLE / f"double_norm.{half}").read_text().replace('name = "double_norm"', 'name = "norm"')
        (tmp_path / f"again.{half}").write_text(text)
    done = python("-c", "from megakernel.tasks.task import all_tasks; all_tasks()", folder=tmp_path)
    assert done.returncode != 0 and "there is a task 'norm' already" in done.stderr
