"""ThreadSanitizer on a whole tiny model with perturbed scheduling, in a process with no Python in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.architectures import find_model, random_weights
from megakernel.builder.build import build_program, make_plan, plan_source
from megakernel.device.cpu import compile_source
from megakernel.runtime import Runtime
from megakernel.target import find_target
from megakernel.tasks.record import SLOT, CommandKind, SlotStatus
from tests.dump import Recorder, write_dump

from .harness import ROOT

CLANG = next((c for v in range(24, 15, -1) if (c := shutil.which(f"clang++-{v}"))), None)
# Not every build of clang finds it by itself.
SYMBOLIZER = next((at for n in ("llvm-symbolizer-22", "llvm-symbolizer") if (at := shutil.which(n))), None)
WORKERS, STEPS, LAUNCHES = 4, 12, 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 72, "intermediate_size": 100,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 131,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
BUILD: dict[str, Any] = {"dtype": "f32", "max_slots": 4, "max_context": 384}

needs_clang = pytest.mark.skipif(
    CLANG is None or SYMBOLIZER is None,
    reason="no clang++ 16 or later, or no llvm-symbolizer (tests/install_clang.sh installs both)",
)
pytestmark = needs_clang


def under_tsan(*options: str) -> dict[str, str]:
    """The environment of a program under ThreadSanitizer."""
    said = ("halt_on_error=0", "exitcode=66", f"external_symbolizer_path={SYMBOLIZER}", *options)
    return {**os.environ, "TSAN_OPTIONS": " ".join(said)}


def recorder() -> Recorder:
    return Recorder(workers=WORKERS, target_name="cpu-generic")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, CONFIG["vocab_size"], n).tolist() for n in (1, 20, 40)]


def admit(runtime: Runtime, slot: int, prompt: list[int], penalty: float) -> None:
    pages = runtime.manifest.pages_per_slot
    runtime.set_prompt(slot, prompt)
    runtime.set_pages(slot, list(range(slot * pages, (slot + 1) * pages)))
    state = np.zeros((), SLOT.dtype)
    state["status"], state["request"], state["prompt_length"] = SlotStatus.ACTIVE, slot, len(prompt)
    state["limit"] = BUILD["max_context"]
    sampling = state["sampling"]
    sampling["temperature"], sampling["top_p"], sampling["repetition_penalty"] = 0.7, 0.9, penalty
    sampling["logprobs"], sampling["top_logprobs"] = 1, 2
    runtime.post({"kind": int(CommandKind.ADMIT), "slot": slot, "request": slot, "state": state})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=[1, 2], ids=["flat", "groups"])
def dump(request: pytest.FixtureRequest, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The memory of a model before its first launch, three requests in the mailbox. With groups every counter that two
    of them signal has relays: a hop is said to cost less than nothing."""
    device = recorder()
    target = replace(find_target("cpu-generic").with_workers(WORKERS), groups=request.param, signal_us=1.0, hop_us=-9.0)
    program = build_program(CONFIG, target, device, cache=cache, chaos=True, **BUILD)
    assert (program.records["members"] > 0).any() == (request.param > 1)
    weights = random_weights(find_model(CONFIG).build(CONFIG), 5)
    runtime = Runtime(program, device, lambda name, dtype, rows: weights(name)[rows], spin_budget_ns=120_000_000_000)
    for slot, prompt in enumerate(prompts()):
        admit(runtime, slot, prompt, 1.0 + 0.1 * slot)
    runtime.launch(STEPS)
    folder = write_dump(runtime, device, tmp_path_factory.mktemp("dump"))
    runtime.close()
    return folder


def built(folder: Path, *defines: str) -> Path:
    assert CLANG is not None
    plan = make_plan(CONFIG, find_target("cpu-generic").with_workers(WORKERS), **BUILD)
    output = folder / "kernel"
    extra = ("-fsanitize=thread", "-g", "-O1", *defines)
    compile_source(plan_source(plan, chaos=True), ROOT, output, (CLANG,), extra, standalone=True)
    return output


def run(binary: Path, dump: Path, launches: int = LAUNCHES) -> subprocess.CompletedProcess[str]:
    line = [str(binary), str(dump), str(launches), str(STEPS)]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, env=under_tsan("history_size=4"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("weak"), "-DMEGAKERNEL_WEAK_RELEASE=1")


def runs_soundly(binary: Path, dump: Path) -> None:
    """No race is reported, all steps run, and a second run gives the same events."""
    done = run(binary, dump)
    assert "ThreadSanitizer" not in done.stderr, done.stderr[:4000]
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    events = re.findall(r"event (\d+) (-?\d+) (\d+) (\d+)", done.stdout)
    assert f"end exit 1 steps {STEPS * LAUNCHES}" in done.stdout
    assert len(events) > 3 * (STEPS * LAUNCHES - 6)
    assert run(binary, dump).stdout == done.stdout


def test_no_race_and_the_right_tokens(dump: Path, sound: Path) -> None:
    runs_soundly(sound, dump)


def test_a_weakened_release_is_found(dump: Path, weak: Path) -> None:
    done = run(weak, dump)
    assert "data race" in done.stderr and done.returncode == 66
