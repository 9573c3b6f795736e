"""Runs single nodes on the CPU device, without the builder: records, memory and KernelArgs are made here."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megakernel.builder.kernel import kernel_source, variant_text, variants_of
from megakernel.device.cpu import CpuDevice
from megakernel.device.device import Buffer
from megakernel.settings import read_settings
from megakernel.tasks import f8
from megakernel.tasks.record import (
    ARGS,
    COUNTER_STRIDE,
    FAULT,
    LAUNCH,
    MAILBOX,
    NONE,
    OPCODE_END,
    RECORD,
    SLOT,
    STEP,
    TOKEN_RING,
    abi_hash,
)  # fmt: skip
from megakernel.tasks.task import Addresses, DType, TaskNode, all_fields

ROOT = Path(__file__).resolve().parent.parent.parent
NUMPY = {DType.F32: np.dtype(np.float32), DType.BF16: np.dtype(ml_dtypes.bfloat16), DType.F16: np.dtype(np.float16)}
Array = np.ndarray[Any, Any]


@lru_cache(maxsize=1)
def device() -> CpuDevice:
    """MEGAKERNEL_TARGET=cpu-generic runs these tests without vector extensions."""
    return CpuDevice(target_name=read_settings().target)


def rounded(x: Array, dtype: DType) -> Array:
    """x as stored in `dtype`; vectors [..., n] of 8-bit numbers as float32."""
    if dtype is DType.F8:
        return f8.rounded(x)
    return np.asarray(x, np.float32).astype(NUMPY[dtype])


def build(nodes: Sequence[TaskNode], chaos: bool = False) -> Path:
    """The kernel of these nodes' variants, from a folder of this machine's tests when the sources did not change."""
    source = kernel_source(nodes, device().target, chaos=chaos)
    digest = hashlib.sha256(source.text.encode() + str(chaos).encode() + device().compiler_id(source.target).encode())
    for path in sorted((ROOT / "megakernel").rglob("*")):
        if path.suffix in (".h", ".cuh"):
            digest.update(path.read_bytes())
    for text in source.headers.values():
        digest.update(text.encode())
    folder = Path(tempfile.gettempdir()) / f"megakernel-test-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    final = folder / f"{digest.hexdigest()[:24]}.so"
    if not final.exists():
        work = folder / f"{final.name}.{os.getpid()}"
        device().compile(source, ROOT, work)
        os.replace(work, final)
    return final


@dataclass(frozen=True)
class Rows:
    """A step: `rows` of (token, slot, position, first); which of them are sampled."""

    rows: tuple[tuple[int, int, int, int], ...]
    sampled: tuple[int, ...] = ()


def step_header(rows: Rows, step: int = 1) -> Array:
    header = np.zeros((), STEP.dtype)
    header["step"], header["rows"], header["sampled"] = step, len(rows.rows), len(rows.sampled)
    header["sample_row"][: len(rows.sampled)] = rows.sampled
    for i, (token, slot, position, first) in enumerate(rows.rows):
        sample = rows.sampled.index(i) if i in rows.sampled else NONE
        header["row"][i] = (token, slot, position, sample, first)
    return header


@dataclass
class Machine:
    """Memory and workers for one kernel. Everything is filled with NaN bytes unless it is given."""

    binary: Path
    nodes: Sequence[TaskNode]  # of the kernel: their variants are its opcodes
    workers: int = 1
    max_slots: int = 4
    max_context: int = 512
    vocab: int = 1
    page_tokens: int = 32
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = device().target.with_workers(self.workers)
        self.executable = device().load(self.binary, target, abi_hash(all_fields()))
        self.opcodes = {text: i for i, text in enumerate(variants_of(self.nodes))}
        sizes = {
            "headers": 2 * STEP.size, "launch": LAUNCH.size, "slots": self.max_slots * SLOT.size,
            "page_table": self.max_slots * self.pages_per_slot * 4, "tokens": self.max_slots * self.max_context * 4,
            "seen": self.max_slots * self.vocab * 2, "mailbox": MAILBOX.size, "ring": TOKEN_RING.size,
            "fault": FAULT.size, "counters": 64 * COUNTER_STRIDE * 8,
        }  # fmt: skip
        for name, size in sizes.items():
            self.put(name, np.zeros(size, np.uint8))

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_context // self.page_tokens)

    def put(self, name: str, data: Array) -> None:
        buffer = device().allocate(max(1, data.nbytes))
        device().upload(buffer, 0, data)
        self.buffers[name] = buffer

    def view(self, name: str, dtype: Any) -> Array:
        host = self.buffers[name].host
        assert host is not None
        return host.view(dtype)

    def segment(self, name: str, parts: Mapping[str, Array]) -> dict[str, int]:
        """One buffer of several arrays, each with NaN bytes behind it; offsets by name."""
        at, offsets = 0, {}
        for key, data in parts.items():
            offsets[key] = at
            at += -(-data.nbytes // 256) * 256 + 256
        whole = np.full(max(at, 256), 0xFF, np.uint8)
        for key, data in parts.items():
            whole[offsets[key] : offsets[key] + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.put(name, whole)
        return offsets

    def queues(self, entries: Sequence[Sequence[tuple[TaskNode, int, int]]], at: Addresses, **more: Any) -> None:
        """Each worker's (node, first tile, tiles). `more`: fields of every record."""
        length = max(len(q) for q in entries) + 1
        table = np.zeros((self.workers, length), RECORD.dtype)
        table["opcode"], table["signal"] = OPCODE_END, NONE
        for w, queue in enumerate(entries):
            for i, (node, first, count) in enumerate(queue):
                payload = node.task.fields.pack(node.task.payload(node, at))
                table[w, i]["opcode"] = self.opcodes[variant_text(node)]
                table[w, i]["node"], table[w, i]["tile_begin"], table[w, i]["tile_count"] = i, first, count
                table[w, i]["payload"][: len(payload)] = np.frombuffer(payload, np.uint8)
                for key, value in more.items():
                    table[w, i][key] = value
        self.put("queues", table.reshape(-1).view(np.uint8))
        self.queue_length = length

    def args(self, **more: int) -> bytes:
        values: dict[str, int] = {name: b.address for name, b in self.buffers.items()}
        values |= {
            "workers": self.workers, "queue_length": self.queue_length, "counter_count": 64,
            "max_slots": self.max_slots, "max_context": self.max_context, "pages_per_slot": self.pages_per_slot,
            "max_rows": 16, "vocab": self.vocab, "step_limit": 1 << 40, "spin_budget_ns": 5_000_000_000,
            "drop_signal": NONE,
        }  # fmt: skip
        return ARGS.pack(values | more)

    def run(self, **more: int) -> None:
        """One launch; raises AssertionError for a fault or a launch that does not end."""
        self.executable.launch(self.args(**more))
        assert self.executable.join(60), "the launch did not end in a minute"
        fault = self.view("fault", FAULT.dtype)[0]
        assert fault["kind"] == 0, f"fault {fault}"

    def run_step(self, rows: Rows, **more: int) -> None:
        """One step of a kernel without `advance`."""
        self.view("headers", STEP.dtype)[1] = step_header(rows)
        self.view("launch", LAUNCH.dtype)["published"] = 1
        self.view("launch", LAUNCH.dtype)["step"] = 0
        self.run(**more)

    def close(self) -> None:
        self.executable.close()


def deal(node: TaskNode, workers: int) -> list[list[tuple[TaskNode, int, int]]]:
    """Tiles of a node in near-equal ranges."""
    edges = [node.tiles * w // workers for w in range(workers + 1)]
    return [[(node, a, b - a)] if b > a else [] for a, b in pairwise(edges)]


def run_node(
    binary: Path, nodes: Sequence[TaskNode], node: TaskNode, rows: Rows, *, weights: Mapping[str, Array],
    tensors: Mapping[str, Array], workers: int = 1, extra: Mapping[str, Array] | None = None, vocab: int = 1,
    settings: Mapping[str, int] | None = None, page_tokens: int = 32,
) -> dict[str, Array]:  # fmt: skip
    """Run one node and return every tensor and every extra buffer afterwards. `tensors` that are outputs hold NaN."""
    machine = Machine(binary, nodes, workers, vocab=vocab, page_tokens=page_tokens)
    try:
        for name, data in (extra or {}).items():
            machine.put(name, data)
        w, t = machine.segment("weights", weights), machine.segment("workspace", tensors)
        machine.queues(deal(node, workers), Addresses(w.__getitem__, t.__getitem__))
        machine.run_step(rows, **(settings or {}))
        out = {}
        whole = machine.view("workspace", np.uint8)
        for name, data in tensors.items():
            out[name] = whole[t[name] : t[name] + data.nbytes].copy().view(data.dtype).reshape(data.shape)
            slack = whole[t[name] + data.nbytes : t[name] + -(-data.nbytes // 256) * 256 + 256]
            assert (slack == 0xFF).all(), f"{node.name} wrote past the end of {name}"
        for name, data in (extra or {}).items():
            out[name] = machine.view(name, data.dtype).reshape(data.shape).copy()
        return out
    finally:
        machine.close()


def blank(*shape: int) -> Array:
    """NaN: what an output holds before a task writes it."""
    return np.full(shape, np.nan, np.float32)


def decode_rows(positions: Sequence[int], sampled: Sequence[int] = ()) -> Rows:
    """One row of each slot."""
    return Rows(tuple((0, s, p, p) for s, p in enumerate(positions)), tuple(sampled))
