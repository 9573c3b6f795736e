"""How the programs of this folder end: what they lack is one sentence on standard error, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from megakernel.device.cuda import CudaDevice
from megakernel.devices import list_devices
from megakernel.errors import DeviceUnavailable, MegakernelError
from megakernel.settings import read_settings

LACKING = 2  # exit status when something is missing or was asked for wrongly
INTERRUPTED = 130


def run(main: Callable[[], Any]) -> None:
    """Call `main` and exit: with 2 after a sentence when it raises one of the package's errors or a module is missing,
    130 after Ctrl-C. MEGAKERNEL_DEBUG shows the traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except MegakernelError as e:
        if _debug():
            raise
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(LACKING) from None
    except ModuleNotFoundError as e:
        if _debug():
            raise
        print(f"error: {e}: pip install 'megakernel-decode[torch,bench,cuda]'", file=sys.stderr)
        raise SystemExit(LACKING) from None


def nvidia_gpus(count: int, who: str, otherwise: str = "") -> list[CudaDevice]:
    """The first `count` that can be used. Raises DeviceUnavailable, which says why there are fewer."""
    known = [d for d in list_devices() if isinstance(d, CudaDevice)]
    usable = [d for d in known if d.availability().usable]
    if len(usable) < count:
        why = "; ".join(d.availability().reason for d in known if not d.availability().usable)
        raise DeviceUnavailable(
            f"{who}: expected {count} NVIDIA GPU{'s' if count > 1 else ''}, got {len(usable)}"
            f"{f': {why}' if why else ''}{f'; {otherwise}' if otherwise else ''}"
        )
    return usable[:count]


def _debug() -> bool:
    try:
        return read_settings().debug > 0
    except MegakernelError:  # reported by what reads the settings for its work
        return bool(os.environ.get("MEGAKERNEL_DEBUG"))
