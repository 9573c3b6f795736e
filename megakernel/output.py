"""What a prompt gives: its output so far, put together from tokens as they come."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.checkpoint import Tokenizer
from megakernel.engine import Engine
from megakernel.request import Processor, Request, Timings, Token
from megakernel.sampling import SamplingParams
from megakernel.text import StoppingText


@dataclass(frozen=True)
class Encoded:
    """A prompt: its text if it was one, its ids, and embeddings for those of them that are below 0."""

    text: str | None
    ids: list[int]
    embeddings: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Output:
    """A prompt's output so far. `delta`: text since the previous one of the same prompt; `logprobs` beside
    `token_ids` when asked for. finish_reason and timings are None until the last.

    finish_reason: "stop" (stop token, which is the last of token_ids, or stop text, cut off `text`), "length".
    hidden: what the head read for each of token_ids, float32 [hidden], when it was asked for; prompt_hidden: at each
    token of the prompt, [prompt, hidden]."""

    index: int  # which prompt
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta: str
    logprobs: tuple[Token, ...] | None
    finish_reason: str | None = None
    timings: Timings | None = None
    hidden: tuple[npt.NDArray[np.float32], ...] = ()
    prompt_hidden: npt.NDArray[np.float32] | None = None


class Flow:
    """Several requests read as they produce tokens, by `updates` or, in an event loop, by `updates_async`: once."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        prompts: list[Encoded],
        params: SamplingParams,
        every_token: bool,
        processor: Processor | None = None,
        hidden: bool = False,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._every_token = every_token
        self._processor = processor
        self._wants_hidden = hidden
        self._texts = [StoppingText(tokenizer, params.stop_texts) for _ in prompts]
        self._tokens: list[list[Token]] = [[] for _ in prompts]
        self._requests: list[Request] = []
        self._left = set(range(len(prompts)))

    def updates(self) -> Iterator[Output]:
        """Outputs as they come; of each prompt only the last one unless every token is wanted."""
        news: queue.SimpleQueue[int] = queue.SimpleQueue()  # index of a request that has something new
        try:
            self._submit(news.put)
            while self._left:
                yield from self._fresh(news.get())
        finally:
            self._cancel()

    async def updates_async(self) -> AsyncIterator[Output]:
        """As `updates`. Ending the iteration, or cancelling the task that reads it, cancels the requests."""
        news: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(index: int) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody reads
                loop.call_soon_threadsafe(news.put_nowait, index)

        try:
            self._submit(tell)
            while self._left:
                for output in self._fresh(await news.get()):
                    yield output
        finally:
            self._cancel()

    def _submit(self, tell: Callable[[int], None]) -> None:
        for i, prompt in enumerate(self._prompts):
            request = self._engine.submit(
                prompt.ids, self._params, partial(tell, i), self._processor, prompt.embeddings, self._wants_hidden
            )
            self._requests.append(request)

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()

    def _fresh(self, index: int) -> Iterator[Output]:
        """Outputs that are wanted of what is new of one request."""
        if index not in self._left:
            return
        for output in self._read(index):
            if output.finish_reason is not None:
                self._left.discard(index)
            if self._every_token or output.finish_reason is not None:
                yield output

    def _read(self, index: int) -> Iterator[Output]:
        """What is new of one request."""
        request, text = self._requests[index], self._texts[index]
        fresh, done = request.poll(len(self._tokens[index]))
        for at, token in enumerate(fresh):
            self._tokens[index].append(token)
            last = done and at == len(fresh) - 1
            delta = text.push(token.id)
            if last:
                delta += text.finish()
            if text.stopped:
                request.cancel("stop")
                yield self._output(index, delta, "stop")
                return
            if self._every_token or last:
                yield self._output(index, delta, request.finish_reason if last else None)
        if done and not fresh:  # cancelled from elsewhere
            yield self._output(index, text.finish(), request.finish_reason)

    def _output(self, index: int, delta: str, reason: str | None) -> Output:
        prompt, request = self._prompts[index], self._requests[index]
        tokens = tuple(self._tokens[index])
        return Output(
            index=index,
            prompt=prompt.text,
            prompt_token_ids=tuple(prompt.ids),
            token_ids=tuple(t.id for t in tokens),
            text=self._texts[index].text,
            delta=delta,
            logprobs=tokens if self._params.logprobs is not None else None,
            finish_reason=reason,
            timings=request.timings() if reason is not None else None,
            hidden=tuple(t.hidden for t in tokens if t.hidden is not None),
            prompt_hidden=request.prompt_hidden,
        )
