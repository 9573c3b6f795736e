"""Hierarchical counters on the processor, with its workers in pretended groups: the same bits, and whole reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program
from megakernel.device.cpu import CpuDevice, compile_source, find_compiler
from megakernel.device.device import KernelSource
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.scheduler.encode import decode
from megakernel.target import Target
from megakernel.tasks.record import NONE

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 400,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 301,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 300, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 301, 44)]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


class Quick(CpuDevice):
    """Compiles in a third of the time."""

    def compiler_id(self, target: Target) -> str:
        return f"{super().compiler_id(target)} -O1"

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        compile_source(source, include, output, find_compiler(), ("-O1",))


def opened(cache: Path, workers: int, groups: int) -> Runtime:
    """A turn at a counter is said to be dear. All programs share one kernel, which has random delays."""
    device = Quick(workers)
    target = replace(device.target, groups=groups, signal_us=1.0, hop_us=0.01)
    program = build_program(CONFIG, target, device, cache=cache, dtype="f32", max_context=200, max_slots=1, chaos=True)
    weights = random_weights(build_graph(CONFIG), seed=3, dtype="f32")
    return Runtime(program, device, weights.read, spin_budget_ns=20_000_000_000)


def relays(run: Runtime) -> int:
    return len(decode(run.program.records, (), run.manifest.counter_count).relays)


def logits(run: Runtime) -> npt.NDArray[np.float32]:
    run.reset()
    return forced_logits(run, IDS, 36)


@pytest.fixture(scope="module")
def flat(cache: Path) -> npt.NDArray[np.float32]:
    run = opened(cache, 6, 1)
    assert relays(run) == 0
    got = logits(run)
    run.close()
    return got


@pytest.mark.parametrize(("workers", "groups"), [(6, 2), (8, 3), (7, 7)])
def test_the_same_bits_with_groups(cache: Path, flat: npt.NDArray[np.float32], workers: int, groups: int) -> None:
    run = opened(cache, workers, groups)
    try:
        assert (relays(run) > 8) == (groups < workers)  # groups of one worker are better left flat
        assert (logits(run).view(np.uint32) == flat.view(np.uint32)).all()
    finally:
        run.close()


@pytest.fixture(scope="module")
def delayed(cache: Path) -> Iterator[Runtime]:
    run = opened(cache, 6, 2)
    yield run
    run.close()


def test_delays_change_no_bit(delayed: Runtime, flat: npt.NDArray[np.float32]) -> None:
    for seed in (1, 2, 3):
        delayed.chaos_seed = seed
        assert (logits(delayed).view(np.uint32) == flat.view(np.uint32)).all(), seed


@pytest.mark.alone
@pytest.mark.parametrize("level", ["group", "all"])
def test_a_lost_signal_names_both_counters(delayed: Runtime, flat: npt.NDArray[np.float32], level: str) -> None:
    records = delayed.program.records.reshape(-1)
    relayed = records[records["members"] > 0]
    group, above = int(relayed["signal"][5]), int(relayed["relay"][5])
    delayed.reset()
    delayed.drop_signal = group if level == "group" else above
    delayed.spin_budget_ns = 300_000_000
    try:
        with pytest.raises(DeviceFault) as caught:
            forced_logits(delayed, IDS, 36)
    finally:
        delayed.drop_signal, delayed.spin_budget_ns = NONE, 20_000_000_000
    report = caught.value.report
    assert report.kind == "wait budget" and report.counter == above and report.value == report.target - 1
    assert any(f"through counter {group}" in p for p in report.producers)
    if level == "group":
        members = int(relayed["members"][5])
        said = (
            f"counter {group}, of a group, whose relay goes to counter {above}, has {members - 1} of {members} signals"
        )
    else:
        said = f"counter {above} has 1 of 2 relays; complete are the groups' counters"
    assert f"missing first: {said}" in report.detail and report.detail.count("missing first") == 1
    assert (logits(delayed).view(np.uint32) == flat.view(np.uint32)).all()
