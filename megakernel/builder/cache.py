"""The compile cache: try_load, build, load. A key covers every source, flag, the target and the compiler.

Entries are made in a temporary folder beside the final one and published by one rename, so that a killed build
or two builds at once never leave half an entry. `try_load` raises nothing for an absent entry; a damaged one is
removed and built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from megakernel.device.device import Device, KernelSource
from megakernel.errors import BuildError
from megakernel.settings import read_settings

PACKAGE = Path(__file__).resolve().parent.parent
INCLUDE = PACKAGE.parent
SOURCE_FOLDERS = ("tasks", "scheduler", "device")
SOURCE_SUFFIXES = (".cuh", ".h")
STALE_SECONDS = 3600.0


@lru_cache(maxsize=1)
def device_sources() -> tuple[Path, ...]:
    """Every device source of the package, in a fixed order."""
    folders = [*(PACKAGE / f for f in SOURCE_FOLDERS), *read_settings().task_folders]
    return tuple(sorted(p for folder in folders for p in folder.iterdir() if p.suffix in SOURCE_SUFFIXES))


def cache_key(source: KernelSource, compiler_id: str) -> str:
    """Hex digest over everything that can change the binary."""
    h = hashlib.sha256()
    parts = [source.text, compiler_id, source.target.name, f"chaos={source.chaos} trace={source.trace}"]
    parts += [f"{name}\0{text}" for name, text in sorted(source.headers.items())]
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part.encode())
    for path in device_sources():
        data = path.read_bytes()
        where = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path
        h.update(f"{where}\0{len(data)}\0".encode())
        h.update(data)
    return h.hexdigest()[:32]


@lru_cache(maxsize=1)
def compiler_sources() -> tuple[Path, ...]:
    """The package's own Python files that decide what a program is: everything below the engine."""
    folders = ("tasks", "scheduler", "builder", "models")
    single = [PACKAGE / f"{name}.py" for name in ("graph", "rope", "target", "parts", "operators")]
    outside = [p for folder in read_settings().task_folders for p in folder.glob("*.py")]
    return tuple(sorted([p for f in folders for p in (PACKAGE / f).glob("*.py")] + single + outside))


def program_entry(folder: Path, parts: Sequence[object]) -> Path:
    """Where the cache keeps the whole program made from `parts` (plain values) by the present sources."""
    h = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for path in (*device_sources(), *compiler_sources()):
        h.update(f"\0{path.name}\0".encode())
        h.update(path.read_bytes())
    return folder / "programs" / h.hexdigest()[:32]


def compiled(source: KernelSource, device: Device, folder: Path) -> Path:
    """The compiled kernel for `source`: from the cache, or built and published. Raises BuildError, NoCompiler."""
    compiler_id = device.compiler_id(source.target)
    entry = folder / "kernels" / cache_key(source, compiler_id)
    return try_load(entry) or _build(entry, source, device, compiler_id)


def try_load(entry: Path) -> Path | None:
    """The binary of a whole cache entry, or None. An entry whose content changed is removed."""
    binary = entry / "kernel.bin"
    try:
        meta = json.loads((entry / "entry.json").read_text())
        if hashlib.sha256(binary.read_bytes()).hexdigest() == meta["sha256"]:
            return binary
    except (OSError, ValueError, KeyError, TypeError):
        if not entry.exists():
            return None
    shutil.rmtree(entry, ignore_errors=True)
    return None


def _build(entry: Path, source: KernelSource, device: Device, compiler_id: str) -> Path:
    with writable(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        _sweep(entry.parent)
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=entry.parent))
    try:
        with writable(entry.parent):
            (work / "kernel.cpp").write_text(source.text)
            for name, text in source.headers.items():
                (work / name).write_text(text)
        with writable(entry.parent):
            device.compile(source, INCLUDE, work / "kernel.bin")
            digest = hashlib.sha256((work / "kernel.bin").read_bytes()).hexdigest()
            (work / "entry.json").write_text(json.dumps({"sha256": digest, "compiler": compiler_id}))
            os.chmod(work, 0o755)
        return _publish(work, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, entry: Path) -> Path:
    try:
        os.rename(work, entry)
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise BuildError(f"cannot publish the compiled kernel to {entry}: {e.strerror}") from e
        found = try_load(entry)  # another process was first; its result is the same
        if found is None:  # it was damaged, and is removed
            with contextlib.suppress(OSError):  # unless another process was first again
                os.rename(work, entry)
            if try_load(entry) is None:
                raise BuildError(f"cannot publish the compiled kernel to {entry}: {e.strerror}") from e
    return entry / "kernel.bin"


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turns an OSError inside into a BuildError that names the cache folder."""
    try:
        yield
    except OSError as e:
        place = f" ({e.filename})" if e.filename else ""
        raise BuildError(
            f"cannot write the compile cache {folder}: {e.strerror or e}{place}; free some space, or choose another "
            "folder with MEGAKERNEL_CACHE"
        ) from e


def _sweep(folder: Path) -> None:
    """Remove folders of builds that were killed more than an hour ago."""
    for left in folder.glob(".build-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
