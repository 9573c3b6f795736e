"""8-bit pages in the kernel for AMD targets, on the host: the bits of bf16 pages that hold the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.device.cpu import CpuDevice
from tests.f8_pages import check_given, check_own
from tests.hip.emulated import EmulatedHip


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated-f8")


def agree(target: str, cache: Path, **config: Any) -> None:
    """Also with the CPU device, where float32 sums differ in their last bits and now and then a code of it."""
    device = EmulatedHip(target)
    got, expected = (check_own(d, cache, dtype="f32", **config) for d in (device, CpuDevice(2)))
    assert device.seen().errors() == {}
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-3


def test_keys_and_values_of_the_step(cache: Path) -> None:
    agree("gfx1250", cache)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 24])  # 24: no whole block of columns
@pytest.mark.parametrize("target", ["gfx1250", "gfx1100", "gfx942", "gfx950"])
def test_given_keys_and_values(target: str, head_dim: int, cache: Path) -> None:
    check_given(EmulatedHip(target), cache, dtype="f32", head_dim=head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "head_dim"), [("gfx1100", 24), ("gfx942", 64), ("gfx950", 128)])
def test_other_instructions_and_tiles(target: str, head_dim: int, cache: Path) -> None:
    agree(target, cache, head_dim=head_dim)
