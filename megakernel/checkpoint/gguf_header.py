"""The GGUF container: metadata and the table of tensors. Format: docs/gguf.md of ggml, versions 2 and 3."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from megakernel.checkpoint.mapped import MappedFile
from megakernel.checkpoint.message import problem

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the table. `dims` has the fastest-varying dimension first; `offset` is from the file's start."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads values one after the other and notices the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > self.file.size - self.at:
            raise problem(
                "the GGUF file is truncated inside its header",
                self.file.path,
                expected=f"at least {self.at + count} bytes",
                got=f"{self.file.size} bytes",
                todo="download it again",
            )
        self.at += count
        return self.file.data[self.at - count : self.at]

    def values(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code)))

    def text(self) -> str:
        (length,) = self.values("Q")
        raw = self.take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise problem("a string of the GGUF header is not UTF-8", self.file.path, got=raw[:40]) from error

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.values("I")[0], self.values("Q")[0]
            if inner in SCALARS:
                return list(self.values(SCALARS[inner], count))
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise problem("a GGUF metadata value has an unknown type", self.file.path, expected="0 to 12", got=kind)
        return self.values(SCALARS[kind])[0]


def read_header(file: MappedFile) -> GgufHeader:
    """Parse the header. Raises CheckpointError when this is not a GGUF file of a known version, or cut short."""
    cursor = _Cursor(file)
    if cursor.take(4) != b"GGUF":
        raise problem("this is not a GGUF file", file.path, expected="GGUF as its first bytes", got=file.data[:4])
    (version,) = cursor.values("I")
    if version not in VERSIONS:
        todo = "convert it to little-endian" if version & 0xFFFF == 0 else "convert the model again"
        raise problem("unsupported GGUF version", file.path, expected="2 or 3", got=version, todo=todo)
    tensor_count, value_count = cursor.values("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        if key in metadata:
            raise problem(f"metadata key {key} is there twice", file.path)
        metadata[key] = cursor.value(cursor.values("I")[0])
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise problem("general.alignment is wrong", file.path, expected="a power of two", got=alignment)
    start = -(-cursor.at // alignment) * alignment
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise problem(f"tensor {entry.name} is there twice", file.path)
        names.add(entry.name)
    placed = (GgufTensor(entry.name, entry.dims, entry.kind, start + entry.offset) for entry in entries)
    return GgufHeader(metadata, tuple(placed))


def _entry(cursor: _Cursor) -> GgufTensor:
    name = cursor.text()
    (rank,) = cursor.values("I")
    if rank > 4:
        raise problem(f"tensor {name} has too many dimensions", cursor.file.path, expected="at most 4", got=rank)
    dims = tuple(int(size) for size in cursor.values("Q", rank))
    kind, offset = cursor.values("I")[0], cursor.values("Q")[0]
    if math.prod(dims) > 1 << 48:
        raise problem(f"tensor {name} has impossible dimensions", cursor.file.path, got=list(dims))
    return GgufTensor(name, dims, kind, offset)
