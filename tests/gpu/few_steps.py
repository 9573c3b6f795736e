"""A few steps of a tiny model on few workers, for tools that watch every instruction."""

from __future__ import annotations

from bench.device_session import generate
from megakernel.device.cuda_compiler import Tunables
from tests.gpu.machine import opened, prompts

if __name__ == "__main__":
    run = opened("tiny-llama", workers=4, max_context=128, tunables=Tunables(every_lane=1))[0]
    run.spin_budget_ns = 300_000_000_000
    try:
        print(generate(run, prompts(run.manifest.vocab, (17, 3)), 3, limit_s=180.0))  # racecheck beside a compiler
    finally:
        run.close()
