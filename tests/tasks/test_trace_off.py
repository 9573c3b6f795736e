"""Without the timeline the compiled kernel is the one of sources that never had it."""

from __future__ import annotations

import re
from pathlib import Path

from megakernel.device.cpu import compile_source, find_compiler

from .harness import ROOT
from .test_targets import source_for

FOLDERS = ("device", "scheduler", "tasks")
RECORDING = re.compile(r"\btrace::|/(cuda_)?trace\.cuh|\bbool traces\(\)")
OBJECT = ("-c", "-O1")


def without_recording(to: Path) -> Path:
    """A copy of the device sources without a line that has to do with recording."""
    for folder in FOLDERS:
        (to / "megakernel" / folder).mkdir(parents=True)
        for path in (ROOT / "megakernel" / folder).iterdir():
            if path.suffix in (".h", ".cuh") and path.name not in ("trace.cuh", "cuda_trace.cuh"):
                lines = [line for line in path.read_text().splitlines() if not RECORDING.search(line)]
                (to / "megakernel" / folder / path.name).write_text("\n".join(lines) + "\n")
    return to


def test_no_byte_of_recording_in_a_kernel_without_it(tmp_path: Path) -> None:
    command = find_compiler()
    with_lines, stripped = tmp_path / "with.o", tmp_path / "stripped.o"
    source = source_for("cpu-generic")
    bare = without_recording(tmp_path / "bare")
    assert "trace::" not in (bare / "megakernel" / "scheduler" / "pipeline.cuh").read_text()
    compile_source(source, ROOT, with_lines, command, OBJECT)
    compile_source(source, bare, stripped, command, OBJECT)
    assert with_lines.read_bytes() == stripped.read_bytes()
