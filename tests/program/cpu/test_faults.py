"""Faults of the real CPU kernel: a lost signal, a NaN, delays everywhere; each ends in a report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megakernel.errors import CheckpointError, DeviceFault
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.tasks.record import NONE
from tests.program.cpu.conftest import Open, write_checkpoint
from tests.program.cpu.test_generate import greedy, prompt

pytestmark = pytest.mark.timeout(120)


PATIENCE_NS = 500_000_000


def set_chaos(runtime: Runtime, seed: int, drop: int = NONE) -> None:
    """Waits are given up soon only where a signal is lost: elsewhere a busy machine may keep a worker from running."""
    runtime.chaos_seed, runtime.drop_signal = seed, drop
    runtime.spin_budget_ns = 60_000_000_000 if drop == NONE else PATIENCE_NS


def waited_counters(runtime: Runtime) -> list[int]:
    """Counters that some record of another worker waits for, in queue order."""
    records = runtime.program.records
    found = [
        int(w["counter"])
        for record in records.reshape(-1)
        if record["opcode"] < 0xFFF0
        for w in record["waits"][: record["wait_count"]]
    ]
    return list(dict.fromkeys(found))


@pytest.mark.alone
@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_lost_signal_is_reported_and_the_next_request_works(opened: Open, place: int) -> None:
    llm = opened(chaos=True, workers=3)
    ids = prompt(20, 6)
    want = llm.generate([ids], greedy(8))[0].token_ids
    counter = waited_counters(llm.engine.runtime)[place]
    llm.engine.exclusive(lambda runtime: set_chaos(runtime, 0, counter))
    with pytest.raises(DeviceFault) as caught:
        llm.generate([ids], greedy(8))
    report = caught.value.report
    assert report.kind == "wait budget" and report.value < report.target
    assert f"missing first: counter {counter} has" in report.detail and report.detail.count("missing first") == 1
    assert report.node in {n.name for n in llm.program.manifest.nodes} and 0 <= report.worker < 3
    assert report.producers and all("on worker" in p for p in report.producers)
    llm.engine.exclusive(lambda runtime: set_chaos(runtime, 0))
    assert llm.generate([ids], greedy(8))[0].token_ids == want
    assert llm.stats().faults == 1


def test_delays_at_every_wait_and_signal_change_no_bit(opened: Open) -> None:
    llm = opened(chaos=True, workers=4)
    ids = prompt(21, 20)
    want = llm.generate([ids], greedy(10))[0].token_ids
    for seed in range(1, 4):
        llm.engine.exclusive(lambda runtime, seed=seed: set_chaos(runtime, seed))
        assert llm.generate([ids], greedy(10))[0].token_ids == want


def test_logits_that_are_not_numbers_are_a_fault(opened: Open) -> None:
    llm = opened()
    ids = prompt(22, 6)
    want = llm.generate([ids], greedy(5))[0].token_ids
    weight = next(w for w in llm.program.manifest.weights if w.kind == "vector")

    def poison(runtime: Runtime, value: np.ndarray) -> np.ndarray:
        buffer = runtime.buffer("weights")
        old = runtime.device.download(buffer, weight.offset, 4)
        runtime.device.upload(buffer, weight.offset, value)
        return old

    old = llm.engine.exclusive(lambda runtime: poison(runtime, np.array([np.nan], np.float32)))
    with pytest.raises(DeviceFault, match=r"nan logits.*sample.*, slot 0, position \d+; record"):
        llm.generate([ids], SamplingParams(max_tokens=5))
    llm.engine.exclusive(lambda runtime: poison(runtime, old))
    assert llm.generate([ids], greedy(5))[0].token_ids == want


def test_a_nan_in_the_checkpoint_is_refused_by_name(opened: Open, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_checkpoint(tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds nan at \[3, 5\]"):
        opened(folder)
