"""Reading that was held back, and room in the ring, in a step of two workers with separate roles, made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megakernel.report.arrivals import arrivals
from megakernel.report.critical import HELD, critical_path, path_by, path_names
from megakernel.report.graph import DATA, END, READY, Kind, StepGraph
from megakernel.report.graph_build import graph_of
from megakernel.report.held import held_back
from megakernel.report.steps import steps_of
from megakernel.tasks.record import NONE, Role
from megakernel.timeline import Timeline
from tests.fake_timeline import meta, nodes, table, timeline_of
from tests.report.test_analysis import PLAIN, chain

STEP = 7


def line(asked: int = 1600, gbps: float = 2.0) -> Timeline:
    """Worker 0 reads the 4,000 bytes of `make` in 6,000 ns, which take 4,000 at its share, and its loader asks for
    values until `asked`. Worker 1 has read a part of `end` when its ring is full, and waits for room until 7,900."""
    made = timeline_of(chain(), PLAIN)
    rows = [
        (0, Role.PRODUCER, 0, 0, 0, 1, STEP, 100, 100, 100, 6100, 6100),
        (0, Role.LOADER, 0, 0, 0, 1, STEP, 100, asked, asked, asked, asked),
        (0, Role.CONSUMER, 0, 0, 0, 1, STEP, 100, asked, asked, 6200, 6200),
        (0, Role.STORER, 0, 0, 0, 1, STEP, 100, 6210, 6210, 6300, 6300),
        (1, Role.PRODUCER, 0, 1, 0, 1, STEP, 100, 7900, 7900, 8800, 8800),
        (1, Role.CONSUMER, 0, 1, 0, 1, STEP, 100, 6800, 6900, 9000, 9000),
        (1, Role.STORER, 0, 1, 0, 1, STEP, 100, 7800, 7800, 9050, 9050),
        *((w, Role.CONTROL, NONE, NONE, 1, 0, STEP, 0, 50, 50, 9050, 9050) for w in (0, 1)),
    ]
    about = replace(meta(PLAIN, 2, "hand", STEP, STEP), roles=("producer", "loader", "consumer", "storer"))
    about = replace(about, ring_bytes=1024, ceiling_gbps=gbps)
    return Timeline(table(rows), about, nodes(chain(), 0), made.edges)


def event(g: StepGraph, worker: int, role: Role) -> int:
    e = g.arrivals.events
    return int(np.flatnonzero((e["worker"] == worker) & (e["role"] == role))[0])


def test_reading_is_held_back_only_while_values_are_asked_for() -> None:
    for asked, gbps, expected in ((1600, 2.0, 1500), (5000, 2.0, 2000), (100, 2.0, 0), (5000, 1.0, 0)):
        made = line(asked, gbps)
        seen = arrivals(made, steps_of(made)[0])
        found = dict(zip(zip(seen.events["worker"].tolist(), seen.events["role"].tolist()), held_back(made, seen)))
        assert found.pop((0, Role.PRODUCER)) == expected
        assert not any(found.values()), "of one that waited for room it is not known"


def test_what_was_held_back_is_a_part_of_the_path_by_itself() -> None:
    made = line()
    g = graph_of(made, steps_of(made)[0])
    assert tuple(g.replay()) == g.time
    parts = critical_path(g)
    assert sum(p.end - p.begin for p in parts) == g.step.length
    by = path_by(parts, path_names(made, g))
    assert by[HELD] == 1500
    reading = [p for p in parts if p.event == event(g, 0, Role.PRODUCER) and p.kind in (Kind.WORK, Kind.HELD)]
    assert [(p.kind, p.end - p.begin) for p in reading] == [(Kind.WORK, 4500), (Kind.HELD, 1500)]


def test_room_in_the_ring_comes_from_the_consumers() -> None:
    made = line()
    g = graph_of(made, steps_of(made)[0])
    producer, consumer = event(g, 1, Role.PRODUCER), event(g, 1, Role.CONSUMER)
    (came,) = (a for a in g.arcs[g.point[producer][READY]] if a.kind == Kind.INSIDE)
    assert came.source == g.point[consumer][DATA], "the storer's moments, which are later, give no room"
    assert g.time[g.point[producer][END]] == 8800 - g.step.begin
