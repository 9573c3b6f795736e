"""What a prompt gives: its output so far, put together from tokens as they come."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from megakernel.checkpoint import Tokenizer
from megakernel.engine import Engine
from megakernel.request import Request, Timings, Token
from megakernel.sampling import SamplingParams
from megakernel.text import StoppingText

Encoded = tuple["str | None", "list[int]"]  # a prompt's text, if it was one, and its ids


@dataclass(frozen=True)
class Output:
    """A prompt's output so far. `delta`: text since the previous one of the same prompt; `logprobs` beside
    `token_ids` when asked for. finish_reason and timings are None until the last.

    finish_reason: "stop" (stop token, which is the last of token_ids, or stop text, cut off `text`), "length"."""

    index: int  # which prompt
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta: str
    logprobs: tuple[Token, ...] | None
    finish_reason: str | None = None
    timings: Timings | None = None


class Flow:
    """Several requests read as they produce tokens."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        prompts: list[Encoded],
        params: SamplingParams,
        every_token: bool,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._params = params
        self._every_token = every_token
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()  # index of a request that has something new
        self._texts = [StoppingText(tokenizer, params.stop_texts) for _ in prompts]
        self._tokens: list[list[Token]] = [[] for _ in prompts]
        self._requests: list[Request] = []

    def updates(self) -> Iterator[Output]:
        """Outputs as they come; of each prompt only the last one unless every token is wanted."""
        try:
            for i, (_, ids) in enumerate(self._prompts):
                self._requests.append(self._engine.submit(ids, self._params, partial(self._news.put, i)))
            left = set(range(len(self._prompts)))
            while left:
                index = self._news.get()
                if index in left:
                    for output in self._read(index):
                        if output.finish_reason is not None:
                            left.discard(index)
                        if self._every_token or output.finish_reason is not None:
                            yield output
        finally:
            for request in self._requests:
                request.cancel()

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
        prompt, ids = self._prompts[index]
        tokens = tuple(self._tokens[index])
        return Output(
            index=index,
            prompt=prompt,
            prompt_token_ids=tuple(ids),
            token_ids=tuple(t.id for t in tokens),
            text=self._texts[index].text,
            delta=delta,
            logprobs=tokens if self._params.logprobs is not None else None,
            finish_reason=reason,
            timings=self._requests[index].timings() if reason is not None else None,
        )
