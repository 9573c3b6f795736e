"""What the command line prints: JSON lines, tables, progress bars, errors."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from megakernel.errors import MegakernelError
from megakernel.settings import read_settings

Command = TypeVar("Command", bound=Callable[..., None])
INTERRUPTED = 130

# Where no terminal is, a sentence is one line, for whoever searches it.
errors = Console(stderr=True, soft_wrap=sys.stderr is None or not sys.stderr.isatty())


def emit(value: Any) -> None:
    """One JSON object on one line, at once."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    made = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 160).print(made)


def size(count: float) -> str:
    """Bytes for people: "98.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Stages:
    """Progress bars on stderr, one a stage; nothing when stderr is no terminal. A context manager and a callback."""

    def __init__(self, quiet: bool) -> None:
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(),
            console=errors, transient=True, disable=quiet or not errors.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            for earlier in self._tasks.values():
                self._bars.stop_task(earlier)
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def __enter__(self) -> Stages:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def say_error(text: str) -> None:
    errors.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)


def reported(command: Command) -> Command:
    """A command whose errors are one clear message and exit status 1; Ctrl-C ends it with 130.

    With `--json` the message is a JSON line too. MEGAKERNEL_DEBUG shows the traceback."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            errors.print("stopped")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output went away
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (OSError, UnicodeEncodeError) as e:
            if _debug():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer has nowhere to go
            say_error(f"standard output or a file cannot be written: {e}")
            raise typer.Exit(1) from None
        except MegakernelError as e:
            if _debug():
                raise
            if kwargs.get("as_json"):
                emit({"error": type(e).__name__, "message": str(e)})
            say_error(str(e))
            raise typer.Exit(1) from None

    return wrapper  # type: ignore[return-value]  # same signature, by functools.wraps


def _debug() -> bool:
    try:
        return read_settings().debug > 0
    except MegakernelError:  # the settings themselves are what is wrong; they are reported by the caller
        return False
