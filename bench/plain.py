"""Ceilings of a processor: reading a model's bytes, and a plain matrix-vector loop over the same bytes."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from megakernel.bench import Contender, Run
from megakernel.builder.program import Manifest
from megakernel.device.cpu import CpuDevice, find_compiler

FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffast-math", "-funroll-loops", "-fPIC", "-shared", "-pthread")
ELEMENT_BYTES = {"f32": 4, "bf16": 2}


def library() -> ctypes.CDLL:
    """plain.cpp, compiled for this very machine. Raises NoCompiler, CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plain.so"
        subprocess.run([*find_compiler(), *FLAGS, str(Path(__file__).with_suffix(".cpp")), "-o", str(out)], check=True)
        made = ctypes.CDLL(str(out))
    pointer, number, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    made.plain_read.argtypes = (pointer, number, count, pointer)
    made.plain_matvec.argtypes = (pointer, pointer, count, count, pointer, pointer, count)
    made.plain_read.restype = made.plain_matvec.restype = ctypes.c_double
    return made


class Plain:
    """The matrices of a program as one run of memory, with values that keep every product finite."""

    def __init__(self, m: Manifest) -> None:
        self.library = library()
        self.threads = m.workers
        matrices = [w for w in m.weights if w.kind in ("matrix", "interleaved")]
        self.shapes = np.array([(w.n, w.k) for w in matrices], np.int64)
        self.element = ELEMENT_BYTES[m.dtype]
        self.bytes = int(self.shapes.prod(axis=1).sum()) * self.element
        self.buffer = CpuDevice().allocate(self.bytes)
        assert self.buffer.host is not None
        kind, one = (np.float32, 1e-3) if self.element == 4 else (np.uint16, 0x3A83)
        self.buffer.host.view(kind)[:] = one
        self.x = np.full(int(self.shapes[:, 1].max()), 0.5, np.float32)
        self.y = np.zeros(int(self.shapes[:, 0].max()), np.float32)
        self.seen = np.zeros(self.threads, np.uint64)

    def read(self) -> float:
        """Seconds to read every byte once."""
        return float(self.library.plain_read(self.buffer.address, self.bytes // 8, self.threads, self.seen.ctypes.data))

    def matvec(self) -> float:
        """Seconds to multiply every matrix once."""
        return float(
            self.library.plain_matvec(
                self.buffer.address, self.shapes.ctypes.data, len(self.shapes), self.element, self.x.ctypes.data,
                self.y.ctypes.data, self.threads,
            )
        )  # fmt: skip

    def contenders(self) -> dict[str, Contender]:
        return {
            "plain matrix-vector loop": lambda _prompt, count: Run(tuple(self.matvec() for _ in range(count)), ()),
            "plain read": lambda _prompt, count: Run(tuple(self.read() for _ in range(count)), ()),
        }
