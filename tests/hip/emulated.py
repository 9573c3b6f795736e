"""An AMD device whose kernel runs on the host: hip.h compiled by a host clang, lanes as fibers. See before.h."""

from __future__ import annotations

import ctypes
from pathlib import Path

from megakernel.device.device import KernelSource
from megakernel.device.hip_compiler import compile_flags, find_compiler
from megakernel.target import Target
from tests.emulator.build import EmulatedDevice, compile_on_host, headers_of

HERE = Path(__file__).parent
MFMA, WMMA = "__builtin_amdgcn_mfma_f32_16x16x", "__builtin_amdgcn_wmma_f32_16x16x"
BUILTINS = {
    "gfx90a": (f"{MFMA}16bf16_1k",),
    "gfx942": (f"{MFMA}16bf16_1k",),
    "gfx950": (f"{MFMA}32_bf16",),
    "gfx1100": (f"{WMMA}16_bf16_w32",),
    "gfx1250": (
        f"{WMMA}32_bf16", "__builtin_amdgcn_tensor_load_to_lds_d2", "__builtin_amdgcn_global_load_async_to_lds_b128",
        "__builtin_amdgcn_s_wait_tensorcnt",
    ),
}  # fmt: skip
MISSING = ("none", "loads", "tensors", "lds", "last", "barrier")  # what the emulator can leave out, as in before.h


class Seen(ctypes.Structure):
    """What the emulated workgroups of one kernel have seen of copies; all but the first three are errors."""

    names = ("copies", "waits", "most_stages", "early_reuse", "unawaited", "uneven_barriers", "bad_descriptors")
    _fields_ = [(name, ctypes.c_uint64) for name in names]

    def errors(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.names[3:] if getattr(self, name)}


class EmulatedHip(EmulatedDevice):
    """`workers` workgroups of an AMD target, each a thread of the host. `missing`: what is left out."""

    def __init__(self, target: str, workers: int = 2, missing: str = "none") -> None:
        super().__init__(target, workers)
        self._missing = MISSING.index(missing)

    def seen(self) -> Seen:
        """Since the last call, in this process."""
        out = Seen()
        self.library.mk_emulated_seen(ctypes.byref(out))
        return out

    def compiler_id(self, target: Target) -> str:
        parts = (find_compiler().version, *compile_flags(target, False, False), str(self._missing), headers_of(HERE))
        return " ".join(parts)

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        flags = [f for f in compile_flags(source.target, source.chaos, source.trace) if not f.startswith("--offload")]
        flags += [f"-DEMULATED{name}=1" for name in BUILTINS[source.target.name]]
        flags.append(f"-DEMULATOR_MISSING={self._missing}")
        compile_on_host(source, include, output, HERE, find_compiler(), flags)
