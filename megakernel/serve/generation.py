"""Engine requests on an event loop: tokens become text here.

With few sequences the engine's thread makes text of a token and sends it by itself: to wake the loop's thread, and to
wait for the interpreter's lock there, takes longer than the work. With more of them that thread only rings the bell, so
that one wake-up serves many tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from megakernel.checkpoint import Tokenizer
from megakernel.engine import Engine
from megakernel.request import Processor, Request, Token
from megakernel.sampling import SamplingParams
from megakernel.text import StoppingText

DIRECT = 4  # sequences; with more, their sends would hold up the engine's thread


class Bell:
    """Wakes generations on the loop's thread. The engine's thread rings; many rings make one wake-up of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.live = 0  # sequences that run or wait, of all generations
        self._loop = loop
        self._rung: deque[Callable[[], None]] = deque()
        self._armed = False

    def ring(self, wake: Callable[[], None]) -> None:
        """From any thread; never blocks. `wake` is called on the loop soon, not at all when the loop has ended."""
        self._rung.append(wake)
        if not self._armed:
            self._armed = True
            with suppress(RuntimeError):  # the loop was closed: nobody is left to wake
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._armed = False  # first: a ring that comes after the last look below arms again
        while self._rung:
            self._rung.popleft()()


class Update(NamedTuple):
    """What is new of one choice. The last update of a choice has a finish_reason."""

    choice: int
    delta: str
    tokens: list[Token]
    finish_reason: str | None


class _Choice:
    """One engine request and its text."""

    def __init__(self, request: Request, text: StoppingText) -> None:
        self.request = request
        self.text = text
        self.tokens: list[Token] = []
        self.finish_reason: str | None = None


class Sink(Protocol):
    """Takes updates at once, without waking a task."""

    @property
    def open(self) -> bool:
        """Whether `take` may be called."""

    @property
    def empty(self) -> bool:
        """Whether `send` may be called."""

    def prepare(self) -> bool:
        """On the loop, before the first `send`. False when it cannot be."""

    def take(self, update: Update) -> None:
        """On the loop."""

    def send(self, update: Update) -> bool:
        """On any thread. False when it could not be done whole: no more before `settle`."""

    def settle(self) -> None:
        """On the loop: finish what `send` began."""


class Generation:
    """The choices of one HTTP request. Lives on the loop; `updates` is read once, by one task.

    While that task waits, updates other than a choice's last go to `sink`, if there is one, by the thread that has
    them: the loop's, or the engine's while `_direct` is set. Whoever reads has `_lock`: each token is read once,
    in order."""

    def __init__(self, bell: Bell, on_end: Callable[[Generation], None] | None = None) -> None:
        self._bell = bell
        self._news: deque[int] = deque()
        self._wakeup = asyncio.Event()
        self._on_end = on_end
        self._ended = False
        self._stop: Exception | None = None  # why it was ended before its time
        self.sink: Sink | None = None
        self._lock = threading.Lock()
        self._direct = False  # the engine's thread may read and send
        self._parked = False  # the reader has taken everything and waits
        self._last: deque[Update] = deque()  # read already, for the reader
        self.choices: list[_Choice] = []
        self.started = time.perf_counter()
        self.first_token = 0.0

    def submit(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
        processors: Sequence[Processor | None],
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """One choice for each prompt, with its processor; special tokens of `keep` are part of its text.

        Raises what `Engine.submit` raises and leaves none."""
        try:
            for i, ((ids, params), processor) in enumerate(zip(prompts, processors)):
                listen = partial(self._heard, i, partial(self._wake, i))
                request = engine.submit(ids, params, listen, processor)
                self.choices.append(_Choice(request, StoppingText(tokenizer, params.stop_texts, keep)))
                self._bell.live += 1
        except BaseException:
            self.cancel()
            raise

    # ------------------------------------------------------------------------------------------ the engine's thread
    def _heard(self, choice: int, wake: Callable[[], None]) -> None:
        """There is something new of a choice. Never waits: while another thread reads, it is told."""
        if self._direct and self._lock.acquire(blocking=False):
            try:
                if self._direct and self._send(choice):
                    return
                self._direct = False
            finally:
                self._lock.release()
        self._bell.ring(wake)

    def _send(self, choice: int) -> bool:
        """False when the loop has to go on."""
        sink = self.sink
        if sink is None or self._bell.live > DIRECT:
            return False
        try:
            update = self._read(choice)
            if update is None:
                return True
            if update.finish_reason is None:
                return sink.send(update)
            self._last.append(update)
        except Exception as e:  # the reader's to raise
            self._stop = self._stop or e
        return False

    # ------------------------------------------------------------------------------------------ the loop's thread
    def _wake(self, choice: int) -> None:
        """What `_heard` left. Many sequences: it is written here, without the reader."""
        sink = self.sink
        many = self._bell.live > DIRECT
        if sink is None or not many or not self._parked or self._wakeup.is_set() or self._last or not sink.open:
            self._news.append(choice)
            self._wakeup.set()
            return
        try:
            with self._lock:
                self._direct = False
                update = self._read(choice)
            if update is None:
                return
            if update.finish_reason is None:
                sink.take(update)
                return
            self._last.append(update)
            self._wakeup.set()
        except Exception as e:
            self.abort(e)

    def _take_over(self) -> None:
        """From here on only the loop reads."""
        with self._lock:
            self._direct = False
        if self.sink is not None:
            self.sink.settle()

    async def _hand_over(self) -> None:
        """Let the engine's thread read, if few sequences run and nothing that was written waits."""
        if self.sink is None or self._bell.live > DIRECT or any(c.request.processor for c in self.choices):
            return
        if not self.sink.empty:
            await asyncio.sleep(0)  # the transport may write at the end of a turn of the loop
        if self.sink is not None and self.sink.empty and not self._news and self._stop is None:
            self._direct = self.sink.prepare()

    def abort(self, reason: Exception) -> None:
        """End it early: `updates` raises `reason`. The engine's slots are free within a step."""
        if self._stop is None and not self._ended:
            self._stop = reason
            self.cancel()
            self._wakeup.set()

    def cancel(self) -> None:
        """End every request that still runs, and the generation with them."""
        self._take_over()
        self.sink = None
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.request.cancel()
        if not self._ended:
            self._ended = True
            self._bell.live -= len(self.choices)
            if self._on_end:
                self._on_end(self)

    async def updates(self) -> AsyncIterator[list[Update]]:
        """What came since the last one, until every choice has ended. Raises DeviceFault, EngineClosed, ApiError.

        When the reader stops early the requests are cancelled."""
        left = len(self.choices)
        try:
            while left:
                await self._hand_over()
                self._parked = True
                await self._wakeup.wait()
                self._wakeup.clear()
                self._parked = False
                self._take_over()
                if self._stop is not None:
                    raise self._stop
                out = list(self._last)
                self._last.clear()
                for choice in dict.fromkeys(self._drain()):
                    update = self._read(choice)
                    if update is not None:
                        out.append(update)
                left -= sum(update.finish_reason is not None for update in out)
                if out:
                    yield out
        finally:
            self.cancel()

    def _drain(self) -> list[int]:
        news = list(self._news)
        self._news.clear()
        return news

    def _read(self, index: int) -> Update | None:
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return None
        fresh, done = choice.request.poll(len(choice.tokens))
        if fresh and not self.first_token:
            self.first_token = time.perf_counter()
        delta, taken = "", []
        for token in fresh:
            taken.append(token)
            delta += choice.text.push(token.id)
            if choice.text.stopped:
                choice.request.cancel("stop")
                break
        choice.tokens += taken
        if choice.text.stopped:
            choice.finish_reason = "stop"
        elif done:
            delta += choice.text.finish()
            choice.finish_reason = "stop" if choice.text.stopped else choice.request.finish_reason or "stop"
        elif not taken:
            return None
        elif choice.request.done:  # it failed behind these tokens, and one wake-up may have stood for both
            self._bell.ring(partial(self._wake, index))
        return Update(index, delta, taken, choice.finish_reason)
