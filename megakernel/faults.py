"""A FaultRecord of the kernel in words: who waited for what, who should have signalled, what is missing first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.program import Program
from megakernel.errors import FaultReport, ProgramError
from megakernel.tasks.record import NONE, OPCODE_END, TILE_ROWS, FaultKind, Role

Counters = npt.NDArray[np.uint64]


def decode_fault(raw: Mapping[str, int], program: Program, counters: Counters | None = None) -> FaultReport:
    """`raw`: the fields of the FaultRecord; `counters`: their values after the launch, for finding the first cause."""
    m = program.manifest
    node = m.nodes[raw["node"]] if raw["node"] < len(m.nodes) else None
    opcode = raw["opcode"]
    variant = m.variants[opcode] if opcode < len(m.variants) else "none"
    try:
        kind, role = FaultKind(raw["kind"]), Role(raw["role"])
    except ValueError as e:
        raise ProgramError(f"the kernel left a fault record that cannot be read ({e}): {dict(raw)}") from e
    details = [f"record {raw['record']} of its queue, {variant}"]
    if counters is not None and kind in (FaultKind.WAIT_BUDGET, FaultKind.HEADER_BUDGET):
        details += missing_signals(program, counters, raw["step"])
    if kind is FaultKind.PEER_BUDGET:
        details.append(_peer(program, raw))
    elif kind is FaultKind.WAIT_BUDGET and (wide := _wide_count(program, raw["counter"])):
        details.append(f"the counter is of {wide[0]}")
    return FaultReport(
        kind=kind.name.lower().replace("_", " "),
        task=node.task if node else variant,
        node=node.name if node else "none",
        tile=raw["tile"],
        worker=raw["worker"],
        role=role.name.lower(),
        counter=raw["counter"],
        value=raw["value"],
        target=raw["target"],
        step=raw["step"],
        producers=producers_of(program, raw["counter"]),
        detail="; ".join(details),
    )


def _peer(program: Program, raw: Mapping[str, int]) -> str:
    """Which peer did not send what."""
    m = program.manifest
    index = raw["counter"] - m.counter_count
    if not 0 <= index < len(m.exchanges) * m.ranks:
        return f"rank {m.rank} waits for rank 0 to say what the next step computes, or for a peer's largest logit"
    exchange, sender = m.exchanges[index // m.ranks], index % m.ranks
    who = f"rank {m.rank} waits for rank {sender}, which has"
    if raw["opcode"] < len(m.variants) and "stamped = true" in m.variants[raw["opcode"]]:
        return f"{who} not sent its part of {exchange}"
    tiles = raw["target"] // max(1, raw["step"])
    return f"{who} sent {raw['value'] - (raw['step'] - 1) * tiles} of {tiles} tiles of its part of {exchange}"


def _wide_count(program: Program, counter: int) -> tuple[str, int] | None:
    """Of a counter behind those of the schedule, which steps of many rows have on CUDA devices: what it counts, and the
    node whose records add to it. Two a node, from the end on: see device/cuda_wide_order.cuh."""
    m = program.manifest
    back = m.counter_count - 1 - counter
    if m.backend != "cuda" or m.max_rows <= TILE_ROWS or not 0 <= back < 2 * len(m.nodes):
        return None
    node, sums = back // 2, back % 2 != 0
    name = m.nodes[node].name
    if sums:
        return f"{name}'s sums of shares of its columns", node
    if m.nodes[node].task == "attention":
        return f"keys and values that {name} stores before their pages are copied", node
    variants = (m.variants[int(r["opcode"])] for _, r in _tasks(program, "node", node))
    given = any("given_wide = true" in v for v in variants)
    return f"the packed input of {name}", node - 1 if given else node


def producers_of(program: Program, counter: int) -> tuple[str, ...]:
    """Who signals a counter: node, tiles and worker of each record, and the counter of its group if there is one."""
    if counter == NONE:
        return ()
    if wide := _wide_count(program, counter):
        return tuple(_describe(program, worker, r) for worker, r in _tasks(program, "node", wide[1]))
    own = [_describe(program, worker, r) for worker, r in _tasks(program, "signal", counter)]
    for group in _relays_to(program, counter):
        own += [f"{_describe(program, w, r)} through counter {group}" for w, r in _tasks(program, "signal", group)]
    return tuple(own)


def missing_signals(program: Program, counters: Counters, step: int) -> list[str]:
    """One sentence for each counter that lacks signals although records that signal it had all that they wait for.

    A lost signal stops others that stop others; the report may be of any of them, and this tells the first."""
    said = []
    free = set(_unblocked(program, counters, step))
    for counter in range(len(counters)):
        makers = list(_tasks(program, "signal", counter))
        got = int(counters[counter]) - (step - 1) * len(makers)
        ready = [(worker, r) for worker, r in makers if _key(worker, r) in free]
        if makers and got < len(ready):
            who = ", ".join(_describe(program, worker, r) for worker, r in ready[:4])
            above = int(makers[0][1]["relay"]) if int(makers[0][1]["members"]) else None
            group = "" if above is None else f", of a group, whose relay goes to counter {above},"
            said.append(
                f"missing first: counter {counter}{group} has {got} of {len(makers)} signals; ready to signal: {who}"
            )
        if lost := _lost_relay(program, counters, counter, step):
            said.append(lost)
    return said


def _lost_relay(program: Program, counters: Counters, counter: int, step: int) -> str:
    """A sentence when more groups are complete than the counter above them was told of."""
    relays = _relays_to(program, counter)
    full = [group for group, members in relays.items() if int(counters[group]) >= members * step]
    got = int(counters[counter]) - (step - 1) * len(relays)
    if not relays or got >= len(full):
        return ""
    names = ", ".join(str(group) for group in full)
    return (
        f"missing first: counter {counter} has {got} of {len(relays)} relays; complete are the groups' counters {names}"
    )


def _relays_to(program: Program, counter: int) -> dict[int, int]:
    """The counters of groups whose relays go to `counter`, each with its signals of a step."""
    records = program.records
    found = records[(records["members"] > 0) & (records["relay"] == counter)]
    return {int(r["signal"]): int(r["members"]) for r in found}


def _unblocked(program: Program, counters: Counters, step: int) -> Iterator[tuple[int, int, int]]:
    """Records whose own waits and those of all before them in the queue are over."""
    for worker, row in enumerate(program.records):
        blocked = False
        for record in row:
            if int(record["opcode"]) == OPCODE_END:
                blocked = False  # what follows is the shared list: its records wait for themselves alone
                continue
            over = not any(_short(counters, wait, step) for wait in record["waits"][: int(record["wait_count"])])
            blocked = blocked or not over
            if not blocked:
                yield _key(worker, record)


def _short(counters: Counters, wait: Any, step: int) -> bool:
    counter = int(wait["counter"])
    return counter < len(counters) and int(counters[counter]) < int(wait["count"]) * step


def _tasks(program: Program, field: str, value: int) -> Iterator[tuple[int, Any]]:
    """Worker and record of each task whose record has that value in that field."""
    records = program.records
    for worker, index in zip(*np.nonzero(records[field] == value)):
        if int(records[worker, index]["opcode"]) != OPCODE_END:
            yield int(worker), records[worker, index]


def _key(worker: int, record: Any) -> tuple[int, int, int]:
    return worker, int(record["node"]), int(record["tile_begin"])


def _describe(program: Program, worker: int, record: Any) -> str:
    first, count = int(record["tile_begin"]), int(record["tile_count"])
    name = program.manifest.nodes[int(record["node"])].name
    tiles = f"tiles {first} to {first + count - 1}" if count else "its tickets"
    return f"{name} {tiles} on worker {worker}"
