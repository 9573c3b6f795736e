"""How long a stamped element takes from one GPU's kernel to another's: two kernels answer each other in turn."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

from megakernel.device.cuda import CudaDevice
from megakernel.device.cuda_compiler import checked, open_nvrtc

ROUNDS = 20_000
SOURCE = """
__device__ void put(unsigned long long* p, unsigned i) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"((unsigned long long)i << 32) : "memory");
}
extern "C" __global__ void answer(unsigned long long* own, unsigned long long* other, unsigned first, unsigned rounds,
                                  unsigned long long* ns) {
  unsigned long long begin, end;
  for (unsigned i = 1; i <= rounds; ++i) {
    if (i == 101) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    if (first) put(other, i);
    unsigned long long seen = 0;
    for (unsigned spin = 0; (seen >> 32) != i && spin < 10000000u; ++spin) {
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(own) : "memory");
    }
    if ((seen >> 32) != i) { *ns = 0; return; }
    if (!first) put(other, i);
  }
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(end));
  *ns = end - begin;
}
"""


def hop_us(one: CudaDevice, two: CudaDevice) -> dict[str, Any]:
    """Half of a round trip, microseconds; one thread a GPU, the machine otherwise idle."""
    from cuda.bindings import driver as d

    one.reach(two)
    two.reach(one)
    cubin = _compiled(one)
    windows = [g.allocate_window(4096, shared=False) for g in (one, two)]
    times = [g.allocate(256) for g in (one, two)]
    streams, kept = [], []
    for window, gpu in zip(windows, (one, two)):
        gpu.fill(window, 0)
    for rank, gpu in ((1, two), (0, one)):  # who answers is there first
        gpu.make_current()
        module = checked(d.cuModuleLoadData(cubin))
        function = checked(d.cuModuleGetFunction(module, b"answer"))
        stream = checked(d.cuStreamCreate(int(d.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        values = (windows[rank].address, windows[1 - rank].address, int(rank == 0), ROUNDS, times[rank].address)
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
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
    ns = int(one.download(times[0], 0, 8).view(np.uint64)[0])
    for gpu, window, buffer in zip((one, two), windows, times):
        gpu.free(window)
        gpu.free(buffer)
    if ns == 0:
        raise TimeoutError("an answer did not come")
    return {"hop_us": ns / 1e3 / (ROUNDS - 100) / 2, "rounds": ROUNDS - 100}


def _compiled(gpu: CudaDevice) -> bytes:
    nvrtc = open_nvrtc()
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"hop.cu", 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={gpu.target.name}".encode()]))
    size = checked(nvrtc.nvrtcGetCUBINSize(program))
    cubin = b" " * max(size, 2)
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin
