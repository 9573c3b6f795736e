"""The step loop on the CPU device: slots, prompts, stops, limits, commands, events, faults. The model is a stub: the
logits of each sampled row are fixed, so `sample` picks a known token."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.tasks import advance, sample
from megakernel.tasks.record import (
    FAULT,
    LAUNCH,
    MAILBOX,
    RECORD,
    SAMPLE_RESULT,
    SLOT,
    STEP,
    TOKEN_RING,
    CommandKind,
    EventKind,
    ExitReason,
    FaultKind,
    Finish,
    SlotStatus,
)  # fmt: skip
from megakernel.tasks.task import Addresses, TaskNode

from .harness import Array, Machine, build

VOCAB = 50
SAMPLE = sample.node("sample", vocab=VOCAB, logits="l", scaled="z", result="r")
ADVANCE = advance.node("advance", result="r")
PACED = advance.node("advance", result="r", paced=True)


@lru_cache(maxsize=4)
def kernel(chaos: bool, paced: bool) -> Path:
    return build((SAMPLE, PACED if paced else ADVANCE), chaos)


class Loop:
    """Worker 0 samples rows 0 to 7, the last worker the others; worker 0 advances. Sampled row s gives token s."""

    def __init__(
        self, workers: int = 1, chaos: bool = False, max_slots: int = 4, bad: bool = False, paced: bool = False
    ) -> None:
        end = PACED if paced else ADVANCE
        nodes: tuple[TaskNode, ...] = (SAMPLE, end)
        self.machine = m = Machine(kernel(chaos, paced), nodes, workers, max_slots=max_slots, vocab=VOCAB)
        logits = np.zeros((16, VOCAB), np.float32)
        logits[np.arange(16), np.arange(16)] = 9.0
        if bad:
            logits[0, 3] = np.nan
        parts = {"l": logits, "z": logits * 0, "r": np.zeros(16 * SAMPLE_RESULT.size, np.uint8)}
        at = m.segment("workspace", parts)
        queues: list[list[tuple[TaskNode, int, int]]] = [[] for _ in range(workers)]
        queues[-1].append((SAMPLE, 8, 8))
        queues[0] += [(SAMPLE, 0, 8), (end, 0, 1)]
        m.queues(queues, Addresses({}.__getitem__, at.__getitem__))
        table = m.view("queues", RECORD.dtype).reshape(workers, -1)
        table[-1, 0]["signal"] = 5
        last = table[0, len(queues[0]) - 1]
        last["wait_count"], last["waits"][0] = 1, (5, 1)
        self.posted = self.read = 0

    def post(self, kind: CommandKind, slot: int, request: int, prompt: list[int] | None = None, **state: Any) -> None:
        m = self.machine
        box = m.view("mailbox", MAILBOX.dtype)
        entry = box["entry"][0, self.posted % 64]
        entry["kind"], entry["slot"], entry["request"] = kind, slot, request
        if prompt is not None:
            m.view("tokens", np.int32).reshape(m.max_slots, -1)[slot, : len(prompt)] = prompt
            s = np.zeros((), SLOT.dtype)
            s["status"], s["request"], s["prompt_length"] = SlotStatus.ACTIVE, request, len(prompt)
            s["limit"] = state.pop("limit", 512)
            stops = state.pop("stop", [])
            s["stop_count"] = len(stops)
            s["stop"][: len(stops)] = stops
            s["sampling"]["repetition_penalty"], s["sampling"]["top_p"] = 1.0, 1.0
            for key, value in state.items():
                s["sampling"][key] = value
            entry["state"] = s
        self.posted += 1
        box["posted"] = self.posted

    def admit(self, slot: int, request: int, prompt: list[int], **state: Any) -> None:
        self.post(CommandKind.ADMIT, slot, request, prompt, **state)

    def run(self, steps: int = 1 << 30, **more: int) -> ExitReason:
        limit = int(self.launch["step"]) + steps
        self.machine.run(step_limit=limit, **more)
        return ExitReason(int(self.launch["exit"]))

    @property
    def launch(self) -> Any:
        return self.machine.view("launch", LAUNCH.dtype)[0]

    def events(self) -> list[Any]:
        ring = self.machine.view("ring", TOKEN_RING.dtype)
        out = [ring["entry"][0, i].copy() for i in range(self.read, int(ring["written"][0]))]
        self.read += len(out)
        return out

    def header(self) -> Any:
        """Of the next step."""
        return self.machine.view("headers", STEP.dtype)[(int(self.launch["step"]) + 1) % 2]


def brief(events: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(int(e[k]) for k in ("request", "token", "position", "finish")) for e in events]


def test_idle_at_once() -> None:
    loop = Loop()
    assert loop.run() == ExitReason.IDLE
    assert loop.launch["steps_run"] == 0 and loop.events() == []
    loop.machine.close()


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_prompt_then_tokens_to_the_limit(workers: int) -> None:
    loop = Loop(workers)
    loop.admit(1, 77, [9] * 20, limit=23)
    assert loop.run() == ExitReason.IDLE
    assert brief(loop.events()) == [(77, 0, 20, 0), (77, 0, 21, 0), (77, 0, 22, Finish.LENGTH)]
    assert loop.launch["steps_run"] == 4  # 16 and 4 prompt tokens, then one row twice more
    assert loop.launch["tokens_out"] == 3 and loop.machine.view("slots", SLOT.dtype)[1]["status"] == SlotStatus.FREE
    assert loop.machine.view("tokens", np.int32).reshape(4, -1)[1, 18:23].tolist() == [9, 9, 0, 0, 0]
    assert loop.run() == ExitReason.IDLE and loop.events() == []
    loop.machine.close()


def test_rows_of_ragged_slots() -> None:
    """Decode rows first, then prompts in slot order; the last prompt token of a slot is sampled."""
    loop = Loop()
    loop.admit(2, 1, [5])
    loop.run(1)
    loop.admit(0, 2, [10, 11, 12])
    loop.admit(3, 3, list(range(20, 40)))
    loop.run(0)
    h = loop.header()
    rows = [tuple(int(v) for v in h["row"][i]) for i in range(int(h["rows"]))]
    none = 0xFFFFFFFF
    want = [(0, 2, 1, 0, 1), (10, 0, 0, none, 0), (11, 0, 1, none, 0), (12, 0, 2, 1, 0)]
    want += [(20 + i, 3, i, none, 0) for i in range(12)]
    assert rows == want and h["sampled"] == 2 and h["sample_row"][:2].tolist() == [0, 3]
    loop.run(1)
    assert brief(loop.events()) == [(1, 0, 1, 0), (1, 0, 2, 0), (2, 1, 3, 0)]
    loop.run(1)
    assert brief(loop.events()) == [(2, 0, 4, 0), (1, 1, 3, 0), (3, 2, 20, 0)]
    loop.machine.close()


def rows_of(loop: Loop) -> dict[int, list[int]]:
    """Positions of each slot's rows in the next step."""
    h = loop.header()
    out: dict[int, list[int]] = {}
    for i in range(int(h["rows"])):
        out.setdefault(int(h["row"][i]["slot"]), []).append(int(h["row"][i]["position"]))
    return out


def test_prompts_share_the_rows() -> None:
    """A running slot has its row; a prompt that wants less than its share leaves the rest to the others."""
    loop = Loop(paced=True)
    loop.admit(2, 1, [5])
    loop.run(1)
    loop.admit(0, 2, [10, 11, 12])
    loop.admit(1, 3, [7] * 50)
    loop.admit(3, 4, [8] * 40)
    loop.run(0)
    rows = rows_of(loop)
    assert {s: len(r) for s, r in rows.items()} == {2: 1, 0: 3, 1: 6, 3: 6}
    assert rows[1] == list(range(6)) and loop.header()["sampled"] == 2
    loop.run(1)
    loop.run(0)
    assert {s: len(r) for s, r in rows_of(loop).items()} == {2: 1, 0: 1, 1: 7, 3: 7}
    assert rows_of(loop)[3] == list(range(6, 13))
    loop.machine.close()


def test_more_prompts_than_rows_take_turns() -> None:
    loop = Loop(max_slots=40, paced=True)
    for slot in range(40):
        loop.admit(slot, slot, [1] * 30, limit=32)
    seen = np.zeros(40, int)
    for _ in range(60):
        loop.run(1)
        loop.run(0)
        for slot, rows in rows_of(loop).items():
            seen[slot] += len(rows)
    assert seen.min() >= 10
    assert loop.run() == ExitReason.IDLE
    assert len({int(e["request"]) for e in loop.events()}) == 40
    loop.machine.close()


def test_a_step_with_a_budget_carries_fewer_prompt_rows() -> None:
    """Too slow a step shrinks the chunk in proportion, down to one row; a quick one lets it grow again."""
    loop = Loop(paced=True)
    loop.admit(0, 1, [5], limit=500)
    loop.run(1)
    loop.admit(1, 2, [6] * 400, limit=402)
    second = 1_000_000_000
    loop.run(0, step_budget_ns=second, first_chunk=3)
    assert {s: len(r) for s, r in rows_of(loop).items()} == {0: 1, 1: 3}
    loop.run(1, step_budget_ns=second, first_chunk=3)
    assert int(loop.launch["chunk"]) == 4
    loop.run(6, step_budget_ns=second, first_chunk=3)
    assert int(loop.launch["chunk"]) > 10
    loop.run(4, step_budget_ns=1, first_chunk=3)
    assert int(loop.launch["chunk"]) == 1
    loop.run(0, step_budget_ns=1, first_chunk=3)
    assert {s: len(r) for s, r in rows_of(loop).items()} == {0: 1, 1: 1}
    loop.run(0)  # without a budget the rest of the rows
    assert {s: len(r) for s, r in rows_of(loop).items()} == {0: 1, 1: 15}
    loop.machine.close()


def test_a_prompt_alone_is_not_bounded() -> None:
    loop = Loop(paced=True)
    loop.admit(1, 2, [6] * 40, limit=41)
    loop.run(0, step_budget_ns=1, first_chunk=1)
    assert {s: len(r) for s, r in rows_of(loop).items()} == {1: 16}
    loop.machine.close()


def test_stop_tokens() -> None:
    loop = Loop()
    loop.admit(0, 1, [4], stop=[30, 0])
    loop.admit(1, 2, [4], stop=[2], limit=4)
    assert loop.run() == ExitReason.IDLE
    assert brief(loop.events()) == [(1, 0, 1, Finish.STOP), (2, 1, 1, 0), (2, 0, 2, 0), (2, 0, 3, Finish.LENGTH)]
    loop.machine.close()


def test_cancel_and_reuse() -> None:
    loop = Loop()
    loop.admit(0, 1, [4] * 3)
    loop.run(5)
    assert len(loop.events()) == 5
    loop.post(CommandKind.CANCEL, 0, 99)  # of another request: nothing happens
    loop.post(CommandKind.CANCEL, 0, 1)
    loop.post(CommandKind.CANCEL, 0, 1)
    loop.admit(0, 2, [7, 7], limit=3)
    assert loop.run() == ExitReason.IDLE
    events = loop.events()
    assert [int(e["kind"]) for e in events] == [EventKind.RETIRED, EventKind.TOKEN]
    assert brief(events) == [(1, -1, 7, Finish.CANCELLED), (2, 0, 2, Finish.LENGTH)]
    assert loop.machine.view("mailbox", MAILBOX.dtype)["taken"][0] == loop.posted
    loop.machine.close()


def test_more_slots_than_rows_take_turns() -> None:
    loop = Loop(max_slots=24)
    for slot in range(24):
        loop.admit(slot, slot, [1], limit=40)
    loop.run(60)
    counts = np.bincount([int(e["request"]) for e in loop.events()], minlength=24)
    assert counts.min() >= 28
    loop.machine.close()


def test_seen_counts_prompt_and_output() -> None:
    loop = Loop()
    seen = loop.machine.view("seen", np.uint16).reshape(4, VOCAB)
    seen[:] = 0xFFFF  # of whoever had the slots before
    loop.admit(0, 1, [3, 3, 8], limit=6, presence_penalty=1e-6)
    loop.admit(1, 2, [3], limit=4)
    loop.run()
    want = np.zeros(VOCAB, np.uint16)
    want[[3, 8]] = 0x8000
    assert (seen[1] == 0xFFFF).all()  # no penalty: nobody reads them
    tokens = [int(e["token"]) for e in loop.events() if e["request"] == 1]
    for t in tokens:
        want[t] += 1
    assert seen[0].tolist() == want.tolist()
    loop.machine.close()


def test_many_launches_of_one_step_equal_one_launch() -> None:
    runs = []
    for steps in (1, 7, 1 << 30):
        loop = Loop(2)
        loop.admit(0, 1, list(range(30)), limit=45)
        loop.admit(2, 2, [1, 2], limit=30)
        while loop.run(steps) != ExitReason.IDLE:
            pass
        runs.append(brief(loop.events()))
        assert loop.launch["arrived"] == 0
        loop.machine.close()
    assert runs[0] == runs[1] == runs[2]


def test_ring_wraps() -> None:
    loop = Loop(2, max_slots=16)
    for round_ in range(2):
        for slot in range(16):
            loop.admit(slot, slot, [1], limit=500)
        loop.run()
        assert int(loop.machine.view("ring", TOKEN_RING.dtype)["written"][0]) == 16 * 499 * (round_ + 1)
    assert loop.launch["tokens_out"] == 2 * 16 * 499
    loop.machine.close()


def faulted(loop: Loop, **more: int) -> Array:
    loop.machine.executable.launch(loop.machine.args(**more))
    assert loop.machine.executable.join(30)
    assert loop.launch["exit"] == ExitReason.FAULT
    return loop.machine.view("fault", FAULT.dtype)[0]


def reset(loop: Loop) -> None:
    for name in ("fault", "launch", "counters", "slots", "headers", "mailbox", "ring"):
        loop.machine.view(name, np.uint8)[:] = 0
    loop.posted = loop.read = 0


@pytest.mark.alone
def test_a_lost_signal_is_a_fault_and_the_next_launch_works() -> None:
    loop = Loop(3, chaos=True)
    loop.admit(0, 1, [1], limit=400)
    fault = faulted(loop, drop_signal=5, spin_budget_ns=50_000_000)
    assert fault["kind"] == FaultKind.WAIT_BUDGET
    assert (fault["worker"], fault["record"], fault["node"], fault["opcode"]) == (0, 1, 1, 1)
    assert (fault["counter"], fault["value"], fault["target"], fault["step"]) == (5, 0, 1, 1)
    reset(loop)
    loop.admit(0, 1, [1], limit=40)
    assert loop.run() == ExitReason.IDLE and len(loop.events()) == 39
    loop.machine.close()


def test_not_a_number_is_a_fault_of_every_worker() -> None:
    loop = Loop(3, bad=True)
    loop.admit(0, 1, [1])
    fault = faulted(loop)
    assert (fault["kind"], fault["worker"], fault["tile"], fault["step"]) == (FaultKind.NAN_LOGITS, 0, 0, 1)
    loop.machine.close()


def test_a_bad_opcode_is_a_fault() -> None:
    loop = Loop(2)
    loop.machine.view("queues", RECORD.dtype).reshape(2, -1)[1, 0]["opcode"] = 40
    loop.admit(0, 1, [1])
    fault = faulted(loop)
    assert (fault["kind"], fault["worker"], fault["opcode"]) == (FaultKind.BAD_RECORD, 1, 40)
    loop.machine.close()


@pytest.mark.parametrize("workers", [2, 4])
def test_random_delays_change_nothing(workers: int) -> None:
    runs = []
    for chaos, seed in ((False, 0), (True, 1), (True, 2)):
        loop = Loop(workers, chaos=chaos, max_slots=16)
        for slot in range(16):
            loop.admit(slot, slot, list(range(1 + 3 * slot)), limit=200 + slot)
        assert loop.run(chaos_seed=seed) == ExitReason.IDLE
        runs.append(brief(loop.events()))
        loop.machine.close()
    assert runs[0] == runs[1] == runs[2]


def test_close_ends_a_running_launch() -> None:
    loop = Loop(2)
    loop.admit(0, 1, [1], limit=1 << 31)  # tokens past the context are not stored
    loop.machine.executable.launch(loop.machine.args())
    assert loop.machine.executable.wait_event(0, 10)
    assert loop.machine.executable.running()
    loop.machine.close()
    loop.machine.close()


def test_waiting_for_events_sleeps_and_wakes() -> None:
    import time

    loop = Loop(2)
    ex = loop.machine.executable
    assert ex.join(0) and not ex.running()
    loop.admit(0, 1, [1], limit=300)
    ex.launch(loop.machine.args())
    seen = 0
    while ex.running() or int(loop.machine.view("ring", TOKEN_RING.dtype)["written"][0]) > seen:
        assert ex.wait_event(seen, 10)
        seen = int(loop.machine.view("ring", TOKEN_RING.dtype)["written"][0])
    assert seen == 299
    began = time.process_time()
    assert ex.wait_event(seen, 0.2)  # nothing runs: returns at once
    assert time.process_time() - began < 0.1
    loop.machine.close()
