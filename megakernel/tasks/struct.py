"""Structures that host and device share: members in order, their offsets, NumPy types and C source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megakernel.errors import RecordError

_SCALARS: dict[str, tuple[str, str, int]] = {  # name -> (C type, numpy type, bytes)
    "u8": ("uint8_t", "u1", 1),
    "u16": ("uint16_t", "<u2", 2),
    "u32": ("uint32_t", "<u4", 4),
    "i32": ("int32_t", "<i4", 4),
    "f32": ("float", "<f4", 4),
    "u64": ("uint64_t", "<u8", 8),
    "i64": ("int64_t", "<i8", 8),
}


@dataclass(frozen=True)
class Field:
    """One member: a scalar type name or a `Struct`, repeated `count` times."""

    name: str
    type: str | Struct
    count: int = 1
    doc: str = ""

    @property
    def alignment(self) -> int:
        return self.type.alignment if isinstance(self.type, Struct) else self._scalar()[2]

    @property
    def item_bytes(self) -> int:
        return self.type.size if isinstance(self.type, Struct) else self._scalar()[2]

    @property
    def span(self) -> tuple[int, int] | None:
        """The least and the largest integer that fits; None when it is no integer."""
        if isinstance(self.type, Struct) or self.type == "f32":
            return None
        bits = self.item_bytes * 8
        return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if self.type[0] == "i" else (0, (1 << bits) - 1)

    def c_type(self) -> str:
        return self.type.name if isinstance(self.type, Struct) else self._scalar()[0]

    def numpy_type(self) -> Any:
        base: Any = self.type.dtype if isinstance(self.type, Struct) else self._scalar()[1]
        return (base, (self.count,)) if self.count > 1 else base

    def _scalar(self) -> tuple[str, str, int]:
        assert isinstance(self.type, str)
        if self.type not in _SCALARS:
            raise RecordError(f"field {self.name}: unknown type {self.type!r}; known: {', '.join(_SCALARS)}")
        return _SCALARS[self.type]


@dataclass(frozen=True)
class Struct:
    """A structure with natural C alignment. `pad_to` fixes its size; smaller contents are padded at the end."""

    name: str
    fields: tuple[Field, ...]
    pad_to: int = 0
    doc: str = ""

    @cached_property
    def alignment(self) -> int:
        own = 16 if self.pad_to and self.pad_to % 16 == 0 else 1  # as `c_source` asks for
        return max([own, *(f.alignment for f in self.fields)])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        out, at = [], 0
        for f in self.fields:
            at = -(-at // f.alignment) * f.alignment
            out.append(at)
            at += f.item_bytes * f.count
        return tuple(out)

    @cached_property
    def size(self) -> int:
        end = 0
        for f, o in zip(self.fields, self.offsets):
            end = o + f.item_bytes * f.count
        end = max(1, -(-end // self.alignment) * self.alignment)
        if self.pad_to:
            if end > self.pad_to:
                raise RecordError(f"struct {self.name} has {end} bytes; its limit is {self.pad_to}")
            end = self.pad_to
        return end

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(
            {
                "names": [f.name for f in self.fields],
                "formats": [f.numpy_type() for f in self.fields],
                "offsets": list(self.offsets),
                "itemsize": self.size,
            }
        )

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Encode `values` (every missing field is zero). Raises RecordError naming an unknown or unfit field."""
        row = np.zeros((), self.dtype)
        for key, value in values.items():
            if key not in self._spans:
                raise RecordError(f"struct {self.name} has no field {key!r}; it has {', '.join(self._spans)}")
            low, high = self._spans[key]
            if not (type(value) is int and low <= value <= high):  # the usual case, of every launch, costs nothing more
                _check_range(self.name, self.fields[list(self._spans).index(key)], value)
            row[key] = value
        return row.tobytes()

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """Of each field the least and the largest integer that fits one; an empty span where none is checked."""
        return {f.name: f.span or (0, -1) for f in self.fields}

    def unpack(self, data: bytes) -> dict[str, Any]:
        if len(data) != self.size:
            raise RecordError(f"struct {self.name}: expected {self.size} bytes, got {len(data)}")
        row = np.frombuffer(data, self.dtype)[0]
        return {f.name: row[f.name] for f in self.fields}

    def c_source(self) -> str:
        align = f"alignas({self.alignment}) " if self.pad_to and self.pad_to % 16 == 0 else ""
        lines = [f"// {self.doc}"] if self.doc else []
        lines.append(f"struct {align}{self.name} {{")
        used = 0
        for f, o in zip(self.fields, self.offsets):
            array = f"[{f.count}]" if f.count > 1 else ""
            note = f"  // {f.doc}" if f.doc else ""
            lines.append(f"  {f.c_type()} {f.name}{array};{note}")
            used = o + f.item_bytes * f.count
        if self.size > used:
            lines.append(f"  uint8_t pad_[{self.size - used}];")
        lines.append("};")
        lines.append(f'static_assert(sizeof({self.name}) == {self.size}, "{self.name}");')
        for f, o in zip(self.fields, self.offsets):
            lines.append(f'static_assert(__builtin_offsetof({self.name}, {f.name}) == {o}, "{self.name}.{f.name}");')
        return "\n".join(lines)


def _check_range(struct: str, field: Field, value: Any) -> None:
    if field.span is None:
        return
    low, high = field.span
    flat = np.asarray(value, dtype=object).reshape(-1)
    if flat.size > field.count:
        raise RecordError(f"{struct}.{field.name} holds {field.count} values, got {flat.size}")
    for item in flat:
        if not low <= int(item) <= high:
            raise RecordError(f"{struct}.{field.name} = {item} does not fit {field.type} [{low}, {high}]")
