"""The safetensors format: 8 bytes of header length, a JSON header, then raw little-endian data."""

from __future__ import annotations

import math
import struct
from typing import Any

from megakernel.checkpoint.config import parse_json
from megakernel.checkpoint.mapped import MappedFile
from megakernel.checkpoint.message import problem
from megakernel.checkpoint.stored import Codec, StoredTensor, plain_codec

CODECS: dict[str, Codec] = {"F32": plain_codec("f32"), "BF16": plain_codec("bf16"), "F16": plain_codec("f16")}


def read_safetensors(file: MappedFile, ignore: tuple[str, ...]) -> dict[str, StoredTensor]:
    """The tensors of one file by name.

    Tensors whose name ends in one of `ignore` are left out when their type is not one we read. Raises
    CheckpointError when the header or a tensor reaches past the end of the file, or on another type.
    """
    header, start = _header(file)
    tensors: dict[str, StoredTensor] = {}
    used, left_out = start, False
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
            begin, end = (int(at) for at in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise problem(
                f"the header entry of tensor {name} is damaged",
                file.path,
                expected="dtype, shape and data_offsets",
                got=repr(entry),
                todo="download the file again",
            ) from error
        if kind not in CODECS:
            if name.endswith(ignore):
                left_out = True
                continue
            raise problem(
                f"tensor {name} has an unsupported dtype",
                file.path,
                expected=", ".join(CODECS),
                got=kind,
                todo="convert the weights to bf16, or use a GGUF file for quantised ones",
            )
        codec = CODECS[kind]
        size = math.prod(shape) * codec.block_bytes
        if begin < 0 or end - begin != size:
            raise problem(
                f"tensor {name}: data_offsets do not match its shape",
                file.path,
                expected=f"{size} bytes for {kind} {list(shape)}",
                got=f"{end - begin} bytes at {begin}",
                todo="download the file again",
            )
        if start + end > file.size:
            raise problem(
                f"the file is truncated: tensor {name} ends beyond it",
                file.path,
                expected=f"at least {start + end} bytes",
                got=f"{file.size} bytes",
                todo="download the file again",
            )
        tensors[name] = StoredTensor(name, file, start + begin, shape, codec)
        used = max(used, start + end)
    if tensors and used < file.size and not left_out:
        raise problem(
            "bytes follow the last tensor",
            file.path,
            expected=f"{used} bytes",
            got=f"{file.size} bytes",
            todo="download the file again",
        )
    return tensors


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset at which data starts."""
    if file.size < 8:
        raise problem(
            "the file is truncated: no safetensors header",
            file.path,
            expected="at least 8 bytes",
            got=f"{file.size} bytes",
            todo="download the file again",
        )
    (length,) = struct.unpack("<Q", file.data[:8])
    if 8 + length > file.size:
        raise problem(
            "the file is truncated, or not a safetensors file: its header is longer than the file",
            file.path,
            expected=f"at least {8 + length} bytes",
            got=f"{file.size} bytes",
            todo="download the file again (a Git LFS pointer is a few lines of text)",
        )
    try:
        header = parse_json(file.data[8 : 8 + length].decode("utf-8"), file.path)
    except ValueError as error:
        raise problem("the safetensors header is not JSON", file.path, got=error, todo="download it again") from error
    if not isinstance(header, dict):
        raise problem("the safetensors header is not an object", file.path, got=type(header).__name__)
    return header, 8 + length
