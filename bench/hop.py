"""How long a stamped element takes from one GPU's kernel to another's: two kernels answer each other in turn.

`python -m bench.hop` prints one JSON object; bench.tp has it as a part.
"""

from __future__ import annotations

import ctypes
import json
import time
from typing import Any

import numpy as np

from bench import ending
from megakernel.device.cuda import CudaDevice
from megakernel.device.cuda_compiler import checked, open_nvrtc

ROUNDS, WARM = 20_000, 100
STAMPED = 2_000  # rounds after these of which each GPU keeps the times
SOURCE = """
__device__ void put(unsigned long long* p, unsigned i) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"((unsigned long long)i << 32) : "memory");
}
__device__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}
// ns: the time of the unstamped rounds, then of each stamped one when this GPU sent and when it saw.
extern "C" __global__ void answer(unsigned long long* own, unsigned long long* other, unsigned first, unsigned warm,
                                  unsigned rounds, unsigned stamped, unsigned long long* ns) {
  unsigned long long begin = 0, sent = 0;
  for (unsigned i = 1; i <= rounds + stamped; ++i) {
    const bool keeps = i > rounds;
    if (i == warm + 1) begin = now();
    if (i == rounds + 1) ns[0] = now() - begin;
    if (keeps && first) sent = now();
    if (first) put(other, i);
    unsigned long long seen = 0;
    for (unsigned spin = 0; (seen >> 32) != i && spin < 10000000u; ++spin) {
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(own) : "memory");
    }
    if ((seen >> 32) != i) { ns[0] = 0; return; }
    const unsigned long long saw = keeps ? now() : 0;
    if (keeps && !first) sent = now();
    if (!first) put(other, i);
    if (keeps) {
      ns[1 + 2 * (i - rounds - 1)] = sent;
      ns[2 + 2 * (i - rounds - 1)] = saw;
    }
  }
}
"""


def hop_us(one: CudaDevice, two: CudaDevice) -> dict[str, Any]:
    """Half of a round trip, microseconds, one thread a GPU, the machine otherwise idle; and what the timer of `two`
    shows more than that of `one`, ns: half of what the ways there and back differ by."""
    times = _ping_pong(one, two)
    there = (times[1][1] - times[0][0]).astype(np.float64)  # seen by two, less sent by one
    back = (times[0][1] - times[1][0]).astype(np.float64)
    offset, trip = (there - back) / 2, (there + back) / 2
    half = STAMPED // 2
    low, high = np.quantile(offset, (0.05, 0.95))
    return {
        "hop_us": times[2] / 1e3 / (ROUNDS - WARM) / 2, "rounds": ROUNDS - WARM,
        "stamped_hop_ns": [float(np.quantile(trip, q)) for q in (0.01, 0.1, 0.5, 0.9, 0.99)],
        "timer_offset_ns": float(np.median(offset)), "timer_spread_ns": float(high - low),
        "timer_drift_ns": float(np.median(offset[half:]) - np.median(offset[:half])),
        "timer_step_ns": int(np.min(np.diff(np.unique(times[0][:2])))),
    }  # fmt: skip


def _ping_pong(one: CudaDevice, two: CudaDevice) -> tuple[Any, Any, int]:
    """Of each GPU the times when it sent and saw, [2, STAMPED] ns of its own timer; the ns of the unstamped rounds."""
    from cuda.bindings import driver as d

    one.reach(two)
    two.reach(one)
    cubin = _compiled(one)
    size = 8 * (1 + 2 * STAMPED)
    windows = [g.allocate_window(4096, shared=False) for g in (one, two)]
    times = [g.allocate(size) for g in (one, two)]
    streams, kept = [], []
    for window, buffer, gpu in zip(windows, times, (one, two)):
        gpu.fill(window, 0)
        gpu.fill(buffer, 0)
    for rank, gpu in ((1, two), (0, one)):  # who answers is there first
        gpu.make_current()
        module = checked(d.cuModuleLoadData(cubin))
        function = checked(d.cuModuleGetFunction(module, b"answer"))
        stream = checked(d.cuStreamCreate(int(d.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        values = (
            windows[rank].address, windows[1 - rank].address, int(rank == 0), WARM, ROUNDS, STAMPED, times[rank].address
        )  # fmt: skip
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        kinds = (pointer, pointer, number, number, number, number, pointer)
        checked(d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (values, kinds), 0))
        streams.append((gpu, stream))
        kept.append(module)
    deadline = time.monotonic() + 30
    for gpu, stream in streams:
        gpu.make_current()
        while d.cuStreamQuery(stream)[0] == d.CUresult.CUDA_ERROR_NOT_READY:
            if time.monotonic() > deadline:
                raise TimeoutError("the kernels do not answer each other")
            time.sleep(0.001)
    found = [gpu.download(buffer, 0, size).view(np.int64) for gpu, buffer in zip((one, two), times)]
    for gpu, window, buffer in zip((one, two), windows, times):
        gpu.free(window)
        gpu.free(buffer)
    if found[0][0] == 0 or found[1][0] == 0:
        raise TimeoutError("an answer did not come")
    (a, b) = (f[1:].reshape(STAMPED, 2).T for f in found)
    return a, b, int(found[0][0])


def _compiled(gpu: CudaDevice) -> bytes:
    nvrtc = open_nvrtc()
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"hop.cu", 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={gpu.target.name}".encode()]))
    size = checked(nvrtc.nvrtcGetCUBINSize(program))
    cubin = b" " * max(size, 2)
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


if __name__ == "__main__":
    ending.run(lambda: print(json.dumps(hop_us(*ending.nvidia_gpus(2, "bench.hop")))))
