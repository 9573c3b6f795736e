"""Several CPU devices that run one model together, as threads of one process and as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megakernel import profile, ranks
from megakernel.architectures import random_weights
from megakernel.builder.build import build_graph, build_program, rank_program
from megakernel.builder.weights import pack_weights
from megakernel.checkpoint import open_checkpoint
from megakernel.errors import DeviceFault, EngineClosed, LoweringError, ProgramError, RankLost
from megakernel.llm import LLM
from megakernel.probe import forced_logits
from megakernel.ranks import ProcessRank, Ranks
from megakernel.request import Request
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.settings import Settings
from megakernel.target import Target
from megakernel.tasks.record import NONE
from tests.models.quick import QuickDevice
from tests.program.cpu.conftest import TINY, write_checkpoint
from tests.program.cpu.test_generate import prompt

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parents[3]
SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 192}
BUDGET_MS = 400

Open = Callable[..., LLM]
Array = npt.NDArray[np.float32]


class StampedDevice(QuickDevice):
    """Elements carry their own validity between devices, as they do between GPUs."""

    @property
    def target(self) -> Target:
        return replace(super().target, stamped_links=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ranks") / "even", **SIZES)


@pytest.fixture(scope="module")
def shared(model: Path, cache: Path) -> Iterator[Callable[..., LLM]]:
    """LLMs that live as long as the module, one of each kind: none of their tests breaks them."""
    known: dict[object, LLM] = {}
    with ExitStack() as stack:

        def make(**options: Any) -> LLM:
            key = tuple(sorted(options.items()))
            if key not in known:
                known[key] = stack.enter_context(open_model(model, cache, **options))
            return known[key]

        yield make


@pytest.fixture
def opened(model: Path, cache: Path) -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(open_model(model, cache, **options))


def open_model(path: Path, cache: Path, spin_ms: int = 60_000, stamped: bool = False, **options: Any) -> LLM:
    device = StampedDevice() if stamped else QuickDevice()
    chosen = {"dtype": "f32", "workers": 1, "max_context": 300, "max_slots": 4, **options}
    return LLM(path, device=device, settings=Settings(cache=cache, spin_ms=spin_ms), **chosen)


def greedy(count: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def sampled(count: int = 12) -> SamplingParams:
    return SamplingParams(
        max_tokens=count, ignore_eos=True, temperature=0.8, top_p=0.95, repetition_penalty=1.2, seed=5, logprobs=2
    )


def open_config(path: Path) -> dict[str, Any]:
    with open_checkpoint(path) as checkpoint:
        return dict(checkpoint.config)


PROMPTS = [prompt(seed, n) for seed, n in ((1, 5), (2, 40), (3, 1), (4, 17))]


def tokens(llm: LLM, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [o.token_ids for o in llm.generate([list(p) for p in prompts], params)]


def logits(llm: LLM) -> Array:
    return llm.engine.exclusive(lambda runtime: forced_logits(runtime, PROMPTS[1], 20))


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


# ---------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tokens_are_those_of_one_device(shared: Open, tp: int) -> None:
    """With 8 ranks each KV head is on two of them."""
    one, several = shared(), shared(tp=tp)
    assert several.program.manifest.ranks == tp
    assert tokens(several, greedy()) == tokens(one, greedy())
    assert tokens(several, sampled()) == tokens(one, sampled())
    a, b = logits(one), logits(several)
    assert np.abs(a - b).max() < 2e-5 * np.abs(a).max() and not same_bits(a, b)
    assert same_bits(b, logits(several))


def test_three_ranks(tmp_path: Path, cache: Path) -> None:
    """An odd number, and a vocabulary that it does not divide."""
    path = write_checkpoint(tmp_path / "odd", num_attention_heads=6, num_key_value_heads=3, intermediate_size=150)
    with open_model(path, cache) as one, open_model(path, cache, tp=3) as three:
        assert tokens(three, greedy()) == tokens(one, greedy())
        assert same_bits(logits(three), logits(three))


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_and_threads_give_the_same_bits(shared: Open, opened: Open, tp: int) -> None:
    threads = shared(tp=tp)
    processes = opened(tp=tp, tp_processes=True, workers=2)
    assert tokens(processes, greedy()) == tokens(threads, greedy())
    assert tokens(processes, sampled()) == tokens(threads, sampled())
    assert same_bits(logits(processes), logits(threads))


@pytest.mark.parametrize(("tp", "processes"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_stamped_elements_give_the_same_bits(shared: Open, opened: Open, tp: int, processes: bool) -> None:
    counted = shared(tp=tp)
    stamped = opened(tp=tp, tp_processes=processes, stamped=True, workers=2, chaos=True)
    assert "stamped = true" in "".join(stamped.program.manifest.variants)
    assert tokens(stamped, greedy()) == tokens(counted, greedy())
    assert tokens(stamped, sampled()) == tokens(counted, sampled())
    assert same_bits(logits(stamped), logits(counted))


def test_stamps_that_come_again_meet_no_old_ones(opened: Open) -> None:
    """As after 2^30 exchanges: what is left in the windows would be taken for that of this step."""
    llm = opened(tp=2, stamped=True, chaos=True)
    want = tokens(llm, greedy())
    runtime = llm.engine.runtime
    assert isinstance(runtime, Ranks)

    def spoil(runtime: Runtime) -> None:
        assert isinstance(runtime, Ranks)
        runtime._turn = 7  # the next launch sees that another turn has begun
        for window in (runtime.window, runtime.others[0].runtime.window):  # type: ignore[attr-defined]
            assert window.host is not None
            first = 128 + len(runtime.manifest.exchanges) * 2 * 128
            words = window.host[first : first + (len(window.host) - first) // 8 * 8].view(np.uint32)
            words[0::2] = np.float32(3e4).view(np.uint32)
            words[1::2] = (runtime._step + 1) * len(runtime.manifest.exchanges) | 0x80000000

    llm.engine.between_launches(spoil)
    assert tokens(llm, greedy()) == want and runtime._turn == 0


@pytest.mark.parametrize("seeds", [(1, 2), pytest.param((3, 4, 5, 6), marks=pytest.mark.slow)])
def test_delays_everywhere_change_no_bit(shared: Open, seeds: tuple[int, ...]) -> None:
    plain, chaos = shared(tp=2), shared(tp=2, chaos=True, workers=2)
    want, bits = tokens(plain, greedy()), logits(plain)
    for seed in seeds:
        chaos.engine.exclusive(lambda runtime, seed=seed: setattr(runtime, "chaos_seed", seed))
        assert tokens(chaos, greedy()) == want
        assert same_bits(logits(chaos), bits)
    chaos.engine.exclusive(lambda runtime: setattr(runtime, "chaos_seed", 0))


def test_weights_are_split_and_read_once(shared: Open) -> None:
    """Every rank has its part: of what is split nothing twice, and little else."""
    one, two = shared(), shared(tp=2)
    runtime = two.engine.runtime
    assert isinstance(runtime, Ranks)
    whole, parts = one.program.manifest, [runtime.manifest, runtime.others[0].runtime.manifest]  # type: ignore[attr-defined]
    assert [m.rank for m in parts] == [0, 1] and parts[0].kv_heads == whole.kv_heads // 2
    matrices = lambda m: sum(w.bytes for w in m.weights if w.kind in ("matrix", "interleaved"))  # noqa: E731
    assert matrices(parts[0]) == matrices(parts[1]) < 0.6 * matrices(whole)
    read = {(p.tensor, p.start, p.stop, p.first_col, p.stop_col) for m in parts for w in m.weights for p in w.parts}
    q = [r for r in read if r[0].endswith("layers.0.self_attn.q_proj.weight")]
    o = [r for r in read if r[0].endswith("layers.0.self_attn.o_proj.weight")]
    assert sorted(r[1:3] for r in q) == [(0, 64), (64, 128)] and sorted(r[3:5] for r in o) == [(0, 64), (64, 128)]


def test_each_value_of_a_matrix_is_read_by_one_rank(model: Path, cache: Path) -> None:
    """Of the matrices that are split; the tables and vectors are read by every rank."""
    target = QuickDevice().target
    program = build_program(open_config(model), target, QuickDevice(), cache=cache, dtype="f32", max_context=300, tp=2)
    programs = [rank_program(program, open_config(model), target, rank) for rank in range(2)]
    with open_checkpoint(model) as checkpoint:
        seen = {name: np.zeros(checkpoint.shape(name), int) for name in checkpoint.names()}

        class Counting:
            def __call__(self, name: str, dtype: str, rows: slice) -> Any:
                seen[name][rows] += 1
                return checkpoint.read(name, dtype, rows)

            def columns(self, name: str, dtype: str, rows: slice, cols: slice) -> Any:
                seen[name][rows, cols] += 1
                return checkpoint.read(name, dtype, rows, cols)

        for one in programs:
            pack_weights(one.manifest, target, Counting(), lambda at, data: None)
    split = [n for n in seen if "_proj.weight" in n]
    assert len(split) == 7 * 3 and all((seen[n] == 1).all() for n in split)


# ---------------------------------------------------------------------------------------------- requests
def test_requests_that_come_and_go_while_others_run(shared: Open) -> None:
    one, two = shared(), shared(tp=2)
    want = tokens(one, greedy(40))
    many = [two.engine.submit(p, greedy(40)) for p in PROMPTS for _ in range(3)]
    gone = [two.engine.submit(p, greedy(200)) for p in PROMPTS]
    time.sleep(0.01)
    for request in gone[::2]:
        request.cancel()
    got = [tuple(t.id for t in r) for r in many]
    assert got == [w for w in want for _ in range(3)]
    for request in gone[1::2]:
        request.cancel()


def test_a_processor_and_a_bias_reach_every_rank(shared: Open) -> None:
    one, two = shared(), shared(tp=2)
    params = SamplingParams(max_tokens=10, ignore_eos=True, logit_bias={7: 30.0, 9: 29.0}, repetition_penalty=1.5)

    def only_even(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        bias = np.zeros(one.program.manifest.vocab, np.float32)
        bias[1::2] = -np.inf
        return bias

    for processor in (None, only_even):
        found = [llm.generate([PROMPTS[0]], params, processor=processor)[0].token_ids for llm in (one, two)]
        assert found[0] == found[1]
        assert all(t % 2 == 0 for t in found[1]) if processor else 7 in found[1]


@pytest.mark.slow
def test_embeddings_and_hidden_states_are_those_of_one_device(opened: Open) -> None:
    options: dict[str, Any] = {"inputs": True, "hidden": True, "stamped": False}
    one, two = opened(**options), opened(tp=2, **options)
    rows = np.random.default_rng(5).normal(size=(6, 88)).astype(np.float32)
    a, b = (llm.generate([rows], greedy(5), hidden=True)[0] for llm in (one, two))
    assert a.token_ids == b.token_ids and a.prompt_hidden is not None and b.prompt_hidden is not None
    assert np.allclose(a.prompt_hidden, b.prompt_hidden, atol=1e-3)


def test_a_bound_on_steps_is_kept_by_all_ranks(opened: Open, shared: Open) -> None:
    """How many prompt rows a step carries comes from a clock: rank 0's, for all."""
    llm = opened(tp=2, max_step_ms=0.05, workers=1)
    want = tokens(shared(), greedy(30))
    for _ in range(3):
        assert tokens(llm, greedy(30)) == want


def test_a_recording_shows_all_devices_on_one_clock(opened: Open) -> None:
    llm = opened(tp=2, trace=True)
    timeline = profile.record(llm, steps=4, context=8)
    one = len(llm.program.manifest.nodes)
    assert timeline.meta.workers == 2 and len(timeline.nodes) == 2 * one and len(timeline.complete_steps) == 4
    assert [timeline.nodes[i].name for i in (0, one)] == ["rank 0: embedding", "rank 1: embedding"]
    assert {int(w) for w in timeline.tasks["worker"][timeline.tasks["node"] >= one]} == {1}
    between = [e for e in timeline.edges if (e["producer"] < one) != (e["consumer"] < one)]
    assert len(between) == 2 * len(llm.program.manifest.exchanges)
    hop = timeline.meta.alignment.worst_hop_ns
    assert hop is not None and hop > -20_000  # nothing is seen before it is sent


def test_keys_and_values_are_those_of_all_heads(shared: Open) -> None:
    one, two, eight = shared(), shared(tp=2), shared(tp=8)

    def exported(llm: LLM) -> Any:
        request = llm.engine.submit(PROMPTS[1], greedy(2), keep_kv=True)
        request.result(60)
        return request.kv

    a = exported(one)
    for llm in (two, eight):
        b = exported(llm)
        count = min(len(a.tokens), len(b.tokens), len(PROMPTS[1]))
        assert b.keys.shape[2] == 4 and a.keys.shape[2] == 4
        assert np.allclose(a.keys[:, :count], b.keys[:, :count], atol=1e-4)
        llm.engine.put_kv(b)
        assert tokens(llm, greedy()) == tokens(one, greedy())


# ---------------------------------------------------------------------------------------------- faults
def peer_counter(runtime: Runtime, exchange: int, sender: int) -> int:
    m = runtime.manifest
    return m.counter_count + exchange * m.ranks + sender


@pytest.mark.alone
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_lost_push_names_the_devices_and_the_exchange(opened: Open, processes: bool) -> None:
    llm = opened(tp=2, chaos=True, tp_processes=processes, spin_ms=BUDGET_MS)
    want = tokens(llm, greedy(6))

    def lose(runtime: Runtime, counter: int) -> None:
        assert isinstance(runtime, Ranks)
        runtime.drop_signal, runtime.chaos_rank = counter, 1

    llm.engine.exclusive(lambda runtime: lose(runtime, peer_counter(runtime, 2, 1)))
    began = time.monotonic()
    with pytest.raises(DeviceFault) as caught:
        tokens(llm, greedy(6))
    assert time.monotonic() - began < 5 * BUDGET_MS / 1e3
    report = caught.value.report
    assert report.kind == "peer budget" and report.device.startswith("rank 0 (cpu")
    assert "rank 0 waits for rank 1, which has sent" in report.detail
    assert llm.program.manifest.exchanges[2] in report.detail and report.task == "receive"
    llm.engine.exclusive(lambda runtime: lose(runtime, NONE))
    assert tokens(llm, greedy(6)) == want and llm.stats().faults == 1


@pytest.mark.alone
def test_a_lost_stamp_names_the_sender(opened: Open) -> None:
    """Rank 1 writes into another buffer: what rank 0 waits for does not come."""
    llm = opened(tp=2, stamped=True, chaos=True, spin_ms=BUDGET_MS)
    want = tokens(llm, greedy(6))

    def misdirect(runtime: Runtime, back: bool) -> None:
        assert isinstance(runtime, Ranks)
        other = runtime.others[0].runtime  # type: ignore[attr-defined]
        other.connect([(other if not back else runtime).window.address, other.window.address])

    llm.engine.exclusive(lambda runtime: misdirect(runtime, False))
    with pytest.raises(DeviceFault) as caught:
        tokens(llm, greedy(6))
    assert "rank 0 waits for rank 1, which has not sent its part of layers.0." in caught.value.report.detail
    llm.engine.exclusive(lambda runtime: misdirect(runtime, True))
    assert tokens(llm, greedy(6)) == want


@pytest.mark.alone
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_on_one_device_stops_all_and_is_the_one_reported(opened: Open, rank: int) -> None:
    llm = opened(tp=2, chaos=True, workers=2, spin_ms=BUDGET_MS)
    want = tokens(llm, greedy(6))
    records = llm.program.records
    waited = [
        int(w["counter"]) for r in records.reshape(-1) if r["opcode"] < 0xFFF0 for w in r["waits"][: r["wait_count"]]
    ]

    def lose(runtime: Runtime, counter: int) -> None:
        assert isinstance(runtime, Ranks)
        runtime.drop_signal, runtime.chaos_rank = counter, rank

    llm.engine.exclusive(lambda runtime: lose(runtime, waited[3]))
    began = time.monotonic()
    with pytest.raises(DeviceFault) as caught:
        tokens(llm, greedy(6))
    assert time.monotonic() - began < 5 * BUDGET_MS / 1e3
    report = caught.value.report
    assert report.kind == "wait budget" and report.device.startswith(f"rank {rank} (cpu")
    assert str(caught.value).startswith(f"device rank {rank} (cpu")
    llm.engine.exclusive(lambda runtime: lose(runtime, NONE))
    assert tokens(llm, greedy(6)) == want


def running(llm: LLM) -> tuple[ProcessRank, Request]:
    """Rank 1, a process, and a long request that has begun."""
    runtime = llm.engine.runtime
    assert isinstance(runtime, Ranks)
    other = runtime.others[0]
    assert isinstance(other, ProcessRank)
    request = llm.engine.submit(PROMPTS[0], greedy(3_900))
    next(iter(request))
    return other, request


@pytest.mark.alone
def test_a_killed_process_ends_in_a_report(opened: Open) -> None:
    llm = opened(tp=2, tp_processes=True, spin_ms=2_000, steps_per_launch=2_000, max_context=4_000)
    tokens(llm, greedy(4))
    other, request = running(llm)
    began = time.monotonic()
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(
        DeviceFault, match=r"device rank 1: device lost at step \d+; rank 1 \(cpu, process \d+\) is gone.*-9"
    ):
        for _ in request:
            pass
    assert time.monotonic() - began < 4.0
    with pytest.raises(EngineClosed, match="open the model again"):
        for _ in range(100):
            llm.generate([PROMPTS[0]], greedy(2))
            time.sleep(0.01)


def test_a_process_that_is_killed_while_nothing_runs_ends_the_engine(opened: Open) -> None:
    """Nobody has to ask for anything before it is known."""
    llm = opened(tp=2, tp_processes=True, spin_ms=2_000, steps_per_launch=2_000, max_context=4_000)
    tokens(llm, greedy(4))
    time.sleep(3 * ranks.CHECK_S)
    assert not llm.engine.load().recovering
    os.kill(llm.engine.runtime.others[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    began = time.monotonic()
    while not llm.engine.load().recovering:
        assert time.monotonic() - began < 30.0
        time.sleep(0.01)
    with pytest.raises(EngineClosed, match=r"rank 1 \(cpu, process \d+\) is gone, exit status -9"):
        llm.generate([PROMPTS[0]], greedy(2))


def test_a_process_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for every call after that, whose answer would come too late for it."""
    monkeypatch.setattr(ranks, "ANSWER_S", 0.3)
    rank = ProcessRank(1, QuickDevice(), {})
    rank.check()
    os.kill(rank.pid, signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(RankLost, match=r"rank 1 \(cpu, process \d+\) did not answer within 0.3 s"):
            rank.call("ended")
    with pytest.raises(RankLost, match="did not answer"):
        rank.check()
    began = time.monotonic()
    rank.close()
    assert time.monotonic() - began < 5 and not Path(f"/proc/{rank.pid}/cmdline").exists()


@pytest.mark.alone
def test_a_stopped_process_ends_in_a_report(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive, and never answers."""
    monkeypatch.setattr(ranks, "ENDING_S", 0.5)
    llm = opened(tp=2, tp_processes=True, spin_ms=BUDGET_MS, steps_per_launch=2_000, max_context=4_000)
    other, request = running(llm)
    began = time.monotonic()
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(
        DeviceFault, match=r"device rank 1: device lost.* rank 1 \(cpu, process \d+\) did not answer within"
    ):
        for _ in request:
            pass
    llm.close()
    assert time.monotonic() - began < 10.0
    assert not Path(f"/proc/{other.pid}").exists()


ORPHANS = """
import sys
from pathlib import Path
from tests.program.cpu.test_ranks import open_model, greedy
llm = open_model(Path(sys.argv[1]), Path(sys.argv[2]), tp=2, tp_processes=True, max_context=4000)
request = llm.engine.submit([1, 2, 3], greedy(3900))
next(iter(request))
print(llm.engine.runtime.others[0].pid, flush=True)
for _ in request: pass
"""


def test_processes_end_with_the_one_that_started_them(model: Path, cache: Path) -> None:
    line = [sys.executable, "-c", ORPHANS, str(model), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        child.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, f"process {pid} is left over"
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------- what does not fit
def test_one_rank_alone_is_not_run(shared: Open) -> None:
    program, weights = shared(tp=2).program, random_weights(build_graph({**TINY, **SIZES}), 1)
    runtime = Runtime(program, QuickDevice(), lambda name, dtype, rows: weights.read(name, dtype, rows))
    with pytest.raises(ProgramError, match=r"is of rank 0 of 2 and was not told of the others"):
        runtime.launch(1)
    runtime.close()


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (0, "tp: expected an integer from 1 to 8, got 0"),
        (9, "tp: expected an integer from 1 to 8, got 9"),
        (3, r"tp 3: node layers.0.attention has 8 heads on 4 KV heads; expected .*; possible are 1, 2, 4, 8$"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(model: Path, cache: Path, tp: int, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        open_model(model, cache, tp=tp)
