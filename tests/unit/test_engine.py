"""The engine against a kernel that is a Python model: slots, pages, limits, stops, cancels, faults, closing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from megakernel.engine import Engine, EngineStats
from megakernel.errors import (
    CapacityError,
    DeviceFault,
    EngineClosed,
    FaultReport,
    InvalidRequest,
    MegakernelError,
    ProgramError,
)
from megakernel.faults import decode_fault
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.tasks.record import FAULT, MAILBOX_ENTRIES, NONE, RING_ENTRIES, CommandKind
from tests.fake_device import VOCAB, FakeDevice, expected, fake_program

pytestmark = pytest.mark.timeout(60)


def no_weights(name: str, dtype: str, rows: slice) -> np.ndarray:
    raise AssertionError(f"{name} is not a weight of the fake program")


def open_engine(device: FakeDevice | None = None, steps: int = 256, stop_ids: tuple[int, ...] = (), **sizes) -> Engine:
    runtime = Runtime(fake_program(**sizes), device or FakeDevice(), no_weights)
    return Engine(runtime, stop_ids=stop_ids, steps_per_launch=steps)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine() as made:
        yield made


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=count, **more)


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """The engine's driver stands still: what is submitted meanwhile begins together, however long that takes here."""
    inside, gate = threading.Event(), threading.Event()

    def stay(_: Runtime) -> None:
        inside.set()
        assert gate.wait(60)

    waiting = threading.Thread(target=engine.between_launches, args=(stay,))
    waiting.start()
    assert inside.wait(60)
    try:
        yield
    finally:
        gate.set()
        waiting.join()


def settled(engine: Engine) -> EngineStats:
    """Counts when no launch runs."""
    return engine.exclusive(lambda _: engine.stats())


def test_one_request_gives_the_models_tokens(engine: Engine) -> None:
    request = engine.submit([3, 4, 5], greedy(10))
    done = request.result(10)
    assert list(done.token_ids) == expected([3, 4, 5], 10)
    assert done.finish_reason == "length" and done.prompt_token_ids == (3, 4, 5)
    assert [t.id for t in request] == list(done.token_ids)  # a second look sees everything again
    assert 0 <= done.timings.queued_s <= done.timings.first_token_s <= done.timings.total_s
    assert done.timings.tokens_per_s > 0


@pytest.mark.parametrize("steps", [1, 2, 7, 256])
def test_ragged_requests_share_slots(steps: int) -> None:
    rng = random.Random(steps)
    device = FakeDevice()
    with open_engine(device, steps) as engine:
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(25)]
        lengths = [rng.randint(1, 30) for _ in prompts]
        requests = [engine.submit(p, greedy(n)) for p, n in zip(prompts, lengths)]
        for prompt, length, request in zip(prompts, lengths, requests):
            assert list(request.result(20).token_ids) == expected(prompt, length)
        stats = settled(engine)
        assert stats.tokens == stats.kernel_tokens == sum(lengths)
        assert stats.steps >= max(lengths) and stats.launches >= 1 and stats.requests == 25
        if steps == 1:
            assert stats.launches >= stats.steps
        assert device.loaded[0].max_active == 4


def test_a_waiting_request_gets_a_slot_in_the_middle_of_a_launch() -> None:
    with open_engine(FakeDevice(step_s=0.005), max_slots=2, max_context=400) as engine:
        with held(engine):
            long, short, third = (engine.submit([i], greedy(n)) for i, n in enumerate((200, 5, 5)))
        assert list(third.result(20).token_ids) == expected([2], 5) and short.done
        whole = long.result(20)
        assert list(whole.token_ids) == expected([0], 200)
        assert third.result().tokens[-1].time_ns < whole.tokens[-1].time_ns
        assert settled(engine).launches == 1


@pytest.mark.parametrize(("length", "tokens"), [(63, 1), (62, 2)])
def test_the_context_limits_the_output(engine: Engine, length: int, tokens: int) -> None:
    prompt = [i % VOCAB for i in range(length)]
    done = engine.submit(prompt, greedy(50)).result(10)
    assert list(done.token_ids) == expected(prompt, tokens) and done.finish_reason == "length"


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_as_long_as_the_context_is_refused(engine: Engine, length: int) -> None:
    with pytest.raises(CapacityError, match=rf"fewer than 64 tokens.*got {length}"):
        engine.submit([1] * length)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([], "at least one token"), ([VOCAB], "got 97 at place 0"), ([0, -1], "got -1 at place 1"), (["a"], "token ids")],
)
def test_bad_prompts_are_refused(engine: Engine, prompt: list, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        engine.submit(prompt)


def test_stop_tokens_of_checkpoint_and_request() -> None:
    tokens = expected([7, 7], 20)
    eos, other = tokens[6], tokens[3]
    with open_engine(stop_ids=(eos,)) as engine:
        plain = engine.submit([7, 7], greedy(20)).result(10)
        assert list(plain.token_ids) == tokens[: tokens.index(eos) + 1] and plain.finish_reason == "stop"
        own = engine.submit([7, 7], greedy(20, stop_token_ids=[other])).result(10)
        assert list(own.token_ids) == tokens[: tokens.index(other) + 1] and own.finish_reason == "stop"
        ignored = engine.submit([7, 7], greedy(20, ignore_eos=True)).result(10)
        assert list(ignored.token_ids) == tokens and ignored.finish_reason == "length"


def test_more_stop_tokens_than_a_slot_holds() -> None:
    tokens = expected([9], 20)
    last = tokens[5]
    others = [i for i in range(VOCAB) if i not in tokens][:12]
    with open_engine(FakeDevice(step_s=0.001)) as engine:
        done = engine.submit([9], greedy(20, stop_token_ids=[*others, last])).result(10)
        assert list(done.token_ids) == tokens[: tokens.index(last) + 1] and done.finish_reason == "stop"
        assert list(engine.submit([8], greedy(5)).result(10).token_ids) == expected([8], 5)


def test_log_probabilities(engine: Engine) -> None:
    three, none, own = (engine.submit([1], greedy(2, logprobs=n)).result(10).tokens[0] for n in (3, None, 0))
    assert three.logprob == -1.5 and three.top == ((0, 0.0), (1, -1.0), (2, -2.0))
    assert none.logprob is None and none.top == ()
    assert own.logprob == -1.5 and own.top == ()


@pytest.mark.alone
def test_cancel_ends_a_stream_and_frees_the_slot() -> None:
    with open_engine(FakeDevice(step_s=0.001), max_slots=1, max_context=4000) as engine:
        for round_ in range(20):
            request = engine.submit([round_], greedy(3000))
            seen = []
            for token in request:
                seen.append(token.id)
                if len(seen) == round_ % 4 + 1:
                    request.cancel()
            assert request.result().finish_reason == "cancelled"
            assert seen[: round_ % 4 + 1] == expected([round_], round_ % 4 + 1)
        started = time.perf_counter()
        assert list(engine.submit([5], greedy(3)).result(10).token_ids) == expected([5], 3)
        assert time.perf_counter() - started < 1.0


def test_cancel_of_a_waiting_request() -> None:
    with open_engine(FakeDevice(step_s=0.001), max_slots=1) as engine:
        with held(engine):
            first, second, third = (engine.submit([i], greedy(30)) for i in range(3))
            second.cancel()
        assert second.result().finish_reason == "cancelled" and second.result().tokens == ()
        assert list(third.result(10).token_ids) == expected([2], 30) and first.done


def test_a_fault_fails_the_running_requests_and_the_engine_goes_on() -> None:
    device = FakeDevice(step_s=0.001)
    device.fault_at = {5}
    with open_engine(device, max_slots=2) as engine:
        with held(engine):
            running = [engine.submit([i], greedy(20)) for i in range(2)]
            waiting = engine.submit([9], greedy(20))
        for request in running:
            with pytest.raises(DeviceFault, match=r"layer0.fake, tile 3, worker 1.*counter 1: value 5, target 6") as e:
                request.result(10)
            assert e.value.report.producers == (
                "layer0.fake tiles 0 to 1 on worker 0", "layer0.fake tiles 2 to 3 on worker 1",
            )  # fmt: skip
            with pytest.raises(DeviceFault):
                list(request)
        assert list(waiting.result(10).token_ids) == expected([9], 20)
        assert engine.stats().faults == 1
        assert list(engine.submit([1], greedy(4)).result(10).token_ids) == expected([1], 4)


def test_close_fails_what_runs_and_what_waits() -> None:
    device = FakeDevice(step_s=0.001)
    engine = open_engine(device, max_slots=1, max_context=4000)
    requests = [engine.submit([i], greedy(3000)) for i in range(3)]
    next(iter(requests[0]))
    started = time.perf_counter()
    engine.close()
    engine.close()
    assert time.perf_counter() - started < 5
    for request in requests:
        with pytest.raises(EngineClosed):
            request.result(1)
    with pytest.raises(EngineClosed):
        engine.submit([1])
    with pytest.raises(EngineClosed):
        engine.exclusive(lambda runtime: 1)
    assert device.loaded[0].closed and not device.buffers


def test_an_unforeseen_error_ends_the_engine_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(step_s=0.001)
    engine = open_engine(device, max_slots=1)
    with held(engine):
        requests = [engine.submit([i], greedy(50)) for i in range(2)]
        monkeypatch.setattr(engine.runtime, "events", lambda: 1 // 0)
    for request in requests:
        with pytest.raises(ZeroDivisionError):
            request.result(10)
    engine.close()
    assert engine.closed and not device.buffers
    with pytest.raises(EngineClosed, match="ended by an error"):
        engine.submit([1])


def test_exclusive_waits_for_requests_and_hands_back_errors(engine: Engine) -> None:
    request = engine.submit([1], greedy(20))
    next(iter(request))
    assert engine.exclusive(lambda runtime: (request.done, runtime.manifest.vocab)) == (True, VOCAB)
    with pytest.raises(ZeroDivisionError):
        engine.exclusive(lambda runtime: 1 // 0)
    assert list(engine.submit([2], greedy(3)).result(10).token_ids) == expected([2], 3)


def test_forty_threads_submit_at_once(engine: Engine) -> None:
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = list(engine.submit([i, i + 1], greedy(i % 7 + 1)).result(20).token_ids)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(40)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert results == {i: expected([i, i + 1], i % 7 + 1) for i in range(40)}


def test_result_says_that_time_is_up() -> None:
    with open_engine(FakeDevice(step_s=0.01), max_context=4000) as engine:
        request = engine.submit([1], greedy(3000))
        with pytest.raises(MegakernelError, match="goes on"):
            request.result(0.05)
        request.cancel()


def test_fewer_pages_than_slots_need() -> None:
    device = FakeDevice(step_s=0.0005)
    runtime = Runtime(fake_program(), device, no_weights, kv_pages=6)
    with Engine(runtime) as engine:
        requests = [engine.submit([i], greedy(23)) for i in range(6)]  # 3 pages each: two at a time
        for i, request in enumerate(requests):
            assert list(request.result(20).token_ids) == expected([i], 23)
        assert device.loaded[0].max_active == 2
        with pytest.raises(CapacityError, match="needs 7 KV pages; the engine has 6"):
            engine.submit([1], greedy(50))


def test_teacher_forcing_between_launches(engine: Engine) -> None:
    """What `LLM.logits` relies on: the kernel continues with the token that the host put into the slot."""
    request = engine.submit([5], greedy(1))
    assert list(request.result(10).token_ids) == expected([5], 1)

    def forced(runtime: Runtime) -> int:
        runtime.set_pages(0, (0,))
        runtime.set_prompt(0, [5])
        state = {"status": 1, "request": 1 << 31, "prompt_length": 1, "limit": 60}
        row = np.zeros((), runtime_slot(state).dtype)
        row[()] = runtime_slot(state)
        runtime.post({"kind": CommandKind.ADMIT, "slot": 0, "request": 1 << 31, "state": row})
        for _ in range(2):
            runtime.launch(1)
            runtime.finish()
            runtime.force_token(0, 42)
        token = int(runtime.events()[-1]["token"])
        runtime.post({"kind": CommandKind.CANCEL, "slot": 0, "request": 1 << 31})
        runtime.launch(1)
        runtime.finish()
        runtime.events()
        return token

    assert engine.exclusive(forced) == expected([5, 42], 1)[0]


def runtime_slot(values: dict[str, int]) -> np.ndarray:
    from megakernel.tasks.record import SLOT

    return np.frombuffer(SLOT.pack(values), SLOT.dtype)[0]


# ---------------------------------------------------------------------------------------------- runtime
def test_memory_is_reported_and_must_fit() -> None:
    device = FakeDevice(memory=100_000)
    with pytest.raises(CapacityError, match=r"does not fit device fake.*lower max_context, max_slots or kv_pages"):
        Runtime(fake_program(), device, no_weights)
    assert not device.buffers
    runtime = Runtime(fake_program(), FakeDevice(), no_weights)
    report = runtime.memory()
    assert report.kv == 4 * 8 * 64 and report.workspace == 1024 and report.total > report.kv
    runtime.close()
    runtime.close()


def test_poisoned_and_zeroed_at_load() -> None:
    runtime = Runtime(fake_program(), FakeDevice(), no_weights)
    assert np.isnan(runtime.tensor("logits")).all()
    for name in ("kv", "counters", "slots", "launch", "fault", "mailbox"):
        buffer = runtime.buffer(name)
        assert not runtime.device.download(buffer, 0, buffer.bytes).any(), name
    with pytest.raises(ProgramError, match="no workspace tensor 'none'"):
        runtime.tensor("none")
    runtime.close()


def test_the_mailbox_has_an_end() -> None:
    runtime = Runtime(fake_program(), FakeDevice(), no_weights)
    command = {"kind": CommandKind.CANCEL, "slot": 0, "request": 1}
    assert all(runtime.post(command) for _ in range(MAILBOX_ENTRIES)) and not runtime.post(command)
    assert runtime.pending() == MAILBOX_ENTRIES
    runtime.launch(1)
    runtime.finish()
    assert runtime.pending() == 0 and runtime.post(command)
    runtime.close()


def test_a_launch_cannot_overflow_the_ring() -> None:
    runtime = Runtime(fake_program(max_slots=16), FakeDevice(), no_weights)
    assert runtime.max_steps(10**9) * 2 * 16 <= RING_ENTRIES
    runtime.close()


def test_a_caller_whose_listen_raises_ends_its_own_request_alone() -> None:
    with open_engine(FakeDevice(step_s=0.001), max_slots=3) as engine:
        calls: list[int] = []

        def listen() -> None:
            calls.append(1)
            raise ValueError("the caller's mistake")

        with held(engine):
            bad = engine.submit([1], greedy(50), listen=listen)
            others = [engine.submit([i], greedy(20)) for i in (2, 3, 4, 5)]
        with pytest.raises(InvalidRequest, match=r"listen of request 1: expected .*, got ValueError: the caller's mis"):
            bad.result(10)
        for i, request in zip((2, 3, 4, 5), others, strict=True):
            assert list(request.result(10).token_ids) == expected([i], 20)
        assert len(calls) == 1 and not engine.closed
        for wrong in ({"listen": 5}, {"processor": 5}):
            with pytest.raises(InvalidRequest, match=f"{next(iter(wrong))}: expected a callable, got int"):
                engine.submit([1], greedy(1), **wrong)


@pytest.mark.parametrize(
    ("made", "got"),
    [(np.zeros((1, VOCAB)), rf"ndarray \[1, {VOCAB}\] of float64"), ("a", "str"), (np.zeros(3), r"\[3\]")],
)
def test_what_a_processor_returns_is_checked(engine: Engine, made: object, got: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"processor of request \d+: expected numbers \[{VOCAB}\].*got .*{got}"):
        engine.submit([1], greedy(2), processor=lambda _: made).result(10)
    assert list(engine.submit([1], greedy(4)).result(10).token_ids) == expected([1], 4)


def test_a_forked_child_is_told_that_the_engine_is_not_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("megakernel.engine.os.getpid", lambda: 1)
        for call in (lambda: engine.submit([1], greedy(1)), lambda: engine.exclusive(lambda _: None)):
            with pytest.raises(EngineClosed, match=r"belongs to process \d+, this is process 1; open the model here"):
                call()
    assert list(engine.submit([1], greedy(4)).result(10).token_ids) == expected([1], 4)


def test_fault_records_are_read_with_care() -> None:
    program = fake_program()
    raw = {name: 0 for name in FAULT.dtype.names or ()}
    report = decode_fault({**raw, "kind": 2, "node": NONE, "opcode": 0xFFFF, "counter": NONE}, program)
    assert (report.kind, report.node, report.producers) == ("roll call", "none", ())
    with pytest.raises(ProgramError, match="cannot be read"):
        decode_fault({**raw, "kind": 99}, program)


def test_a_bound_of_steps_needs_a_paced_program() -> None:
    device = FakeDevice()
    runtime = Runtime(fake_program(), device, no_weights)
    with pytest.raises(InvalidRequest, match=r"with max_rows \d+ was built to keep to no bound; build it with paced"):
        Engine(runtime, max_step_ms=5.0)
    runtime.close()


def test_a_prompt_in_a_late_slot_is_not_overtaken() -> None:
    """The fake kernel computes prompts in slot order, as a program that is not paced."""
    with open_engine(FakeDevice(step_s=0.001), max_slots=2, max_rows=2) as engine:
        with held(engine):
            first = engine.submit([1], greedy(8))
            late = engine.submit(list(range(1, 41)), greedy(2))  # gets the other slot
            others = [engine.submit(list(range(1, 12)), greedy(1)) for _ in range(6)]
        done = [request.result(10) for request in (first, late, *others)]
        assert (first.slot, late.slot) == (0, 1)
        assert late._first < min(request._first for request in others)
        assert list(done[1].token_ids) == expected(list(range(1, 41)), 2)


def test_a_device_that_is_gone_is_named_without_what_nobody_knows() -> None:
    report = FaultReport(
        "device lost", "none", "none", NONE, NONE, "none", NONE, 0, 0, 73, detail="rank 2 is gone", device="rank 2"
    )
    assert str(DeviceFault(report)) == "device rank 2: device lost at step 73; rank 2 is gone"


def test_a_fault_before_any_record_still_says_who_waited() -> None:
    report = FaultReport("header budget", "none", "none", NONE, 5, "consumer", 7, 1, 2, 3)
    assert "worker 5 (consumer), step 3, counter 7: value 1, target 2" in str(DeviceFault(report))
