"""Proof that what devices write into each other's windows is read before it is written over.

All ranks run one schedule, so what is proven here of a rank r that is written to and a rank q that writes holds for
every pair. Known: a tile that receives exchange m on q begins when all tiles that send m in that step are done on r
(or, of a stamped one, at least one of them), and a step of a device begins when its step before is over. Let q send k
where r still has j. That r has read j is known to q by an exchange m between them, which r sends after it has read j:

    in one step, j before k   every tile of r that receives j comes before a tile that sends m (stamped: every one),
                              and every tile of q that sends k comes after one that receives m
    j of the step before      the first is enough (q ends a step after all it has received in it),
                              and so is the second (r begins a step after all it has read in the one before)

`clock[B][c]`, how many entries of column c are done when entry B begins, is that of `verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.scheduler.schedule import Entry, Schedule
from megakernel.tasks.task import Exchange, TaskNode

Clock = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Ends:
    """An exchange with the nodes that send and receive it, as indices."""

    exchange: Exchange
    sender: int
    receiver: int


def exchanges_of(nodes: Sequence[TaskNode]) -> tuple[tuple[Ends, ...], tuple[str, ...]]:
    """The exchanges in order of their senders, and findings: numbers must run from 0, each with one sender and one
    receiver of the same bytes behind it."""
    sent: dict[int, tuple[int, Exchange]] = {}
    received: dict[int, tuple[int, Exchange]] = {}
    findings = []
    for index, node in enumerate(nodes):
        for found, table, what in (
            (node.task.sends(node), sent, "sends"), (node.task.receives(node), received, "receives"),
        ):  # fmt: skip
            if found is None:
                continue
            if found.number in table:
                findings.append(f"node {node.name} {what} exchange {found.number}, and so does another node")
            table[found.number] = index, found
    out = []
    for number in sorted(sent.keys() | received.keys()):
        if number not in sent or number not in received:
            findings.append(f"exchange {number} has no {'sender' if number not in sent else 'receiver'}")
            continue
        (at, exchange), (to, other) = sent[number], received[number]
        if exchange != other or to <= at:
            findings.append(f"exchange {number}: node {nodes[to].name} does not receive what {nodes[at].name} sends")
        out.append(Ends(exchange, at, to))
    if sorted(sent) != list(range(len(sent))):
        findings.append(f"exchanges are numbered {sorted(sent)}; expected 0 to {len(sent) - 1}")
    return tuple(sorted(out, key=lambda e: e.sender)), tuple(findings)


class ExchangeCheck:
    """Looks at every pair of exchanges whose bytes of a window overlap, one of which is the same twice."""

    def __init__(
        self, schedule: Schedule, ends: Sequence[Ends], columns: Sequence[Sequence[Entry]],
        clock: Sequence[Sequence[Clock]],
    ) -> None:  # fmt: skip
        self.schedule, self.ends = schedule, ends
        places: dict[int, list[tuple[int, int]]] = {}
        for column, queue in enumerate(columns):
            for position, entry in enumerate(queue):
                if entry.count:
                    places.setdefault(entry.node, []).append((column, position))
        nodes = {e.sender for e in ends} | {e.receiver for e in ends}
        self.places = {n: np.asarray(places.get(n, []), np.int64).reshape(-1, 2) for n in nodes}
        self.clocks = {n: np.asarray([clock[c][p] for c, p in places.get(n, [])]) for n in nodes}
        self.before_any = {e.sender: self.clocks[e.sender].max(0) for e in ends}  # before some tile that sends it
        self.before_all = {e.sender: self.clocks[e.sender].min(0) for e in ends}
        self.known: dict[tuple[int, int], bool] = {}

    def run(self) -> list[str]:
        out = []
        for at, k in enumerate(self.ends):
            for earlier, j in enumerate(self.ends):
                if j.exchange.start >= k.exchange.stop or k.exchange.start >= j.exchange.stop:
                    continue
                same_step = earlier < at
                if not self._proven(j, k, at, same_step):
                    when = "earlier in the step" if same_step else "in the step before"
                    out.append(
                        f"{self._name(k.sender)} writes over the part of every peer's window that "
                        f"{self._name(j.receiver)} reads {when}: no exchange tells the sender that it has been read"
                    )
        return out

    def _proven(self, j: Ends, k: Ends, at: int, same_step: bool) -> bool:
        nearest_first = [*self.ends[:at][::-1], *self.ends[at:]]
        if same_step:
            return any(
                self._read_before_sent(j, m, every=m.exchange.stamped) and self._sent_after_received(k, m)
                for m in nearest_first
            )
        return any(self._read_before_sent(j, m) or self._sent_after_received(k, m) for m in nearest_first)

    def _read_before_sent(self, j: Ends, m: Ends, *, every: bool = False) -> bool:
        """Every tile that receives j comes before some tile that sends m, or before every one."""
        where = self.places[j.receiver]
        before = self.before_all if every else self.before_any
        return bool((before[m.sender][where[:, 0]] > where[:, 1]).all())

    def _sent_after_received(self, k: Ends, m: Ends) -> bool:
        """Every tile that sends k comes after some tile that receives m."""
        pair = k.sender, m.receiver
        if pair not in self.known:
            where = self.places[m.receiver]
            done = self.clocks[k.sender][:, where[:, 0]] > where[:, 1]
            self.known[pair] = bool(done.any(1).all())
        return self.known[pair]

    def _name(self, node: int) -> str:
        return f"node {self.schedule.nodes[node].name}"
