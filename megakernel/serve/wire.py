"""Chunks of a stream straight to the connection: the layers of ASGI between cost more than a token's text."""

from __future__ import annotations

from asyncio import Transport
from typing import Any, Protocol

EXTENSION = "megakernel.wire"  # of a scope, see ASGI's own word for it
CHUNKED = (b"transfer-encoding", b"chunked")  # the head of an answer on a wire must say so


class Flow(Protocol):
    """What uvicorn knows of a connection's reader."""

    write_paused: bool


class Wire:
    """The connection of one answer, between its head and its last chunk, which go through ASGI. On the loop only."""

    def __init__(self, transport: Transport, flow: Flow) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def open(self) -> bool:
        """Whether the reader is there and takes what is sent; otherwise `send` is the way, which waits for it."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, body: bytes) -> None:
        """One chunk, not empty, behind everything that was written or sent before."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def of_scope(scope: Any) -> Wire | None:
    """None where the HTTP server gives none."""
    found = (scope.get("extensions") or {}).get(EXTENSION)
    return found["wire"] if found else None
