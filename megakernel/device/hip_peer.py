"""Memory of one AMD GPU that kernels of another write. Written from HIP's documentation, not run on hardware."""

from __future__ import annotations

import ctypes
from typing import Any

from megakernel.errors import CapacityError, DeviceUnavailable

FINE_GRAINED = 1  # hipDeviceMallocFinegrained
HANDLE_BYTES = 64


class Opened:
    """Owner of memory that belongs to another process."""


def allocate(hip: Any, name: str, nbytes: int) -> Any:
    """Fine-grained memory of the current GPU. Raises CapacityError."""
    status, pointer = hip.hipExtMallocWithFlags(max(nbytes, 256), FINE_GRAINED)
    if int(status) != 0:
        raise CapacityError(f"{name}: cannot allocate {nbytes:,} bytes that peers may write ({status.name})")
    return pointer


def enable(hip: Any, own: Any, peer: Any) -> None:
    """Let the current GPU, `own`, reach the memory of `peer`. Raises DeviceUnavailable."""
    status, can = hip.hipDeviceCanAccessPeer(own.index, peer.index)
    if int(status) != 0 or not int(can):
        raise DeviceUnavailable(
            f"GPU {own.index} ({own.name}) cannot reach the memory of GPU {peer.index} ({peer.name}): they need "
            f"Infinity Fabric, or PCIe with peer access (hipDeviceCanAccessPeer: {status.name}, {int(can)})"
        )
    (status,) = hip.hipDeviceEnablePeerAccess(peer.index, 0)
    if int(status) != 0 and status != hip.hipError_t.hipErrorPeerAccessAlreadyEnabled:
        raise DeviceUnavailable(
            f"GPU {own.index} ({own.name}) may not reach the memory of GPU {peer.index} ({peer.name}): {status.name}"
        )


def handle_of(hip: Any, address: int) -> bytes:
    """What another process opens the memory at `address` by. Raises DeviceUnavailable."""
    status, handle = hip.hipIpcGetMemHandle(address)
    if int(status) != 0:
        raise DeviceUnavailable(
            f"GPU memory cannot be shared with another process ({status.name}); run all ranks in one process"
        )
    return ctypes.string_at(handle.as_c_void_p().value, HANDLE_BYTES)


def opened(hip: Any, name: str, handle: bytes) -> int:
    """Where the current GPU sees the memory of another process. Raises DeviceUnavailable."""
    made = hip.hipIpcMemHandle_t()
    ctypes.memmove(made.as_c_void_p().value, handle, HANDLE_BYTES)
    status, address = hip.hipIpcOpenMemHandle(made, hip.hipIpcMemLazyEnablePeerAccess)
    if int(status) != 0:
        raise DeviceUnavailable(
            f"{name} cannot open the window of a peer in another process ({status.name}); run all ranks in one process"
        )
    return int(address)
