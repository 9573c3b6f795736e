"""From a model's name to a program, and from a program to a loaded runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megakernel.builder.build import build_program, rank_program
from megakernel.builder.program import Program
from megakernel.device.device import Device
from megakernel.devices import find_device, list_devices, open_device
from megakernel.errors import CapacityError, DeviceUnavailable, ProgramError, TargetError
from megakernel.origin import Origin, Progress, open_origin
from megakernel.ranks import LocalRank, Member, ProcessRank, Ranks, rank_devices
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
    paced: bool = False,
    tp: int = 1,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Program:
    """Build the program of a model for `target` (whose hardware need not be here), or for `device`, or for the CPU.
    `paced`: its steps can keep to `Engine`'s max_step_ms. `tp`: devices that run it together; the program is that of
    rank 0.

    Raises TargetError, CheckpointError, LoweringError, ScheduleError, BuildError, NoCompiler."""
    chosen = settings or read_settings()
    where, goal = target_and_compiler(target, device, workers, chosen)
    origin = open_origin(model, dtype=dtype, cache=chosen.cache, progress=progress)
    try:
        return build(
            origin, goal, where, chosen, progress, dtype=dtype, kv_dtype=kv_dtype, max_slots=max_slots,
            max_context=max_context, max_rows=max_rows, policy=policy, paced=paced, tp=tp, chaos=False,
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
    """The device's own target, or the named one, or the settings' if it is of the same backend; with `workers`.

    Raises TargetError for one of another backend, whose kernel the device can neither build nor run."""
    own = device.target
    if name is None and settings.target and find_target(settings.target).backend == own.backend:
        name = settings.target
    goal = own if name in (None, own.name) else find_target(name or "")
    if goal.backend != own.backend:
        raise TargetError(
            f"target {goal.name} is one of {goal.backend}, device {device.name} one of {own.backend}: give only one of "
            "the two, or a device that has this target"
        )
    return goal.with_workers(workers if workers is not None else settings.workers or own.workers)


def build(
    origin: Origin, target: Target, device: Device, settings: Settings, progress: Progress | None, **options: Any
) -> Program:
    """`build_program` with the origin's configuration and name; `options` are its own."""

    def say(stage: str) -> None:
        if progress:
            progress(stage, 0, 0)

    return build_program(origin.config, target, device, cache=settings.cache, name=origin.name, progress=say, **options)


def workers_of_rank(target: Target, tp: int, workers: int | None, settings: Settings) -> Target:
    """The target of each of `tp` devices: processors share their cores out, unless the user has said how many."""
    if tp == 1 or target.backend != "cpu" or workers is not None or settings.workers:
        return target
    return target.with_workers(max(1, target.workers // tp))


def save_ranks(
    program: Program, config: Mapping[str, Any], target: Target, folder: Path, beside: Mapping[str, str] | None = None
) -> Path:
    """Save a program to a new folder; of several ranks each to one of its own in it, "rank0", "rank1", ... `beside`:
    texts of further files, by name, for every rank. Raises ProgramError."""
    if program.manifest.ranks == 1:
        return program.save(folder, beside)
    if folder.exists():
        raise ProgramError(f"{folder} exists; give a new folder or remove it")
    for rank in range(program.manifest.ranks):
        rank_program(program, config, target, rank).save(folder / f"rank{rank}", beside)
    return folder


def load(
    program: Program,
    device: Device,
    origin: Origin,
    settings: Settings,
    *,
    kv_pages: int | None = None,
    progress: Progress | None = None,
    processes: str | None = None,
    seed: int = 0,
    devices: Sequence[Device] | None = None,
) -> Runtime:
    """Allocate and pack; `progress` gets stage "pack" with bytes. Of a program of several ranks all are loaded.

    processes: the model's name, when every other rank is to be a process of its own, which opens it with `seed`.
    devices: one for each rank; default: `device` and those after it. Raises what Runtime does, CapacityError for ranks
    on one processor that need more than its memory, RankLost, DeviceUnavailable."""
    done, total = 0, program.manifest.weights_bytes

    def count(written: int) -> None:
        nonlocal done
        done += written
        if progress:
            progress("pack", done, total)

    options: dict[str, Any] = {"kv_pages": kv_pages, "spin_budget_ns": settings.spin_budget_ns}
    m = program.manifest
    if m.ranks == 1:
        return Runtime(program, device, origin.read, **options, progress=count)
    where = list(devices or rank_devices(device, m.ranks, list_devices))
    if device.target.backend == "cpu":
        check_shared_memory(program, physical_memory())
    others: list[Member] = []
    started: list[ProcessRank] = []
    first: Ranks | None = None
    try:
        programs = [rank_program(program, origin.config, _built_for(program, device), r) for r in range(m.ranks)]
        for rank in range(1, m.ranks if processes else 1):  # they load while rank 0 does
            spec = {
                "program": programs[rank],
                "model": processes,
                "seed": seed,
                "dtype": m.dtype,
                "cache": settings.cache,
            }
            started.append(ProcessRank(rank, where[rank], {**spec, **options}))
        first = Ranks(program, where[0], origin.read, **options, progress=count, shared=bool(processes))
        for process in started:
            process.start()
        for rank in range(1, 1 if processes else m.ranks):
            runtime = Runtime(programs[rank], where[rank], origin.read, **options, progress=count)
            others.append(LocalRank(runtime, f"rank {rank} ({where[rank].name})"))
        others += started
        first.join(others)
        return first
    except BaseException:
        for rank_ in {id(o): o for o in (*others, *started)}.values():
            rank_.close()
        if first is not None:
            first.close()
        raise


def physical_memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_shared_memory(program: Program, have: int) -> None:
    """Raises CapacityError when all ranks' weights and workspaces, which every one of them writes, are more than `have`
    bytes. The system grants each what it would grant one alone, and later ends the process."""
    m = program.manifest
    each = m.weights_bytes + m.workspace_bytes * m.workspace_copies
    if m.ranks * each > have:
        raise CapacityError(
            f"program {m.name} does not fit this machine: {m.ranks} ranks on the processor need {each:,} bytes each "
            f"for weights and workspace, {m.ranks * each:,} together; it has {have:,}"
        )


def _built_for(program: Program, device: Device) -> Target:
    own = device.target
    m = program.manifest
    return (own if own.name == m.target else find_target(m.target)).with_workers(m.workers)
