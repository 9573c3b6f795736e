"""What a resident kernel on a GPU must stand: repeats, delays, other users of the GPU, many openings, full contexts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.device_session import generate
from megakernel import LLM, SamplingParams
from megakernel.bisect import LIMITS, compare
from megakernel.checkpoint import GenerationDefaults
from megakernel.errors import CapacityError, MegakernelError
from megakernel.origin import Origin
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from tests.gpu.machine import MODELS, NAME, needs_device, opened, prompts

pytestmark = [needs_device, pytest.mark.alone]
MARGIN = 0.2  # of the two largest float32 logits; above it every correct bf16 path gives the same token


@pytest.fixture(scope="module")
def run() -> Iterator[Runtime]:
    made = opened("tiny-llama")[0]
    yield made
    made.close()


@pytest.mark.parametrize("tokens", [1, 16, 21, 300])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_task_agrees_with_the_interpreter(name: str, tokens: int) -> None:
    """Tensor by tensor: the first task that is off is named."""
    made, graph, weights = opened(name, keep_tensors=True, max_slots=1)
    origin = Origin(name, MODELS[name], lambda n, d, r: np.asarray(weights.read(n, d, r)), None, GenerationDefaults())
    try:
        found = compare(made, graph, origin, prompts(made.manifest.vocab, (tokens,))[0], LIMITS["bf16"])
        assert len(found) > 5 and not [f for f in found if f.bad]
    finally:
        made.close()


def test_a_thousand_repeats(run: Runtime) -> None:
    given = prompts(run.manifest.vocab, (17,))
    assert len({tuple(generate(run, given, 20)[0]) for _ in range(1000)}) == 1


@pytest.mark.parametrize("left_out", [4, 32, 66])
def test_the_same_bits_with_workers_left_out(run: Runtime, left_out: int) -> None:
    workers = max(1, run.manifest.workers - left_out)
    few = opened("tiny-llama", workers=workers)[0]
    ids = prompts(run.manifest.vocab, (70,))[0]
    try:
        run.reset()
        assert np.array_equal(forced_logits(few, ids, 60), forced_logits(run, ids, 60))
    finally:
        few.close()


def test_poison_before_the_start_changes_nothing(run: Runtime) -> None:
    given = prompts(run.manifest.vocab, (17, 3))
    expected = generate(run, given, 12)
    for byte in (0xFF, 0x7F, 0x01):
        for name in ("workspace", "counters", "kv"):
            run.device.fill(run.buffer(name), byte)
        assert generate(run, given, 12) == expected


def test_many_forced_steps_have_the_tokens_of_the_interpreter() -> None:
    made, graph, weights = opened("tiny-llama", max_context=2047, max_slots=1)
    ids = prompts(made.manifest.vocab, (2046,))[0]
    try:
        got = forced_logits(made, ids, 0)
    finally:
        made.close()
    want = graph.interpret(lambda n: weights.read(n, "bf16"), ids)["logits"].numpy()
    apart = np.nonzero(got.argmax(1) != want.argmax(1))[0]
    top = np.sort(want, axis=1)
    margins = (top[:, -1] - top[:, -2])[apart]
    print(f"{len(apart)} of {len(ids)} tokens differ, margins there {margins.round(4).tolist()}")
    assert (margins < MARGIN).all()


def test_random_delays_for_a_hundred_thousand_steps() -> None:
    made = opened("tiny-llama", chaos=True)[0]
    given = prompts(made.manifest.vocab, (5,))
    results = set()
    try:
        steps = 0
        while steps < 100_000:
            made.chaos_seed = steps + 1
            results.add(tuple(generate(made, given, 1000)[0]))
            steps += 1000
    finally:
        made.close()
    assert len(results) == 1


def test_the_demo_model_has_the_tokens_of_the_processor() -> None:
    questions = [
        "Explain in two sentences why the sky is blue.", "Write a haiku about rain.", "def fibonacci(n):",
        "List three rivers of Europe.", "What is 17 + 25?",
    ]  # fmt: skip
    try:
        ours = LLM("demo", device=NAME, max_slots=1, max_context=512)
    except MegakernelError as e:
        pytest.skip(f"the demo model is not to be had: {e}")
    params = SamplingParams(max_tokens=128, ignore_eos=True)
    with ours, LLM("demo", dtype="f32", max_slots=1, max_context=512) as exact:
        for question in questions:
            ids = ours.generate(question, params)[0].prompt_token_ids
            got, want = (llm.generate(list(ids), params)[0].token_ids for llm in (ours, exact))
            part = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
            if part is None:
                continue
            top = np.sort(exact.logits([*ids, *want[:part]], len(ids) + part - 1)[-1])
            print(f"{question!r}: apart at token {part}, float32 margin {top[-1] - top[-2]:.4f}")
            assert top[-1] - top[-2] < MARGIN


def test_a_full_context_and_one_beyond(run: Runtime) -> None:
    m = run.manifest
    ids = prompts(m.vocab, (m.max_context - 1,))[0]
    run.reset()
    assert np.isfinite(forced_logits(run, ids, len(ids) - 1)).all()
    with pytest.raises(CapacityError, match="max_context"):
        forced_logits(run, [*ids, 1], 0)


def test_two_engines_in_one_process(run: Runtime) -> None:
    other = opened("tiny-qwen3")[0]
    given = prompts(400, (9, 4))
    expected = generate(run, given, 30), generate(other, given, 30)
    try:
        for made in (run, other):
            made.reset()
        for _ in range(5):  # in turns: one kernel fills the GPU
            assert (generate(run, given, 30), generate(other, given, 30)) == expected
    finally:
        other.close()


def test_fifty_openings() -> None:
    results, threads = set(), threading.active_count()
    for _ in range(50):
        made = opened("tiny-llama")[0]
        results.add(tuple(generate(made, prompts(made.manifest.vocab, (3,)), 4)[0]))
        made.close()
    assert len(results) == 1 and threading.active_count() <= threads + 2


def _busy(torch: Any, until: threading.Event, failed: list[BaseException]) -> None:
    """Allocations, copies and first launches of other modules, until told to stop."""
    try:
        size = 1024
        while not until.is_set():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                data = torch.randn(size, size, device="cuda")
                (data @ data).sum().item()
                getattr(data, ("sin", "cos", "exp", "tanh", "erf", "floor")[size % 6])()
            del data
            torch.cuda.empty_cache()
            size = size % 2048 + 65
    except BaseException as e:
        failed.append(e)


@pytest.mark.skipif(NAME != "cuda", reason="needs a GPU that others can use too")
def test_other_users_of_the_gpu(run: Runtime) -> None:
    """Kernels that hold multiprocessors before and during decoding, memory taken and given back, modules loaded."""
    import torch

    given = prompts(run.manifest.vocab, (17, 3))
    expected = generate(run, given, 200)
    torch.cuda._sleep(200_000_000)  # in front of the launch
    assert generate(run, given, 200) == expected
    stop, failed = threading.Event(), []
    thread = threading.Thread(target=_busy, args=(torch, stop, failed))
    thread.start()
    try:
        for _ in range(10):
            assert generate(run, given, 200) == expected
    finally:
        stop.set()
        thread.join(60)
    assert not failed and not thread.is_alive()


@pytest.mark.skipif(NAME != "cuda", reason="compute-sanitizer is for CUDA")
@pytest.mark.parametrize(
    ("tool", "summary"),
    [("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "0 hazards displayed (0 errors, 0 warnings)")],
)
def test_the_sanitizer_finds_nothing(tool: str, summary: str) -> None:
    path = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if path is None:
        pytest.skip("no compute-sanitizer in PATH or /usr/local/cuda/bin")
    command = [path, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.few_steps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and summary in done.stdout + done.stderr, done.stdout[-4000:]
