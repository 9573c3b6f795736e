"""ThreadSanitizer on two devices of one process that run a tiny model together, with perturbed scheduling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megakernel.architectures import find_model, random_weights
from megakernel.builder.build import build_program, make_plan, plan_source, rank_program
from megakernel.device.cpu import compile_source
from megakernel.ranks import LocalRank, Ranks
from megakernel.runtime import Runtime
from megakernel.target import find_target
from tests.dump import write_dump
from tests.tasks.harness import ROOT
from tests.tasks.test_races import BUILD, CLANG, CONFIG, STEPS, admit, needs_clang, prompts, recorder, run, runs_soundly

pytestmark = needs_clang
RANKS, WORKERS = 2, 2
TARGET = find_target("cpu-generic").with_workers(WORKERS)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The memory of both devices before their first launch, three requests in the mailboxes."""
    devices = [recorder() for _ in range(RANKS)]
    cache = tmp_path_factory.mktemp("cache")
    program = build_program(CONFIG, TARGET, devices[0], cache=cache, chaos=True, tp=RANKS, **BUILD)
    weights = random_weights(find_model(CONFIG).build(CONFIG), 5)
    options: dict[str, Any] = {"spin_budget_ns": 120_000_000_000}

    def read(name: str, _dtype: str, rows: slice) -> Any:
        return weights(name)[rows]

    first = Ranks(program, devices[0], read, **options)
    second = Runtime(rank_program(program, CONFIG, TARGET, 1), devices[1], read, **options)
    first.join([LocalRank(second, "rank 1")])
    for slot, prompt in enumerate(prompts()):
        admit(first, slot, prompt, 1.0 + 0.1 * slot)
    first.launch(STEPS)
    folder = tmp_path_factory.mktemp("dump")
    for rank, (runtime, device) in enumerate(((first, devices[0]), (second, devices[1]))):
        part = folder / str(rank)
        part.mkdir()
        write_dump(runtime, device, part)
        (part / "window.bin").write_bytes(device.download(runtime.window, 0, runtime.window.bytes))
    first.close()
    return folder


def built(folder: Path, *defines: str) -> Path:
    assert CLANG is not None
    plan = make_plan(CONFIG, TARGET, tp=RANKS, **BUILD)
    output = folder / "kernel"
    extra = ("-fsanitize=thread", "-g", "-O1", *defines)
    compile_source(plan_source(plan, chaos=True), ROOT, output, (CLANG,), extra, standalone=True)
    return output


def test_no_race_between_devices_and_the_right_tokens(dump: Path, tmp_path: Path) -> None:
    runs_soundly(built(tmp_path), dump)


def test_a_weakened_release_to_a_peer_is_found(dump: Path, tmp_path: Path) -> None:
    done = run(built(tmp_path, "-DMEGAKERNEL_WEAK_PEER=1"), dump)
    assert "data race" in done.stderr and done.returncode == 66
    assert "Receive" in done.stderr or "receive.cuh" in done.stderr
