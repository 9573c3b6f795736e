"""From a model's name to a program, and from a program to a loaded runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megakernel.builder.build import build_program
from megakernel.builder.program import Program
from megakernel.device.device import Device
from megakernel.devices import find_device, list_devices, open_device
from megakernel.errors import DeviceUnavailable
from megakernel.origin import Origin, Progress, open_origin
from megakernel.runtime import Runtime
from megakernel.settings import Settings, read_settings
from megakernel.target import Target, find_target


def compile(
    model: str | Path,
    *,
    target: str | None = None,
    device: str | None = None,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    max_slots: int = 8,
    max_context: int | None = None,
    max_rows: int | None = None,
    workers: int | None = None,
    policy: str = "balanced",
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Program:
    """Build the program of a model for `target` (whose hardware need not be here), or for `device`, or for the CPU.

    Raises TargetError, CheckpointError, LoweringError, ScheduleError, BuildError, NoCompiler."""
    chosen = settings or read_settings()
    where, goal = target_and_compiler(target, device, workers, chosen)
    origin = open_origin(model, dtype=dtype, cache=chosen.cache, progress=progress)
    try:
        return build(
            origin, goal, where, chosen, progress, dtype=dtype, kv_dtype=kv_dtype, max_slots=max_slots,
            max_context=max_context, max_rows=max_rows, policy=policy, chaos=False,
        )  # fmt: skip
    finally:
        origin.close()


def planned_target(target: str | None, device: str | None, workers: int | None, settings: Settings) -> Target:
    """The named target, whose hardware and compiler need not be here, or that of `device`, or of the CPU."""
    if device is not None and device != "cpu":
        return target_of(open_device(device), target, workers, settings)
    if device is not None or target is None:  # the processor's target is known without a compiler
        return target_of(find_device("cpu"), target, workers, settings)
    goal, count = find_target(target), settings.workers if workers is None else workers
    return goal if count is None else goal.with_workers(count)


def target_and_compiler(
    target: str | None, device: str | None, workers: int | None, settings: Settings
) -> tuple[Device, Target]:
    """The target asked for and a device of its backend, whose compiler builds for it."""
    goal = planned_target(target, device, workers, settings)
    if device is not None or target is None:
        return open_device(device or "cpu"), goal
    compilers = [d for d in list_devices() if d.name.split(":")[0] == goal.backend]
    if not compilers:
        raise DeviceUnavailable(f"target {target}: no device of backend {goal.backend} is known here")
    return compilers[0], goal


def target_of(device: Device, name: str | None, workers: int | None, settings: Settings) -> Target:
    """The device's own target, or the named one, or the settings' if it is of the same backend; with `workers`."""
    own = device.target
    if name is None and settings.target and find_target(settings.target).backend == own.backend:
        name = settings.target
    goal = own if name in (None, own.name) else find_target(name or "")
    return goal.with_workers(workers if workers is not None else settings.workers or own.workers)


def build(
    origin: Origin, target: Target, device: Device, settings: Settings, progress: Progress | None, **options: Any
) -> Program:
    """`build_program` with the origin's configuration and name; `options` are its own."""

    def say(stage: str) -> None:
        if progress:
            progress(stage, 0, 0)

    return build_program(origin.config, target, device, cache=settings.cache, name=origin.name, progress=say, **options)


def load(
    program: Program,
    device: Device,
    origin: Origin,
    settings: Settings,
    *,
    kv_pages: int | None = None,
    progress: Progress | None = None,
) -> Runtime:
    """Allocate and pack; `progress` gets stage "pack" with bytes."""
    done, total = 0, program.manifest.weights_bytes

    def count(written: int) -> None:
        nonlocal done
        done += written
        if progress:
            progress("pack", done, total)

    return Runtime(
        program, device, origin.read, kv_pages=kv_pages, spin_budget_ns=settings.spin_budget_ns, progress=count
    )
