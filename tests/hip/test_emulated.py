"""The kernel for AMD targets, run on the host: the same logits as the CPU device, whatever workers and rows there are.

Each matrix instruction is imitated from its operand tables, so an error in a fragment's order, a barrier that not every
lane reaches, or a sum that depends on the batch shows here. Caches and fences are not imitated: docs/amd.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program
from megakernel.device.cpu import CpuDevice
from megakernel.device.device import Device
from megakernel.device.hip_ring import ring_shape
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.target import find_target
from tests.hip.emulated import EmulatedHip
from tests.unit.test_hip_build import TINY

Logits = npt.NDArray[np.float32]
IDS = [int(i) for i in np.random.default_rng(0).integers(0, TINY["vocab_size"], 72)]  # more than one page
LAST_PROMPT = 69  # the tokens after it are decoded one by one
# float16 and bfloat16 keys round the other way now and then, where float32 sums differ in their last bits.
TOLERANCE = {"f32": 5e-6, "f16": 2e-4, "bf16": 1e-3}


def opened(device: Device, cache: Path, dtype: str, rows: int = 16, chaos: bool = False, **config: Any) -> Runtime:
    fields = {**TINY, **config}
    program = build_program(
        fields,
        device.target,
        device,
        cache=cache,
        dtype=dtype,
        max_slots=2,
        max_context=200,
        max_rows=rows,
        chaos=chaos,
    )
    return Runtime(program, device, random_weights(build_graph(fields)).read, spin_budget_ns=60_000_000_000)


def logits(
    device: Device, cache: Path, dtype: str, rows: int = 16, chaos_seed: int = 0, tokens: int = len(IDS), **config: Any
) -> Logits:
    """Of the last tokens of the first `tokens`, which are decoded one by one."""
    runtime = opened(device, cache, dtype, rows, bool(chaos_seed), **config)
    runtime.chaos_seed = chaos_seed
    try:
        return forced_logits(runtime, IDS[:tokens], tokens - (len(IDS) - LAST_PROMPT))
    finally:
        runtime.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def agree(target: str, dtype: str, cache: Path, **config: Any) -> None:
    expected = logits(CpuDevice(2), cache, dtype, **config)
    device, ring = EmulatedHip(target), ring_shape(find_target(target))
    got = logits(device, cache, dtype, **config)
    seen = device.seen()
    assert seen.errors() == {}, "a copy nobody waited for, a stage written while it is read, or uneven barriers"
    assert seen.waits > 0 and bool(seen.copies) == bool(ring.copy_bytes) and seen.most_stages <= ring.stages - 1
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < TOLERANCE[dtype]


def test_logits_equal_those_of_the_cpu(cache: Path) -> None:
    agree("gfx1250", "f32", cache)  # the fewest lanes, so the fastest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "head_dim"),
    [
        ("gfx1100", "bf16", 32),
        ("gfx950", "f32", 32),
        ("gfx942", "f32", 32),
        ("gfx942", "bf16", 64),
        ("gfx1250", "f16", 128),
        ("gfx1100", "f32", 8),
    ],
)
def test_other_instructions_types_and_tiles(target: str, dtype: str, head_dim: int, cache: Path) -> None:
    agree(target, dtype, cache, head_dim=head_dim)


@pytest.mark.slow
def test_scratch_beyond_the_lds(cache: Path) -> None:
    agree("gfx942", "f32", cache, intermediate_size=1544)  # 16 rows of it are 97 KB, and k is no multiple of 16


def test_bits_do_not_depend_on_workers_or_rows(cache: Path) -> None:
    first = logits(EmulatedHip("gfx1250", 2), cache, "f32", tokens=20)
    for workers, rows in ((1, 16), (3, 5)):
        again = logits(EmulatedHip("gfx1250", workers), cache, "f32", rows, tokens=20)
        assert (first.view(np.uint32) == again.view(np.uint32)).all(), (workers, rows)


@pytest.mark.slow
def test_random_delays_and_a_lost_signal(cache: Path) -> None:
    quiet = logits(EmulatedHip("gfx942", 3), cache, "f32")
    for seed in (1, 2):
        again = logits(EmulatedHip("gfx942", 3), cache, "f32", chaos_seed=seed)
        assert (quiet.view(np.uint32) == again.view(np.uint32)).all(), seed
    runtime = opened(EmulatedHip("gfx942", 2), cache, "f32", chaos=True)
    try:
        runtime.spin_budget_ns = 3_000_000_000  # longer than any record takes here while other programs run
        runtime.drop_signal = 3
        with pytest.raises(DeviceFault) as caught:
            forced_logits(runtime, IDS, LAST_PROMPT)
        report = caught.value.report
        assert report.kind == "wait budget" and report.counter == 3 and report.value == report.target - 1
        runtime.drop_signal, runtime.spin_budget_ns = 0xFFFFFFFF, 60_000_000_000
        runtime.reset()
        assert (forced_logits(runtime, IDS, LAST_PROMPT).view(np.uint32) == quiet.view(np.uint32)).all()
    finally:
        runtime.close()
