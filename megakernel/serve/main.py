"""The process: a socket, an event loop, signals."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from megakernel.errors import ApiError, MegakernelError, SettingsError
from megakernel.serve.app import make_app
from megakernel.serve.host import Host, Model
from megakernel.serve.options import ServeOptions
from megakernel.serve.wire import EXTENSION, Wire

log = logging.getLogger("megakernel.serve")
HEADER_BYTES = 64 << 10  # of one request's line and headers
HEADER_S = 30.0  # from the begin of a connection, or of a further request, to the end of the headers
UNREAD_MS = 60_000  # a client that takes nothing of what was sent for so long is gone
BACKLOG = 2048
TELL_S = 2.0  # after the drain: for the last words, and for connections that never asked anything
SWITCH_S = 50e-6  # after so long a thread that computes gives way to one that waits; Python's own 5 ms is many tokens


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains, the second ends at once; the process ends with 0 after a drain."""

    def __init__(self, config: uvicorn.Config, host: Host) -> None:
        super().__init__(config)
        self._host = host

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """The engine's thread and the loop's take turns at every token, so they may not wait long for each other."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH_S))
        try:
            super().run(sockets)
        finally:
            sys.setswitchinterval(before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What runs may end by itself for drain_timeout_s; then it is told that it ends, and has TELL_S to be sent."""
        after = self._host.options.drain_timeout_s
        late = ApiError(
            503, f"the server shuts down, and the request had not ended {after:g} s later", kind="service_unavailable",
            code="shutting_down", retry_after_s=1,
        )  # fmt: skip
        ending = asyncio.get_running_loop().call_later(after, self._host.end_all, late)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self._host.draining = True
        self.should_exit = True
        log.info("%s: %d sequences run or wait", signal.Signals(sig).name, self._host.outstanding)


def listen(options: ServeOptions) -> socket.socket:
    """The socket. Raises SettingsError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)  # accepted sockets inherit it
        made.bind((options.host, options.port))
        made.listen(BACKLOG)
    except OSError as e:
        made.close()
        raise SettingsError(f"cannot listen on {options.host} port {options.port}: {e.strerror or e}") from e
    return made


def make_server(host: Host) -> Server:
    """A server that is not running yet."""
    config = uvicorn.Config(
        make_app(host), http=_http(), ws="none", proxy_headers=False, access_log=False, log_config=None,
        server_header=False, lifespan="on", timeout_graceful_shutdown=math.ceil(host.options.drain_timeout_s + TELL_S),
        backlog=BACKLOG, h11_max_incomplete_event_size=HEADER_BYTES,
    )  # fmt: skip
    return Server(config, host)


def _http() -> Any:
    """The quicker parser with a limit of its own on headers; h11, which has one, where it is not installed.

    Neither logs requests, whatever another part of the process makes of the logger "uvicorn.access": a path is typed by
    a user."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        class Quiet(H11Protocol):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.access_log = False

        return Quiet

    class Limited(HttpToolsProtocol):
        """Refuses a request whose line and headers pass HEADER_BYTES or HEADER_S; gives answers a Wire."""

        headers_read = 0
        in_headers = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.access_log = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.patience = self.loop.call_later(HEADER_S, self.lose_patience)

        def lose_patience(self) -> None:
            """The headers do not come. An answer before them, on the same connection, goes on."""
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()
            else:
                self.patience = self.loop.call_later(HEADER_S, self.lose_patience)

        def connection_lost(self, exc: Exception | None) -> None:
            self.patience.cancel()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self.in_headers = True
            self.patience.cancel()
            self.patience = self.loop.call_later(HEADER_S, self.lose_patience)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.patience.cancel()
            self.in_headers, self.headers_read = False, 0
            self.scope["extensions"] = {EXTENSION: {"wire": Wire(self.transport, self.flow)}}
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            if self.in_headers:
                self.headers_read += len(data)
                if self.headers_read > HEADER_BYTES + len(data):
                    self.send_400_response("headers too large")
                    self.transport.close()
                    return
            super().data_received(data)

    return Limited


def run(open_model: Callable[[], Model], options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve until a signal. Raises what kept the model from loading, SettingsError for a bad address."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    made = listen(options)
    host = Host(open_model, options)
    server = make_server(host)

    def failed() -> None:
        server.should_exit = True

    host.on_failure = failed
    address = f"[{options.host}]" if ":" in options.host else options.host
    say(f"http://{address}:{made.getsockname()[1]}")
    server.run(sockets=[made])
    if isinstance(host.failure, MegakernelError):
        raise host.failure
    if host.failure is not None:
        raise MegakernelError(
            f"the model did not load: {type(host.failure).__name__}: {host.failure}"
        ) from host.failure
