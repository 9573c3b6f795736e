"""One generation as an HTTP response: whole, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megakernel.errors import ApiError, CapacityError, DeviceFault, EngineClosed, InvalidRequest, RankLost
from megakernel.serve.generation import Generation, Update
from megakernel.serve.replies import DONE, Form, dumps, event, usage
from megakernel.serve.wire import CHUNKED, Wire, of_scope

log = logging.getLogger("megakernel.serve")
GRACE_S = 5.0  # past the deadline, for telling the client so
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def error_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's form."""
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (InvalidRequest, CapacityError)):  # "field: expected ..."
        field = str(error).split(":", 1)[0]
        return ApiError(400, str(error), param=field if field.isidentifier() else None)
    if isinstance(error, (DeviceFault, RankLost)):
        return ApiError(500, f"the kernel stopped: {error}", kind="server_error", code="device_fault")
    if isinstance(error, EngineClosed):
        return ApiError(
            503, f"the engine ended: {error}", kind="service_unavailable", code="not_ready", retry_after_s=1
        )
    return ApiError(500, f"{type(error).__name__} in the server", kind="server_error", code="internal_error")


async def send_json(send: Send, status: int, value: Any, retry_after_s: int | None = None) -> None:
    body = dumps(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.status, error_body(error), error.retry_after_s)


@dataclass(frozen=True)
class Told:
    """What an Answer needs besides its generation. `on_end` gets the generation once; `left` when the client left."""

    form: Form
    prompt_tokens: int
    stream: bool
    include_usage: bool
    deadline_s: float
    on_end: Callable[[Generation], None]
    left: Callable[[], None]


class _Events:
    """A generation's Sink: updates as server-sent events on a wire."""

    def __init__(self, wire: Wire, events: Callable[[Update], bytes]) -> None:
        self._wire = wire
        self._events = events
        self.prepare, self.settle = wire.prepare, wire.settle

    @property
    def open(self) -> bool:
        return self._wire.open

    @property
    def empty(self) -> bool:
        return self._wire.empty

    def take(self, update: Update) -> None:
        body = self._events(update)
        if body:
            self._wire.write(body)

    def send(self, update: Update) -> bool:
        body = self._events(update)
        return not body or self._wire.send(body)


class _Nothing:
    """A generation's Sink for an answer that is sent whole: nobody is woken before the end."""

    open = empty = True

    def prepare(self) -> bool:
        return True

    def take(self, update: Update) -> None: ...

    def send(self, update: Update) -> bool:
        return True

    def settle(self) -> None: ...


class Answer(Response):
    """Sends a generation. A client that leaves, and the deadline, end its requests within a step."""

    def __init__(self, generation: Generation, told: Told) -> None:
        super().__init__()
        self._generation = generation
        self._told = told
        self._began = False
        self._wire: Wire | None = None
        self._opened = set[int]()  # choices of which something was told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._wire = of_scope(scope)
        late = ApiError(
            504, f"the request took longer than {self._told.deadline_s:g} s", kind="timeout_error", code="deadline"
        )
        deadline = loop.call_later(self._told.deadline_s, self._generation.abort, late)
        stuck = loop.call_later(self._told.deadline_s + GRACE_S, task.cancel)  # in a send that nobody reads
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            await (self._stream(send) if self._told.stream else self._whole(send))
            self._told.on_end(self._generation)
        except Exception as e:
            error = as_api_error(e)
            if error.code == "internal_error":
                log.exception("answering failed")
            await self._tell(send, error)
        finally:
            deadline.cancel()
            stuck.cancel()
            watch.cancel()
            self._generation.cancel()
            if self._wire is not None:
                self._wire.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._told.left()
        self._generation.abort(ApiError(499, "the client left", code="client_disconnected"))

    async def _tell(self, send: Send, error: ApiError) -> None:
        with suppress(OSError):
            if not self._began:
                await send_error(send, error)
            else:
                await send({"type": "http.response.body", "body": event(dumps(error_body(error)))})

    # ------------------------------------------------------------------------------------------ the two kinds
    async def _whole(self, send: Send) -> None:
        self._generation.sink = _Nothing()
        async for _ in self._generation.updates():
            pass
        choices = [
            self._told.form.choice(i, c.text.text, c.tokens, c.finish_reason)
            for i, c in enumerate(self._generation.choices)
        ]
        self._began = True
        await send_json(send, 200, self._told.form.whole(choices, self._used()))

    async def _stream(self, send: Send) -> None:
        async for updates in self._generation.updates():
            body = b"".join([self._events(update) for update in updates])
            if body:
                await self._begin(send)
                await self._put(send, body)
                if self._wire is not None:
                    self._generation.sink = self._generation.sink or _Events(self._wire, self._events)
        await self._begin(send)
        last = self._told.form.usage_chunk(self._used()) if self._told.include_usage else b""
        await send({"type": "http.response.body", "body": last + DONE})

    async def _begin(self, send: Send) -> None:
        """Headers go with the first token: an error before it still has its own status."""
        if not self._began:
            self._began = True
            headers = STREAM_HEADERS if self._wire is None else [*STREAM_HEADERS, CHUNKED]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _put(self, send: Send, body: bytes) -> None:
        if self._wire is not None and self._wire.open:
            self._wire.write(body)
        else:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    # ------------------------------------------------------------------------------------------ text
    def _events(self, update: Update) -> bytes:
        """Server-sent events of an update; may be none."""
        form, out = self._told.form, b""
        if update.choice not in self._opened:
            self._opened.add(update.choice)
            out = form.opening(update.choice)
        if update.delta or (update.tokens and form.every_token):
            out += form.chunk(update.choice, update.delta, update.tokens, None)
        if update.finish_reason is not None:
            out += form.chunk(update.choice, "", (), update.finish_reason)
        return out

    def _used(self) -> dict[str, int]:
        return usage(self._told.prompt_tokens, sum(len(c.tokens) for c in self._generation.choices))
