"""ThreadSanitizer on the kernel for CUDA, a warp a thread to it, in a process with no Python in it.

What orders warps is __syncthreads, barriers in shared memory, and releases that are acquired. Words that say by their
value whether they are valid are read and written whole, and order nothing else. So it finds what one warp reads or
overwrites too early, in shared memory and in global memory. What orders the lanes of a warp it does not see, nor the
fences that asynchronous copies need beside the barriers: those are the sanitizer's on a GPU (tests/gpu).
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.device_session import admit
from megakernel.architectures import random_weights
from megakernel.builder import dealing
from megakernel.builder.build import build_graph, build_program, make_plan, plan_source
from megakernel.builder.cache import INCLUDE
from megakernel.device.cuda_compiler import Tunables
from megakernel.device.hip_compiler import find_compiler
from megakernel.runtime import Runtime
from tests.cuda.emulated import FLAGS, HERE, EmulatedCuda, host_flags
from tests.cuda.test_emulated import ONE_LAYER, SHAPES
from tests.dump import Recorder, write_dump
from tests.emulator.build import compile_on_host
from tests.gpu.machine import prompts
from tests.tasks.test_races import needs_clang, under_tsan

WORKERS, TOKENS = 2, 3
TUNABLES = Tunables(every_lane=1)
BUILD = {"dtype": "bf16", "max_context": 192, "max_slots": 3, "max_rows": 16}
# Without function entries, for lanes of a warp have stacks of their own.
SEEN = (
    "-fsanitize=thread", f"-fsanitize-ignorelist={HERE.parent / 'emulator' / 'ignore.txt'}", "-g",
    "-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-distinguish-volatile=1",
)  # fmt: skip
# Names of functions, which it takes a symbolizer to find.
OPTIONS = ("history_size=2", f"suppressions={HERE / 'suppressions.txt'}")

pytestmark = needs_clang


class CudaRecorder(Recorder, EmulatedCuda):
    """Launches of the emulated kernel, written down."""


def dump(config: Mapping[str, Any], options: Mapping[str, Any], given: list[int], cache: Path, to: Path) -> Path:
    """The memory of a model before its first launch, requests of `given` prompt tokens in the mailbox."""
    device = CudaRecorder(WORKERS, tunables=TUNABLES)
    weights = random_weights(build_graph(config), seed=3, dtype="bf16")
    program = build_program(config, device.target, device, cache=cache, **{**BUILD, **options})
    runtime = Runtime(program, device, weights.read, spin_budget_ns=600_000_000_000)
    for slot, ids in enumerate(prompts(program.manifest.vocab, given)):
        admit(runtime, slot, ids, len(ids) + TOKENS)
    runtime.launch(100)
    write_dump(runtime, device, to)
    runtime.close()
    return to


def run(
    config: Mapping[str, Any], options: Mapping[str, Any], given: list[int], cache: Path, folder: Path, *defines: str
) -> subprocess.CompletedProcess[str]:
    chaos = bool(options.get("chaos"))
    planned = {name: value for name, value in options.items() if name != "chaos"}
    plan = make_plan(config, EmulatedCuda(WORKERS).target, **{**BUILD, **planned})
    flags = (*host_flags(plan.target, chaos, TUNABLES), *FLAGS, *SEEN, *defines)
    source, output = plan_source(plan, chaos=chaos), folder / "kernel"
    compile_on_host(source, INCLUDE, output, HERE, find_compiler(), flags, standalone=True)
    written = dump(config, options, given, cache, folder)
    line = [str(output), str(written), "1", "100"]
    return subprocess.run(line, capture_output=True, text=True, timeout=900, env=under_tsan(*OPTIONS))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "options", "given"),
    [
        ("normed heads of 128", {"max_rows": 64, "chaos": True}, [20, 1]),  # steps of 21 rows, of 2, and of one
        slow("normed heads of 128", {}, [9, 1]),
        slow("three units", {"max_rows": 64, "chaos": True}, [40, 3]),
        slow("one unit", {"chaos": True}, [70, 1, 5]),
        slow("one unit", {"max_rows": 64}, [100, 30, 1]),
        slow("three units", {}, [12, 3]),
        slow("heads of 96, padded units", {}, [9, 1]),
        slow("units of 1,024 columns", {}, [9, 1]),
    ],
    ids=str,
)
def test_no_race(shape: str, options: dict[str, Any], given: list[int], shared_cache: Path, tmp_path: Path) -> None:
    done = run(SHAPES[shape], options, given, shared_cache, tmp_path)
    assert "ThreadSanitizer" not in done.stderr, done.stderr[:6000]
    assert done.returncode == 0 and done.stdout.count("event") == TOKENS * len(given), done.stdout[-2000:]


@pytest.mark.slow
def test_no_race_where_products_are_dealt_by_shares(
    shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "pays", lambda *sizes: True)
    done = run(SHAPES["one unit"], {"max_rows": 64, "chaos": True}, [40, 1], shared_cache, tmp_path)
    assert "ThreadSanitizer" not in done.stderr, done.stderr[:6000]
    assert done.returncode == 0 and done.stdout.count("event") == TOKENS * 2, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("weak", "found"),
    [("RELEASE", "copy_header"), slow("BARRIER", "copy_to_shared")],
)
def test_what_orders_nothing_is_found(weak: str, found: str, shared_cache: Path, tmp_path: Path) -> None:
    """Releases that are none, between workers; barriers that order nothing, within one."""
    done = run(ONE_LAYER, {}, [9, 1], shared_cache, tmp_path, f"-DEMULATOR_WEAK_{weak}=1")
    assert "data race" in done.stderr and found in done.stderr and done.returncode == 66
