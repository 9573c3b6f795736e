"""The wording of checkpoint errors: what, where, expected, got, and what to do."""

from __future__ import annotations

from pathlib import Path

from megakernel.errors import CheckpointError


def problem(
    what: str, where: str | Path, *, expected: object = None, got: object = None, todo: str = ""
) -> CheckpointError:
    """An error to raise. `expected` and `got` are left out when None."""
    parts = [f"{what}\n  where: {where}"]
    if expected is not None:
        parts.append(f"  expected: {expected}")
    if got is not None:
        parts.append(f"  got: {got}")
    if todo:
        parts.append(f"  what to do: {todo}")
    return CheckpointError("\n".join(parts))
