"""Timelines without a kernel: files that cannot be read, clocks that differ, graphs of other targets, other formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megakernel import cli, profile
from megakernel.builder.build import make_plan
from megakernel.clocks import align
from megakernel.errors import MissingExtra, TimelineError
from megakernel.flow import edges_of
from megakernel.perfetto_file import ring_changes, write_perfetto
from megakernel.target import find_target
from megakernel.tasks.record import NONE, TRACE_EVENT, Role, TraceFlag
from megakernel.timeline import EDGE, VALUE, Alignment, Meta, Timeline, TimelineFault, TimelineNode
from tests.unit.test_cuda_build import CONFIG


def event(worker: int, role: Role, node: int, step: int, times: tuple[int, ...], **fields: int) -> np.void:
    row = np.zeros((), TRACE_EVENT.dtype)
    row["worker"], row["role"], row["node"], row["step"] = worker, role, node, step
    row["record"], row["tile_count"], row["longest_wait_counter"] = node, 1, NONE
    for name, time in zip(("start", "ready", "first_data", "end", "published"), times, strict=True):
        row[name] = time
    for name, value in fields.items():
        row[name] = value
    return row[()]


def made(cut: bool = False) -> Timeline:
    """Two workers, two nodes: worker 1 waits for worker 0. With roles, as a device whose roles run side by side."""
    rows = [
        event(0, Role.PRODUCER, 0, 7, (5, 10, 10, 28, 28)),
        event(0, Role.CONSUMER, 0, 7, (20, 25, 30, 90, 100)),
        event(0, Role.CONTROL, NONE, 7, (0, 10, 10, 200, 200), tile_begin=1, tile_count=33),
        event(1, Role.CONSUMER, 1, 7, (15, 120, 125, 150, 0 if cut else 160), longest_wait=105, longest_wait_counter=0,
              flags=TraceFlag.BY_VALUE | (TraceFlag.CUT if cut else 0)),
        event(1, Role.CONTROL, NONE, 7, (2, 12, 12, 190, 190), tile_begin=1, tile_count=33),
    ]  # fmt: skip
    nodes = (
        TimelineNode("layers.0.glu", "glu", "matmul", 0, 1, 1000.0, 0.0, 5.0, {"k": 8}),
        TimelineNode("logits", "logits", "matmul", -1, 1, 500.0, 0.0, 5.0),
    )
    fault = TimelineFault("wait budget", "logits", "matmul", 0, 1, "consumer", 7, "wait budget: of logits")
    meta = Meta(
        "tiny", "shape", "cuda", "a device", "sm_90a", 2, ("producer", "consumer"), 4096,
        Alignment("c", 1e9, (0.0,), (1.0,)), 7, 7, 33, 1.0, (0, 3), {"dtype": "bf16"}, fault if cut else None,
    )  # fmt: skip
    return Timeline(np.array(rows), meta, nodes, np.array([(0, 0, 1, 1, 0, 1, VALUE, NONE)], EDGE))


# ---------------------------------------------------------------------------------------------- files
def test_a_timeline_survives_its_file(tmp_path: Path) -> None:
    for timeline in (made(), made(cut=True)):
        again = Timeline.load(timeline.save(tmp_path / "t.json"))
        assert (again.events == timeline.events).all() and (again.edges == timeline.edges).all()
        assert again.meta == timeline.meta and again.nodes == timeline.nodes
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"], "no temporary file is left"
    assert again.complete_steps == () and made().complete_steps == (7,)
    assert made().waited_for(made().tasks[2]) == "values of layers.0.glu"


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    raw = json.loads(made().to_json())
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (made().to_json()[:-1], "is truncated: it ends after"),
        (made().to_json()[: len(made().to_json()) // 2], "is truncated: it ends after"),
        ("", "is truncated: it ends after 0"),
        ("{] and more of it", "is not JSON"),
        ("[]", "is not a timeline"),
        ('{"format": "other"}', "is not a timeline"),
        (damaged(lambda r: r.update(schema=99)), "schema version 99, this version reads 2; record it again"),
        (damaged(lambda r: r.pop("schema")), "schema version None"),
        (damaged(lambda r: r.pop("edges")), r"misses or adds a field \('edges'\)"),
        (damaged(lambda r: r["meta"].pop("target")), "misses or adds a field"),
        (damaged(lambda r: r["meta"].update(more=1)), "misses or adds a field"),
        (damaged(lambda r: r["events"].pop("start")), "events: columns start"),
        (damaged(lambda r: r["events"]["start"].pop()), r"events: columns of \[4, 5\] rows"),
        (damaged(lambda r: r["events"]["worker"].__setitem__(0, -1)), "has a value that none has"),
        (damaged(lambda r: r["events"]["worker"].__setitem__(0, 2)), "worker 2 of 2 workers"),
        (damaged(lambda r: r["events"]["role"].__setitem__(0, 99)), "role 99"),
        (damaged(lambda r: r["events"]["ready"].__setitem__(0, 4)), "event 0: start 5, ready 4"),
        (damaged(lambda r: r["events"]["longest_wait"].__setitem__(0, 1 << 63)), "longest_wait 9223372036854775808"),
        (damaged(lambda r: r["nodes"][1].update(layer=[])), r"node 1: layer: expected int, got '\[\]'"),
        (damaged(lambda r: r["nodes"][1].update(flops=float("inf"))), "node 1: flops: expected float, got 'inf'"),
        (damaged(lambda r: r["nodes"][1].update(fields=3)), "node 1: fields: expected Mapping"),
        (damaged(lambda r: r["nodes"][0].update(name=True)), "node 0: name: expected str, got 'True'"),
        (damaged(lambda r: r["meta"].update(overflow="xy")), "meta: overflow: expected tuple"),
        (damaged(lambda r: r["meta"].update(overflow=[1])), "overflow of 1 workers, there are 2"),
        (damaged(lambda r: r["meta"]["alignment"].update(clock_hz=None)), "alignment: clock_hz: expected float"),
        pytest.param('{"a":' * 100_000, "is not a timeline", id="nested"),
        (damaged(lambda r: r["events"]["node"].__setitem__(0, 2)), "node 2 of 2 nodes"),
        (damaged(lambda r: r["edges"]["producer"].__setitem__(0, 9)), "producer 9 of 2 nodes"),
    ],
)
def test_a_file_that_cannot_be_read(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TimelineError, match=words):
        Timeline.load(path)
    result = CliRunner().invoke(cli.app, ["profile", str(path), "-o", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["error"] == "TimelineError"


def test_wherever_a_file_is_cut_it_is_called_truncated() -> None:
    text = made().to_json().replace('"a device"', '"a \\u0064evice"')
    for end in range(1, len(text)):
        with pytest.raises(TimelineError, match="is truncated: it ends after"):
            Timeline.from_json(text[:end])


def test_a_step_is_complete_when_all_its_tiles_are_there() -> None:
    """Not when it has as many events as the fullest: all may have lost some."""
    whole = made()
    lost = (whole.events["role"] == Role.CONSUMER) & (whole.events["node"] == 1)
    assert whole.complete_steps == (7,)
    assert replace(whole, events=whole.events[~lost]).complete_steps == ()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="cannot read the timeline"):
        Timeline.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TimelineError, match="cannot read the timeline"):
        Timeline.load(tmp_path / "binary.json")
    with pytest.raises(TimelineError, match="cannot write the timeline to"):
        made().save(tmp_path / "no-such-folder" / "t.json")


# ---------------------------------------------------------------------------------------------- clocks
def ticks_of(ns: float, worker: int) -> int:
    """A clock of 2.5 ticks a nanosecond, worker 1's ahead by 1 ms."""
    return round((ns + 1e6 * worker) * 2.5) + 10_000_000


def raw_steps(count: int, late: Callable[[int, int], float] = lambda step, worker: 0.0) -> np.ndarray:
    """Steps of 1 ms of two workers as a CPU records them. `late`: nanoseconds between tick and reading of the clock."""
    rows = []
    for step in range(count):
        for worker in range(2):
            at = 1e6 * step
            ticks = [ticks_of(at + d, worker) for d in (0, 1000, 0, 900_000, 900_000)]
            row = event(worker, Role.CONTROL, NONE, step, tuple(ticks))
            row["first_data"] = 5_000_000_000 + at + 1000 + late(step, worker)
            row["longest_wait"] = 5_000_000_000 + at + 900_000
            rows.append(row)
    return np.array(rows)


def test_clocks_are_aligned() -> None:
    events, alignment = align(raw_steps(20), 2, "cpu")
    assert alignment.clock_hz == pytest.approx(2.5e9, rel=1e-6)
    assert alignment.offset_ns == pytest.approx((0.0, -1e6), abs=2.0)
    assert max(alignment.drift_ns) < 2.0
    for worker in range(2):
        starts = events["start"][events["worker"] == worker].astype(np.int64)
        assert np.abs(np.diff(starts) - 1_000_000).max() <= 2
    assert np.abs(events["start"][0::2].astype(np.int64) - events["start"][1::2].astype(np.int64)).max() <= 3


def test_a_thread_that_lost_its_core_between_two_readings_moves_nothing() -> None:
    _, alignment = align(raw_steps(20, lambda step, worker: 4e6 if step in (0, 7) and worker == 0 else 0.0), 2, "cpu")
    assert alignment.clock_hz == pytest.approx(2.5e9, rel=1e-6) and alignment.offset_ns[1] == pytest.approx(-1e6, abs=2)
    _, one = align(raw_steps(1), 2, "cpu")
    assert one.clock_hz == pytest.approx(2.5e9, rel=1e-4), "one step has two readings, and that is enough"


def test_drift_is_seen() -> None:
    _, alignment = align(raw_steps(40, lambda step, worker: 500.0 * step * worker), 2, "cpu")
    assert alignment.drift_ns[1] > 3_000 > alignment.drift_ns[0]
    _, shared = align(raw_steps(3), 2, "cuda")
    assert shared.clock_hz == 1e9 and shared.offset_ns == (0.0, 0.0), "ticks are the clock itself"


# ---------------------------------------------------------------------------------------------- the graph of a GPU
def test_edges_by_value_are_what_the_tasks_read() -> None:
    target = find_target("sm_90a").with_workers(5)
    plan = make_plan(CONFIG, target, max_context=1024, max_slots=2)
    edges, nodes = edges_of(plan.schedule, target.value_edges), plan.schedule.nodes
    names = {n.name: i for i, n in enumerate(nodes)}
    glu, down = names["layers.0.glu"], names["layers.0.mlp_residual"]
    into = edges[(edges["consumer"] == down) & (edges["producer"] == glu)]
    assert len(into) and (into["kind"] == VALUE).all() and (into["counter"] == NONE).all()
    assert into["producer_first"].tolist() == [0] and into["producer_count"].tolist() == [nodes[glu].tiles]
    assert into["consumer_count"].sum() == nodes[down].tiles, "every tile reads all of the input"
    residual = edges[(edges["consumer"] == down) & (edges["producer"] == names["layers.0.attention_residual"])]
    assert residual["consumer_count"].sum() == nodes[down].tiles, "and its own columns of the residual"
    assert (edges["producer"] < edges["consumer"]).all() and {0, 1} == set(edges["kind"].tolist())


# ---------------------------------------------------------------------------------------------- other formats
def read_trace(path: Path) -> Any:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = protos.Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def test_the_perfetto_trace(tmp_path: Path) -> None:
    trace = read_trace(write_perfetto(made(), tmp_path / "t.pftrace"))
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    assert {t.process.process_name for t in tracks.values() if t.HasField("process")} == {"worker 0", "worker 1"}
    threads = [t.thread.thread_name for t in tracks.values() if t.HasField("thread")]
    assert sorted(threads) == ["consumer", "consumer", "producer", "steps", "steps"]
    events = [p for p in trace.packet if p.HasField("track_event")]
    assert all(p.track_event.track_uuid in tracks for p in events)
    depth: dict[int, int] = {}
    last: dict[int, int] = {}
    flows: dict[int, list[tuple[int, str]]] = {}
    for p in events:
        kind, track = p.track_event.type, p.track_event.track_uuid
        if kind in (p.track_event.TYPE_SLICE_BEGIN, p.track_event.TYPE_SLICE_END):
            depth[track] = depth.get(track, 0) + (1 if kind == p.track_event.TYPE_SLICE_BEGIN else -1)
            assert depth[track] >= 0 and p.timestamp >= last.get(track, 0)
            last[track] = p.timestamp
        for flow in p.track_event.flow_ids:
            flows.setdefault(flow, []).append((p.timestamp, p.track_event.name))
    assert set(depth.values()) == {0}, "every slice that begins ends"
    assert list(flows.values()) == [[(30, "work"), (125, "work")]], "one arrow, from the producer to who waited"
    counters = [p.track_event.counter_value for p in events if p.track_event.type == p.track_event.TYPE_COUNTER]
    assert counters.count(1000) == 2 and counters[-1] == 0, "a ring that is filled and emptied, and the sum of rings"
    assert sum(change for _, change in ring_changes(made(), 0)) == 0


def test_a_ring_never_shows_more_bytes_than_it_has(tmp_path: Path) -> None:
    """A record may stream many times the ring: it is taken away while it still comes."""
    pytest.importorskip("perfetto")
    small = replace(made(), meta=replace(made().meta, ring_bytes=100))
    asked = [(t, n) for t, n in ring_changes(small, 0) if n > 0]
    assert len(asked) == 40 and {n for _, n in asked} == {25.0} and 10 <= asked[0][0] < asked[-1][0] <= 28
    packets = read_trace(write_perfetto(small, tmp_path / "t.pftrace")).packet
    counters = [p.track_event.counter_value for p in packets if p.track_event.type == p.track_event.TYPE_COUNTER]
    assert max(counters) <= 2 * 100 and counters[-1] == 0 and sorted(counters)[len(counters) // 2] > 0


def test_a_fault_is_an_instant_of_the_trace(tmp_path: Path) -> None:
    trace = read_trace(write_perfetto(made(cut=True), tmp_path / "t.pftrace"))
    instants = [p for p in trace.packet if p.HasField("track_event") and p.track_event.type == 3]
    assert [p.track_event.name for p in instants] == ["wait budget: of logits"] and instants[0].timestamp == 200


def test_the_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    with pytest.raises(MissingExtra, match=r'pip install "megakernel-decode\[profile\]"'):
        profile.write(made(), tmp_path / "out")
    assert Timeline.load(tmp_path / "out" / "timeline.json").steps == (7,), "what was recorded is not lost"


def test_where_files_go_is_looked_at_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profile.check_folder(tmp_path / "new" / "folder")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TimelineError, match="is a file; choose another --output"):
            profile.check_folder(output)
        result = CliRunner().invoke(cli.app, ["profile", "there is no such model", "-o", str(output), "--json"])
        assert result.exit_code == 1 and "choose another --output" in json.loads(result.stdout)["message"]


def test_without_a_complete_step_there_is_no_time_of_one(tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    path = made(cut=True).save(tmp_path / "t.json")
    result = CliRunner().invoke(cli.app, ["profile", str(path), "-o", str(tmp_path / "out"), "--json"])
    facts = json.loads(result.stdout.splitlines()[0])
    assert facts["step_us"] is None and facts["operators"] == [] and facts["fault"] == "wait budget: of logits"


def test_the_command_reads_a_timeline_again(tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    path = made().save(tmp_path / "t.json")

    def run(*more: str) -> Any:
        return CliRunner().invoke(cli.app, ["profile", str(path), "-o", str(tmp_path / "out"), *more])

    facts = json.loads(run("--json").stdout)
    assert facts["step_us"] == 0.16 and facts["events"] == 5 and facts["events_lost"] == 3 and facts["fault"] is None
    glu = facts["operators"][0]
    assert glu == {"operator": "glu", "records": 1, "work_us": 0.035, "wait_us": 0.0025, "data_us": 0.0025}
    assert (tmp_path / "out" / "timeline.pftrace").exists()
    for bad, words in (("7:8", "steps 7 to 8"), ("8:7", "steps 8 to 7"), ("x", "FIRST:LAST"), ("7", "FIRST:LAST")):
        result = run("--range", bad)
        assert result.exit_code == 1 and words in result.stderr
    replace(made(cut=True)).save(path)
    result = run()
    assert result.exit_code == 1 and "ended with a fault" in result.stderr and "wait budget: of logits" in result.stderr
    assert (tmp_path / "out" / "timeline.pftrace").exists()
