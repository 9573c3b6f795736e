"""Which worker a workgroup becomes: the device's own code on the host, with XCDs in every order and number."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.device.cpu import CpuExecutable
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.scheduler.encode import decode
from megakernel.scheduler.relay import group_of
from megakernel.target import Target
from tests.hip.emulated import EmulatedHip
from tests.hip.test_emulated import IDS, LAST_PROMPT, Logits, logits, opened

WORKERS, GROUPS = 6, 2
SHORT = IDS[:3]


class Grouped(EmulatedHip):
    """Six workgroups on two XCDs or more; a turn at a counter is said to be dear, so that edges have relays."""

    def __init__(self) -> None:
        super().__init__("gfx942", WORKERS)

    @property
    def target(self) -> Target:
        return replace(super().target, groups=GROUPS, signal_us=1.0, hop_us=0.01)

    def place(self, places: Sequence[int], missing: int = 0) -> None:
        self.library.mk_place((ctypes.c_uint32 * len(places))(*places), len(places), missing)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seats")


@pytest.fixture(scope="module")
def device() -> Grouped:
    return Grouped()


@pytest.fixture(scope="module")
def run(device: Grouped, cache: Path) -> Any:
    runtime = opened(device, cache, "f32", chaos=True)
    yield runtime
    device.place([0] * 64)
    runtime.close()


def reached(run: Runtime) -> Logits:
    run.reset()
    return forced_logits(run, SHORT, 2)


def places_of(device: Grouped, run: Runtime) -> list[int]:
    executable = run._executable
    assert isinstance(executable, CpuExecutable)
    return [device.library.mk_place_of(ctypes.c_void_p(executable._handle), w) for w in range(WORKERS)]


def test_workers_of_a_group_share_an_xcd_however_workgroups_are_dealt(device: Grouped, run: Runtime) -> None:
    assert len(decode(run.program.records, (), run.manifest.counter_count).relays) > 4
    bits = []
    for dealt in ([0, 1, 0, 1, 0, 1], [5, 5, 2, 2, 5, 2], [9, 9, 9, 0, 0, 0]):
        device.place(dealt)
        bits.append(reached(run))
        found = places_of(device, run)
        for group in range(GROUPS):
            mine = {p for w, p in enumerate(found) if group_of(w, WORKERS, GROUPS) == group}
            assert len(mine) == 1, f"dealt {dealt}: group {group} is on {mine}"
    assert all((b.view(np.uint32) == bits[0].view(np.uint32)).all() for b in bits)


@pytest.mark.parametrize("dealt", [[0] * 6, [0, 0, 0, 0, 3, 3], [0, 1, 2, 3, 4, 5], [15, 14, 15, 15, 15, 15]])
def test_other_numbers_on_an_xcd_change_speed_alone(device: Grouped, run: Runtime, dealt: list[int]) -> None:
    device.place([0, 1, 0, 1, 0, 1])
    want = reached(run)
    device.place(dealt)
    assert (reached(run).view(np.uint32) == want.view(np.uint32)).all()
    assert sorted(places_of(device, run)) == sorted(dealt)


@pytest.mark.alone
def test_a_workgroup_that_never_starts_is_a_fault_of_the_roll_call(device: Grouped, run: Runtime) -> None:
    device.place([0, 1, 0, 1, 0, 1], missing=1)
    budget, run.spin_budget_ns = run.spin_budget_ns, 200_000_000
    try:
        with pytest.raises(DeviceFault) as caught:
            reached(run)
        assert (caught.value.report.kind, caught.value.report.value, caught.value.report.target) == ("roll call", 5, 6)
    finally:
        run.spin_budget_ns = budget
        device.place([0, 1, 0, 1, 0, 1])
    assert np.isfinite(reached(run)).all()


def test_seats_are_a_bijection_and_fill_groups_first(device: Grouped, run: Runtime) -> None:
    """The function that a workgroup computes its worker with, for many counts of workgroups on each XCD."""
    seat = device.library.mk_seat
    rng = np.random.default_rng(0)
    for _ in range(300):
        workers, groups = int(rng.integers(1, 80)), int(rng.integers(1, 9))
        used = rng.choice(16, int(rng.integers(1, 10)), replace=False)
        count = np.bincount(rng.choice(used, workers), minlength=16).astype(np.uint32)
        pointer = count.ctypes.data_as(ctypes.c_void_p)
        got = {(p, r): seat(pointer, workers, groups, p, r) for p in range(16) for r in range(count[p])}
        assert sorted(got.values()) == list(range(workers)), (workers, groups, count)
        busy = [p for p in range(16) if count[p]]
        for group, place in enumerate(busy[:groups]):
            room = sum(group_of(w, workers, groups) == group for w in range(workers))
            mine = [group_of(got[place, r], workers, groups) for r in range(min(room, count[place]))]
            assert mine == [group] * len(mine)


def test_more_workgroups_than_workers_are_seen(device: Grouped, run: Runtime) -> None:
    count = (ctypes.c_uint32 * 16)(*([3] + [0] * 15))
    assert device.library.mk_seat(count, 2, 1, 0, 2) & 0xFFFFFFFF == 0xFFFFFFFF


@pytest.mark.slow
def test_relays_agree_with_the_flat_counters_of_one_group(cache: Path, device: Grouped, run: Runtime) -> None:
    device.place([1, 0, 0, 1, 1, 0])
    flat = logits(EmulatedHip("gfx942", 2), cache, "f32", chaos_seed=1)
    run.reset()
    assert (forced_logits(run, IDS, LAST_PROMPT).view(np.uint32) == flat.view(np.uint32)).all()
