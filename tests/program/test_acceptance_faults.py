"""Lost signals and random delays, in child processes with a time limit: a hang is a failure, not a wait."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
BUDGET_MS = 250

LOST = """
import json, sys, time
from dataclasses import replace
from megakernel.errors import DeviceFault
from megakernel.llm import LLM
from megakernel.sampling import SamplingParams
from megakernel.settings import read_settings
from megakernel.tasks.record import NONE

path, budget = sys.argv[1], int(sys.argv[2])
settings = replace(read_settings(), spin_ms=budget)
params = SamplingParams(max_tokens=12, ignore_eos=True)
llm = LLM(path, dtype="f32", workers=3, max_slots=4, max_context=128, chaos=True, settings=settings)
runtime = llm.engine.runtime
records = runtime.program.records
signalled = sorted({int(r["signal"]) for r in records.reshape(-1) if r["opcode"] < 0xFFF0 and r["signal"] != NONE})
waited = sorted({
    int(w["counter"]) for r in records.reshape(-1) if r["opcode"] < 0xFFF0 for w in r["waits"][: r["wait_count"]]
})
prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]]
tokens = lambda: [o.token_ids for o in llm.generate(prompts, params)]
want = tokens()
for counter in sorted(set(signalled) & set(waited)):
    llm.engine.exclusive(lambda runtime: setattr(runtime, "drop_signal", counter))
    began = time.monotonic()
    try:
        tokens()
        fault = None
    except DeviceFault as error:
        fault = {**vars(error.report), "text": str(error), "seconds": time.monotonic() - began}
    llm.engine.exclusive(lambda runtime: setattr(runtime, "drop_signal", NONE))
    print(json.dumps({"counter": counter, "fault": fault, "again": tokens() == want}), flush=True)
llm.close()
print(json.dumps({"nodes": [n.name for n in llm.program.manifest.nodes], "faults": llm.stats().faults}))
"""

DELAYED = """
import json, sys
from megakernel.llm import LLM
from megakernel.sampling import SamplingParams

path, seed, chaos, workers = sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])), int(sys.argv[4])
llm = LLM(path, dtype="f32", workers=workers, max_slots=4, max_context=900, chaos=chaos)
llm.engine.exclusive(lambda runtime: setattr(runtime, "chaos_seed", seed))
found = []
for turn in range(3):
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, seed=7 + turn, repetition_penalty=r)
        for n, t, r in ((860, 0.0, 1.0), (700, 1.0, 1.0), (400, 0.8, 1.2), (850, 0.5, 1.0), (300, 0.0, 1.1))
    ]
    requests = [llm.engine.submit([3 + i, 5, 7 + turn] * (1 + 4 * i), p) for i, p in enumerate(params)]
    found.append([list(r.result().token_ids) for r in requests])
llm.close()
print(json.dumps({"steps": llm.stats().steps, "tokens": found}))
"""


def child(code: str, *arguments: object, seconds: float) -> list[dict[str, Any]]:
    """JSON lines of a Python process. A process that is too slow has hung: the test fails."""
    line = [sys.executable, "-c", code, *map(str, arguments)]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as hung:
        raise AssertionError(f"no end within {seconds} s; it printed {hung.stdout!r:.2000}") from hung
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(row) for row in done.stdout.splitlines()]


@pytest.mark.alone
def test_every_lost_signal_is_reported(tiny_path: Path) -> None:
    """Each counter that somebody waits for loses one signal; each ends in a report, and the process goes on."""
    *found, last = child(LOST, tiny_path, BUDGET_MS, seconds=200)
    assert len(found) >= 15 and last["faults"] == len(found)
    for entry in found:
        fault, counter = entry["fault"], entry["counter"]
        assert fault is not None, f"counter {counter} lost a signal and nobody noticed"
        assert fault["seconds"] < BUDGET_MS / 1000 + 5.0, fault
        assert fault["kind"] == "wait budget" and fault["value"] < fault["target"]
        assert fault["node"] in last["nodes"] and 0 <= fault["worker"] < 3 and fault["producers"]
        for words in (
            f"task {fault['task']} of node {fault['node']}", f"tile {fault['tile']}", f"worker {fault['worker']}",
            f"counter {fault['counter']}: value {fault['value']}, target {fault['target']}",
        ):  # fmt: skip
            assert words in fault["text"], fault["text"]
        assert str(counter) in fault["text"], f"the report never names counter {counter}: {fault['text']}"
        assert entry["again"], f"after the fault at counter {counter} the tokens are others"


def test_random_delays_change_nothing(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten thousand steps with delays at every wait and signal, against a build that has none."""
    (plain,) = child(DELAYED, tiny_path, 0, 0, 1, seconds=120)
    total = 0
    for seed, workers in ((1, 2), (2, 3), (3, 4), (4, 2)):
        (delayed,) = child(DELAYED, tiny_path, seed, 1, workers, seconds=200)
        assert delayed["tokens"] == plain["tokens"], f"seed {seed}, {workers} workers"
        total += delayed["steps"]
    with capsys.disabled():
        print(f"\n{total} delayed steps")
    assert total >= 10_000
