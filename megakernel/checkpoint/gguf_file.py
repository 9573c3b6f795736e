"""A GGUF file: tensors dequantised at read, metadata as config.json's keys, and the tokenizer that is inside."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.checkpoint.checkpoint import Checkpoint
from megakernel.checkpoint.generation import GenerationDefaults, generation_defaults
from megakernel.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from megakernel.checkpoint.gguf_names import (
    COMPUTED,
    SPLIT_EXPERTS,
    family_of,
    hugging_face_name,
    translate_config,
)
from megakernel.checkpoint.gguf_tokenizer import build_tokenizer
from megakernel.checkpoint.mapped import MappedFile
from megakernel.checkpoint.message import problem
from megakernel.checkpoint.stored import Array, Codec, StoredTensor, plain_codec
from megakernel.checkpoint.tokenizer import Tokenizer
from megakernel.errors import MissingExtra

__all__ = ["CODECS", "build_tokenizer", "open_gguf"]


def _dequantise(kind: int, raw: npt.NDArray[np.uint8]) -> Array:
    """Bytes [rows, row_bytes] to float32 [rows, cols], by the gguf package."""
    try:
        gguf: Any = importlib.import_module("gguf")
        quants: Any = importlib.import_module("gguf.quants")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            'quantised GGUF tensors need the gguf package\n  what to do: pip install "megakernel-decode[gguf]"'
        ) from error
    values: Array = quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    return values


def _quantised(name: str, kind: int, block_values: int, block_bytes: int) -> Codec:
    return Codec(name, block_values, block_bytes, partial(_dequantise, kind))


CODECS: dict[int, Codec] = {
    0: plain_codec("f32"),
    1: plain_codec("f16"),
    30: plain_codec("bf16"),
    2: _quantised("Q4_0", 2, 32, 18),
    3: _quantised("Q4_1", 3, 32, 20),
    6: _quantised("Q5_0", 6, 32, 22),
    7: _quantised("Q5_1", 7, 32, 24),
    8: _quantised("Q8_0", 8, 32, 34),
    12: _quantised("Q4_K", 12, 256, 144),
    13: _quantised("Q5_K", 13, 256, 176),
    14: _quantised("Q6_K", 14, 256, 210),
}
"""Tensor types by GGUF's number."""


def open_gguf(path: Path) -> Checkpoint:
    """Open the file. Raises CheckpointError; the file does not stay open then."""
    file = MappedFile.open(path)
    try:
        return _open(file)
    except BaseException:
        file.close()
        raise


def _open(file: MappedFile) -> Checkpoint:
    header = read_header(file)
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise problem("the GGUF file does not name its architecture", file.path, expected="general.architecture")
    if metadata.get("split.count", 1) > 1:
        raise problem(
            "the GGUF file is one of several parts",
            file.path,
            expected="one file",
            got=f"{metadata['split.count']} parts",
            todo="join them: llama-gguf-split --merge FIRST_PART OUTPUT",
        )
    tensors: dict[str, StoredTensor] = {}
    factors: dict[str, list[float]] = {}
    for entry in header.tensors:
        for tensor in _tensors(file, entry, header, arch):
            if tensor.name in tensors:
                raise problem(f"tensor {tensor.name} is there twice", file.path)
            if entry.name in COMPUTED:
                values = np.empty((1, tensor.cols), np.float32)
                tensor.read_flat(0, 1, values)
                factors[entry.name] = values[0].tolist()
            else:
                tensors[tensor.name] = tensor
    vocab = _vocab_size(metadata, arch, tensors)
    config = translate_config(metadata, frozenset(tensors), vocab, factors)
    generation = _generation(metadata, config, file.path)

    def load() -> Tokenizer | None:
        return build_tokenizer(metadata, file.path, generation.eos_token_ids)

    return Checkpoint(file.path, config, generation, tensors, (file,), load)


def _tensors(file: MappedFile, entry: GgufTensor, header: GgufHeader, arch: str) -> list[StoredTensor]:
    """The stored tensors of one table entry: one, or one an expert."""
    codec = CODECS.get(entry.kind)
    if codec is None:
        known = ", ".join(codec.name for codec in CODECS.values())
        raise problem(
            f"tensor {entry.name} has an unsupported quantisation type",
            file.path,
            expected=known,
            got=_type_name(entry.kind),
            todo="quantise the model to one of these, for example Q4_K_M or Q8_0",
        )
    shape = tuple(reversed(entry.dims))
    if shape and shape[-1] % codec.block_values:
        raise problem(
            f"tensor {entry.name}: rows are not whole blocks",
            file.path,
            expected=f"a multiple of {codec.block_values} for {codec.name}",
            got=shape[-1],
        )
    family = family_of(arch)
    name = hugging_face_name(arch, entry.name, int(header.metadata.get(f"{arch}.block_count", 0)))
    tensor = StoredTensor(
        name,
        file,
        entry.offset,
        shape,
        codec,
        head_rows=_head_rows(header.metadata, arch, entry.name, shape) if family.interleaved else 0,
        offset_value=-family.norm_offset if entry.name.endswith("norm.weight") else 0.0,
    )
    if entry.offset + tensor.nbytes > file.size:
        raise problem(
            f"the GGUF file is truncated: tensor {entry.name} ends beyond it",
            file.path,
            expected=f"at least {entry.offset + tensor.nbytes} bytes",
            got=f"{file.size} bytes",
            todo="download it again",
        )
    stem = entry.name.split(".")[-2] if entry.name.startswith("blk.") else ""
    if stem in SPLIT_EXPERTS and len(shape) == 3 and family.blocks:
        block = entry.name.split(".")[1]
        size = tensor.nbytes // shape[0]
        return [
            StoredTensor(
                f"model.layers.{block}.mlp.experts.{expert}.{SPLIT_EXPERTS[stem]}.weight",
                file,
                entry.offset + expert * size,
                shape[1:],
                codec,
            )
            for expert in range(shape[0])
        ]
    return [tensor]


def _head_rows(metadata: dict[str, Any], arch: str, name: str, shape: tuple[int, ...]) -> int:
    """Rows of one head when this tensor's rows are interleaved, else 0."""
    parts = name.split(".")
    if len(shape) > 2 or not shape or len(parts) < 3 or parts[-2] not in ("attn_q", "attn_k"):
        return 0
    heads = metadata.get(f"{arch}.attention.head_count")
    if parts[-2] == "attn_k":
        heads = metadata.get(f"{arch}.attention.head_count_kv", heads)
    if isinstance(heads, list):
        heads = heads[int(parts[1])]
    if not isinstance(heads, int) or heads <= 0 or shape[0] % heads or shape[0] // heads % 2:
        raise problem(f"tensor {name} does not hold whole heads", arch, expected=f"{heads} heads", got=list(shape))
    return shape[0] // heads


def _vocab_size(metadata: dict[str, Any], arch: str, tensors: dict[str, StoredTensor]) -> int:
    """Rows of the embedding; without one, what the metadata says."""
    table = f"{family_of(arch).top['token_embd']}.weight"
    if table in tensors:
        return tensors[table].shape[0]
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    return int(metadata.get(f"{arch}.vocab_size", len(tokens)))


def _generation(metadata: dict[str, Any], config: dict[str, Any], path: Path) -> GenerationDefaults:
    """End tokens: eos, then end of turn, then end of message; sampling values where the file has them."""
    keys = ("eos", "eot", "eom")
    found = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    names = {
        "temperature": "temp",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    values = {ours: metadata.get(f"general.sampling.{theirs}") for ours, theirs in names.items()}
    given = {"eos_token_id": [number for number in found if number is not None], **values}
    return generation_defaults(path, given, config, None)


def _type_name(kind: int) -> str:
    try:
        gguf: Any = importlib.import_module("gguf")
        return str(gguf.GGMLQuantizationType(kind).name)
    except (ModuleNotFoundError, ValueError):
        return f"type number {kind}"
