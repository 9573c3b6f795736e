"""A Program: compiled kernel, queues, memory plan and manifest. It holds no addresses and no weights."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import ProgramError
from megakernel.tasks.record import RECORD, abi_hash, row_capacity
from megakernel.tasks.task import all_fields

FORMAT = 2
FILES = frozenset({"manifest.json", "records.npy", "kernel.bin", "kernel.cpp"})  # of a saved program, with their sums


@dataclass(frozen=True)
class WeightPart:
    """Rows `[start, stop)` of one checkpoint tensor, or of its transpose; `stop` -1 is to the end.

    head: the rows come in heads of so many, each of which takes `padded` rows, the last of them zero. half: rows `i`
    and `i + half` of a head are put side by side, i < half. 0: as they are stored.
    first_col, stop_col: only these columns; stop_col 0: all. A part of a vector that names no tensor is zeros.
    """

    tensor: str
    start: int = 0
    stop: int = -1
    transposed: bool = False
    head: int = 0
    half: int = 0
    padded: int = 0
    first_col: int = 0
    stop_col: int = 0

    def rows(self, stored: int) -> int:
        """Rows that `stored` rows take."""
        return stored // self.head * self.padded if self.head else stored

    def source_rows(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Where rows `[first, last)` of this part are in the part as stored; -1: a row of zeros."""
        rows = np.arange(first, last)
        if not self.head:
            return rows
        at = rows % self.padded
        inside = np.where(at < 2 * self.half, at // 2 + at % 2 * self.half, at)
        return np.where(at < self.head, rows // self.padded * self.head + inside, -1)


@dataclass(frozen=True)
class PackedWeight:
    """One weight as the kernel reads it, at byte `offset` of the weights segment.

    kind: "matrix" (concatenated parts, packed by the target's weight layout), "interleaved" (two parts, gate and up,
    interleaved per tile, then packed), "vector" (float32, parts concatenated, plus `add`, times `scale`), "table"
    (row-major rows in the weight dtype), "cos" / "sin" (float32 rotary tables made by the host). col_head, col_padded:
    the columns come in heads of so many, each of which takes so many columns, the last zero; 0: as they are stored.
    """

    name: str
    kind: str
    offset: int
    bytes: int
    n: int
    k: int
    parts: tuple[WeightPart, ...] = ()
    add: float = 0.0
    rope: int = -1  # index of the rotary specification of a table
    scale: float = 1.0
    col_head: int = 0
    col_padded: int = 0


@dataclass(frozen=True)
class WorkspaceTensor:
    """A buffer of the workspace: `rows` x `cols` elements of `dtype` at byte `offset`."""

    name: str
    offset: int
    bytes: int
    rows: int
    cols: int
    dtype: str  # "f32", "bf16", "u32", "u8"


@dataclass(frozen=True)
class NodeInfo:
    """What a person wants to know of a node when reading a fault or a timeline.

    writes: its tensors. tile_cols: columns of the first of them that a tile writes; 0 where the tiles share out
    something else.
    """

    name: str
    task: str
    variant: str
    tiles: int
    layer: int
    writes: tuple[str, ...] = ()
    tile_cols: int = 0


@dataclass(frozen=True)
class Manifest:
    """Everything about a program but its code and its queues. Sizes in bytes unless named otherwise."""

    format: int
    abi_hash: int
    name: str
    model: dict[str, Any]  # ModelConfig as a dict
    rope: tuple[dict[str, Any], ...]  # rotary specifications used by tables
    target: str
    backend: str
    workers: int
    dtype: str
    kv_dtype: str
    policy: str
    max_slots: int
    max_context: int
    max_rows: int
    max_pieces: int
    page_tokens: int
    pages_per_slot: int
    piece_tokens: int
    kv_layers: int
    kv_heads: int
    head_dim: int
    kv_unit_bytes: int  # one page of one KV head: K and V
    vocab: int
    weights_bytes: int
    stream_bytes: int  # bytes of weights read by one step at one row
    workspace_bytes: int  # of one copy
    counter_count: int
    queue_length: int
    variants: tuple[str, ...]  # by opcode
    nodes: tuple[NodeInfo, ...]
    weights: tuple[PackedWeight, ...]
    tensors: tuple[WorkspaceTensor, ...]
    source_hash: str
    chaos: bool = False
    trace: bool = False
    workspace_copies: int = 1  # 2: even and odd steps have their own
    keeps_tensors: bool = False  # no two tensors of a step share memory
    input_cols: int = 0  # floats of a row that the host may give in place of a token; 0: it may not
    hidden_cols: int = 0  # of what the head reads, when it goes out to the host
    output_cols: int = 0  # floats of a row to the host; 0 for a program that gives tokens
    paced: bool = False  # steps share rows evenly among prompts and keep to a budget
    ranks: int = 1  # devices that run the model together, one program each; records and kernel are the same
    rank: int = 0  # which of them these weights are for
    window_bytes: int = 0  # of each device's memory, written by its peers
    exchanges: tuple[str, ...] = ()  # names, by number
    best_offset: int = 0  # in a window: of each rank, row and worker its largest logit, where the target looks for it
    part_vocab: int = 0  # columns of a rank's part of the logits
    row_flops: float = 0.0  # floating-point operations of one row, for the cost model

    def tensor(self, name: str) -> WorkspaceTensor:
        for t in self.tensors:
            if t.name == name:
                return t
        raise ProgramError(f"program {self.name} has no workspace tensor {name!r}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Manifest:
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as e:
            raise ProgramError(f"manifest.json is not JSON ({e}); build the program again") from e
        known = {f.name for f in fields(Manifest)}
        if not isinstance(raw, dict) or set(raw) - known or raw.get("format") != FORMAT:
            got = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise ProgramError(f"manifest format {got}, this version reads {FORMAT}; build the program again")
        try:
            raw["nodes"] = tuple(NodeInfo(**{**n, "writes": tuple(n["writes"])}) for n in raw["nodes"])
            raw["weights"] = tuple(
                PackedWeight(**{**w, "parts": tuple(WeightPart(**p) for p in w["parts"])}) for w in raw["weights"]
            )
            raw["tensors"] = tuple(WorkspaceTensor(**t) for t in raw["tensors"])
            raw["variants"], raw["rope"] = tuple(raw["variants"]), tuple(raw["rope"])
            raw["exchanges"] = tuple(raw.get("exchanges", ()))
            return Manifest(**raw)
        except (TypeError, KeyError) as e:
            raise ProgramError(f"manifest.json misses or adds a field ({e}); build the program again") from e


@dataclass(frozen=True)
class Program:
    """`records` is [workers, queue_length] of RECORD.dtype; `binary` the compiled kernel; `source` its text."""

    manifest: Manifest
    records: npt.NDArray[Any]
    binary: Path
    source: str

    def save(self, folder: str | os.PathLike[str], beside: Mapping[str, str] | None = None) -> Path:
        """Write the program to a folder that must not exist yet; all or nothing. `beside`: texts of further files, by
        name. Raises ProgramError."""
        try:
            return self.write(Path(folder), beside)
        except OSError as e:
            raise ProgramError(
                f"cannot write the program to {folder}: {e.strerror or e}; free some space or choose another folder"
            ) from e

    def write(self, final: Path, beside: Mapping[str, str] | None = None) -> Path:
        """As `save`, but a disk that does not take it raises OSError."""
        if final.exists():
            raise ProgramError(f"{final} exists; give a new folder or remove it")
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        try:
            (work / "manifest.json").write_text(self.manifest.to_json())
            (work / "kernel.cpp").write_text(self.source)
            shutil.copyfile(self.binary, work / "kernel.bin")
            np.save(work / "records.npy", self.records.view(np.uint8), allow_pickle=False)
            for name, text in (beside or {}).items():
                (work / name).write_text(text)
            sums = {p.name: _sha(p) for p in sorted(work.iterdir())}
            (work / "sums.json").write_text(json.dumps(sums))
            os.chmod(work, 0o755)
            os.rename(work, final)
        except BaseException as e:
            shutil.rmtree(work, ignore_errors=True)
            if isinstance(e, OSError) and e.errno in (
                errno.EEXIST,
                errno.ENOTEMPTY,
            ):  # by another process
                raise ProgramError(f"{final} exists; give a new folder or remove it") from e
            raise
        return final

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Program:
        """Read a saved program; raises ProgramError when it is damaged or of another version."""
        root = Path(folder)
        try:
            sums = json.loads((root / "sums.json").read_text())
            if not isinstance(sums, dict) or not FILES.issubset(sums):
                raise ValueError("sums.json has not the sum of every file")
            for name, want in sums.items():
                got = _sha(root / name)
                if got != want:
                    raise ProgramError(f"{root / name}: content changed since it was saved; build the program again")
            manifest = Manifest.from_json((root / "manifest.json").read_text())
            raw = np.load(root / "records.npy", allow_pickle=False)
        except (OSError, ValueError) as e:
            raise ProgramError(
                f"{root} is not a saved program ({e}); expected {', '.join(sorted(FILES))} and sums.json"
            ) from e
        check_abi(manifest)
        shape = (manifest.workers, manifest.queue_length)
        if raw.size != shape[0] * shape[1] * RECORD.size:
            raise ProgramError(
                f"{root}: records.npy has {raw.size} bytes, expected {shape[0] * shape[1] * RECORD.size}"
            )
        records = np.frombuffer(raw.tobytes(), RECORD.dtype).reshape(shape)
        return Program(manifest, records, root / "kernel.bin", (root / "kernel.cpp").read_text())


def check_abi(manifest: Manifest) -> None:
    """Raise ProgramError when the program's structures are not this version's."""
    here = abi_hash(all_fields(), row_capacity(manifest.max_rows))
    if manifest.abi_hash != here:
        raise ProgramError(
            f"program {manifest.name} was built with record layout {manifest.abi_hash:016x}, this version has "
            f"{here:016x}; build the program again"
        )


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
