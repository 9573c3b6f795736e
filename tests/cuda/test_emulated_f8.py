"""8-bit pages in the kernel for CUDA, on the host: the bits of 16-bit pages that hold the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.emulated import EmulatedCuda
from tests.f8_pages import check_pages


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated-cuda-f8")


def test_the_bits_of_wider_pages(cache: Path) -> None:
    check_pages(EmulatedCuda(2), cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},  # a page takes two stages
        {"head_dim": 128, "num_key_value_heads": 6},
        {"head_dim": 96},
        {"head_dim": 32, "num_attention_heads": 9, "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_other_heads(config: dict[str, Any], cache: Path) -> None:
    check_pages(EmulatedCuda(3), cache, **config)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_shorter_rings(target: str, cache: Path) -> None:
    check_pages(EmulatedCuda(2, target), cache, head_dim=128)
