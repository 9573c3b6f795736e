"""The tree is the architecture: imports point down, and vendor words stay under device/."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megakernel.tasks.task import all_tasks

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "megakernel"

# A module may import from a layer below its own, or from its own layer.
LAYERS: dict[str, int] = {
    "errors": 0, "settings": 0, "target": 0, "parts": 0,
    "tasks": 1, "show": 1, "columns": 1, "marks": 2,
    "checkpoint": 2, "graph": 2, "interpret": 2, "operators": 2, "rope": 2, "models": 2, "architectures": 2,
    "capture": 3,
    "scheduler": 2, "device": 2, "devices": 3, "model_table": 3, "origin": 3, "text": 3,
    "builder": 4,
    "faults": 5, "runtime": 5, "kv_cache": 5, "sampling": 5, "request": 5, "recording": 5,
    "flow_ranks": 6, "ranks": 6, "rank_process": 6,
    "kv_tensors": 5, "slots": 6, "engine": 6, "opening": 6, "probe": 6, "timeline": 2, "clocks": 3, "flow": 6,
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
# Words of one vendor or of its programming model, also as parts of a name (kProducerWarp, warp_meets).
VENDOR_WORDS = re.compile(
    r"nvidia|cuda|hopper|ampere|blackwell|nvcc|nvrtc|cubin|ptx|sass|sms?|ctas?|smem|tma|wgmma|hmma|mbarrier|warps?|warpgroups?"
    r"|amd|amdgcn|gcn|hip|hiprtc|rocm|[cr]dna|mi\d{3}x?|mfma\w*|wmma\w*|swmmac\w*|xccs?|xcds?|tdm|lds|[vs]gprs?|vmcnt"
    r"|waves?|wavefronts?|shfl|syncthreads|syncwarp",
    re.IGNORECASE,
)
VENDOR_NAMES = re.compile(
    r"(?<![a-z0-9])(sm_?\d+a?|gfx\d+\w*|cp\.async\w*|threadIdx|blockIdx|__global__|__shared__|__\w*_sync|tensor_load_to_lds)"
    r"(?![a-z0-9])",
    re.IGNORECASE,
)
# Where the design itself has the word. `warp`: "Roles, one set of warps each"; roles.cuh is the driver of devices whose
# roles are warps of one block, and has no meaning elsewhere.
DESIGN_WORDS: dict[str, frozenset[str]] = {"roles.cuh": frozenset({"warp", "warps"})}
CONDITIONAL = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|elifdef|elifndef|else|endif)\b")


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


def vendor_words(line: str) -> set[str]:
    """The vendors' words in a line, lower case; a name is taken apart at underscores and capital letters."""
    parts = re.findall(r"[A-Z]+(?![a-z])\d*[a-z]?\b|[A-Z]?[a-z]+\d*[a-z]?|[A-Z]+\d*", line)
    whole = re.findall(r"[A-Za-z0-9]+", line)
    words = {w.lower() for w in (*parts, *whole) if VENDOR_WORDS.fullmatch(w)}
    return words | {m.group(0).lower() for m in VENDOR_NAMES.finditer(line)}


@pytest.mark.parametrize("path", portable_sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_vendor_word_in_tasks_and_scheduler(path: Path) -> None:
    allowed, used = DESIGN_WORDS.get(path.name, frozenset()), set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = vendor_words(line)
        used |= found
        assert found <= allowed, f"{path.name}:{number}: vendor words {sorted(found - allowed)} in {line.strip()!r}"
    assert not allowed or used, f"{path.name} needs no exemption any more: take it out of DESIGN_WORDS"


def test_no_preprocessor_condition_outside_of_devices() -> None:
    """What differs by device is a name that its header defines, or an `if constexpr`."""
    sources = [p for p in portable_sources() if p.suffix == ".cuh"]
    lines = [(p.name, n, line) for p in sources for n, line in enumerate(p.read_text().splitlines(), 1)]
    assert len(sources) > 10 and not [found for found in lines if CONDITIONAL.match(found[2])]


def test_sources_of_devices_are_only_in_known_folders() -> None:
    """So that the two rules above see every one."""
    sources = [p for p in PACKAGE.rglob("*") if p.suffix in (".cuh", ".h", ".cu", ".hip")]
    folders = {str(p.parent.relative_to(PACKAGE)) for p in sources}
    assert folders == {"device", "scheduler", "tasks"}


def test_device_headers_name_no_task() -> None:
    names = [p.stem for p in (PACKAGE / "tasks").glob("*.cuh") if p.stem != "task"]
    for path in sorted((PACKAGE / "device").iterdir()):
        if path.suffix in (".h", ".cuh"):
            for name in names:
                assert f"tasks/{name}.cuh" not in path.read_text(), f"{path.name} includes task {name}"


def test_the_gate_can_go_red(tmp_path: Path) -> None:
    assert vendor_words("  // uses cp.async here") and "sm_90a" in vendor_words("-arch=sm_90a")
    for name in (
        "kProducerWarp",
        "w.warp_lane()",
        "lane_of_warp",
        "kXcds",
        "v_mfma_f32",
        "useTMA",
        "__shfl_sync",
        "AMD's",
    ):
        assert vendor_words(name), name
    assert not vendor_words("a smart barrier, relationship, awarded, hop_us, wavelet, small")
    assert CONDITIONAL.match("#ifdef X") and CONDITIONAL.match("  # if 1") and not CONDITIONAL.match("#include <x>")
    bad = tmp_path / "x.py"
    bad.write_text("from megakernel.device.device import Device\nimport megakernel.builder.cache\n")
    assert imports(bad) == {"device", "builder"}


def test_the_picture_of_the_layers_names_them() -> None:
    """Every task, and every part of the package that is not a detail of another."""
    words = set(re.findall(r"\w+", (ROOT / "docs" / "architecture.svg").read_text()))
    assert set(all_tasks()) <= words
    assert {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()} <= words
    assert {"llm", "engine", "runtime", "ranks", "opening", "module", "cli", "profile", "bisect"} <= words
