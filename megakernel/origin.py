"""Where a model comes from: a checkpoint's files, the demo model, or a published shape with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.architectures import (
    find_model,
    known_models,
    parameter_shapes,
    random_weights,
    shape_config,
    shape_names,
)
from megakernel.checkpoint import Checkpoint, GenerationDefaults, Tokenizer, fetch_demo, open_checkpoint
from megakernel.errors import CheckpointError

Read = Callable[[str, str, slice], npt.NDArray[Any]]
Progress = Callable[[str, int, int], None]  # stage, done, total; total 0 when it is not known

DEMO = "demo"


@dataclass(frozen=True)
class Origin:
    """An open model. `tokenizer` is None for a shape, which has no text. `close` it after the weights are read."""

    name: str
    config: Mapping[str, Any]
    read: Read
    tokenizer: Tokenizer | None
    generation: GenerationDefaults
    close: Callable[[], None] = field(default=lambda: None)


def open_origin(
    model: str | Path, *, seed: int = 0, dtype: str = "bf16", cache: Path, progress: Progress | None = None
) -> Origin:
    """`model`: a folder, a .gguf file, "demo", or the name of a published shape.

    `seed` and `dtype` are those of a shape's random weights. Raises CheckpointError or UnknownArchitecture."""
    text = str(model)
    if text == DEMO and not Path(text).exists():
        return _of_checkpoint(fetch_demo(cache, progress))
    if Path(text).expanduser().exists():
        return _of_checkpoint(Path(text))
    if text.lower() in shape_names():
        return _of_shape(text.lower(), seed, dtype)
    if isinstance(model, Path) or "/" in text or text.endswith(".gguf"):
        return _of_checkpoint(Path(text))  # raises, and says what is missing
    raise CheckpointError(
        f"there is no model {text!r}: expected a checkpoint folder, a .gguf file, {DEMO!r}, or one of the published "
        f"shapes {', '.join(_buildable())}"
    )


def _buildable() -> list[str]:
    """The published shapes whose architecture has a file."""
    known = known_models()
    return [n for n in shape_names() if any(a in known for a in shape_config(n)["architectures"])]


@dataclass(frozen=True)
class _CheckpointRead:
    """`Read` of a checkpoint; `columns` touches only these columns of the rows."""

    checkpoint: Checkpoint

    def __call__(self, name: str, dtype: str, rows: slice) -> npt.NDArray[Any]:
        return self.checkpoint.read(name, dtype, rows)

    def columns(self, name: str, dtype: str, rows: slice, cols: slice) -> npt.NDArray[Any]:
        return self.checkpoint.read(name, dtype, rows, cols)


def _of_checkpoint(path: Path) -> Origin:
    checkpoint = open_checkpoint(path)
    try:
        _check_tensors(checkpoint)
        tokenizer = checkpoint.tokenizer
    except BaseException:
        checkpoint.close()
        raise

    return Origin(
        checkpoint.path.stem if checkpoint.path.is_file() else checkpoint.path.name,
        checkpoint.config,
        _CheckpointRead(checkpoint),
        tokenizer,
        checkpoint.generation,
        checkpoint.close,
    )


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Every tensor that the architecture reads is there with its shape, and no other is left over."""
    config, stored = checkpoint.config, len(checkpoint.names())
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if isinstance(layers, int) and layers > stored:  # before a graph of so many is made
        raise CheckpointError(
            f"{checkpoint.path}: the config has {layers} layers, the checkpoint {stored} tensors; one of them is wrong"
        )
    shapes = parameter_shapes(find_model(checkpoint.config).build(checkpoint.config))
    checkpoint.check_used(shapes)
    for name, shape in shapes.items():
        checkpoint.expect(name, shape)


def _of_shape(name: str, seed: int, dtype: str) -> Origin:
    config = shape_config(name)
    weights = random_weights(find_model(config).build(config), seed, dtype)

    def read(tensor: str, kind: str, rows: slice) -> npt.NDArray[Any]:
        return np.asarray(weights.read(tensor, kind, rows))

    return Origin(name, config, read, None, GenerationDefaults())
