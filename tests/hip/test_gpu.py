"""A tiny model on a real AMD GPU: numbers against the CPU device and float32, equal bits, faults, requests in flight.

The same tests run on the CPU device in `make test-all`, so that they are known to pass where the kernel is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel import LLM, SamplingParams
from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program
from megakernel.device import hip
from megakernel.device.cpu import CpuDevice
from megakernel.device.device import Device
from megakernel.device_report import CHECKED
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.scheduler.relay import group_of
from megakernel.settings import Settings
from megakernel.tasks.record import NONE
from tests.program.cpu.conftest import write_checkpoint

STATE = hip.devices()[0].availability()
ON_GPU = pytest.mark.skipif(not STATE.usable, reason=f"no AMD GPU: {STATE.reason}")
pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]


@pytest.fixture(scope="module", params=[pytest.param("hip", marks=ON_GPU), pytest.param("cpu", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest) -> Device:
    return hip.devices()[0] if request.param == "hip" else CpuDevice(6)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def opened(device: Device, cache: Path, workers: int = 0, chaos: bool = False) -> Runtime:
    target = device.target.with_workers(workers or device.target.workers)
    program = build_program(
        CHECKED, target, device, cache=cache, dtype="bf16", max_slots=2, max_context=400, chaos=chaos
    )
    weights = random_weights(build_graph(CHECKED), seed=3, dtype="bf16")
    return Runtime(program, device, weights.read, spin_budget_ns=5_000_000_000)


@pytest.fixture(scope="module")
def run(device: Device, cache: Path) -> Iterator[Runtime]:
    made = opened(device, cache)
    yield made
    made.close()


@pytest.fixture(scope="module")
def delayed(device: Device, cache: Path) -> Iterator[Runtime]:
    made = opened(device, cache, chaos=True)
    yield made
    made.close()


def ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, CHECKED["vocab_size"], count)]


def logits(run: Runtime, count: int, start: int) -> Any:
    run.reset()
    return forced_logits(run, ids(count), start)


@pytest.mark.parametrize(("count", "start"), [(1, 0), (20, 0), (40, 32), (300, 290)])
def test_logits(run: Runtime, count: int, start: int) -> None:
    graph = build_graph(CHECKED)
    got = logits(run, count, start)
    want = graph.interpret(random_weights(graph, seed=3, dtype="bf16"), ids(count))["logits"].numpy()[start:]
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 0.02, error


def test_equal_from_run_to_run(run: Runtime) -> None:
    first = logits(run, 60, 40)
    for _ in range(20):
        assert (logits(run, 60, 40).view(np.uint32) == first.view(np.uint32)).all()


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_equal_with_fewer_workers(device: Device, cache: Path, run: Runtime, workers: int) -> None:
    few = opened(device, cache, workers)
    try:
        assert (logits(few, 60, 40).view(np.uint32) == logits(run, 60, 40).view(np.uint32)).all()
    finally:
        few.close()


def test_random_delays_change_nothing(run: Runtime, delayed: Runtime) -> None:
    want = logits(run, 40, 30)
    for seed in range(1, 6):
        delayed.chaos_seed = seed
        assert (logits(delayed, 40, 30).view(np.uint32) == want.view(np.uint32)).all(), seed


def test_a_lost_signal_is_a_fault_and_the_next_launch_works(run: Runtime, delayed: Runtime) -> None:
    waited = {int(w["counter"]) for r in delayed.program.records.reshape(-1) for w in r["waits"][: r["wait_count"]]}
    delayed.reset()
    delayed.drop_signal, delayed.spin_budget_ns = min(waited), 300_000_000
    with pytest.raises(DeviceFault, match="missing first"):
        forced_logits(delayed, ids(20), 10)
    delayed.drop_signal, delayed.spin_budget_ns = NONE, 5_000_000_000
    assert (logits(delayed, 20, 10).view(np.uint32) == logits(run, 20, 10).view(np.uint32)).all()


def test_workers_of_a_group_share_an_xcd(device: Device, run: Runtime) -> None:
    """Where workgroups are dealt evenly, as many to an XCD as a group has workers, each group has an XCD of its own."""
    logits(run, 4, 0)
    places = run.facts().get("xcd_of_worker")
    if places is None or device.target.groups == 1:
        pytest.skip("this device has one group of workers")
    groups = device.target.groups
    assert len(places) == run.manifest.workers and len(set(places)) == groups, sorted(set(places))
    for group in range(groups):
        mine = [p for w, p in enumerate(places) if group_of(w, len(places), groups) == group]
        assert len(set(mine)) == 1, f"group {group} is on XCDs {sorted(set(mine))}"


def test_requests_that_come_while_others_run(device: Device, cache: Path, tmp_path: Path) -> None:
    """Prompts and rows of the page table are uploaded while the kernel runs: each answer is that of a request alone."""
    model = write_checkpoint(tmp_path / "model")
    chosen = Settings(cache=cache, spin_ms=10_000)
    prompts = [[int(i) for i in np.random.default_rng(n).integers(0, 331, n)] for n in (3, 70, 20, 150, 5, 33)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(model, device=device, dtype="bf16", max_slots=3, max_context=300, settings=chosen) as llm:
        alone = [llm.generate([p], params)[0].token_ids for p in prompts]
        for _ in range(5):
            assert [r.token_ids for r in llm.generate(prompts, params)] == alone
        assert llm.stats().faults == 0


def test_open_and_close_many_times(device: Device, cache: Path, run: Runtime) -> None:
    want = logits(run, 10, 5)
    for _ in range(10):
        again = opened(device, cache)
        assert (logits(again, 10, 5).view(np.uint32) == want.view(np.uint32)).all()
        again.close()
