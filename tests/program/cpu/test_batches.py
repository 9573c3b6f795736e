"""Many rows in a step on the CPU device: every batch size, every chunking, random schedules, steps with a budget.

What a sequence gives never depends on what runs beside it."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megakernel.errors import InvalidRequest, LoweringError
from megakernel.llm import LLM
from megakernel.opening import compile
from megakernel.sampling import SamplingParams

from .conftest import TINY, Open

VOCAB = int(TINY["vocab_size"])
pytestmark = pytest.mark.timeout(300)


def prompt(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


def params(count: int, seed: int | None = None) -> SamplingParams:
    """Every token's log-probability is compared too: it shows each bit of a row's logits."""
    hot = {} if seed is None else {"temperature": 1.2, "seed": seed, "top_k": 30}
    return SamplingParams(max_tokens=count, ignore_eos=True, logprobs=2, **hot)


def answer(request) -> list[tuple]:
    return [(t.id, t.logprob, t.top) for t in request.result(100).tokens]


def alone(llm: LLM, ids: list[int], sampling: SamplingParams) -> list[tuple]:
    return answer(llm.engine.submit(ids, sampling))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_batch_size_from_1_to_64(opened: Open, dtype: str) -> None:
    """Slots that stay empty, sequences of one token beside long ones, all in one step."""
    llm = opened(dtype=dtype, max_slots=64, max_rows=64, max_context=300, share_prefixes=False)
    work = [(prompt(i, 1 if i % 5 == 0 else 290 if i == 33 else 1 + i % 23), params(3 + i % 4)) for i in range(64)]
    want = [alone(llm, *item) for item in work]
    for size in range(1, 65):
        chosen = [(i * 7 + size) % 64 for i in range(size)]
        requests = [llm.engine.submit(*work[i]) for i in chosen]
        assert [answer(r) for r in requests] == [want[i] for i in chosen], size


def test_the_number_of_rows_of_a_program_changes_no_bits(opened: Open) -> None:
    ids = prompt(1, 500)
    found = {opened(max_rows=rows).logits(ids, 498).tobytes() for rows in (1, 16, 64, 100, 128)}
    assert len(found) == 1


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=pytest.mark.slow)])
def test_sixteen_bit_weights_and_rows_of_every_count(opened: Open, dtype: str) -> None:
    """Blocks of rows begin and end everywhere; many rows go another way through a tile than few."""
    ids = prompt(2, 130)
    llm = opened(dtype=dtype, max_rows=128, share_prefixes=False)
    want = opened(dtype=dtype, max_rows=1).logits(ids, 0)
    found = [llm.logits(ids, start)[0].tobytes() for start in (0, 1, 2, 4, 22, 23, 24, 27, 28, 63, 100, 127, 129)]
    places = (0, 1, 2, 4, 22, 23, 24, 27, 28, 63, 100, 127, 129)
    assert found == [want[start].tobytes() for start in places]


def test_identical_sequences_are_equal_bit_by_bit(opened: Open) -> None:
    llm = opened(max_slots=64, max_rows=64, share_prefixes=False)
    requests = [llm.engine.submit(prompt(3, 19), params(8)) for _ in range(64)]
    first, *others = [answer(r) for r in requests]
    assert all(other == first for other in others)


def test_windows_and_wide_programs(opened: Open, tmp_path_factory: pytest.TempPathFactory) -> None:
    from .conftest import write_checkpoint

    path = write_checkpoint(
        tmp_path_factory.mktemp("window") / "m", architectures=["MistralForCausalLM"], model_type="mistral",
        sliding_window=40,
    )  # fmt: skip
    ids = prompt(4, 200)
    found = {opened(path, max_rows=rows).logits(ids, 199).tobytes() for rows in (16, 128)}
    assert len(found) == 1


def test_a_slot_is_reused_in_the_next_step(opened: Open) -> None:
    llm = opened(max_slots=2, max_rows=32, share_prefixes=False)
    work = [(prompt(10 + i, 1 + i % 40), params(1 + i % 2)) for i in range(40)]
    want = [alone(llm, *item) for item in work]
    requests = [llm.engine.submit(*item) for item in work]
    assert [answer(r) for r in requests] == want


class Schedule:
    """One engine of 6 slots and few pages, and what each request gives alone."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.known = llm, {}

    def want(self, seed: int, stem: int, length: int, count: int) -> list[tuple]:
        key = (seed, stem, length, count)
        if key not in self.known:
            self.known[key] = alone(self.llm, ids_of(*key[:3]), params(count, seed if seed % 2 else None))
        return self.known[key]


def ids_of(seed: int, stem: int, length: int) -> list[int]:
    """Prompts that share the first `stem` tokens."""
    return (prompt(1000, stem) + prompt(seed, length))[: max(1, length)]


@pytest.fixture(scope="module")
def crowded(tiny, cache):
    from megakernel.device.cpu import CpuDevice
    from megakernel.settings import Settings

    options = {"dtype": "f32", "workers": 2, "max_context": 200, "max_slots": 6, "max_rows": 32, "kv_pages": 16}
    with LLM(tiny, device=CpuDevice(), settings=Settings(cache=cache), steps_per_launch=7, **options) as llm:
        yield llm


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    items=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from([0, 30, 33, 50, 64, 90]), st.integers(1, 110), st.integers(1, 12),
            st.booleans(), st.integers(0, 3),
        ),
        min_size=1, max_size=14,
    )
)  # fmt: skip
def test_random_schedules_give_what_each_gives_alone(crowded: LLM, plain: LLM, items: list[tuple]) -> None:
    """Admit, retire and cancel at random, with shared prefixes and a pool that is too small for all."""
    reference = Schedule(plain)
    requests = []
    for seed, stem, length, count, cancel, pause in items:
        sampling = params(count, seed if seed % 2 else None)
        request = crowded.engine.submit(ids_of(seed, stem, length), sampling)
        requests.append((request, reference.want(seed, stem, length, count), cancel))
        if cancel:
            time.sleep(0.001 * pause)
            request.cancel()
    for request, want, cancel in requests:
        got = answer(request)
        assert got == want[: len(got)] if cancel else got == want
    load = crowded.engine.load()
    assert load.pages == 16


@pytest.fixture(scope="module")
def plain(tiny, cache):
    from megakernel.device.cpu import CpuDevice
    from megakernel.settings import Settings

    options = {"dtype": "f32", "workers": 2, "max_context": 200, "max_slots": 1, "max_rows": 16}
    with LLM(tiny, device=CpuDevice(), settings=Settings(cache=cache), share_prefixes=False, **options) as llm:
        yield llm


@pytest.mark.parametrize(("target", "most"), [("sm_90a", 64), ("gfx942", 16)])
def test_programs_for_gpus_have_room_for_as_many_rows_as_there_are_kernels_for(target: str, most: int) -> None:
    """But for one slot or several devices, whose programs have one tile of rows; or as many as were asked for."""
    from megakernel.builder.build import make_plan
    from megakernel.target import find_target

    config = TINY | {"head_dim": 32}
    assert make_plan(config, find_target(target)).limits.max_rows == most
    assert make_plan(config, find_target(target), max_slots=1).limits.max_rows == 16
    assert make_plan(config, find_target(target), tp=2).limits.max_rows == 16
    assert make_plan(config, find_target(target), max_rows=most).limits.max_rows == most
    with pytest.raises(
        LoweringError, match=f"max_rows {most + 1}: the kernels of target {target} have room for {most} rows"
    ):
        compile("llama-3.2-1b", target=target, max_rows=most + 1)


# ---------------------------------------------------------------------------------------------- prompts beside streams
def test_a_short_prompt_does_not_wait_for_a_long_one(opened: Open) -> None:
    llm = opened(max_slots=2, max_rows=16, max_context=2000, share_prefixes=False)
    long = llm.engine.submit(prompt(5, 1900), params(1))
    short = llm.engine.submit(prompt(6, 20), params(1))
    assert answer(short) == alone(llm, prompt(6, 20), params(1))
    answer(long)
    assert short.timings().first_token_s < 0.5 * long.timings().first_token_s


@pytest.mark.alone
def test_a_budget_keeps_steps_short(opened: Open) -> None:
    """A bound that no prompt row fits: one at a time beside the streams; without it as many as there is room for."""
    ids, beside = prompt(7, 120), prompt(8, 3)
    most: dict[float | None, list[int]] = {}  # steps from the stream's first token on: at least those beside the prompt
    least: dict[float | None, list[int]] = {}  # from the prompt's admission on, by the clock that host and kernel share
    for bound in (None, 1e-6, 1e6):
        llm = opened(max_slots=2, max_rows=64, max_step_ms=bound, share_prefixes=False)
        want = alone(llm, ids, params(2))
        for _ in range(5):
            stream = llm.engine.submit(beside, params(400))
            next(iter(stream))
            request = llm.engine.submit(ids, params(2))
            assert answer(request) == want
            first, admitted = request.poll(0)[0][0].time_ns, request._admitted * 1e9
            stamps = [t.time_ns for t in stream.poll(0)[0] if t.time_ns <= first]
            most.setdefault(bound, []).append(len(stamps))
            least.setdefault(bound, []).append(sum(t > admitted for t in stamps))
            stream.cancel()
    assert min(most[1e-6]) >= 120, most
    assert max(min(least[None]), min(least[1e6])) < 60, least


@pytest.mark.alone
def test_measured_steps_correct_the_chunk(opened: Open) -> None:
    """A bound of twice a plain step: parts of the prompt end up larger than one row, and most steps keep the bound."""
    llm = opened(max_slots=2, max_rows=256, max_context=3000, share_prefixes=False)
    stream = [t.time_ns for t in llm.engine.submit(prompt(9, 3), params(200)).result(60).tokens]
    usual = float(np.median(np.diff(stream))) * 1e-6
    llm.close()
    llm = opened(max_slots=2, max_rows=256, max_context=3000, max_step_ms=max(1.0, 3 * usual), share_prefixes=False)
    running = llm.engine.submit(prompt(9, 3), params(2900))
    next(iter(running))
    request = llm.engine.submit(prompt(10, 2500), params(1))
    first = request.result(100).tokens[0].time_ns
    running.cancel()
    stamps = [t.time_ns for t in running.poll(0)[0] if t.time_ns <= first]
    steps = sum(1 for a, b in pairwise(stamps) if b > first - request.timings().first_token_s * 1e9)
    assert 10 <= steps < 2500, "the chunk never grew, or was never bounded"


@pytest.mark.parametrize("bound", [0, -1.0])
def test_a_bound_is_more_than_nothing(opened: Open, bound: float) -> None:
    with pytest.raises(InvalidRequest, match="max_step_ms: expected more than 0"):
        opened(max_step_ms=bound)


def test_more_slots_than_rows(opened: Open) -> None:
    """Sequences take turns, and a prompt gets through."""
    llm = opened(max_slots=5, max_rows=2, share_prefixes=False)
    rng = random.Random(4)
    work = [(prompt(20 + i, rng.randint(1, 20)), params(rng.randint(1, 9))) for i in range(12)]
    want = [alone(llm, *item) for item in work]
    requests = [llm.engine.submit(*item) for item in work]
    assert [answer(r) for r in requests] == want
    one = opened(max_slots=3, max_rows=1, share_prefixes=False)
    requests = [one.engine.submit(*item) for item in work]
    assert [answer(r) for r in requests] == want
