"""An open checkpoint: configuration, tensors by their Hugging Face names, tokenizer, generation defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megakernel.checkpoint.generation import GenerationDefaults
from megakernel.checkpoint.mapped import MappedFile
from megakernel.checkpoint.message import problem
from megakernel.checkpoint.stored import ALL, NUMPY_DTYPES, Array, StoredTensor, interleaved_rows
from megakernel.checkpoint.tokenizer import Tokenizer

BENIGN_SUFFIXES = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "self_attn.masked_bias",
    "attn.masked_bias",
    "attention.masked_bias",
    ".attn.bias",
    ".attention.bias",
    "position_ids",
)
"""Tensors that some savers wrote although they are computed from the configuration; they may stay unused."""

TIED_HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")


class Checkpoint:
    """Made by `open_checkpoint`. A context manager; after `close` nothing can be read."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        generation: GenerationDefaults,
        tensors: Mapping[str, StoredTensor],
        files: tuple[MappedFile, ...],
        load_tokenizer: Callable[[], Tokenizer | None],
    ) -> None:
        self.path = path
        self.config = config
        self.generation = generation
        self._tensors = tensors
        self._files = files
        self._load_tokenizer = load_tokenizer
        self._closed = False

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, loaded at first use; None when the folder has none. Raises CheckpointError."""
        return self._load_tokenizer()

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits over configuration, tensor names, shapes, types and places, file sizes and times.

        Reads no weights. A copied or touched file has another fingerprint; equal ones mean equal contents.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        for file in self._files:
            digest.update(f"{file.path.name} {file.size} {file.mtime_ns}\n".encode())
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            digest.update(
                f"{name} {tensor.shape} {tensor.codec.name} {tensor.file.path.name} {tensor.offset}\n".encode()
            )
        return digest.hexdigest()

    def names(self) -> tuple[str, ...]:
        """Every tensor of the files, sorted, benign ones included."""
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def stored_dtype(self, name: str) -> str:
        """ "f32", "bf16", "f16", or a quantised type as GGUF names it, such as "Q4_1"."""
        return self._find(name).codec.name

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError when `name` is missing or has another shape."""
        got = self._find(name).shape
        if got != tuple(shape):
            raise problem(
                f"tensor {name} does not have the shape that the configuration asks for",
                self._find(name).file.path,
                expected=list(shape),
                got=list(got),
                todo="the configuration and the weights are of different models; fetch both from one place",
            )

    def read(self, name: str, dtype: str = "f32", rows: slice | None = None, cols: slice = ALL) -> Array:
        """The values of `name`, dequantised, [rows, cols] (the tensor's own shape), as a new array.

        dtype: "f32", "bf16" (`ml_dtypes.bfloat16`) or "f16", rounded to nearest even. `rows` picks entries of the
        first axis (step 1), `cols` columns of a matrix; only those are read. NaN and infinity pass through unchanged.
        Raises CheckpointError on an unknown name, dtype or row range, and when a finite value overflows f16.
        """
        tensor = self._find(name)
        if self._closed:
            raise problem("the checkpoint is closed", self.path, todo="read inside its `with` block")
        if dtype not in NUMPY_DTYPES:
            raise problem(f"cannot read {name} as {dtype!r}", self.path, expected=", ".join(NUMPY_DTYPES), got=dtype)
        first, last = self._row_range(tensor, rows)
        if len(tensor.shape) <= 1:
            whole = np.empty((1, tensor.cols), NUMPY_DTYPES[dtype])
            tensor.read_flat(0, 1, whole)
            if tensor.head_rows:  # a bias: its elements are what rows are elsewhere
                whole = whole[:, interleaved_rows(np.arange(tensor.cols), tensor.head_rows)]
            return whole.reshape(tensor.shape) if not tensor.shape else whole[0, first:last]
        width = len(range(*cols.indices(tensor.cols)))
        out = np.empty((last - first, *tensor.shape[1:-1], width), NUMPY_DTYPES[dtype])
        inner = tensor.flat_rows // tensor.shape[0] if tensor.shape[0] else 0
        tensor.read_flat(first * inner, last * inner, out.reshape(-1, width), cols)
        return out

    def check_used(self, used_names: Iterable[str]) -> None:
        """Raises CheckpointError naming tensors nobody used and tensors that are not there.

        Allowed to stay unused: names ending in BENIGN_SUFFIXES, and a stored output head that equals the embedding
        when the configuration ties the two.
        """
        used = set(used_names)
        missing = sorted(used - self._tensors.keys())
        left = sorted(
            name
            for name in self._tensors.keys() - used
            if not name.endswith(BENIGN_SUFFIXES) and not self._is_tied(name)
        )
        if not missing and not left:
            return
        parts = [_listing("missing", missing), _listing("left over", left)]
        raise problem(
            "the tensors of the checkpoint are not those of the architecture",
            self.path,
            expected=f"the tensors of {self.config.get('architectures') or self.config.get('model_type')}",
            got="; ".join(part for part in parts if part),
            todo="check that config.json and the weights belong together and that every shard is there",
        )

    def close(self) -> None:
        """Unmap the files. May be called twice."""
        if not self._closed:
            self._closed = True
            for file in self._files:
                file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            near = sorted(self._tensors, key=lambda other: -_common_ends(name, other))[:3]
            raise problem(f"tensor {name} is missing", self.path, expected=name, got=f"nearest: {', '.join(near)}")
        return tensor

    def _row_range(self, tensor: StoredTensor, rows: slice | None) -> tuple[int, int]:
        count = tensor.shape[0] if tensor.shape else 1
        if rows is None:
            return 0, count
        first, last = rows.start or 0, count if rows.stop is None else rows.stop
        if rows.step not in (None, 1) or not 0 <= first <= last <= count:
            raise problem(
                f"cannot read these rows of {tensor.name}",
                self.path,
                expected=f"0 <= start <= stop <= {count}, step 1",
                got=f"{rows.start}:{rows.stop}:{rows.step}",
            )
        return first, last

    def _ties(self) -> bool:
        """Whether the head is the embedding; GPT-2's is when its config does not say."""
        return bool(self.config.get("tie_word_embeddings", self.config.get("model_type") == "gpt2"))

    def _is_tied(self, name: str) -> bool:
        """True when `name` is the output head and the same numbers as the embedding that it is tied to."""
        table = next((name for name in EMBEDDINGS if name in self._tensors), None)
        if name not in TIED_HEADS or table is None or not self._ties():
            return False
        if self.shape(name) != self.shape(table):
            return False
        step = max(1, (1 << 20) // max(1, self._tensors[name].cols))
        spans = [slice(at, min(at + step, self.shape(name)[0])) for at in range(0, self.shape(name)[0], step)]
        return all(
            np.array_equal(self.read(name, rows=span), self.read(table, rows=span), equal_nan=True) for span in spans
        )


def _listing(label: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{len(names)} {label}: {', '.join(names[:12])}{more}"


def _common_ends(one: str, other: str) -> int:
    """How many characters two names share at the start plus at the end."""
    total = 0
    for left, right in ((one, other), (one[::-1], other[::-1])):
        for a, b in zip(left, right, strict=False):
            if a != b:
                break
            total += 1
    return total
