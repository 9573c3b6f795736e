"""A device without a compiler: its kernel is a Python model of what the last task of a step does.

The model's tokens depend only on the sequence so far, so that a sequence is the same alone and in any batch.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megakernel.builder.program import FORMAT, Manifest, NodeInfo, Program, WorkspaceTensor
from megakernel.device.device import Availability, Buffer, Device, Executable, KernelSource
from megakernel.errors import CapacityError
from megakernel.target import Target, find_target
from megakernel.tasks.record import (
    ARGS,
    FAULT,
    LAUNCH,
    MAILBOX,
    MAILBOX_ENTRIES,
    NONE,
    OPCODE_END,
    RECORD,
    RING_ENTRIES,
    SLOT,
    TOKEN_RING,
    CommandKind,
    EventKind,
    ExitReason,
    FaultKind,
    Finish,
    SlotStatus,
    abi_hash,
)
from megakernel.tasks.task import all_fields

VOCAB = 97


def next_token(sequence: list[int]) -> int:
    """The fake model: a token for every sequence."""
    return hashlib.sha256(repr(sequence).encode()).digest()[0] % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


def fake_program(max_slots: int = 4, max_context: int = 64, max_rows: int = 8, page_tokens: int = 8) -> Program:
    manifest = Manifest(
        format=FORMAT, abi_hash=abi_hash(all_fields()), name="fake", model={"eos": 1}, rope=(), target="cpu-generic",
        backend="cpu", workers=2, dtype="f32", kv_dtype="f32", policy="balanced", max_slots=max_slots,
        max_context=max_context, max_rows=max_rows, max_pieces=1, page_tokens=page_tokens,
        pages_per_slot=-(-max_context // page_tokens), piece_tokens=256, kv_layers=1, kv_heads=1, head_dim=4,
        kv_unit_bytes=64, vocab=VOCAB, weights_bytes=0, stream_bytes=0, workspace_bytes=1024, counter_count=3,
        queue_length=2, variants=("Fake<FakeConfig{}>",), nodes=(NodeInfo("layer0.fake", "fake", "Fake", 4, 0),),
        weights=(), tensors=(WorkspaceTensor("logits", 0, 388, 1, VOCAB, "f32"),), source_hash="",
    )  # fmt: skip
    records = np.zeros((2, 2), RECORD.dtype)
    records["signal"], records["opcode"] = NONE, OPCODE_END
    for worker in (0, 1):
        records[worker, 0]["opcode"], records[worker, 0]["signal"] = 0, 1
        records[worker, 0]["tile_begin"], records[worker, 0]["tile_count"] = 2 * worker, 2
    return Program(manifest, records, Path("none"), "")


class FakeDevice(Device):
    name = "fake"

    def __init__(self, step_s: float = 0.0, memory: int = 1 << 30) -> None:
        self.step_s = step_s
        self.memory = memory
        self.buffers: dict[int, Buffer] = {}
        self.loaded: list[FakeExecutable] = []
        self.fault_at: set[int] = set()  # steps that end in a fault, counted since load

    def availability(self) -> Availability:
        return Availability(True, "", "a model in Python")

    @property
    def target(self) -> Target:
        return find_target("cpu-generic")

    def compiler_id(self, target: Target) -> str:
        return "none"

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        output.write_bytes(b"")

    def load(self, binary: Path, target: Target, abi_hash: int) -> Executable:
        self.loaded.append(FakeExecutable(self))
        return self.loaded[-1]

    def allocate(self, nbytes: int, host_visible: bool = False) -> Buffer:
        used = sum(b.bytes for b in self.buffers.values())
        if used + nbytes > self.memory:
            raise CapacityError(f"{nbytes} bytes asked for, {self.memory - used} are free")
        address = (len(self.loaded) + len(self.buffers) + 1) << 32
        while address in self.buffers:
            address += 1 << 32
        data = np.random.default_rng(address).integers(0, 255, nbytes, np.uint8)
        self.buffers[address] = Buffer(address, nbytes, data, data)
        return self.buffers[address]

    def fill(self, buffer: Buffer, byte: int) -> None:
        self.view(buffer.address)[:] = byte

    def upload(self, buffer: Buffer, offset: int, data: np.ndarray[Any, Any]) -> None:
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self.view(buffer.address)[offset : offset + raw.size] = raw

    def download(self, buffer: Buffer, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self.view(buffer.address)[offset : offset + nbytes].copy()

    def free(self, buffer: Buffer) -> None:
        del self.buffers[buffer.address]

    def view(self, address: int) -> np.ndarray[Any, Any]:
        host = self.buffers[address].host
        assert host is not None
        return host


class FakeExecutable(Executable):
    """Runs `FakeKernel` on a thread for every launch."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.history: dict[tuple[int, int], list[int]] = {}
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.kernel: FakeKernel | None = None
        self.closed = False
        self.max_active = 0

    def launch(self, args: bytes) -> None:
        assert not self.running() and not self.closed
        self.kernel = FakeKernel(self, ARGS.unpack(args))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        assert self.kernel is not None
        self.kernel.run(self._notify)
        self._notify()

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait_event(self, ring_seen: int, timeout_s: float) -> bool:
        assert self.kernel is not None
        ring = self.kernel.ring
        with self.changed:
            return self.changed.wait_for(lambda: int(ring["written"][0]) > ring_seen or not self.running(), timeout_s)

    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        assert self.thread is not None
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def notify(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class FakeKernel:
    """One launch."""

    def __init__(self, exe: FakeExecutable, args: dict[str, Any]) -> None:
        self.exe, self.args = exe, {k: int(v) for k, v in args.items()}
        self.slots = self._view("slots", SLOT.dtype)
        self.launch = self._view("launch", LAUNCH.dtype)
        self.mailbox = self._view("mailbox", MAILBOX.dtype)
        self.ring = self._view("ring", TOKEN_RING.dtype)
        self.fault = self._view("fault", FAULT.dtype)
        self.tokens = self._view("tokens", np.dtype("<i4")).reshape(self.args["max_slots"], self.args["max_context"])

    def _view(self, name: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        raw = self.exe.device.view(self.args[name])
        return raw[: raw.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def run(self, notify: Callable[[], None]) -> None:
        while True:
            self._take_commands()
            reason = self._exit()
            if reason is not None:
                self.launch["exit"][0] = reason
                return
            self.launch["step"][0] += 1
            time.sleep(self.exe.device.step_s)
            if int(self.launch["step"][0]) in self.exe.device.fault_at:
                self._write_fault()
                return
            self._step()
            self.launch["steps_run"][0] += 1
            notify()

    def _exit(self) -> ExitReason | None:
        if not (self.slots["status"] == SlotStatus.ACTIVE).any():
            return ExitReason.IDLE
        if int(self.launch["step"][0]) >= self.args["step_limit"]:
            return ExitReason.STEPS
        return None

    def _write_fault(self) -> None:
        self.exe.device.fault_at.discard(int(self.launch["step"][0]))
        for name, value in {
            "worker": 1, "node": 0, "tile": 3, "counter": 1, "value": 5, "target": 6, "step": self.launch["step"][0],
            "kind": FaultKind.WAIT_BUDGET,
        }.items():  # fmt: skip
            self.fault[name][0] = value
        self.launch["exit"][0] = ExitReason.FAULT

    def _take_commands(self) -> None:
        while int(self.launch["mailbox_taken"][0]) < int(self.mailbox["posted"][0]):
            command = self.mailbox["entry"][0, int(self.launch["mailbox_taken"][0]) % MAILBOX_ENTRIES].copy()
            self.launch["mailbox_taken"][0] += 1
            self.mailbox["taken"][0] = self.launch["mailbox_taken"][0]
            slot, request = int(command["slot"]), int(command["request"])
            if command["kind"] == CommandKind.ADMIT:
                assert self.slots["status"][slot] == SlotStatus.FREE, f"slot {slot} is taken"
                self.slots[slot] = command["state"]
                length = int(command["state"]["prompt_length"])
                self.exe.history[(slot, request)] = self.tokens[slot, :length].tolist()
            elif self.slots["request"][slot] == request and self.slots["status"][slot] == SlotStatus.ACTIVE:
                self.slots["status"][slot] = SlotStatus.FREE
                self._event(slot, EventKind.RETIRED, 0, Finish.CANCELLED)

    def _step(self) -> None:
        """Decode rows of all active slots first; the other rows go to prompts, in slot order."""
        active = [s for s in range(self.args["max_slots"]) if self.slots["status"][s] == SlotStatus.ACTIVE]
        self.exe.max_active = max(self.exe.max_active, len(active))
        rows = self.args["max_rows"]
        decode = [s for s in active if self.slots["position"][s] >= self.slots["prompt_length"][s]]
        for slot in decode[:rows]:
            self._advance(slot, 1)
        rows -= len(decode)
        for slot in active:
            left = int(self.slots["prompt_length"][slot]) - int(self.slots["position"][slot])
            if slot not in decode and rows > 0:
                self._advance(slot, min(left, rows))
                rows -= min(left, rows)

    def _advance(self, slot: int, rows: int) -> None:
        state = self.slots[slot]
        state["position"] += rows
        position = int(state["position"])
        if position < int(state["prompt_length"]):
            return
        sequence = self.exe.history[(slot, int(state["request"]))]
        if position > int(state["prompt_length"]):
            sequence[-1] = int(state["last_token"])  # the host may have replaced it
        token = next_token(sequence)
        sequence.append(token)
        state["last_token"] = token
        finish = Finish.NONE
        if token in state["stop"][: int(state["stop_count"])].tolist():
            finish = Finish.STOP
        elif position + 1 >= int(state["limit"]):
            finish = Finish.LENGTH
        if finish is not Finish.NONE:
            state["status"] = SlotStatus.FREE
        self.launch["tokens_out"][0] += 1
        self._event(slot, EventKind.TOKEN, token, finish)

    def _event(self, slot: int, kind: EventKind, token: int, finish: Finish) -> None:
        at = int(self.launch["ring_written"][0])
        entry = self.ring["entry"][0, at % RING_ENTRIES]
        wanted = int(self.slots["sampling"]["top_logprobs"][slot])
        for name, value in {
            "kind": kind, "slot": slot, "request": self.slots["request"][slot], "token": token, "finish": finish,
            "position": self.slots["position"][slot], "logprob": -1.5, "top_count": wanted,
            "step": self.launch["step"][0], "time_ns": time.perf_counter_ns(),
        }.items():  # fmt: skip
            entry[name] = value
        entry["top_token"][:wanted] = np.arange(wanted)
        entry["top_logprob"][:wanted] = -np.arange(wanted, dtype=np.float32)
        self.launch["ring_written"][0] = at + 1
        self.ring["written"][0] = at + 1
