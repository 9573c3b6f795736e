"""What is installed is what the tree holds, and the core does without the extras."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 reads no TOML without the package tomli")

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "megakernel"
EXTRAS = {"torch", "transformers", "gguf", "cuda", "hip", "fastapi", "uvicorn"}  # modules that the core may lack


def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return loaded


def package_name(folder: Path) -> str:
    return ".".join(("megakernel", *folder.relative_to(PACKAGE).parts))


def test_every_package_is_listed() -> None:
    folders = [PACKAGE, *(p for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py")))]
    assert {package_name(f) for f in folders} == set(project()["tool"]["setuptools"]["packages"])


def test_every_file_that_is_not_python_is_package_data() -> None:
    data: dict[str, list[str]] = project()["tool"]["setuptools"]["package-data"]
    for path in sorted(p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")):
        home = next(f for f in path.parents if (f / "__init__.py").exists())
        globs = data.get(package_name(home), [])
        inside = path.relative_to(home).as_posix()
        assert any(fnmatch(inside, g) for g in globs), f"{path.relative_to(ROOT)} would not be installed: {globs}"


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="building a wheel needs setuptools")
def test_a_wheel_works_without_the_tree(tmp_path: Path) -> None:
    """Built from this tree and imported from elsewhere it has every device source and generates a kernel."""
    build = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copied(tmp_path / "tree"), capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-2000:]
    wheel = tmp_path / made.stdout.split()[-1]
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        opened.extractall(tmp_path / "site")
    for folder in ("tasks", "scheduler", "device"):
        for path in (PACKAGE / folder).iterdir():
            if path.suffix in (".cuh", ".h", ".py"):
                assert f"megakernel/{folder}/{path.name}" in names
    assert "megakernel/models/llama.py" in names and not any(n.startswith(("models/", "tests/")) for n in names)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "MEGAKERNEL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "megakernel", "source", "smollm2-135m", "--target", "cpu-avx2"]
    out = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    assert "MEGAKERNEL_ENTRY" in out.stdout


def copied(tree: Path) -> Path:
    """The sources of a build, so that nothing is written into this tree."""
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            copy(path, tree)
    for path in (PACKAGE / "models").glob("*.py"):  # a link: some Pythons do not walk into it
        copy(path, tree)
    return tree


def copy(path: Path, tree: Path) -> None:
    to = tree / path.relative_to(ROOT)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(path.read_bytes())


def test_the_command_line_needs_no_extra() -> None:
    """`import megakernel.cli` loads none of the optional packages, even when they are installed."""
    text = f"import sys, megakernel.cli; print(sorted(set({sorted(EXTRAS)!r}) & sys.modules.keys()))"
    out = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"


def test_top_level_imports_are_dependencies() -> None:
    """A module that is imported when a file is loaded belongs to the core's dependencies; others are imported late."""
    wanted = {d.split(">")[0].split("=")[0].replace("-", "_") for d in project()["project"]["dependencies"]}
    late = {
        "serve": {
            "fastapi",
            "starlette",
            "uvicorn",
            "pydantic",
            "pydantic_core",
            "prometheus_client",
            "httpx",
            "anyio",
        },
        "capture": {"torch"},  # module.py imports the folder late
    }
    for path in PACKAGE.rglob("*.py"):
        extra = late.get(path.parent.name, set())
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            for name in (n.split(".")[0] for n in names):
                known = name in sys.stdlib_module_names or name in wanted | extra or name == "megakernel"
                assert known, f"{path.relative_to(ROOT)} imports {name}, which is no dependency"


def test_versions_agree() -> None:
    import megakernel

    assert project()["project"]["version"] == megakernel.__version__


def test_ci_runs_the_tests() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_docs_name_every_command_and_setting() -> None:
    from megakernel.cli import app

    text = (ROOT / "docs" / "cli.md").read_text() + (ROOT / "README.md").read_text()
    commands = [c.name or (c.callback.__name__ if c.callback else "") for c in app.registered_commands]
    assert len(commands) >= 7
    for name in commands:
        assert f"`{name}" in text or f"`megakernel {name}" in text, f"docs/cli.md says nothing of {name}"
    for name in set(re.findall(r"MEGAKERNEL_[A-Z_]+", (PACKAGE / "settings.py").read_text())):
        assert f"`{name}`" in text, f"docs/cli.md says nothing of {name}"


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Paths in code marks that begin with a folder of the tree."""
    for name in re.findall(
        r"`((?:megakernel|models|tests|bench|docs|builder|scheduler|tasks|device)/[\w./-]+\.\w+)`", page.read_text()
    ):
        assert any((base / name).exists() for base in (ROOT, PACKAGE)), f"{page.name} names {name}, which is not there"
