"""Before any endpoint: who may call, and a form for every error. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac
import logging
import re
import time
import traceback
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megakernel.errors import ApiError
from megakernel.serve.answer import as_api_error, send_error
from megakernel.serve.metrics import Metrics
from megakernel.serve.options import ServeOptions

log = logging.getLogger("megakernel.serve")
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})  # no key needed
LOCAL_PAGE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
Headers = list[tuple[bytes, bytes]]


class Guard:
    """Keys, origins, errors, one log line and one count for each request."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics, paths: Iterable[str]) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        headers = {name.lower(): value for name, value in scope["headers"]}
        origin = headers.get(b"origin", b"").decode("latin-1")
        extra = self._cors(origin)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            if origin and not extra:
                raise ApiError(403, "this origin may not call this server; see --allowed-origin", code="origin_refused")
            if scope["method"] == "OPTIONS" and origin:
                await _preflight(counted)
            else:
                self._check_key(scope["path"], headers)
                await self._app(scope, receive, counted)
        except Exception as e:
            if not isinstance(e, ApiError):
                log.error("%s in %s\n%s", type(e).__name__, self._endpoint(scope), _frames(e))
            if status == 0:
                await send_error(counted, as_api_error(e))
        finally:
            endpoint = self._endpoint(scope)
            self._metrics.requests.labels(endpoint, str(status or 499)).inc()
            spent = 1000 * (time.perf_counter() - started)
            level = logging.DEBUG if endpoint in OPEN_PATHS else logging.INFO
            log.log(level, "%s %s in %.1f ms", endpoint, status or "left", spent)

    def _endpoint(self, scope: Scope) -> str:
        """A path of ours; what somebody else typed is "other"."""
        return scope["path"] if scope["path"] in self._paths else "other"

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        keys = self._options.api_keys
        if not keys or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key")

    def _cors(self, origin: str) -> Headers:
        """Headers for an origin that may call: a page of this machine, or one that was named."""
        if not origin:
            return []
        allowed = self._options.allowed_origins
        if not (LOCAL_PAGE.fullmatch(origin) or origin in allowed or "*" in allowed):
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]


async def _preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _frames(error: BaseException) -> str:
    """Where an error came from, without its message: that may hold what a user typed."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-12:]))
