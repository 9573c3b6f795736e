"""The shared ticket queue: work that no worker owns until it takes a ticket.

A node in `Schedule.ticketed` has its entries in `Schedule.shared`, with waits and signals as always. In a worker's
queue stands one entry of no tiles: when its waits are over the worker takes tickets of that node, and runs the shared
entry of each, until a ticket is past the last; then the entry of no tiles signals, if it has a signal. Entries are
taken in the order of the list; one may wait only for what comes before the taking of tickets in every queue.

A ticket is `fetch_add(counter, 1) - (step - 1) * pops`. In one step every entry is taken once and every worker fails
once, so the counter grows by exactly `pops` and is never reset. That holds only if no worker enters the next step
before all have failed once, so the last node of a step follows the entries of no tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

from megakernel.errors import ScheduleError
from megakernel.scheduler.schedule import Entry, Schedule


def counter(schedule: Schedule, node: int) -> int:
    """The counter that hands out the tickets of `node`."""
    if node not in schedule.ticketed:
        raise ScheduleError((f"node {schedule.nodes[node].name} is not ticketed",))
    return schedule.counters - len(schedule.ticketed) + sorted(schedule.ticketed).index(node)


def entries(schedule: Schedule, node: int) -> tuple[Entry, ...]:
    """The shared entries of `node`, in ticket order."""
    return tuple(e for e in schedule.shared if e.node == node)


def pops(schedule: Schedule, node: int) -> int:
    """Tickets of `node` taken in one step."""
    return len(entries(schedule, node)) + sum(e.node == node for queue in schedule.queues for e in queue)


def payload(schedule: Schedule, node: int, shared_at: int) -> dict[str, int]:
    """Fields of a Ticket; `shared_at` is where the shared list begins in the array of all queues."""
    first = next((i for i, e in enumerate(schedule.shared) if e.node == node), 0)
    return {
        "counter": counter(schedule, node),
        "first": shared_at + first,
        "count": len(entries(schedule, node)),
        "pops": pops(schedule, node),
    }


class TicketQueue:
    """Model of what the device does for one node: who gets which entry."""

    def __init__(self, entries: Sequence[Entry], workers: int) -> None:
        self.entries = tuple(entries)
        self.pops = len(self.entries) + workers
        self.value = 0

    def take(self, step: int) -> Entry | None:
        """The next entry of step 1, 2, ...; None when the list is done."""
        ticket = self.value - (step - 1) * self.pops
        self.value += 1
        return self.entries[ticket] if ticket < len(self.entries) else None
