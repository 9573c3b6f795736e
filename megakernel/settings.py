"""The one file that reads the environment. A bad value raises; nothing is guessed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megakernel.errors import SettingsError
from megakernel.target import MAX_WORKERS

DEBUG_LEVELS = "0 off, 1 devices, 2 timings, 3 schedule, 4 source"


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. None: the default of whoever uses it.

    MEGAKERNEL_CACHE: folder of compiled kernels and the demo model (default ~/.cache/megakernel).
    MEGAKERNEL_CXX: C++ compiler of the CPU device, a command that may have arguments.
    MEGAKERNEL_HIPCXX: clang++ for AMD targets. ROCM_PATH: where ROCm is, which other tools read too.
    MEGAKERNEL_TARGET: name of the target that the CPU device takes instead of what it detects.
    MEGAKERNEL_WORKERS: resident workers instead of the target's number.
    MEGAKERNEL_DEBUG: 0 to 4, each level adds to the one before.
    MEGAKERNEL_SPIN_MS: how long a worker waits for another before it reports a fault.
    MEGAKERNEL_STEPS: most steps of one launch.
    MEGAKERNEL_TASKS: folders with tasks beside the package's own, separated as in PATH.
    MEGAKERNEL_API_KEY: key that the server's clients must have.
    """

    cache: Path
    cxx: str | None = None
    hip_cxx: str | None = None
    rocm: Path = Path("/opt/rocm")
    target: str | None = None
    workers: int | None = None
    debug: int = 0
    spin_ms: int = 10_000
    steps_per_launch: int = 256
    api_key: str | None = field(default=None, repr=False)
    task_folders: tuple[Path, ...] = ()

    @property
    def spin_budget_ns(self) -> int:
        return self.spin_ms * 1_000_000

    def say(self, level: int, text: str) -> None:
        """Print to stderr when MEGAKERNEL_DEBUG is at least `level`."""
        if self.debug >= level:
            print(text, file=sys.stderr, flush=True)


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `environ` (default: the process's). Raises SettingsError naming variable, expected and got."""
    env = os.environ if environ is None else environ
    workers = _integer(env, "MEGAKERNEL_WORKERS", 0, 1, MAX_WORKERS)
    return Settings(
        cache=_cache_folder(env),
        cxx=_command(env, "MEGAKERNEL_CXX"),
        hip_cxx=_command(env, "MEGAKERNEL_HIPCXX"),
        rocm=Path(_text(env, "ROCM_PATH") or "/opt/rocm"),
        target=_text(env, "MEGAKERNEL_TARGET"),
        workers=workers or None,
        debug=_integer(env, "MEGAKERNEL_DEBUG", 0, 0, 4, DEBUG_LEVELS),
        spin_ms=_integer(env, "MEGAKERNEL_SPIN_MS", 10_000, 1, 3_600_000),
        steps_per_launch=_integer(env, "MEGAKERNEL_STEPS", 256, 1, 1_000_000),
        api_key=_text(env, "MEGAKERNEL_API_KEY"),
        task_folders=_folders(env, "MEGAKERNEL_TASKS"),
    )


def _folders(env: Mapping[str, str], name: str) -> tuple[Path, ...]:
    found = tuple(Path(part).expanduser().resolve() for part in (_text(env, name) or "").split(os.pathsep) if part)
    for folder in found:
        if not folder.is_dir():
            raise SettingsError(f"{name}: expected folders separated by {os.pathsep!r}, got {str(folder)!r}")
    return found


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _command(env: Mapping[str, str], name: str) -> str | None:
    text = _text(env, name)
    try:
        shlex.split(text or "")
    except ValueError as e:
        raise SettingsError(f"{name}: expected a command as in a shell, got {text!r} ({e})") from e
    return text


def _integer(env: Mapping[str, str], name: str, default: int, low: int, high: int, meaning: str = "") -> int:
    text = _text(env, name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        more = f" ({meaning})" if meaning else ""
        raise SettingsError(f"{name}: expected an integer from {low} to {high}{more}, got {text!r}")
    return value


def _cache_folder(env: Mapping[str, str]) -> Path:
    text = _text(env, "MEGAKERNEL_CACHE")
    if text is None:
        base = _text(env, "XDG_CACHE_HOME")
        return (Path(base) if base else Path("~/.cache").expanduser()) / "megakernel"
    folder = Path(text).expanduser()
    if not folder.is_absolute():
        raise SettingsError(f"MEGAKERNEL_CACHE: expected an absolute path, got {text!r}")
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"MEGAKERNEL_CACHE: expected a folder, got the file {text!r}")
    return folder
