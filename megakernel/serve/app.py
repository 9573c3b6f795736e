"""The endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import megakernel
from megakernel.errors import ApiError, CapacityError, InvalidRequest
from megakernel.request import Processor
from megakernel.sampling import SamplingParams
from megakernel.serve.answer import Answer, Told, as_api_error, error_body
from megakernel.serve.describe import describe, requests_of
from megakernel.serve.generation import Bell, Generation
from megakernel.serve.grammar import Grammars
from megakernel.serve.guard import Guard
from megakernel.serve.host import Host, Model
from megakernel.serve.metrics import Metrics
from megakernel.serve.page import page
from megakernel.serve.parse import parse, read_body
from megakernel.serve.prompts import (
    COMPLETION_TOKENS,
    chat_text,
    completion_prompts,
    encode,
    need_tokenizer,
    room,
    sampling,
)
from megakernel.serve.replies import ChatForm, CompletionForm, dumps
from megakernel.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseFormat,
    TokenizeRequest,
)
from megakernel.serve.strip import Strips
from megakernel.serve.tools import Tools

log = logging.getLogger("megakernel.serve")


def make_app(host: Host) -> ASGIApp:
    """An ASGI application that serves `host`; its lifespan starts and closes it."""
    api = Endpoints(host)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        api.bell = Bell(asyncio.get_running_loop())
        host.start()
        try:
            yield
        finally:
            await asyncio.to_thread(host.close)

    app = FastAPI(
        title="megakernel", version=megakernel.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    routes: list[tuple[str, str, Any]] = [
        ("GET", "/health", api.health),
        ("GET", "/ready", api.ready),
        ("GET", "/metrics", api.metrics_text),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{model_id:path}", api.model),
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/completions", api.completions),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
    ]
    if host.options.web:
        routes += [("GET", "/", api.web), ("GET", "/timeline", api.timeline)]
    for method, path, endpoint in routes:
        app.add_api_route(
            path, endpoint, methods=[method], response_class=Response, openapi_extra=requests_of(path),
            include_in_schema=path not in ("/", "/timeline"),
        )  # fmt: skip
    for path, endpoint in (("/health", api.health), ("/ready", api.ready)):  # as probes ask; the body is left out
        app.add_api_route(path, endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (ApiError, InvalidRequest, CapacityError, Exception):
        app.add_exception_handler(kind, _error)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]  # FastAPI's own way of extending it
    return Guard(app, host.options, api.metrics, (path for _, path, _ in routes))


def _json(value: Any, status: int = 200, retry_after_s: int | None = None) -> Response:
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return Response(dumps(value), status, headers, "application/json")


async def _http_error(_: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    made = _json(error_body(ApiError(error.status_code, str(error.detail), code=code)), error.status_code)
    made.headers.update(error.headers or {})
    return made


async def _error(_: Request, error: Exception) -> Response:
    told = as_api_error(error)
    return _json(error_body(told), told.status, told.retry_after_s)


class Endpoints:
    """One method for each path."""

    bell: Bell

    def __init__(self, host: Host) -> None:
        self._host = host
        self._options = host.options
        self._started = int(time.time())
        self._page = page()
        self._grammars: Grammars | None = None
        self._strips = Strips()
        self.metrics = Metrics(host)

    # ------------------------------------------------------------------------------------------ state
    async def health(self) -> Response:
        """200 when the model is loaded and no fault is being cleaned up, else 503; the body says what is the matter."""
        state = self._host.state
        good = state in ("ok", "draining")
        return _json({"status": state}, 200 if good else 503, None if good else 1)

    async def ready(self) -> Response:
        """200 when new requests are welcome, else 503."""
        state = self._host.state
        return _json({"status": state}, 200 if state == "ok" else 503, None if state == "ok" else 1)

    async def metrics_text(self) -> Response:
        """Prometheus text."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """The names of the one model."""
        self._host.loaded  # noqa: B018 (raises when there is none)
        return _json({"object": "list", "data": [self._described(name) for name in self._host.names]})

    async def model(self, model_id: str) -> Response:
        """One model by its name."""
        self._host.loaded  # noqa: B018
        return _json(self._described(self._host.check_name(model_id)))

    def _described(self, name: str) -> dict[str, Any]:
        m = self._host.loaded.program.manifest
        return {
            "id": name, "object": "model", "created": self._started, "owned_by": "megakernel", "root": m.name,
            "max_model_len": m.max_context,
        }  # fmt: skip

    async def web(self) -> Response:
        """The chat page."""
        return Response(self._page.html, headers=self._page.headers, media_type="text/html; charset=utf-8")

    async def timeline(self) -> Response:
        """What the kernel's workers did in a step that ran just now, for the page."""
        strip = await self._strips.record(self._host.loaded)
        return Response(status_code=204) if strip is None else _json(strip)

    # ------------------------------------------------------------------------------------------ text
    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        body = parse(ChatRequest, await self._body(request))
        model, name = self._host.loaded, self._host.check_name(body.model)
        tokenizer = need_tokenizer(model.tokenizer, "messages")
        tools = Tools(body, tokenizer, self._options.tool_call_parser)
        text = await chat_text(
            tokenizer, body.messages, tools.offered, body.chat_template_kwargs, body.add_generation_prompt
        )
        ids = await encode(tokenizer, text)
        asked = body.max_completion_tokens or body.max_tokens
        count = room(ids, asked, None, model.program.manifest.max_context, "messages")
        params = [sampling(body, model.generation, count, i) for i in range(self._choices(body.n))]
        form = ChatForm(name, self._fingerprint(model), tokenizer, params[0].logprobs, self._with_usage(body))
        form.new_parser = tools.parser
        return await self._answer(model, body, form, [(ids, p) for p in params], len(ids), tools)

    async def completions(self, request: Request) -> Response:
        """Continuations of one or several prompts."""
        body = parse(CompletionRequest, await self._body(request))
        model, name = self._host.loaded, self._host.check_name(body.model)
        if body.stop and model.tokenizer is None:
            need_tokenizer(None, "stop")
        prompts = await completion_prompts(model.tokenizer, body)
        limit, n = model.program.manifest.max_context, self._choices(body.n)
        pairs: list[tuple[Sequence[int], SamplingParams]] = []
        for ids in prompts:
            count = room(ids, body.max_tokens, COMPLETION_TOKENS, limit, "prompt")
            pairs += [(ids, sampling(body, model.generation, count, i)) for i in range(n)]
        form = CompletionForm(
            name, self._fingerprint(model), model.tokenizer, body.logprobs, self._with_usage(body)
        )  # fmt: skip
        if body.echo:
            tokenizer = need_tokenizer(model.tokenizer, "echo")
            texts = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
            for i in range(len(pairs)):
                text = texts[i // n] if len(texts) == len(prompts) else None
                form.prefixes[i] = text if isinstance(text, str) else tokenizer.decode(prompts[i // n])
        return await self._answer(model, body, form, pairs, sum(len(ids) for ids in prompts))

    async def _answer(
        self,
        model: Model,
        body: ChatRequest | CompletionRequest,
        form: ChatForm | CompletionForm,
        pairs: Sequence[tuple[Sequence[int], SamplingParams]],
        prompt_tokens: int,
        tools: Tools | None = None,
    ) -> Response:
        form.with_ids = body.return_token_ids
        self._host.admit(len(pairs))  # before a grammar is compiled for nothing
        processors = await self._processors(model, body, len(pairs), tools)
        self._host.admit(len(pairs))
        generation = Generation(self.bell, self._host.ended)
        keep = tools.marks if tools else frozenset[int]()
        generation.submit(model.engine, model.tokenizer, pairs, processors, keep)
        self._host.began(generation)
        told = Told(
            form, prompt_tokens, body.stream, self._with_usage(body), self._options.request_timeout_s, self._count,
            self.metrics.disconnects.inc,
        )  # fmt: skip
        return Answer(generation, told)

    async def _processors(
        self, model: Model, body: ChatRequest | CompletionRequest, count: int, tools: Tools | None
    ) -> Sequence[Processor | None]:
        form = body.response_format
        if form is not None and form.type == "text":
            form = None
        grammar = tools.grammar() if tools else None
        strict = tools is not None and tools.strict
        if form is None and grammar is None and not strict:
            return [None] * count
        if self._grammars is None or self._grammars.model is not model:
            self._grammars = Grammars(model)
        made = self._grammars
        if tools is not None and strict:
            return await asyncio.to_thread(made.callers, tools.own_grammar(), count, tools.new_parser, tools.marks)
        if form is not None and (tools is None or not tools.forced):
            processors = await asyncio.to_thread(made.processors, form, 0 if grammar else count)
            if grammar is None:
                return processors
        asked = ResponseFormat(type="grammar", grammar=grammar)
        return await asyncio.to_thread(made.processors, asked, count, "tools")

    def _count(self, generation: Generation) -> None:
        for choice in generation.choices:
            request = choice.request
            reason = choice.finish_reason or "cancelled"
            self.metrics.sequence(len(request.prompt_ids), choice.tokens, reason, request.timings())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        body = parse(TokenizeRequest, await self._body(request))
        model = self._host.loaded
        self._host.check_name(body.model)
        tokenizer = need_tokenizer(model.tokenizer, "prompt" if body.messages is None else "messages")
        text = body.prompt
        if body.messages is not None:
            text = await chat_text(
                tokenizer, body.messages, body.tools or (), body.chat_template_kwargs, body.add_generation_prompt
            )
        ids = await encode(tokenizer, text or "", body.add_special_tokens)
        strings = [tokenizer.token(i) for i in ids] if body.return_token_strs else None
        limit = model.program.manifest.max_context
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = parse(DetokenizeRequest, await self._body(request))
        model = self._host.loaded
        self._host.check_name(body.model)
        tokenizer, vocab = need_tokenizer(model.tokenizer, "tokens"), model.program.manifest.vocab
        for at, number in enumerate(body.tokens):
            if number >= vocab:
                raise ApiError(400, f"tokens.{at}: expected an id below {vocab}, got {number}", param=f"tokens.{at}")
        return _json({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)})

    # ------------------------------------------------------------------------------------------ shared
    async def _body(self, request: Request) -> bytes:
        body = await read_body(request, self._options.max_body_bytes, self._options.request_timeout_s)
        if self._options.log_requests:
            log.info("request %s", body.decode("utf-8", "replace"))
        return body

    def _choices(self, n: int) -> int:
        if n > self._options.max_choices:
            raise ApiError(400, f"n: expected at most {self._options.max_choices}, got {n}", param="n")
        return n

    @staticmethod
    def _with_usage(body: ChatRequest | CompletionRequest) -> bool:
        return body.stream_options is not None and body.stream_options.include_usage

    @staticmethod
    def _fingerprint(model: Model) -> str:
        return f"megakernel-{megakernel.__version__}-{model.program.manifest.source_hash[:12]}"
