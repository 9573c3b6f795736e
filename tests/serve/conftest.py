"""Servers that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server's tests need the extra `serve`")
pytest.importorskip("httpx", reason="the server's tests need httpx")

from megakernel.checkpoint import fetch_demo
from megakernel.device.cpu import CpuDevice
from megakernel.errors import MegakernelError
from megakernel.llm import LLM
from megakernel.settings import Settings, read_settings
from tests.serve.server import Running, serving, spread, talking_checkpoint


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint(tmp_path_factory.mktemp("serve") / "talking")


@pytest.fixture(scope="session")
def serve_cache(shared_cache: Path) -> Path:
    return shared_cache


@pytest.fixture(scope="session")
def open_tiny(talking: Path, serve_cache: Path) -> Callable[..., LLM]:
    """Opens the tiny model on the CPU; programs are compiled once."""

    def make(spin_ms: int = 60_000, **options: object) -> LLM:
        chosen = {"dtype": "f32", "workers": 2, "max_context": 512, "max_slots": 4, "trace": True, **options}
        return LLM(talking, device=CpuDevice(), settings=Settings(cache=serve_cache, spin_ms=spin_ms), **chosen)

    return make


@pytest.fixture(scope="session")
def tiny(open_tiny: Callable[..., LLM]) -> Iterator[Running]:
    """One server of the tiny model for all tests that leave it as it was."""
    with serving(open_tiny, web=True) as running:
        yield running


@pytest.fixture(scope="session")
def demo() -> Iterator[Running]:
    """One server of the demo model, opened as users do. Skips where the model cannot be had."""
    try:
        path = fetch_demo(read_settings().cache)
    except MegakernelError as why:
        pytest.skip(f"the demo model cannot be had: {why}")
    with serving(lambda: LLM(path, max_slots=16, max_context=512)) as running:
        yield running


@pytest.fixture
def unhurried(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come 2 ms apart, so that the loop has time to hand over on any machine."""
    tiny.wait(tiny.idle)
    spread(tiny, 0.002, monkeypatch)
