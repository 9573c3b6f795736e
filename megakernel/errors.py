"""Every exception of the package. A message says what, where, expected, got and what to do."""

from __future__ import annotations

from dataclasses import dataclass


class MegakernelError(Exception):
    """Base of all errors raised on purpose by this package."""


class CheckpointError(MegakernelError):
    """A checkpoint file or folder is missing, damaged, or says something that contradicts itself."""


class UnknownArchitecture(CheckpointError):
    """The checkpoint's architecture has no file in models/; the message lists the known ones."""


class UnsupportedConfig(CheckpointError):
    """A configuration field that changes the result is not understood."""


class MissingExtra(MegakernelError):
    """An optional dependency is not installed; the message has the line to type."""


class SettingsError(MegakernelError):
    """An environment variable or option has a bad value."""


class TargetError(MegakernelError):
    """No such target, or a target that a program was not built for."""


class GraphError(MegakernelError):
    """A graph is malformed: unknown tensor, wrong shape, a value used before it is made."""


class CaptureError(MegakernelError):
    """A torch module that no graph can be made of; the message names the first operator and its source line."""


class LoweringError(MegakernelError):
    """A graph node that no task can run, or one whose sizes a task cannot take."""


class RecordError(MegakernelError):
    """A record or structure cannot be encoded: unknown field, value out of range."""


class ScheduleError(MegakernelError):
    """`verify` refused a schedule; `.findings` holds one sentence each."""

    def __init__(self, findings: tuple[str, ...]) -> None:
        self.findings = findings
        shown = "\n  ".join(findings[:8])
        more = f"\n  ... and {len(findings) - 8} more" if len(findings) > 8 else ""
        super().__init__(f"the schedule is not safe to run:\n  {shown}{more}")


class BuildError(MegakernelError):
    """The kernel did not compile, or its cache folder cannot be used."""


class NoCompiler(BuildError):
    """No compiler for the target was found; the message lists where it was looked for."""


class ProgramError(MegakernelError):
    """A saved program is damaged, was built by another version, or for another device."""


class DeviceUnavailable(MegakernelError):
    """The device cannot be used here; the message is one sentence that says why."""


class CapacityError(MegakernelError):
    """A request does not fit: prompt or limit over the context, more memory than there is."""


class InvalidRequest(MegakernelError):
    """A request's own values are wrong: empty prompt, sampling value out of range."""


class TimelineError(MegakernelError):
    """A timeline cannot be read or asked for what it has not: damaged file, another version, unknown step."""


class RankLost(MegakernelError):
    """The process of one of several devices is gone."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


class Cancelled(MegakernelError):
    """The request was cancelled before it finished."""


class EngineClosed(MegakernelError):
    """The engine was closed, or a fault ended it before the request finished."""


class ApiError(MegakernelError):
    """An answer of the server that is an error: HTTP status, OpenAI's type and code, the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(message)


NOBODY = 0xFFFFFFFF


@dataclass(frozen=True)
class FaultReport:
    """A device fault, decoded. `value` and `target` are the counter's value seen and the one waited for; of logits that
    are not numbers the slot and its position.

    worker: NOBODY when no kernel said it."""

    kind: str
    task: str
    node: str
    tile: int
    worker: int
    role: str
    counter: int
    value: int
    target: int
    step: int
    producers: tuple[str, ...] = ()
    detail: str = ""
    device: str = ""  # which of several that run the model together


def _of_counter(r: FaultReport) -> str:
    """What was seen and wanted; not every fault is about a counter."""
    if r.kind == "nan logits":
        return f"slot {r.value}, position {r.target}"
    return ("" if r.counter == NOBODY else f"counter {r.counter}: ") + f"value {r.value}, target {r.target}"


class DeviceFault(MegakernelError):
    """The kernel stopped itself: a wait past its budget, a NaN, a failed roll-call."""

    def __init__(self, report: FaultReport) -> None:
        self.report = report
        r = report
        text = f"{r.kind} at step {r.step}"
        if r.worker != NOBODY:
            text = (
                f"{r.kind}: task {r.task} of node {r.node}, tile {r.tile}, worker {r.worker} ({r.role}), "
                f"step {r.step}, {_of_counter(r)}"
            )
        if r.device:
            text = f"device {r.device}: {text}"
        if r.producers:
            text += "; should have been signalled by " + ", ".join(r.producers[:6])
        if r.detail:
            text += f"; {r.detail}"
        super().__init__(text)
