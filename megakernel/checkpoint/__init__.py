"""Checkpoints: a Hugging Face folder or a GGUF file as configuration, tensors and tokenizer."""

from __future__ import annotations

from pathlib import Path

from megakernel.checkpoint.chat import ChatTemplate
from megakernel.checkpoint.checkpoint import BENIGN_SUFFIXES, Checkpoint
from megakernel.checkpoint.demo import fetch_demo
from megakernel.checkpoint.generation import GenerationDefaults
from megakernel.checkpoint.gguf_file import open_gguf
from megakernel.checkpoint.hugging_face import open_folder
from megakernel.checkpoint.message import problem
from megakernel.checkpoint.tokenizer import TextStream, Tokenizer

__all__ = [
    "BENIGN_SUFFIXES",
    "ChatTemplate",
    "Checkpoint",
    "GenerationDefaults",
    "TextStream",
    "Tokenizer",
    "fetch_demo",
    "open_checkpoint",
]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder or a .gguf file. Raises CheckpointError saying what is wrong with it."""
    place = Path(path).expanduser()
    if place.is_dir():
        return open_folder(place)
    if place.is_file():
        with place.open("rb") as handle:
            start = handle.read(4)
        if start == b"GGUF" or place.suffix == ".gguf":
            return open_gguf(place)
        raise problem(
            "the file is not a checkpoint",
            place,
            expected="a .gguf file or a Hugging Face folder",
            got=f"bytes {start!r}",
        )
    raise problem("there is no such checkpoint", place, expected="a Hugging Face folder or a .gguf file", got="nothing")
