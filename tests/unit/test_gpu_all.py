"""The one call that checks a GPU: its parts are run, bounded and told; without a GPU it says so in a sentence."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.gpu_all import Part, parts, run_part
from tests.gpu.machine import MODELS

REPOSITORY = Path(__file__).parents[2]


def test_a_part_passes_fails_or_runs_out_of_time(tmp_path: Path) -> None:
    assert run_part(Part("good", 9, ("-c", "print('{output}')")), tmp_path, 60) == "passed"
    assert (tmp_path / "good.log").read_text() == f"{tmp_path}\n"
    assert run_part(Part("bad", 9, ("-c", "raise SystemExit(3)")), tmp_path, 60) == "failed with status 3"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.perf_counter()
    assert run_part(Part("slow", 9, ("-c", child)), tmp_path, 0.5) == "ran out of its 0.5 s"
    assert time.perf_counter() - began < 30  # its child is gone too, else the log would stay open


def test_what_parts_run_is_there() -> None:
    known = parts(sorted(MODELS), "/bin/compute-sanitizer")
    assert len({p.name for p in known}) == len(known) and {"memcheck", "racecheck"} <= {p.name for p in known}
    for part in known:
        for word in part.command:
            if word.startswith(("bench.", "tests.")):
                assert (REPOSITORY / f"{word.replace('.', '/')}.py").exists(), word
            if word.startswith("tests/"):
                assert (REPOSITORY / word).exists(), word
        assert part.builds and 0 < part.limit_s <= 600
    assert [p.name for p in parts(sorted(MODELS), None)] == [p.name for p in known][:-2]


def test_without_a_gpu_it_is_a_sentence(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "bench.gpu_all", "--only", "tiny"], cwd=REPOSITORY, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert made.returncode == 2 and made.stderr.count("\n") == 1
    assert "bench.gpu_all: expected 1 NVIDIA GPU, got 0" in made.stderr
