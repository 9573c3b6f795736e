"""What the server says of prefixes that requests share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from megakernel.llm import LLM
from tests.serve.server import Running, serving


def counts(server: Running) -> dict[str, float]:
    text = server.client.get("/metrics").text
    return {
        name: float(value) for name, value in re.findall(r"^megakernel_prefix_cache_(\w+)_total (\S+)$", text, re.M)
    }


@pytest.fixture
def own(open_tiny: Callable[..., LLM]) -> Iterator[Running]:
    """Nobody has left pages there that would have to make room."""
    with serving(open_tiny) as running:
        yield running


def test_hits_are_counted_in_tokens(own: Running) -> None:
    before = counts(own)
    ids = [1 + i % 90 for i in range(70)]
    first, second = (
        own.post("/v1/completions", prompt=ids, max_tokens=4, ignore_eos=True, temperature=0).json() for _ in range(2)
    )
    assert first["choices"] == second["choices"]
    found = {name: value - before[name] for name, value in counts(own).items()}
    assert found["queries"] == 140 and found["hits"] >= 64 and found["evictions"] == 0
