"""A published shape with random weights: steps of one row and of many leave the same keys and values every time.

Tiny models keep neither the memory nor the consumers busy, so what only a full ring shows has to be looked for here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.device_session import admit, build, loaded, randomise, view
from megakernel.architectures import shape_config
from megakernel.runtime import Runtime
from tests.gpu.machine import NAME, needs_device

pytestmark = [needs_device, pytest.mark.alone, pytest.mark.skipif(NAME != "cuda", reason="weights are made on the GPU")]
SHAPE, START, STEPS, TIMES = "llama-3.2-1b", 300, 80, 5


@pytest.fixture(scope="module", params=[16, 64])
def run(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    config, rows = shape_config(SHAPE), request.param
    device, program = build(config, dtype="bf16", max_context=1024, max_slots=rows, max_rows=rows)
    made = loaded(config, device, program)
    yield made
    made.close()


def left(run: Runtime, prompts: int, streams: int) -> Any:
    """Keys and values after some steps of so many streams, beside a prompt of so many tokens."""
    import torch

    run.reset()
    randomise(run, weights=False)
    for slot in range(streams):
        admit(run, slot, [1 + slot], START + STEPS + 8, start=START - slot)
    if prompts:
        ids = np.random.default_rng(1).integers(0, run.manifest.vocab, prompts).tolist()
        admit(run, streams, ids, prompts + 8)
    run.launch(STEPS)
    run.finish(30.0)
    run.events()
    out = view(run, "kv").view(torch.int16).clone()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize(("prompt", "streams"), [(0, 1), (0, 7), (0, 16), (700, 0), (700, 9), (0, 64)])
def test_the_same_keys_and_values(run: Runtime, prompt: int, streams: int) -> None:
    import torch

    if streams + (prompt > 0) > run.manifest.max_slots:
        pytest.skip("the program has fewer slots")
    randomise(run)
    first = left(run, prompt, streams)
    assert bool((first != 0).any())
    others = [n for n in range(1, TIMES) if not torch.equal(first, left(run, prompt, streams))]
    assert others == []
