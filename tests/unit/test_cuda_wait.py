"""Waiting for tokens of a GPU, on a clock that is made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megakernel.device import cuda

SLEEP_COSTS_S = 2e-6


class Clock:
    """Time passes in sleeps only."""

    def __init__(self) -> None:
        self.now, self.sleeps = 100.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + SLEEP_COSTS_S
        self.sleeps += 1


class Ring:
    """Counts the events whose time has come."""

    def __init__(self, clock: Clock, times: list[float]) -> None:
        self.clock, self.times = clock, times

    @property
    def value(self) -> int:
        return sum(at <= self.clock.now for at in self.times)


def lateness(monkeypatch: pytest.MonkeyPatch, gaps: list[float]) -> tuple[list[float], Clock]:
    """Seconds from each event to its being seen."""
    clock = Clock()
    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    times = [clock.now + sum(gaps[: i + 1]) for i in range(len(gaps))]
    made = object.__new__(cuda.CudaExecutable)
    made._ring, made._pace, made._last = Ring(clock, times), 0.0, 0.0  # type: ignore[assignment]
    monkeypatch.setattr(made, "running", lambda: True, raising=False)
    late: list[float] = []
    while len(late) < len(times):
        if made.wait_event(len(late), 0.02):
            late += [clock.now - at for at in times[len(late) : made._ring.value]]  # type: ignore[union-attr]
    return late, clock


def test_a_pause_does_not_make_the_tokens_after_it_late(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = [*[0.0006] * 50, 0.1, *[0.0006] * 50]  # a prompt in between
    late, _ = lateness(monkeypatch, gaps)
    assert max(late) < 0.00013


def test_steps_that_get_shorter_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    late, clock = lateness(monkeypatch, [*[0.003] * 40, *[0.0006] * 40])
    assert max(late[:40]) < 0.00013 and max(late[40:]) < 0.0025 and max(late[46:]) < 0.00013
    assert clock.sleeps < 6000  # spinning would be 12,000
