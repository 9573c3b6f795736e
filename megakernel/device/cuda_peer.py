"""Memory of one GPU that kernels of another write: peer access within a process, IPC handles between processes.

No multicast: every window is written by ordinary stores of each peer.
"""

from __future__ import annotations

import ctypes
from typing import Any

from megakernel.errors import DeviceUnavailable

WINDOW_MULTIPLE = 2 << 20  # bytes: the driver gives such memory out whole, and a handle is of all that it gave out
HANDLE_BYTES = 64


class Opened:
    """Owner of memory that belongs to another process."""


def enable(d: Any, own: Any, peer: Any, context: Any) -> None:
    """Let the current context, of GPU `own`, reach the memory of GPU `peer` with that context. Raises
    DeviceUnavailable. `own`, `peer`: GpuInfo."""
    status, can = d.cuDeviceCanAccessPeer(own.index, peer.index)
    if int(status) != 0 or not int(can):
        raise DeviceUnavailable(
            f"GPU {own.index} ({own.name}) cannot reach the memory of GPU {peer.index} ({peer.name}): they need "
            f"NVLink, or PCIe with peer access (cuDeviceCanAccessPeer: {status.name}, {int(can)}); "
            "see `nvidia-smi topo -p2p w`"
        )
    (status,) = d.cuCtxEnablePeerAccess(context, 0)
    if int(status) != 0 and status != d.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        raise DeviceUnavailable(
            f"GPU {own.index} ({own.name}) may not reach the memory of GPU {peer.index} ({peer.name}): {status.name}"
        )


def handle_of(d: Any, address: int) -> bytes:
    """What another process opens the allocation at `address` by. Raises DeviceUnavailable."""
    status, handle = d.cuIpcGetMemHandle(address)
    if int(status) != 0:
        raise DeviceUnavailable(
            f"GPU memory cannot be shared with another process ({status.name}); run all ranks in one process"
        )
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def opened(d: Any, name: str, handle: bytes) -> int:
    """Where the current context sees the memory of another process. Raises DeviceUnavailable."""
    if len(handle) != HANDLE_BYTES:
        raise DeviceUnavailable(f"{name}: the handle of a window: expected {HANDLE_BYTES} bytes, got {len(handle)}")
    made = d.CUipcMemHandle()
    ctypes.memmove(made.getPtr(), handle, HANDLE_BYTES)
    lazily = int(d.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    status, address = d.cuIpcOpenMemHandle(made, lazily)
    if int(status) != 0:
        raise DeviceUnavailable(
            f"{name} cannot open the window of a peer in another process ({status.name}); it needs NVLink or PCIe with "
            "peer access to that GPU, and both processes the same view of the GPUs; run all ranks in one "
            "process"
        )
    return int(address)
