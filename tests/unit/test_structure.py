"""The tree is the architecture: imports point down, and vendor words stay under device/."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "megakernel"

# A module may import from a layer below its own, or from its own layer.
LAYERS: dict[str, int] = {
    "errors": 0, "settings": 0, "target": 0, "parts": 0,
    "tasks": 1, "show": 1,
    "checkpoint": 2, "graph": 2, "interpret": 2, "operators": 2, "rope": 2, "models": 2, "architectures": 2,
    "capture": 3,
    "scheduler": 2, "device": 2, "devices": 3, "model_table": 3, "origin": 3, "text": 3,
    "builder": 4,
    "faults": 5, "runtime": 5, "kv_cache": 5, "sampling": 5, "request": 5, "recording": 5,
    "kv_tensors": 6, "engine": 6, "opening": 6, "probe": 6, "timeline": 2, "clocks": 3, "flow": 6,
    "module": 7, "output": 7, "llm": 8, "bench": 9, "perfetto_file": 4, "profile": 9, "device_report": 10, "bisect": 9,
    "report": 9, "serve": 9, "cli": 11, "__main__": 12, "__init__": 12,
}  # fmt: skip
FORBIDDEN = {
    "scheduler": {"device", "devices", "graph", "builder"},
    "graph": {"device", "scheduler", "builder", "checkpoint"},
    "models": {"device", "scheduler", "builder", "checkpoint"},
    "device": {"scheduler", "graph", "builder", "models"},
    "tasks": {"device", "scheduler", "graph", "models", "checkpoint"},
}
VENDOR = re.compile(
    r"\b(nvidia|cuda|hopper|ampere|blackwell|sm_?\d+a?|amdgcn|gfx\d+\w*|rocm|hip|cdna|rdna|__shfl\w*|mbarrier\w*"
    r"|cp\.async\w*|wgmma|ptx|threadIdx|blockIdx|__global__|__shared__)\b",
    re.IGNORECASE,
)


def layer_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megakernel"):
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("megakernel.")}
    return names


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = layer_name(path)
    assert own in LAYERS, f"{path} belongs to no layer; add {own!r} to LAYERS"
    for other in imports(path) - {own}:
        assert other in LAYERS or own in ("__init__", "__main__"), f"{path} imports unknown layer {other!r}"
        assert LAYERS.get(other, 0) <= LAYERS[own], f"{path} ({own}) imports {other}, which is above it"
        assert other not in FORBIDDEN.get(own, set()), f"{path}: {own} must not import {other}"


def portable_sources() -> list[Path]:
    return sorted(p for f in ("tasks", "scheduler") for p in (PACKAGE / f).iterdir() if p.suffix in (".py", ".cuh"))


@pytest.mark.parametrize("path", portable_sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_vendor_word_in_tasks_and_scheduler(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = VENDOR.search(line)
        assert not found, f"{path.name}:{number}: vendor word {found.group(0)!r} in {line.strip()!r}"


def test_device_headers_name_no_task() -> None:
    names = [p.stem for p in (PACKAGE / "tasks").glob("*.cuh") if p.stem != "task"]
    for path in sorted((PACKAGE / "device").iterdir()):
        if path.suffix in (".h", ".cuh"):
            for name in names:
                assert f"tasks/{name}.cuh" not in path.read_text(), f"{path.name} includes task {name}"


def test_the_gate_can_go_red(tmp_path: Path) -> None:
    assert VENDOR.search("  // uses cp.async here") and VENDOR.search("sm_90a") and not VENDOR.search("smart barrier")
    bad = tmp_path / "x.py"
    bad.write_text("from megakernel.device.device import Device\nimport megakernel.builder.cache\n")
    assert imports(bad) == {"device", "builder"}
