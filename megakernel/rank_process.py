"""One rank of several as a process: `python -m megakernel.rank_process FD`, started by megakernel.ranks.

FD is its end of a pipe. The first message says what to load; every other is a method of the runtime and its arguments.
When the pipe ends, so does the process, and with it a launch that still runs.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megakernel.builder.program import Program
from megakernel.device.device import Device
from megakernel.errors import MegakernelError
from megakernel.origin import open_origin
from megakernel.runtime import Runtime


def load_rank(
    device: Device, program: Program, model: str, seed: int, dtype: str, cache: Path, kv_pages: int | None,
    spin_budget_ns: int,
) -> Runtime:  # fmt: skip
    """The runtime of a rank, with its part of the weights."""
    origin = open_origin(model, seed=seed, dtype=dtype, cache=cache)
    try:
        return Runtime(program, device, origin.read, kv_pages=kv_pages, spin_budget_ns=spin_budget_ns, shared=True)
    finally:
        origin.close()


def serve_rank(pipe: Connection) -> None:
    """Answer until the pipe ends: (True, result) or (False, exception)."""
    try:
        runtime = load_rank(**pipe.recv())
    except BaseException as e:
        _send(pipe, (False, e))
        return
    _send(pipe, (True, None))
    try:
        while True:
            method, args = pipe.recv()
            try:
                answer: Any = (True, getattr(runtime, method)(*args))
            except Exception as e:  # the caller's to handle
                answer = (False, e)
            _send(pipe, answer)
    except (EOFError, OSError):
        pass
    finally:
        with contextlib.suppress(Exception):
            runtime.abort()
        runtime.close()


def _send(pipe: Connection, answer: tuple[bool, Any]) -> None:
    """An exception that does not survive the way goes as its text."""
    good, value = answer
    if not good:
        try:
            pickle.loads(pickle.dumps(value))
        except Exception:
            value = MegakernelError(f"{type(value).__name__}: {value}")
    pipe.send((good, value))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    serve_rank(Connection(int(sys.argv[1])))
