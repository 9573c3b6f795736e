"""What the tools of this package share on the command line: numbers in a range, and one sentence for an error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from megakernel.errors import MegakernelError


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """For `type` of an option: an integer from `low` to `high`, both included."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            span = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"expected an integer {span}, got {text!r}")
        return value

    return read


def wholes(low: int) -> Callable[[str], list[int]]:
    """For `type` of an option: integers of at least `low`, with commas between them."""
    return lambda text: [whole(low)(part) for part in text.split(",")]


def reported(tool: Callable[[], int]) -> int:
    """The exit status of `tool`. What it raises on purpose, and what the system refuses, is told and not traced."""
    try:
        return tool()
    except (MegakernelError, OSError) as e:
        sys.stderr.write(f"error: {e}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
