"""Chunks of a stream straight to the connection: the layers of ASGI between cost more than a token's text."""

from __future__ import annotations

import os
import socket
from asyncio import Transport
from contextlib import suppress
from typing import Any, Protocol

EXTENSION = "megakernel.wire"  # of a scope, in ASGI's sense
CHUNKED = (b"transfer-encoding", b"chunked")  # the head of an answer on a wire must say so


class Flow(Protocol):
    """What uvicorn knows of a connection's reader."""

    write_paused: bool


class Wire:
    """The connection of one answer, between its head and its last chunk, which go through ASGI.

    On the loop `write` hands a chunk to the transport, which keeps what the system does not take. Another thread may
    `send` while the loop does nothing with it (see Generation): by a descriptor of the wire's own, so that it never
    writes into a connection that came after this one."""

    def __init__(self, transport: Transport, flow: Flow) -> None:
        self._transport = transport
        self._flow = flow
        self._left = b""  # of a chunk that `send` began
        self._socket: socket.socket | None = None
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether the reader is there and takes what is written; otherwise ASGI is the way, which waits for it."""
        return not (self._left or self._flow.write_paused or self._transport.is_closing())

    @property
    def empty(self) -> bool:
        """Whether the system has taken all that was written, so that `send` would not overtake any of it."""
        return self.open and self._transport.get_write_buffer_size() == 0

    def write(self, body: bytes) -> None:
        """One chunk, not empty."""
        self._transport.write(_chunk(body))

    def prepare(self) -> bool:
        """Before the first `send`. False when there is no descriptor to be had."""
        if self._socket is None and not self._closed:
            with suppress(OSError):
                self._socket = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
                self._socket.setblocking(False)
        return self._socket is not None

    def send(self, body: bytes) -> bool:
        """One chunk, not empty, from any thread. Never blocks. False when a part is left, for `settle`."""
        data = _chunk(body)
        try:
            sent = self._socket.send(data) if self._socket is not None else 0
        except OSError:  # full, or the reader has gone: the transport finds out which
            sent = 0
        self._left = data[sent:]
        return not self._left

    def settle(self) -> None:
        """Hand what `send` left to the transport; before anything else is written."""
        left, self._left = self._left, b""
        if left and not self._transport.is_closing():
            self._transport.write(left)

    def close(self) -> None:
        """Nothing is sent any more. The connection lives on."""
        self._closed = True
        made, self._socket = self._socket, None
        if made is not None:
            with suppress(OSError):
                made.close()


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def of_scope(scope: Any) -> Wire | None:
    """None where the HTTP server gives none."""
    found = (scope.get("extensions") or {}).get(EXTENSION)
    return found["wire"] if found else None
