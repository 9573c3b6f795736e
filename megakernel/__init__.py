"""A transformer checkpoint goes in; one persistent kernel comes out and decodes tokens."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megakernel.builder.program import Program
    from megakernel.engine import Engine
    from megakernel.errors import MegakernelError
    from megakernel.llm import LLM
    from megakernel.module import from_module
    from megakernel.opening import compile
    from megakernel.output import Output
    from megakernel.request import Embedded
    from megakernel.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM", "Embedded", "Engine", "MegakernelError", "Output", "Program", "SamplingParams", "compile", "from_module",
]  # fmt: skip

_HOMES = {
    "LLM": "llm",
    "Embedded": "request",
    "Engine": "engine",
    "MegakernelError": "errors",
    "Output": "output",
    "Program": "builder.program",
    "SamplingParams": "sampling",
    "compile": "opening",
    "from_module": "module",
}


def __getattr__(name: str) -> Any:
    """Import at first use, so that `import megakernel.errors` and `megakernel --help` stay fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megakernel' has no attribute {name!r}")
    value = getattr(import_module(f"megakernel.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
