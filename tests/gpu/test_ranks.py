"""Tiny models on two GPUs: numbers against float32, equal bits on every run and in a batch, the report of a fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.device_session import generate
from bench.tp import opened
from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph
from megakernel.device.device import Device
from megakernel.devices import list_devices
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.ranks import Ranks
from tests.gpu.machine import MODELS, NAME, SEED, needs_device, prompts

DEVICES: list[Device] = [d for d in list_devices() if d.name.split(":")[0] == NAME and d.availability().usable]
if NAME == "cpu":
    DEVICES *= 2
pytestmark = [
    needs_device,
    pytest.mark.alone,
    pytest.mark.skipif(len(DEVICES) == 1, reason=f"one {NAME}, two are needed"),
]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_two_devices(name: str) -> None:
    config = MODELS[name]
    graph = build_graph(config)
    weights = random_weights(graph, seed=SEED, dtype="bf16")
    run: Any = opened(config, DEVICES[:2], weights.read, 1024, max_slots=4)
    assert isinstance(run, Ranks)
    try:
        for length, start in ((20, 0), (300, 290)):
            ids = prompts(graph.config.vocab, (length,))[0]
            found = []
            for _ in range(2):
                run.reset()
                found.append(forced_logits(run, ids, start))
            assert (found[0].view(np.uint32) == found[1].view(np.uint32)).all()
            want = graph.interpret(weights, ids)["logits"].numpy()[start:]
            error = np.linalg.norm(found[0] - want, axis=1) / np.linalg.norm(want, axis=1)
            assert error.max() < 0.02, error
        given = prompts(graph.config.vocab, (5, 17, 40, 1))
        assert generate(run, given, 24) == [generate(run, [p], 24)[0] for p in given]
        drawn = {"temperature": 0.8, "top_p": 0.9}
        assert generate(run, given, 24, drawn) == generate(run, given, 24, drawn)
    finally:
        run.close()


def test_a_device_that_sends_nothing_is_named() -> None:
    name = sorted(MODELS)[0]
    config = MODELS[name]
    weights = random_weights(build_graph(config), seed=SEED, dtype="bf16")
    run: Any = opened(config, DEVICES[:2], weights.read, 1024, max_slots=4)
    try:
        want = generate(run, [[1, 2, 3]], 8)
        other = run.others[0].runtime
        other.connect([other.window.address, other.window.address])  # what it should send to rank 0
        run.spin_budget_ns = other.spin_budget_ns = 300_000_000
        with pytest.raises(DeviceFault, match="waits for rank 1, which has"):
            generate(run, [[1, 2, 3]], 8)
        other.connect([run.window.address, other.window.address])
        assert generate(run, [[1, 2, 3]], 8) == want
    finally:
        run.close()
