"""The timeline of the real CPU kernel: what must hold of every recording, whatever the machine's load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megakernel import recording
from megakernel.errors import DeviceFault, InvalidRequest, TimelineError
from megakernel.llm import LLM
from megakernel.perfetto_file import arrows
from megakernel.profile import check_range, record
from megakernel.recording import Recorder
from megakernel.request import Completion, Request
from megakernel.sampling import SamplingParams
from megakernel.scheduler.dependencies import edges as every_edge
from megakernel.settings import Settings
from megakernel.tasks.record import NONE, OPCODE_END, Role, TraceFlag
from megakernel.timeline import COUNTER, TIMES, Timeline
from tests.program.conftest import Subject
from tests.program.cpu.conftest import Open
from tests.program.cpu.test_faults import PATIENCE_NS, set_chaos, waited_counters
from tests.program.cpu.test_generate import greedy, prompt

pytestmark = pytest.mark.timeout(300)
CLOCK_ERROR_NS = 5_000  # what the alignment of two cores may be wrong by on a virtual machine


def check(timeline: Timeline, llm: LLM) -> None:
    """All invariants of a recording without a fault."""
    m, events = llm.program.manifest, timeline.tasks
    assert timeline.meta.fault is None and not (events["flags"] & TraceFlag.CUT).any()
    for before, after in pairwise(TIMES):
        assert (timeline.events[before] <= timeline.events[after]).all(), (before, after)
    records = llm.program.records
    scheduled = Counter(
        (worker, index, int(r["node"]), int(r["tile_begin"]), int(r["tile_count"]))
        for worker, row in enumerate(records)
        for index, r in enumerate(row[: int(np.argmax(row["opcode"] == OPCODE_END))])
    )
    names = ("worker", "record", "node", "tile_begin", "tile_count")
    for step in timeline.complete_steps:
        seen = Counter(tuple(int(e[n]) for n in names) for e in events[events["step"] == step])
        assert seen == scheduled, f"step {step}"
    for worker in range(m.workers):
        for role in (Role.WORKER, Role.CONTROL):
            mine = timeline.events[(timeline.events["worker"] == worker) & (timeline.events["role"] == role)]
            assert (np.diff(mine["start"].astype(np.int64)) > 0).all(), "in the order of time"
            assert (mine["start"][1:] >= mine["published"][:-1]).all(), f"two at once on worker {worker}, {role.name}"
            assert (np.diff(mine["step"].astype(np.int64)) >= 0).all()
        steps = timeline.worker_steps[timeline.worker_steps["worker"] == worker]
        assert len(set(steps["step"].tolist())) == len(steps)
        for step in steps:
            of_step = events[(events["step"] == step["step"]) & (events["worker"] == worker)]
            assert (of_step["start"] >= step["ready"]).all() and (of_step["published"] <= step["end"]).all()
    check_waits(timeline)


def check_waits(timeline: Timeline) -> None:
    """Nobody goes on before what it waits for is published; the longest wait is of a counter that it waits for."""
    worst = timeline.meta.alignment.worst_hop_ns
    assert worst is None or worst > -CLOCK_ERROR_NS
    known = {(int(e["consumer"]), int(e["counter"])) for e in timeline.edges if e["kind"] == COUNTER}
    for event in timeline.tasks[timeline.tasks["longest_wait_counter"] != NONE]:
        assert (int(event["node"]), int(event["longest_wait_counter"])) in known
        assert 0 < event["longest_wait"] <= event["published"] - event["start"] + CLOCK_ERROR_NS
        assert timeline.waited_for(event)
    found = list(arrows(timeline))
    assert found or timeline.meta.workers == 1
    for arrow in found:
        source, sink = timeline.events[arrow.source], timeline.events[arrow.sink]
        assert source["step"] == sink["step"]
        assert int(sink["ready"]) - int(source["published"]) > -CLOCK_ERROR_NS


@pytest.fixture(scope="module")
def traced(tiny: Path, cache: Path) -> Iterator[LLM]:
    settings = Settings(cache=cache, spin_ms=60_000)
    with LLM(
        tiny, settings=settings, dtype="f32", workers=3, max_context=600, max_slots=2, steps_per_launch=7, trace=True
    ) as llm:
        yield llm


def test_what_holds_of_every_recording(traced: LLM) -> None:
    timeline = record(traced, steps=10, context=20)
    first, last = timeline.meta.first_step, timeline.meta.last_step
    assert timeline.complete_steps == timeline.steps == tuple(range(first, last + 1)) and last - first + 1 == 10
    check(timeline, traced)
    assert timeline.meta.rows == 1 and 28 <= timeline.meta.context <= 38 and timeline.meta.roles == ("worker",)
    assert timeline.meta.overflow == (0, 0, 0) and timeline.meta.alignment.clock_hz > 1e6
    assert max(timeline.meta.alignment.drift_ns) < 1e6
    matmuls = sum(n.stream_bytes for n in timeline.nodes if n.task == "matmul")
    assert matmuls == traced.program.manifest.stream_bytes


def test_the_demo_model(subject: Subject) -> None:
    with LLM(subject.path, max_slots=1, max_context=256, trace=True) as llm:
        timeline = record(llm, steps=4, context=32)
        assert len(timeline.complete_steps) == 4
        check(timeline, llm)


def test_edges_and_queues_imply_every_dependency(traced: LLM) -> None:
    """What regions put in order is in order by the edges of the timeline and the order of the queues alone."""
    timeline, plan = record(traced, steps=1, context=3), traced._plan()
    placement = tuple(tuple((e.node, e.first, e.count) for e in queue) for queue in plan.schedule.queues)
    entries = [(w, i, *span) for w, queue in enumerate(placement) for i, span in enumerate(queue)]
    number = {(w, i): k for k, (w, i, *_) in enumerate(entries)}
    before: list[set[int]] = [{number[w, i - 1]} if i else set() for w, i, *_ in entries]
    for k, (_, _, node, first, count) in enumerate(entries):
        for edge in timeline.edges[timeline.edges["consumer"] == node]:
            if touches(first, count, edge, "consumer"):
                before[k] |= {
                    p for p, (_, _, n, f, c) in enumerate(entries)
                    if n == edge["producer"] and touches(f, c, edge, "producer")
                }  # fmt: skip
    reach: dict[int, set[int]] = {}

    def all_before(k: int) -> set[int]:
        if k not in reach:
            reach[k] = set().union(*({p} | all_before(p) for p in before[k]))
        return reach[k]

    wanted = every_edge(plan.schedule.nodes, placement, alias=plan.memory.at)
    assert len(wanted) > 100
    for edge in wanted:
        assert number[edge.producer] in all_before(number[edge.consumer])


def touches(first: int, count: int, edge: np.void, side: str) -> bool:
    begin, stop = int(edge[f"{side}_first"]), int(edge[f"{side}_first"]) + int(edge[f"{side}_count"])
    return first < stop and first + count > begin


def test_recording_changes_no_bit_while_requests_run(traced: LLM) -> None:
    """Two requests in a batch, sampled; recording begins and ends between launches in the middle of both."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9, seed=5, logprobs=3)
    prompts = [prompt(3, 9), prompt(4, 30)]

    def run(requests: list[Request]) -> list[tuple[tuple[int, float | None, tuple[tuple[int, float], ...]], ...]]:
        return [tuple((t.id, t.logprob, t.top) for t in r.result().tokens) for r in requests]

    def submit() -> list[Request]:
        return [traced.engine.submit(p, params) for p in prompts]

    quiet = run(submit())
    requests = submit()
    traced.start_recording(steps=12, skip=3)
    recorded = run(requests)
    timeline = traced.stop_recording()
    assert recorded == quiet
    assert len(timeline.complete_steps) == 12 and timeline.meta.rows > 1
    check(timeline, traced)


def test_overflow_is_counted_and_the_newest_are_kept(traced: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "OPEN_STEPS", 2)
    traced.start_recording()
    traced.generate([prompt(1, 5)], greedy(30))
    timeline = traced.stop_recording()
    assert min(timeline.meta.overflow) > 0
    assert 1 <= len(timeline.complete_steps) < len(timeline.steps)
    assert timeline.meta.last_step in timeline.complete_steps
    check(timeline, traced)


def test_a_recording_that_is_stopped_has_the_steps_until_then(traced: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(request: Request) -> Completion:
        for seen, _ in enumerate(request):
            if seen == 40:
                break
        raise KeyboardInterrupt

    monkeypatch.setattr(Request, "result", interrupted)
    timeline = record(traced, steps=400, context=4)
    assert 0 < len(timeline.complete_steps) == len(timeline.steps) < 400
    check(timeline, traced)
    with pytest.raises(KeyboardInterrupt):  # nothing was recorded yet
        record(traced, steps=2, context=4, warm=80)
    traced.start_recording(1)
    traced.stop_recording()


def test_steps_of_a_recording(traced: LLM, tiny: Path, cache: Path, tmp_path: Path) -> None:
    timeline = record(traced, steps=5, context=4)
    first, last = timeline.meta.first_step, timeline.meta.last_step
    part = timeline.of_steps(first + 1, first + 2)
    assert part.steps == (first + 1, first + 2) and len(part.events) == len(timeline.events) * 2 // 5
    for low, high in ((first - 1, last), (first, last + 1), (last, first), (last + 1, last + 1)):
        with pytest.raises(TimelineError, match=f"steps {low} to {high}: this timeline has steps {first} to {last}"):
            timeline.of_steps(low, high)
    with LLM(
        tiny, settings=Settings(cache=cache), dtype="f32", workers=3, max_context=600, max_slots=2, trace=True
    ) as new:
        begin = -(-4 // new.program.manifest.max_rows) + 9
        for wrong in (f"{begin - 1}:{begin}", f"{begin}:{begin + 5}", f"{begin + 1}:{begin}"):
            with pytest.raises(InvalidRequest, match=f"are numbers {begin} to {begin + 4}; give a range inside them"):
                check_range(new, wrong, 5, 4)
        check_range(new, f"{begin}:{begin + 4}", 5, 4)
        assert record(new, steps=5, context=4).steps == tuple(range(begin, begin + 5))
    again = Timeline.load(part.save(tmp_path / "part.json"))
    assert (again.events == part.events).all() and again.meta == part.meta and again.nodes == part.nodes


@pytest.mark.alone
def test_a_fault_cuts_the_recording_and_is_named(opened: Open, tmp_path: Path) -> None:
    llm = opened(chaos=True, workers=3, trace=True)
    ids = prompt(20, 6)
    want = llm.generate([ids], greedy(8))[0].token_ids
    counter = waited_counters(llm.engine.runtime)[3]
    llm.engine.exclusive(lambda runtime: set_chaos(runtime, 0, counter))
    llm.start_recording()
    with pytest.raises(DeviceFault) as caught:
        llm.generate([ids], greedy(8))
    timeline = Timeline.load(llm.stop_recording().save(tmp_path / "cut.json"))
    fault = timeline.meta.fault
    assert fault is not None and fault.text == str(caught.value) and fault.node == caught.value.report.node
    cut = timeline.events[(timeline.events["flags"] & TraceFlag.CUT) != 0]
    assert timeline.meta.last_step == fault.step and set(cut["step"].tolist()) == {fault.step}
    at = cut[(cut["worker"] == fault.worker) & (cut["role"] == Role.WORKER)]
    assert len(at) == 1 and timeline.nodes[int(at["node"][0])].name == fault.node
    assert int(at["longest_wait_counter"][0]) == caught.value.report.counter
    assert int(at["end"][0] - at["start"][0]) > 0.9 * PATIENCE_NS, "it waited until the end of its patience"
    assert (cut["published"] == 0).all() and fault.step not in timeline.complete_steps
    assert int(timeline.events["end"].max()) == int(cut["end"].max()), "nothing is later than the fault"
    llm.engine.exclusive(lambda runtime: set_chaos(runtime, 0))
    assert llm.generate([ids], greedy(8))[0].token_ids == want
    llm.start_recording(steps=2)  # the engine goes on, and so does recording
    llm.generate([ids], greedy(8))
    assert len(llm.stop_recording().complete_steps) == 2


def test_what_cannot_be_recorded(traced: LLM) -> None:
    with pytest.raises(TimelineError, match="nothing is recorded; start a recording first"):
        traced.stop_recording()
    for steps, skip in ((0, 0), (-1, 0), (3, -1)):
        with pytest.raises(TimelineError, match="expected"):
            traced.start_recording(steps, skip)
    traced.start_recording(3)
    with pytest.raises(TimelineError, match="runs already; stop it"):
        traced.start_recording(3)
    empty = traced.stop_recording()
    assert len(empty.events) == 0 and empty.steps == () and empty.complete_steps == ()
    assert len(Timeline.from_json(empty.to_json()).events) == 0
    with pytest.raises(TimelineError, match="was built without the timeline; open the model with trace=True"):
        program, device = traced.program, traced.engine.runtime.device
        Recorder(replace(program.manifest, trace=False), program.records, device, 1, 3)
