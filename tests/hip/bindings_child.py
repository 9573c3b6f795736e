"""Run by test_bindings.py in a process whose libamdhip64.so is runtime.c: the HIP device through hip-python itself."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np


def properties(hip: Any, texts: dict[str, bytes], numbers: dict[str, int]) -> bytes:
    """The properties as the C structure; offsets are found by writing and looking."""
    raw = (ctypes.c_uint8 * hip.hipDeviceProp_t().c_sizeof())()
    seen = hip.hipDeviceProp_t.fromObj(ctypes.addressof(raw))
    found: dict[str, int] = {}
    for at in range(len(raw) - 8):
        raw[at] = 65
        for name in texts:
            if name not in found and getattr(seen, name) == "A":
                found[name] = at
        for name in numbers:
            if name not in found and getattr(seen, name) == 65:
                found[name] = at
        raw[at] = 0
    for name, text in texts.items():
        raw[found[name] : found[name] + len(text)] = list(text)
    for name, number in numbers.items():
        raw[found[name] : found[name] + 4] = list(number.to_bytes(4, "little"))
    return bytes(raw)


def main(library: str, binary: str, abi: int) -> None:
    from hip import hip

    from megakernel.device import hip as device_module
    from megakernel.tasks.record import ARGS

    fake = ctypes.CDLL(library)
    blob = properties(
        hip,
        {"name": b"a GPU", "gcnArchName": b"gfx942:sramecc+:xnack-"},
        {"multiProcessorCount": 4, "sharedMemPerBlock": 65536, "totalGlobalMem": 1 << 30},
    )
    fake.fake_properties(blob, len(blob))
    at = dict(zip((f.name for f in ARGS.fields), ARGS.offsets))
    fake.fake_args(ctypes.c_uint64(ARGS.size), ctypes.c_uint64(at["ring"]))
    (device,) = device_module.devices()
    assert isinstance(device, device_module.HipDevice)
    info = device.info
    assert (info.name, info.architecture, info.units, info.lds_bytes) == ("a GPU", "gfx942", 4, 65536), info
    assert info.runtime == 70_200_000 and info.cooperative is False  # every attribute is 100,000 here
    target = device.target
    ring = device.allocate(4096, host_visible=True)
    device.fill(ring, 0)
    data = device.allocate(1 << 16)
    device.fill(data, 5)
    device.upload(data, 16, np.arange(4, dtype=np.uint32))
    assert device.download(data, 16, 16).view(np.uint32).tolist() == [0, 1, 2, 3]
    assert device.download(data, 0, 4).tolist() == [5] * 4
    loaded = device.load(Path(binary), target, abi)
    args = ARGS.pack({"ring": ring.address, "workers": 4, "weights": 77})
    total = 0
    for byte in args:
        total = (total * 31 + byte) % (1 << 64)
    fake.fake_ready(0)
    loaded.launch(args)
    assert loaded.running() and not loaded.join(0.001)
    assert loaded.wait_event(0, 1.0) and not loaded.wait_event(1, 0.001)
    fake.fake_ready(1)
    assert loaded.join(1.0) and loaded.facts() == {"launch_ms": 2.5, "xcd_of_worker": [0, 1, 0, 1]}
    loaded.close()
    device.free(ring)
    device.free(data)
    print(f"sum {total}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
