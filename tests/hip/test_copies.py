"""The ring of stages, run on the host with copies that arrive as late as the kernel's waits allow, in random order.

The kernel is the real driver, feed and ring on a queue of four matmuls. Each wait that orders copies is left out in
turn, and every time a value or a count is wrong: so none of them is superfluous and none can be lost unseen.
"""

from __future__ import annotations

import math
import re

import pytest

from megakernel.builder.cache import INCLUDE
from megakernel.builder.layout import weight_layout
from megakernel.device.hip_compiler import WAVES
from megakernel.device.hip_ring import ring_shape
from megakernel.target import TARGETS, find_target
from megakernel.tasks.task import DType
from tests.hip.chain import SAMPLED, Result, run

HEADER = (INCLUDE / "megakernel" / "device" / "hip_copy.h").read_text()
TENSOR_LEAST = int(re.findall(r"kTensorBytes = (\d+);", HEADER)[0])  # smaller units are copied by lanes
AMD = [t.name for t in TARGETS.values() if t.backend == "hip"]


def check(result: Result, target: str) -> None:
    """The values, and the static rules of a ring."""
    ring, seen = ring_shape(find_target(target)), result.seen
    assert result.worst() < 5e-6
    assert seen.errors() == {}, "a copy nobody waited for, a stage written while it is read, or uneven barriers"
    if ring.copy_bytes:
        assert seen.copies > 0 and seen.waits > 0
        assert seen.most_stages == ring.stages - 1, "the ring is kept full, and one stage is never on its way"
    else:
        assert seen.copies == 0 and seen.waits > 0  # through registers


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("target", AMD)
def test_a_full_ring_can_be_counted(target: str, dtype: DType) -> None:
    """Of any matrix: a unit fits its stage, and the loads of all stages but one fit a wave's counter, which ends at 63.
    That each copy has its wait and that no more are on their way is looked at while the ring runs, below."""
    ring = ring_shape(find_target(target))
    for k in (1, 31, 32, 33, 64, 127, 128, 129, 255, 257, 576, 1536, 2048, 4097, 8192, 14336, 28672):
        layout = weight_layout(find_target(target), dtype, 100, k)
        unit = layout.tile_n * layout.k_unit * dtype.bytes
        assert 0 < unit <= ring.stage_bytes and unit % 16 == 0, (k, unit)
        if ring.copy_bytes:
            whole = target == "gfx1250" and unit >= TENSOR_LEAST  # one instruction brings all of it
            loads = 1 if whole else -(-unit // (ring.copiers * WAVES[target] * ring.copy_bytes))
            assert loads * (ring.stages - 1) <= 63, (k, unit)


@pytest.mark.parametrize("target", AMD)
def test_weights_stream_through_the_ring(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(run(monkeypatch, target, DType.BF16), target)


@pytest.mark.parametrize("dtype", [DType.F32, pytest.param(DType.F16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx1250", marks=pytest.mark.slow)])
def test_other_types(target: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    check(run(monkeypatch, target, dtype), target)


def test_a_node_without_rows_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the last matmul has rows is known with the header; its weights are then left alone."""
    some = run(monkeypatch, "gfx942", DType.BF16, sampled=SAMPLED)
    none = run(monkeypatch, "gfx942", DType.BF16, sampled=())
    check(none, "gfx942")
    assert 0 < none.seen.copies < some.seen.copies


def test_records_of_the_shared_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows ahead who takes them: their units are fetched when they run, beside a ring that holds later ones."""
    check(run(monkeypatch, "gfx942", DType.BF16, ticket=True), "gfx942")


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("gfx942", "loads"),
        pytest.param("gfx90a", "loads", marks=pytest.mark.slow),
        pytest.param("gfx950", "loads", marks=pytest.mark.slow),
        ("gfx1250", "loads"),
        ("gfx1250", "tensors"),
        ("gfx1100", "lds"),
    ],
)
def test_without_a_wait_for_data_the_values_are_wrong(
    target: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert math.isnan(run(monkeypatch, target, DType.BF16, missing=missing).worst())


@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx1250", marks=pytest.mark.slow)])
def test_without_the_wait_for_reads_a_stage_is_written_too_early(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "early_reuse" in run(monkeypatch, target, DType.BF16, missing="lds").seen.errors()


@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx1250", marks=pytest.mark.slow)])
def test_a_launch_that_fails_waits_for_its_copies(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LDS that is given to another workgroup must not be written."""
    whole = run(monkeypatch, target, DType.BF16, stuck=True).seen
    assert whole.copies > 0 and whole.errors() == {}
    assert "unawaited" in run(monkeypatch, target, DType.BF16, missing="last", stuck=True).seen.errors()


def test_a_copier_that_misses_a_barrier_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "uneven_barriers" in run(monkeypatch, "gfx942", DType.BF16, missing="barrier").seen.errors()
