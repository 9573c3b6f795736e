"""Hops, rates, imbalance, roofline and look-ahead of timelines whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from megakernel.report.analysis import analyse, shown_steps, summary
from megakernel.report.arrivals import arrivals
from megakernel.report.critical import critical_path, path_by, path_names
from megakernel.report.fit import predict
from megakernel.report.graph import Kind
from megakernel.report.graph_build import graph_of
from megakernel.report.hops import HEADER, histogram, hops
from megakernel.report.lookahead import lookahead
from megakernel.report.operators import imbalance, roofline
from megakernel.report.rates import Ceiling, ceiling_of, rates, reading_time
from megakernel.report.steps import row_names, steps_of, typical
from megakernel.scheduler.calibration import Calibration
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.tasks.record import NONE, Role
from megakernel.timeline import EDGE, VALUE, Timeline
from tests.fake_timeline import FIRST_STEP, split, table, timeline_of
from tests.report.test_analysis import PLAIN, chain, layers, random_timeline
from tests.unit import test_flow
from tests.unit.test_scheduler_fakes import node


def recorded() -> Timeline:
    target = replace(PLAIN, workers=4, stream_gbps=4.0)
    return timeline_of(layers(target), target, 7, steps=6, calibration=lambda _s: Calibration(step_us=2.0))


# ---------------------------------------------------------------------------------------------- hops
def test_hops_are_those_that_were_simulated() -> None:
    line = recorded()
    steps = steps_of(line)
    found = {h.kind: h for h in hops(line, [arrivals(line, s) for s in steps], steps)}
    assert set(found) == {"counter", HEADER}
    assert set(found["counter"].ns) == {500} and found["counter"].median == 500
    assert 0 < len(found["counter"].ns) < found["counter"].waits
    assert set(found[HEADER].ns) == {2000} and len(found[HEADER].ns) == 4 * 5  # the first step follows nothing


def test_a_histogram_counts_every_hop_once() -> None:
    for ns in ((500, 500), (-3, 5, 9), tuple(range(1, 5000)), (3,)):
        edges, counts = histogram(ns)
        assert sum(counts) == len(ns) and len(edges) == len(counts) + 1 and edges[0] == min(ns)
        assert all(a < b for a, b in pairwise(edges))
    assert histogram(()) == ([], [])


# ---------------------------------------------------------------------------------------------- bytes a second
def test_rates_add_up_to_the_bytes_of_the_step() -> None:
    line = recorded()
    step = typical(steps_of(line))
    r = rates(line, step, Ceiling(4.0, "test"), bins=50)
    total = sum(n.stream_bytes for n in line.nodes)
    assert r.stream_bytes == pytest.approx(total) and sum(r.gbps) * r.bin_ns == pytest.approx(total)
    assert max(r.gbps) <= 4.0 + 1e-9 and r.mean_gbps == pytest.approx(total / step.length)
    assert r.floor_ns == pytest.approx(total / 4.0)


def test_bytes_of_tiles_that_were_left_out_are_read_by_the_others() -> None:
    line = split(recorded())
    step = typical(steps_of(line))
    readers = np.flatnonzero((line.events["role"] == Role.PRODUCER) & (line.events["step"] == step.number))
    node = line.events["node"][readers]
    several = [i for i in readers if (node == line.events["node"][i]).sum() > 1]
    fewer = replace(line, events=np.delete(line.events, several[0]))
    whole, part = (rates(t, step, Ceiling(4.0, "test")) for t in (line, fewer))
    assert part.stream_bytes == pytest.approx(whole.stream_bytes) == sum(n.stream_bytes for n in line.nodes)
    left, right = ({o.operator: o.intensity for o in roofline(t, steps_of(t)).operators} for t in (line, fewer))
    assert left == right


def test_a_producer_reads_from_its_start() -> None:
    """Its ready is near its end where a record is larger than the ring: that is no time in which all of it was read."""
    line = split(recorded())
    late = line.events.copy()
    producers = late["role"] == Role.PRODUCER
    for moment in ("ready", "first_data"):
        late[moment][producers] = late["end"][producers]
    early, tail = ({o.operator: o.gbps for o in roofline(t, steps_of(t)).operators}
                   for t in (line, replace(line, events=late)))  # fmt: skip
    assert early == pytest.approx(tail)
    begin, end = reading_time(late[producers])
    assert (begin == late["start"][producers]).all() and (end == late["end"][producers]).all()


def test_rates_of_a_chain_by_hand() -> None:
    """4,000 bytes in 4,250 ns, a hop, 2,000 bytes in 2,250 ns: in seven parts of a microsecond."""
    line = timeline_of(chain(), PLAIN)
    r = rates(line, steps_of(line)[0], Ceiling(2.0, "test"), bins=7)
    first, second = 4000 / 4250, 2000 / 2250
    assert r.gbps == pytest.approx([first] * 4 + [first / 4 + second / 4, second, second])


def test_the_ceiling_is_the_measured_one_where_there_is_one() -> None:
    line = timeline_of(chain(), PLAIN)
    assert ceiling_of(line).gbps == 20.0 and "cpu-avx2" in ceiling_of(line).source
    assert ceiling_of(line, 33.0) == Ceiling(33.0, "measured: a plain read of the same bytes")
    unknown = replace(line, meta=replace(line.meta, target="of another version"))
    assert ceiling_of(unknown).gbps == 0.0 and rates(unknown, steps_of(line)[0], ceiling_of(unknown)).floor_ns == 0.0


# ---------------------------------------------------------------------------------------------- operators
def uneven() -> Timeline:
    """Three workers share `wide` as 1, 2 and 3 tiles of 1,000 bytes; `end` needs all of it."""
    nodes = (node("wide", 6, [], [("x", 0, 1, 1)], nbytes=1000), node("end", 1, [("x", 0, 0, 6)], [], nbytes=0))
    queues = (
        (Entry(0, 0, 1, (), 0),), (Entry(0, 1, 2, (), 0),), (Entry(0, 3, 3, (), 0), Entry(1, 0, 1, (Wait(0, 3),))),
    )  # fmt: skip
    return timeline_of(Schedule(nodes, queues, 1, "hand"), replace(PLAIN, workers=3, stream_gbps=3.0))


def test_imbalance_by_hand() -> None:
    (found,) = imbalance(uneven(), steps_of(uneven()))
    assert (found.operator, found.samples, found.workers) == ("wide", 3, 3)
    assert (found.first, found.last, found.spread) == (1250, 3250, 2000)
    assert found.busiest == pytest.approx(3250 / 2250)


def test_roofline_by_hand() -> None:
    r = roofline(uneven(), steps_of(uneven()))
    found = {o.operator: o for o in r.operators}
    assert set(found) == {"wide"}  # `end` reads and computes nothing
    assert found["wide"].intensity == 2.0  # the fakes do two operations a byte
    assert found["wide"].gbps == pytest.approx(6000 / (1250 + 2250 + 3250) * 3)
    assert found["wide"].gflops == pytest.approx(2 * found["wide"].gbps)
    assert found["wide"].share == pytest.approx((1250 + 2250 + 3250) / (3 * 3500))
    assert r.ceiling_gflops == 3 * 50.0


def test_operations_are_those_of_all_rows() -> None:
    alone = uneven()
    events = alone.events.copy()
    events["tile_begin"][events["role"] == Role.CONTROL] = 3
    (one,), (three,) = (roofline(t, steps_of(t)).operators for t in (alone, replace(alone, events=events)))
    assert three.gflops == pytest.approx(3 * one.gflops) and three.intensity == 3 * one.intensity
    assert three.gbps == one.gbps and three.share == one.share, "weights are read once for all rows"
    assert any("The steps compute 3 rows" in n for n in summary(replace(alone, events=events))["notes"])


# ---------------------------------------------------------------------------------------------- look-ahead
def test_lookahead_counts_what_could_have_run() -> None:
    """`late` waits for `make` of the other worker; `free` behind it waits for nothing, `more` for `late`'s like."""
    nodes = (
        node("make", 1, [], [("x", 0, 1, 1)], nbytes=4000), node("late", 1, [("x", 0, 0, 1)], [], nbytes=10),
        node("free", 1, [], [], nbytes=10), node("more", 1, [("x", 0, 0, 1)], [], nbytes=10),
    )  # fmt: skip
    wait = (Wait(0, 1),)
    queues = ((Entry(0, 0, 1, (), 0),), (Entry(1, 0, 1, wait), Entry(2, 0, 1), Entry(3, 0, 1, wait)))
    line = timeline_of(Schedule(nodes, queues, 1, "hand"), PLAIN)
    found = lookahead(line, arrivals(line, steps_of(line)[0]))
    assert found.open_behind == (1,) and found.lead_records == () == found.lead_bytes


def test_a_producer_that_is_ahead_is_seen() -> None:
    line = split(recorded())
    found = lookahead(line, arrivals(line, typical(steps_of(line))))
    assert len(found.lead_records) == len(found.lead_bytes) == len(recorded().tasks) / 6
    assert max(found.lead_records) > 0 and min(found.lead_records) >= 0 and max(found.lead_bytes) > 0


# ---------------------------------------------------------------------------------------------- several roles
@pytest.mark.parametrize("seed", range(12))
def test_a_graph_of_three_roles_gives_back_its_times(seed: int) -> None:
    line = split(random_timeline(seed, 1 + seed % 5)[0])
    for step in steps_of(line):
        g = graph_of(line, step)
        assert tuple(g.replay()) == g.time and g.late == 0
        parts = critical_path(g)
        assert sum(p.end - p.begin for p in parts) == step.length
        assert min(g.slack) >= 0


def test_three_roles_are_three_rows() -> None:
    assert list(row_names(split(timeline_of(chain(), PLAIN))).values()) == [
        f"worker {w} {role}" for w in (0, 1) for role in ("producer", "consumer", "storer")
    ]


def by_value() -> Timeline:
    """Worker 0 publishes x at 1,000; worker 1 has begun at 600, when the first of x was there, and ends at 1,500."""
    line = timeline_of(chain(), PLAIN, steps=1)
    step = FIRST_STEP
    rows = [
        (0, Role.WORKER, 0, 0, 0, 1, step, 0, 0, 0, 900, 1000),
        (1, Role.WORKER, 0, 1, 0, 1, step, 0, 600, 700, 1500, 1500),
        (0, Role.CONTROL, NONE, NONE, 1, 0, step, 0, 0, 0, 1000, 1000),
        (1, Role.CONTROL, NONE, NONE, 1, 0, step, 0, 0, 0, 1500, 1500),
    ]  # fmt: skip
    edges = np.array([(0, 0, 1, 1, 0, 1, VALUE, NONE)], EDGE)
    return replace(line, events=table(rows), edges=edges)


def test_values_may_be_used_before_all_of_them_are_there() -> None:
    line = by_value()
    g = graph_of(line, steps_of(line)[0])
    assert g.late == 0 and tuple(g.replay()) == g.time
    parts = critical_path(g)
    assert [(p.event, p.kind, p.end - p.begin) for p in parts] == [
        (0, Kind.WORK, 900), (0, Kind.WORK, 100), (1, Kind.WORK, 500),
    ]  # fmt: skip
    assert path_by(parts, path_names(line, g)) == {"make": 1000, "end": 500}


def test_a_recording_as_a_kernel_with_roles_leaves_it() -> None:
    line = test_flow.timeline(test_flow.events_of(6))
    a = analyse(line)
    assert tuple(a.graph.replay()) == a.graph.time and a.graph.late == 0
    assert sum(p.end - p.begin for p in a.path) == a.step.length
    b = a.breakdown
    assert (
        b.rows == len(line.meta.roles) * test_flow.WORKERS
        and sum(s.total for s in b.operators) + b.header + b.idle == b.total
    )
    assert {h.kind for h in a.hops} >= {"value"} and a.lookahead.lead_records
    assert a.rates.stream_bytes == pytest.approx(
        sum(n.stream_bytes for n in line.nodes if n.task in ("matmul", "attention"))
    )
    p = predict(line)  # on the queues that ran, though loaders and producers are ahead in them
    assert p.predicted_us > 0 and max(abs(o.difference_us) for o in p.operators) < 0.2


# ---------------------------------------------------------------------------------------------- all of it
def test_the_summary_says_what_the_analysis_found() -> None:
    line = recorded()
    a, said = analyse(line), summary(line)
    assert said["steps"] == 6 and said["step_us"] == a.step.length / 1e3
    parts = sum(sum(kinds.values()) for kinds in said["operators_us"].values())
    assert parts + said["header_us"] + said["idle_us"] == pytest.approx(said["row_step_us"])
    assert sum(said["critical_path_us"].values()) == pytest.approx(said["step_us"])
    assert said["hops_us"]["counter"]["median"] == 0.5 and said["fault"] is None
    parts = sum(sum(kinds.values()) for kinds in said["layers_us"].values())
    assert parts + said["header_us"] + said["idle_us"] == pytest.approx(said["row_step_us"])
    assert (
        set(said["slack_us"]) == {n.name for n in line.nodes}
        and min(s["least"] for s in said["slack_us"].values()) == 0
    )
    assert said["imbalance_us"] and said["roofline"] and said["lookahead"]["open_behind"] and said["notes"] == []
    nothing = summary(replace(line, events=line.events[:0]))
    assert nothing["steps"] == 0 and "no complete step" in nothing["notes"][0]


def test_the_picture_holds_the_steps_around_the_typical_one() -> None:
    line = recorded()
    step = typical(steps_of(line))
    each = int((line.events["step"] == step.number).sum())
    assert list(shown_steps(line, step, each)) == [step.number]
    assert list(shown_steps(line, step, 10**9)) == list(line.steps)
    assert len(shown_steps(line, step, 3 * each)) == 3 and step.number in shown_steps(line, step, 3 * each)
