"""The devices of this machine by name. A backend is one module in device/ with `devices()`; the folder is scanned."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from megakernel import device as device_package
from megakernel.device.device import Device
from megakernel.errors import DeviceUnavailable


def list_devices() -> list[Device]:
    """Every device of every backend; a backend whose hardware is absent gives one device that says why."""
    found: list[Device] = []
    folder = Path(device_package.__file__ or "").parent
    for info in sorted(pkgutil.iter_modules([str(folder)]), key=lambda i: i.name):
        module = importlib.import_module(f"megakernel.device.{info.name}")
        if hasattr(module, "devices"):
            listed: Sequence[Device] = module.devices()
            found += listed
    return found


def find_device(name: str) -> Device:
    """The device called `name` ("cpu", "cuda" or "cuda:0", ...), usable or not. Raises DeviceUnavailable."""
    devices = list_devices()
    if not isinstance(name, str):
        known = ", ".join(d.name for d in devices)
        raise DeviceUnavailable(f"device: expected a Device or the name of one ({known}), got {name!r:.80}")
    wanted = [d for d in devices if d.name == name or d.name.split(":")[0] == name]
    if not wanted:
        kind = [d for d in devices if d.name == name.split(":")[0] and not d.availability().usable]
        if kind:  # none of that kind can be used: the reason says more than the name
            return kind[0]
        known = ", ".join(d.name for d in devices)
        raise DeviceUnavailable(f"no device {name!r}; known: {known}")
    return wanted[0]


def open_device(name: str) -> Device:
    """`find_device`, which must be usable. Raises DeviceUnavailable with the reason."""
    device = find_device(name)
    state = device.availability()
    if not state.usable:
        raise DeviceUnavailable(f"device {name}: {state.reason}")
    return device
