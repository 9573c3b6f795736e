"""Print the size of every source file, longest first: `python -m tests.sizes`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".cuh", ".h"}


def sizes() -> list[tuple[int, Path]]:
    """Lines and path of every source file below megakernel/, models/, tests/ and bench/."""
    found = []
    for folder in ("megakernel", "models", "tests", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                found.append((len(path.read_text().splitlines()), path.relative_to(ROOT)))
    return sorted(found, reverse=True)


def main() -> None:
    table = Table("lines", "file")
    found = sizes()
    for lines, path in found:
        table.add_row(str(lines), str(path), style="yellow" if lines > 500 else None)
    table.add_row(str(sum(n for n, _ in found)), f"{len(found)} files")
    Console().print(table)


if __name__ == "__main__":
    main()
