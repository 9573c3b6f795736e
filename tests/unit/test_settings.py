"""Settings: what the environment may say, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakernel.errors import SettingsError
from megakernel.settings import read_settings


def test_defaults() -> None:
    found = read_settings({})
    assert found.cache == Path("~/.cache/megakernel").expanduser()
    assert (found.cxx, found.target, found.workers, found.debug) == (None, None, None, 0)
    assert found.spin_budget_ns == found.spin_ms * 1_000_000 > 0 and found.steps_per_launch == 256


def test_every_variable(tmp_path: Path) -> None:
    found = read_settings({
        "MEGAKERNEL_CACHE": str(tmp_path), "MEGAKERNEL_CXX": "clang++ -O1", "MEGAKERNEL_TARGET": "cpu-generic",
        "MEGAKERNEL_WORKERS": "3", "MEGAKERNEL_DEBUG": "4", "MEGAKERNEL_SPIN_MS": "50", "MEGAKERNEL_STEPS": "1",
    })  # fmt: skip
    assert found.cache == tmp_path and found.cxx == "clang++ -O1" and found.target == "cpu-generic"
    assert (found.workers, found.debug, found.spin_ms, found.steps_per_launch) == (3, 4, 50, 1)
    assert read_settings({"XDG_CACHE_HOME": str(tmp_path)}).cache == tmp_path / "megakernel"
    assert read_settings({"MEGAKERNEL_DEBUG": " "}).debug == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEGAKERNEL_DEBUG", "5"), ("MEGAKERNEL_DEBUG", "yes"), ("MEGAKERNEL_WORKERS", "0"),
        ("MEGAKERNEL_WORKERS", "2.5"), ("MEGAKERNEL_SPIN_MS", "-1"), ("MEGAKERNEL_STEPS", "0"),
        ("MEGAKERNEL_CACHE", "relative/folder"), ("MEGAKERNEL_CXX", 'cc "-O1'),
        ("MEGAKERNEL_HIPCXX", 'clang "-O1'),
    ],
)  # fmt: skip
def test_a_bad_value_names_variable_expected_and_got(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name}: expected .*got '{value}'"):
        read_settings({name: value})


def test_the_cache_is_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingsError, match="expected a folder, got the file"):
        read_settings({"MEGAKERNEL_CACHE": str(file)})


def test_only_settings_reads_the_environment() -> None:
    package = Path(__file__).parents[2] / "megakernel"
    for path in package.rglob("*.py"):
        text = path.read_text()
        if path.name != "settings.py":
            for line in text.splitlines():
                whole = "**os.environ" in line  # handing the environment on to a child is not reading a setting
                assert whole or ("os.environ" not in line and "getenv" not in line), f"{path}: {line.strip()}"
