"""An OpenAI-compatible HTTP server over the engine. Needs the extra `serve`; its modules are imported late."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from megakernel.errors import MissingExtra


def server_modules() -> tuple[ModuleType, ModuleType]:
    """`main` and `options`. Raises MissingExtra with the line to type when the extra is not installed."""
    try:
        return import_module("megakernel.serve.main"), import_module("megakernel.serve.options")
    except ModuleNotFoundError as e:
        if e.name is not None and e.name.split(".")[0] == "megakernel":
            raise
        raise MissingExtra(
            f'the server needs the package {e.name}, which is not installed: pip install "megakernel-decode[serve]"'
        ) from e
