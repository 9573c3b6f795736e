"""What the server says of prefixes that requests share."""

from __future__ import annotations

import re

from tests.serve.server import Running


def counts(server: Running) -> dict[str, float]:
    text = server.client.get("/metrics").text
    return {
        name: float(value) for name, value in re.findall(r"^megakernel_prefix_cache_(\w+)_total (\S+)$", text, re.M)
    }


def test_hits_are_counted_in_tokens(tiny: Running) -> None:
    before = counts(tiny)
    ids = [1 + i % 90 for i in range(70)]
    first, second = (
        tiny.post("/v1/completions", prompt=ids, max_tokens=4, ignore_eos=True, temperature=0).json() for _ in range(2)
    )
    assert first["choices"] == second["choices"]
    found = {name: value - before[name] for name, value in counts(tiny).items()}
    assert found["queries"] == 140 and found["hits"] >= 64
    assert found["evictions"] <= 8  # pages that other tests of this server have left may make room for these
