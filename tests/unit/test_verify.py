"""What `verify` says of each kind of broken schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megakernel.errors import ScheduleError
from megakernel.scheduler.assign import round_robin
from megakernel.scheduler.dependencies import schedule
from megakernel.scheduler.schedule import Entry, Schedule, Wait
from megakernel.scheduler.verify import verify
from megakernel.target import TARGETS
from tests.unit.test_scheduler_fakes import decoder, node

NODES = (
    node("make", 2, [], [("x", 0, 1, 1)]),
    node("use", 2, [("x", 0, 0, 2)], [("y", 0, 1, 1)]),
    node("end", 1, [("y", 0, 0, 2)], []),
)
GOOD = Schedule(
    NODES,
    (
        (Entry(0, 0, 1, (), 0), Entry(1, 0, 1, (Wait(0, 2),), 1), Entry(2, 0, 1, (Wait(1, 2),))),
        (Entry(0, 1, 1, (), 0), Entry(1, 1, 1, (Wait(0, 2),), 1)),
    ),
    2,
    "hand",
)


def with_entry(worker: int, index: int, **changes: object) -> Schedule:
    queues = [list(q) for q in GOOD.queues]
    queues[worker][index] = replace(queues[worker][index], **changes)  # type: ignore[arg-type]
    return replace(GOOD, queues=tuple(tuple(q) for q in queues))


def test_good_is_good() -> None:
    verify(GOOD)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            with_entry(1, 1, waits=()),
            r"node use tiles \[1, 2\) \(worker 1, entry 1\) reads x\[0:2\) that may not be written",
        ),
        (with_entry(1, 1, waits=(Wait(0, 1),)), "may not be written yet: it does not wait for node make tiles .0, 1."),
        (with_entry(1, 1, waits=(Wait(0, 3),)), "waits for 3 signals of counter 0, which gets 2 in a step"),
        (with_entry(1, 1, waits=(Wait(0, 0),)), "waits for 0 signals; at least 1"),
        (with_entry(1, 1, waits=(Wait(7, 1),)), "uses counter 7; 2 can be signalled"),
        (with_entry(1, 1, waits=tuple(Wait(0, 2) for _ in range(6))), "waits for 6 counters"),
        (with_entry(0, 0, waits=(Wait(1, 2),)), r"deadlock: node make tiles \[0, 1\).*counter 1 has 0 of 2"),
        (with_entry(1, 1, count=0), "with 0 tiles"),
        (with_entry(1, 1, first=0), r"node use: tiles \[0, 1\) run twice"),
        (with_entry(1, 1, first=0), r"node use: tiles \[1, 2\) are on no worker"),
        (with_entry(1, 1, count=2), r"node use: tiles \[2, 3\) do not exist"),
        (with_entry(1, 1, node=9), "names node 9; there are 3"),
        (with_entry(1, 1, signal=None), "waits for 2 signals of counter 1, which gets 1"),
        (replace(GOOD, shared=(Entry(0, 0, 1),)), "shared entry 0: node 0 is not ticketed"),
    ],
)
def test_findings(broken: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(broken)


def test_a_smaller_threshold_is_accepted_only_where_nothing_depends_on_it() -> None:
    harmless = with_entry(0, 1, waits=(Wait(0, 2), Wait(0, 1)))
    verify(harmless)
    with pytest.raises(ScheduleError):
        verify(with_entry(0, 1, waits=(Wait(0, 1),)))


def test_everything_is_done_before_the_step_ends() -> None:
    nodes = (node("log", 1, [], [("x", 0, 1, 1)]), node("end", 1, [], []))
    loose = Schedule(nodes, ((Entry(0, 0, 1),), (Entry(1, 0, 1),)), 0, "hand")
    with pytest.raises(ScheduleError, match=r"node log tiles .* may still run when the next step begins"):
        verify(loose)
    verify(loose, repeats=False)
    after = Schedule(nodes, ((Entry(1, 0, 1), Entry(0, 0, 1)),), 0, "hand")
    with pytest.raises(ScheduleError, match=r"node log tiles .* may still run"):
        verify(after)
    wide = Schedule((node("end", 2, [], []),), ((Entry(0, 0, 2),),), 0, "hand")
    with pytest.raises(ScheduleError, match="must have one tile"):
        verify(wide)


def test_reads_of_what_nothing_wrote() -> None:
    lone = Schedule((node("end", 1, [("x", 0, 0, 4)], []),), ((Entry(0, 0, 1),),), 0, "hand")
    with pytest.raises(ScheduleError, match=r"reads x\[0:4\), which nothing has written"):
        verify(lone)
    verify(lone, external={"x"})


def test_memory_that_is_taken_over_too_early() -> None:
    nodes = (
        node("a", 1, [], [("x", 0, 1, 1)]),
        node("b", 1, [], [("y", 0, 1, 1)]),
        node("end", 1, [("x", 0, 0, 1)], []),
    )
    line = Schedule(nodes, ((Entry(0, 0, 1), Entry(1, 0, 1), Entry(2, 0, 1)),), 0, "hand")
    verify(line, {"x": (0, 64), "y": (64, 64)})
    with pytest.raises(ScheduleError, match=r"reads x.*whose memory node b wrote over"):
        verify(line, {"x": (0, 64), "y": (32, 64)})
    self_made = (nodes[0], node("b", 1, [("x", 0, 0, 1)], [("y", 0, 1, 1)]), node("end", 1, [], []))
    with pytest.raises(ScheduleError, match="node b uses y and x, which share memory"):
        verify(replace(line, nodes=self_made), {"x": (0, 64), "y": (32, 64)})


def test_tiles_of_a_node_may_not_meet_even_in_one_entry() -> None:
    reads = (
        node("a", 1, [], [("x", 0, 4, 4)]),
        node("b", 2, [("x", 0, 0, 4)], [("x", 0, 2, 2)]),
        node("end", 1, [], []),
    )
    line = Schedule(reads, ((Entry(0, 0, 1), Entry(1, 0, 2), Entry(2, 0, 1)),), 0, "hand")
    with pytest.raises(ScheduleError, match=r"node b: tile 0 reads x\[0:4\), which another tile writes"):
        verify(line)
    writes = (node("b", 2, [], [("x", 0, 1, 2)]), node("end", 1, [], []))
    apart = Schedule(
        writes, ((Entry(0, 0, 1, (), 0), Entry(1, 0, 1, (Wait(0, 2),))), (Entry(0, 1, 1, (), 0),)), 1, "hand"
    )
    with pytest.raises(ScheduleError, match=r"writes x\[1:3\), as does node b tiles \[0, 1\)"):
        verify(apart)


def test_a_ticket_list_out_of_order_can_lock_up() -> None:
    """One worker may take every ticket, so an entry must not wait for a later one."""
    nodes = (node("a", 2, [], [("x", 0, 1, 1)]), node("end", 1, [("x", 0, 0, 2)], []))
    queue = (Entry(0, 0, 0), Entry(1, 0, 1, (Wait(0, 1), Wait(1, 1))))
    good = Schedule(
        nodes, (queue,), 3, "hand", frozenset({0}), (Entry(0, 0, 1, (), 0), Entry(0, 1, 1, (Wait(0, 1),), 1))
    )
    verify(good)
    bad = replace(good, shared=(Entry(0, 1, 1, (Wait(0, 1),), 1), Entry(0, 0, 1, (), 0)))
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(bad)
    with pytest.raises(ScheduleError, match="not in node order"):
        verify(replace(good, ticketed=frozenset({0, 1}), shared=(Entry(1, 0, 1), *good.shared)))


@pytest.mark.parametrize("workers", [1, 5])
def test_every_lost_wait_of_a_decoder_is_seen(workers: int) -> None:
    nodes = decoder(layers=1)
    made = schedule(nodes, round_robin(nodes, TARGETS["cpu-avx2"].with_workers(workers), 0), "round_robin")
    verify(made)
    for w, queue in enumerate(made.queues):
        for i, e in enumerate(queue):
            if e.waits:
                lost = (*queue[:i], replace(e, waits=()), *queue[i + 1 :])
                with pytest.raises(ScheduleError):
                    verify(replace(made, queues=(*made.queues[:w], lost, *made.queues[w + 1 :])))
