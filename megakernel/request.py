"""One request as its caller sees it: a stream of tokens, a way to cancel, a result."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import InvalidRequest, MegakernelError
from megakernel.kv_tensors import Kv
from megakernel.sampling import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """One generated token. `logprob` and `top` (id and log-probability, likeliest first) only when asked for.

    time_ns: the device's clock when it was written. hidden: what the head read for it, float32 [hidden], when asked."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    time_ns: int = 0
    hidden: npt.NDArray[np.float32] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Timings:
    """Seconds from submit to a slot, to the first token seen by the host, and to the end; decode rate after the first
    token by the device's clock (0 with fewer than two tokens)."""

    queued_s: float
    first_token_s: float
    total_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Completion:
    """Everything of an ended request. finish_reason: "stop", "length" or "cancelled"."""

    prompt_token_ids: tuple[int, ...]
    tokens: tuple[Token, ...]
    finish_reason: str
    timings: Timings

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True)
class Embedded:
    """A prompt in which embeddings, float32 [n, hidden], stand for the n ids below 0, in their order."""

    token_ids: Sequence[int]
    embeddings: npt.NDArray[Any]


Processor = Callable[[Sequence[int]], "npt.NDArray[np.float32] | None"]
"""From the tokens so far to what is added to the next logits, float32 [vocab] (-inf: never), or None: end here."""


class Request:
    """Made by `Engine.submit`. May be read from several threads; each iteration sees every token."""

    def __init__(
        self,
        number: int,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        limit: int,
        stops: tuple[int, ...],
        cancel: Callable[[Request], None],
        listen: Callable[[], None] | None = None,
    ) -> None:
        self.number = number
        self.prompt_ids = prompt_ids
        self.params = params
        self.limit = limit  # most tokens of prompt and output together
        self.stops = stops
        self.processor: Processor | None = None
        self.embeddings: npt.NDArray[np.float32] | None = None  # in the order of the ids below 0, for which they stand
        self.wants_hidden = False
        self.prompt_hidden: npt.NDArray[np.float32] | None = None  # [prompt, hidden], from the first token on
        self.keeps_kv = False
        self.kv: Kv | None = None  # of a request that keeps them: from its end on, unless it was cancelled or failed
        self.slot: int | None = None  # the slot that it got
        self._cancel = cancel
        self._listen = listen
        self._tokens: list[Token] = []
        self._reason: str | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._submitted = time.perf_counter()
        self._admitted = self._first = self._ended = 0.0

    # ------------------------------------------------------------------------------------------ the caller's side
    @property
    def done(self) -> bool:
        return self._over.is_set()

    @property
    def finish_reason(self) -> str | None:
        """None while it runs."""
        return self._reason

    def __iter__(self) -> Iterator[Token]:
        """Tokens as they come. Raises DeviceFault or EngineClosed when the request failed."""
        seen = 0
        while True:
            with self._changed:
                while len(self._tokens) == seen and not self.done:
                    self._changed.wait()
            fresh, done = self.poll(seen)
            yield from fresh
            seen += len(fresh)
            if done:
                return

    def poll(self, seen: int) -> tuple[list[Token], bool]:
        """Tokens after the first `seen`, and whether it has ended. Never waits; raises what the request failed with
        once every token was given."""
        with self._changed:
            fresh = self._tokens[seen:]
            if self._error is not None and not fresh:
                raise self._error
            return fresh, self._reason is not None

    def cancel(self, reason: str = "cancelled") -> None:
        """End it now, with the tokens so far. Does nothing when it has ended."""
        if self.end(reason):
            self._cancel(self)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end. Raises what the request failed with, and MegakernelError when `timeout_s` passed."""
        if not self._over.wait(timeout_s):
            raise MegakernelError(
                f"request {self.number} has {len(self._tokens)} tokens after {timeout_s} s and goes on; "
                "wait longer or cancel it"
            )
        if self._error is not None:
            raise self._error
        return Completion(self.prompt_ids, tuple(self._tokens), self._reason or "", self.timings())

    # ------------------------------------------------------------------------------------------ the engine's side
    @property
    def biased(self) -> bool:
        return self.processor is not None or bool(self.params.bias)

    @property
    def reusable(self) -> tuple[int, ...]:
        """The prompt as far as others' keys and values may stand for it: what is taken over is not computed, so nobody
        sees its hidden states."""
        return () if self.wants_hidden else self.prompt_ids

    def next_bias(self, vocab: int) -> npt.NDArray[np.float32] | None:
        """What is added to the logits of the next token; None for nothing. Ends the request when the processor does
        so, fails it when the processor fails."""
        row = np.zeros(vocab, np.float32)
        try:
            if self.processor is not None:
                made = self.processor([token.id for token in self._tokens])
                if made is None:
                    self.end("stop")
                    return None
                self._add(row, made)
        except Exception as e:  # the caller's own code
            self.fail(e)
            return None
        for number, value in self.params.bias:
            row[number] += np.float32(value)
        if not row.max() > -np.inf:
            self.fail(InvalidRequest("the logits processor allows no token"))
        return row

    def _add(self, row: npt.NDArray[np.float32], made: Any) -> None:
        try:
            row += made
        except (TypeError, ValueError) as e:
            shape = getattr(made, "shape", None)
            got = type(made).__name__ if shape is None else f"{type(made).__name__} {list(shape)} of {made.dtype}"
            raise InvalidRequest(
                f"processor of request {self.number}: expected numbers [{len(row)}] to add to the logits, or None; "
                f"got {got}"
            ) from e

    def admitted(self, slot: int) -> None:
        self.slot = slot
        self._admitted = time.perf_counter()

    def put(self, token: Token, reason: str | None) -> bool:
        """Append a token, the last one when there is a reason. False when the request has ended before."""
        with self._changed:
            if self.done:
                return False
            if not self._tokens:
                self._first = time.perf_counter()
            self._tokens.append(token)
            if reason is not None:
                self._finish(reason, None)
            self._changed.notify_all()
        self._tell()
        return True

    def end(self, reason: str) -> bool:
        """End without a token. False when it has ended before."""
        return self._end(reason, None)

    def fail(self, error: BaseException) -> bool:
        """End with an error. False when it has ended before."""
        return self._end(None, error)

    def _end(self, reason: str | None, error: BaseException | None) -> bool:
        with self._changed:
            if self.done:
                return False
            self._finish(reason, error)
            self._changed.notify_all()
        self._tell()
        return True

    def _finish(self, reason: str | None, error: BaseException | None) -> None:
        self._reason, self._error, self._ended = reason, error, time.perf_counter()
        self._over.set()

    def _tell(self) -> None:
        listen = self._listen
        if listen is None:
            return
        try:
            listen()
        except Exception as e:  # the caller's own code: it ends its own request and is not called again
            self._listen = None
            said = f"listen of request {self.number}: expected a callable that returns, got {type(e).__name__}: {e}"
            log.error("%s; the request fails, others go on", said)
            failure = InvalidRequest(said)
            failure.__cause__ = e
            self.fail(failure)

    def timings(self) -> Timings:
        """Of an ended request."""
        span = (self._tokens[-1].time_ns - self._tokens[0].time_ns) * 1e-9 if len(self._tokens) > 1 else 0.0
        rate = (len(self._tokens) - 1) / span if span > 0 else 0.0
        start = self._submitted
        return Timings(
            max(0.0, self._admitted - start), max(0.0, self._first - start), max(0.0, self._ended - start), rate
        )
