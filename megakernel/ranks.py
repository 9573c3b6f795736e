"""Several devices that run one model together, as one runtime: rank 0's own, which drives the others too.

Each rank has a program, a runtime and a window that its peers write. Commands go to every rank, to rank 0 last: it
decides what the next step follows, and it alone owns the token ring. Ranks are runtimes of this process, or of others
behind a pipe; the kernels do not know which.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megakernel.builder.program import Program
from megakernel.device.device import Device
from megakernel.errors import DeviceFault, DeviceUnavailable, EngineClosed, FaultReport, MegakernelError, RankLost
from megakernel.flow_ranks import merged
from megakernel.recording import Recording
from megakernel.runtime import LaunchReport, Runtime
from megakernel.tasks.record import MAILBOX_ENTRIES, NONE, ExitReason

WATCH_S = 0.05  # how often the ranks that are not rank 0 are looked at while a launch runs
STAMP_BITS = 30  # a stamp has 31: see stamp_of in tasks/task.cuh
CHECK_S = 0.5  # and between launches, when they are processes
START_S = 600.0  # for a process to load its part of the model
ANSWER_S = 60.0  # for a process to do what takes no longer than to fill its memory
ENDING_S = 10.0  # beside its own budgets, for one that should be at the end of a launch; a stopped one never answers
SECOND_HAND = ("peer budget", "header budget")  # faults that another device's fault brings about


class Member(Protocol):
    """A rank that is not rank 0: methods of its Runtime by name."""

    name: str

    def call(self, method: str, *args: Any, within_s: float | None = None) -> Any:
        """Raises RankLost, also for no answer in that time (ANSWER_S by default), and what the method raises."""
        ...

    def check(self) -> None:
        """Raises RankLost when it is known to be gone; never waits."""
        ...

    def close(self) -> None: ...


@dataclass
class LocalRank:
    """A runtime of this process."""

    runtime: Runtime
    name: str

    def call(self, method: str, *args: Any, within_s: float | None = None) -> Any:
        return getattr(self.runtime, method)(*args)

    def check(self) -> None: ...

    def close(self) -> None:
        self.runtime.close()


class ProcessRank:
    """A runtime of another process, `python -m megakernel.rank_process`."""

    def __init__(self, rank: int, device: Device, spec: Mapping[str, Any]) -> None:
        """`spec`: keyword arguments of `serve_rank`. `start` waits for it."""
        self._rank = rank
        self._gone: RankLost | None = None
        self._pipe, theirs = Pipe()
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:  # what is sent is read, or an OSError
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        line = [sys.executable, "-m", "megakernel.rank_process", str(theirs.fileno())]
        paths = [path or os.getcwd() for path in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(line, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        self.name = f"rank {rank} ({device.name}, process {self._process.pid})"
        self._pipe.send({**spec, "device": device})

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """The runtime is loaded. Raises what its constructor raised, RankLost."""
        self._answer(START_S)

    def call(self, method: str, *args: Any, within_s: float | None = None) -> Any:
        if self._gone is not None:  # a late answer would be taken for that of another question
            raise self._gone
        try:
            self._pipe.send((method, args))
        except OSError as e:
            raise self._lost() from e
        return self._answer(ANSWER_S if within_s is None else within_s)

    def check(self) -> None:
        if self._gone is not None or self._process.poll() is not None:
            raise self._lost()

    def _answer(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        try:
            while not self._pipe.poll(0.2):
                if self._process.poll() is not None and not self._pipe.poll(0):
                    raise self._lost()
                if time.monotonic() > deadline:
                    self._gone = RankLost(self._rank, f"{self.name} did not answer within {timeout_s:g} s")
                    raise self._gone
            good, value = self._pipe.recv()
        except (EOFError, ConnectionError) as e:
            raise self._lost() from e
        if not good:
            raise value
        return value

    def _lost(self) -> RankLost:
        if self._gone is None:
            try:
                code: object = self._process.wait(5)
            except subprocess.TimeoutExpired:
                code = "none yet"
            self._gone = RankLost(self._rank, f"{self.name} is gone, exit status {code}")
        return self._gone

    def close(self) -> None:
        """The process ends when its pipe does; one that no longer answers is ended."""
        self._pipe.close()
        if self._gone is not None:
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Ranks(Runtime):
    """Rank 0's runtime and the others. What a Runtime does is done on every rank; what it gives is rank 0's."""

    def __init__(self, program: Program, device: Device, read: Any, **options: Any) -> None:
        """As of Runtime; `join` follows before the first launch."""
        super().__init__(program, device, read, **options)
        self.others: list[Member] = []
        self.chaos_rank = 0  # which rank loses the signal `drop_signal`
        self._watched = 0.0
        self._turn = 0
        self._lost: RankLost | None = None
        self._name = f"rank 0 ({device.name})"

    def join(self, others: Sequence[Member]) -> None:
        """The other ranks, in order. They are closed with this runtime."""
        self.others = list(others)
        local = [o.runtime for o in self.others if isinstance(o, LocalRank)]
        if len(local) == len(self.others):
            windows = [self.window.address, *(r.window.address for r in local)]
            for runtime in (self, *local):
                for peer in (self, *local):
                    if peer is not runtime:
                        runtime.device.reach(peer.device)
                runtime.connect(windows)
            return
        handles = [self.window_handle(), *(o.call("window_handle") for o in self.others)]
        self.open_windows(handles)
        self._all("open_windows", handles)
        self.seal_window()
        self._all("seal_window")

    def _all(self, method: str, *args: Any) -> list[Any]:
        return [other.call(method, *args) for other in self.others]

    # ------------------------------------------------------------------------------------------ launches
    def launch(self, steps: int) -> None:
        self._freshen(steps)
        for rank, other in enumerate(self.others, 1):
            drop = self.drop_signal if rank == self.chaos_rank else NONE
            other.call("configure", {**self.configuration, "drop_signal": drop})
        self._all("launch", steps)
        kept = self.drop_signal
        self.drop_signal = kept if self.chaos_rank == 0 else NONE
        super().launch(steps)
        self.drop_signal = kept
        self._watched = time.monotonic()

    def _freshen(self, steps: int) -> None:
        """Stamps come again after 2^31 exchanges. Well before that the windows lose the old ones."""
        turn = (self._step + steps) * len(self.manifest.exchanges) >> STAMP_BITS
        if turn != self._turn:
            self._turn = turn
            self.clear_buffers()
            self._all("clear_buffers")

    @property
    def check_s(self) -> float | None:
        return CHECK_S if any(isinstance(other, ProcessRank) for other in self.others) else None

    def check(self) -> None:
        for other in self.others:
            other.check()

    def running(self) -> bool:
        """Of rank 0; looks after the others now and then, and stops all when one has failed."""
        if not super().running():
            return False
        if time.monotonic() - self._watched >= WATCH_S:
            self._watch()
            self._watched = time.monotonic()
        return True

    def _watch(self) -> None:
        try:
            failed = any(other.call("ended", within_s=self._patience_s) for other in self.others)
        except RankLost as lost:
            self._lost, failed = lost, True
        if failed:
            self._abort_all()

    def _abort_all(self) -> None:
        super().abort()
        for other in self.others:
            try:
                other.call("abort")
            except RankLost as lost:
                self._lost = self._lost or lost

    def finish(self, timeout_s: float = 3600.0) -> LaunchReport:
        own = self._own_outcome(timeout_s)
        found = {self._name: own}
        if isinstance(own, FaultReport) or own.exit is ExitReason.FAULT:
            self._abort_all()
        for other in self.others:
            try:
                found[other.name] = other.call("outcome", timeout_s, within_s=self._patience_s)
            except RankLost as lost:
                self._lost = self._lost or lost
        faults = {name: f for name, f in found.items() if isinstance(f, FaultReport)}
        if self._lost is not None or faults:
            raise DeviceFault(self._root(faults))
        assert isinstance(own, LaunchReport)
        if any(r.step != own.step for r in found.values() if isinstance(r, LaunchReport)):
            raise MegakernelError(f"the ranks of {self.manifest.name} ended a launch at different steps: {found}")
        return own

    @property
    def _patience_s(self) -> float:
        """For a rank to say something when rank 0 has ended: its own waits are at most one and a half budgets long."""
        return 2e-9 * self.spin_budget_ns + ENDING_S

    def _own_outcome(self, timeout_s: float) -> LaunchReport | FaultReport:
        try:
            return super().finish(timeout_s)
        except DeviceFault as fault:
            return fault.report

    def _root(self, faults: Mapping[str, FaultReport]) -> FaultReport:
        """The fault that brought about the others, with a word about each of them."""
        order = sorted(faults, key=lambda name: faults[name].kind in SECOND_HAND)
        said = [f"{name}: {faults[name].kind} at {faults[name].node}, {faults[name].detail}" for name in order]
        if self._lost is not None:
            first = faults[order[0]] if order else None
            return FaultReport(
                "device lost", first.task if first else "none", first.node if first else "none",
                first.tile if first else NONE, first.worker if first else NONE,
                first.role if first else "none", NONE, 0, 0,
                first.step if first else self._step, detail="; ".join([str(self._lost), *said]),
                device=f"rank {self._lost.rank}",
            )  # fmt: skip
        root = faults[order[0]]
        more = "; ".join([root.detail, *(f"meanwhile {text}" for text in said[1:])])
        return replace(root, device=order[0], detail=more)

    def start_recording(self, steps: int | None = None, skip: int = 0) -> None:
        super().start_recording(steps, skip)
        self._all("start_recording", steps, skip)

    def stop_recording(self) -> Recording:
        """Of all ranks, one after the other (see flow_ranks.py)."""
        return merged([super().stop_recording(), *self._all("stop_recording")], self.manifest)

    def reset(self) -> None:
        if self._lost is not None:
            raise EngineClosed(f"{self._lost}; open the model again") from self._lost
        super().reset()
        self._all("reset")
        self._turn = 0

    def abort(self) -> None:
        self._abort_all()

    def close(self) -> None:
        for other in getattr(self, "others", []):
            other.close()
        super().close()

    # ------------------------------------------------------------------------------------------ host and kernels
    def post(self, command: Mapping[str, Any]) -> bool:
        if any(count >= MAILBOX_ENTRIES for count in (super().pending(), *self._all("pending"))):
            return False
        self._all("post", command)
        return super().post(command)

    def set_prompt(self, slot: int, ids: Sequence[int]) -> None:
        super().set_prompt(slot, ids)
        self._all("set_prompt", slot, ids)

    def set_inputs(self, slot: int, positions: Sequence[int], rows: npt.NDArray[np.float32]) -> None:
        super().set_inputs(slot, positions, rows)
        self._all("set_inputs", slot, positions, rows)

    def set_bias(self, slot: int, bias: npt.NDArray[np.float32]) -> None:
        super().set_bias(slot, bias)
        self._all("set_bias", slot, bias)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        super().set_pages(slot, pages)
        self._all("set_pages", slot, pages)

    def copy_page(self, source: int, target: int) -> None:
        super().copy_page(source, target)
        self._all("copy_page", source, target)

    def force_token(self, slot: int, token: int) -> None:
        super().force_token(slot, token)
        self._all("force_token", slot, token)

    # ------------------------------------------------------------------------------------------ pages
    @property
    def kv_heads(self) -> int:
        return int(self.manifest.model["kv_heads"]) if self._split else self.manifest.kv_heads

    @property
    def _split(self) -> bool:
        """Whether the ranks have different KV heads."""
        return self.manifest.kv_heads < int(self.manifest.model["kv_heads"])

    def _owners(self) -> list[int]:
        """The ranks whose heads make up those of the model; where several have the same, the first."""
        if not self._split:
            return [0]
        count = self.kv_heads // self.manifest.kv_heads
        return [i * (self.manifest.ranks // count) for i in range(count)]

    def page(self, layer: int, page: int) -> npt.NDArray[Any]:
        parts = [
            super(Ranks, self).page(layer, page) if r == 0 else self.others[r - 1].call("page", layer, page)
            for r in self._owners()
        ]
        return np.concatenate(parts)

    def set_page(self, layer: int, page: int, data: npt.NDArray[Any]) -> None:
        own, owners = self.manifest.kv_heads, self._owners()
        for rank in range(self.manifest.ranks):
            first = rank * len(owners) // self.manifest.ranks * own
            part = np.ascontiguousarray(data[first : first + own])
            if rank == 0:
                super().set_page(layer, page, part)
            else:
                self.others[rank - 1].call("set_page", layer, page, part)


def rank_devices(device: Device, tp: int, known: Callable[[], Sequence[Device]]) -> list[Device]:
    """A device for each rank: the processor several times, or the GPUs from `device` on. Raises DeviceUnavailable."""
    if device.target.backend == "cpu":
        return [device] * tp
    family = device.name.split(":")[0]
    names = [d for d in known() if d.name.split(":")[0] == family and d.availability().usable]
    first = next((i for i, d in enumerate(names) if d.name == device.name), 0)
    found = [device, *names[first + 1 : first + tp]]
    if len(found) < tp:
        raise DeviceUnavailable(
            f"tp {tp}: expected {tp} devices from {device.name} on, got {len(found)}: "
            f"{', '.join(d.name for d in found)}"
        )
    return found
