"""8-bit pages in the kernel for AMD targets, on the host: the bits of bf16 pages that hold the same values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.f8_pages import check_pages
from tests.hip.emulated import EmulatedHip


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated-f8")


@pytest.mark.parametrize(
    ("target", "head_dim"),
    [
        ("gfx1250", 64),
        *(pytest.param(target, 64, marks=pytest.mark.slow) for target in ("gfx1100", "gfx942", "gfx950")),
        pytest.param("gfx1250", 128, marks=pytest.mark.slow),
        pytest.param("gfx1250", 24, marks=pytest.mark.slow),  # no whole block of columns
    ],
)
def test_the_bits_of_wider_pages(target: str, head_dim: int, cache: Path) -> None:
    device = EmulatedHip(target)
    check_pages(device, cache, dtype="f32", head_dim=head_dim)
    assert device.seen().errors() == {}
