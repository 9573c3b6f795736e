"""The engine: requests in, tokens out. One driver thread feeds the kernel and reads its token ring."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megakernel.builder.rows import first_chunk
from megakernel.errors import CapacityError, DeviceFault, EngineClosed, InvalidRequest, MegakernelError
from megakernel.kv_cache import PageAllocator, PrefixStats
from megakernel.kv_tensors import Kv, check_kv, write_kv
from megakernel.recording import Recording
from megakernel.request import Processor, Request
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams, whole_ids
from megakernel.slots import Slots
from megakernel.tasks.record import ExitReason

T = TypeVar("T")
log = logging.getLogger("megakernel.engine")
POLL_S = 0.02  # how soon a request submitted while the kernel runs is seen when no token wakes the driver
MAX_STEP_MS = 1e9  # in nanoseconds it has to fit 64 bits
EMBEDDED = 1 << 30  # how many ids below 0 there are


def check_step_bound(max_step_ms: float | None) -> None:
    """Raises InvalidRequest for what is no time in milliseconds; None is none."""
    number = isinstance(max_step_ms, Real) and not isinstance(max_step_ms, bool)
    if max_step_ms is not None and not (number and 0 < max_step_ms <= MAX_STEP_MS):
        raise InvalidRequest(f"max_step_ms: expected more than 0, at most {MAX_STEP_MS:g}, got {max_step_ms!r:.80}")


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started. `steps` and `kernel_tokens` are the kernel's own, `tokens` those received."""

    steps: int
    launches: int
    kernel_tokens: int
    tokens: int
    requests: int
    faults: int
    prefix: PrefixStats

    @property
    def launches_per_token(self) -> float:
        return self.launches / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class EngineLoad:
    """What the engine holds at this moment. `recovering`: between a fault and the clean state after it, or ended by an
    error."""

    waiting: int
    running: int
    free_pages: int
    pages: int
    recovering: bool


class _Job(Generic[T]):
    """A function to run on the driver thread while no request runs."""

    def __init__(self, function: Callable[[Runtime], T]) -> None:
        self._function = function
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def run(self, runtime: Runtime) -> None:
        try:
            self._result = self._function(runtime)
        except BaseException as e:  # handed to the caller, who waits in `wait`
            self._error = e
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self) -> T:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Engine:
    """Owns the runtime and closes it. Every public method may be called from any thread.

    Requests start in the order in which they came, each as soon as a slot and its KV pages are free, also in the
    middle of a launch. A device fault fails the requests that hold a slot; the engine resets and goes on with the rest.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        stop_ids: Iterable[int] = (),
        steps_per_launch: int = 256,
        share_prefixes: bool = True,
        max_step_ms: float | None = None,
    ) -> None:
        """`stop_ids`: the checkpoint's own end tokens. `share_prefixes`: requests with a common prefix share its pages.

        max_step_ms: how long a step that carries parts of prompts should at most keep running sequences waiting: those
        parts get as small as it takes, though never smaller than one token. Default: as large as fits."""
        if steps_per_launch < 1:
            raise InvalidRequest(f"steps_per_launch: expected at least 1, got {steps_per_launch}")
        self.runtime = runtime
        self.stop_ids = tuple(stop_ids)
        self.steps_per_launch = runtime.max_steps(steps_per_launch)
        m = runtime.manifest
        self._pages = PageAllocator(runtime.kv_pages, m.page_tokens, share=share_prefixes)
        if max_step_ms is not None:
            self._bound_steps(max_step_ms)
        self._slots = Slots(runtime, self._pages)
        self._queue: deque[Request] = deque()
        self._jobs: deque[_Job[Any]] = deque()
        self._between: deque[_Job[Any]] = deque()  # for which requests need not end
        self._side_jobs: deque[_Job[Any]] = deque()  # run while requests run
        self._changed = threading.Condition()
        self._closing = self._recovering = False
        self._failure: BaseException | None = None  # what ended the driver, if not `close`
        self._number = 0
        self._embedding = itertools.count()
        self._launches = self._faults = self._steps = self._kernel_tokens = 0
        self._base = (0, 0)  # steps and tokens of the kernel before its last reset
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._drive, name="megakernel-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # ------------------------------------------------------------------------------------------ for callers
    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        listen: Callable[[], None] | None = None,
        processor: Processor | None = None,
        embeddings: npt.NDArray[Any] | None = None,
        hidden: bool = False,
        keep_kv: bool = False,
    ) -> Request:
        """Queue a request. Raises InvalidRequest or CapacityError naming what is wrong with it.

        `embeddings` [n, hidden] stand for the ids below 0 of the prompt, in their order; `hidden` asks for what the
        head reads at every position. The program must be built for either (`inputs`, `hidden`). `keep_kv`: the request
        has its keys and values at the end (`Request.kv`), but for those of the last token, which are never computed.

        `listen` is called on the driver thread after every token and at the end; it must not block. `processor` is
        called there before every token, with those before it; the slot waits for it, so it makes its request slow."""
        self._check_process()
        for name, given in (("listen", listen), ("processor", processor)):
            if given is not None and not callable(given):
                raise InvalidRequest(f"{name}: expected a callable, got {type(given).__name__}")
        chosen = params or SamplingParams()
        ids, rows = self._embedded(prompt_ids, embeddings)
        ids = self._checked(ids, 0 if rows is None else -EMBEDDED)
        if hidden and not self.runtime.manifest.hidden_cols:
            raise InvalidRequest("hidden: this program keeps hidden states inside; open the model with hidden=True")
        m = self.runtime.manifest
        for number, _ in chosen.bias:
            if number >= m.vocab:
                raise InvalidRequest(f"logit_bias: expected token ids from 0 to {m.vocab - 1}, got {number}")
        limit = min(len(ids) + chosen.max_tokens, m.max_context)
        if self._pages.pages_for(limit) > self._pages.pages:
            raise CapacityError(
                f"a request of {limit} tokens needs {self._pages.pages_for(limit)} KV pages; the engine has "
                f"{self._pages.pages}; lower max_tokens, got {chosen.max_tokens}, or open the model with more kv_pages "
                "(--kv-pages)"
            )
        own = () if chosen.ignore_eos else self.stop_ids
        stops = tuple(dict.fromkeys((*own, *chosen.stop_ids)))
        with self._changed:
            self._check_open()
            self._number = self._number % 0xFFFFFFFE + 1
            request = Request(self._number, ids, chosen, limit, stops, self._wake, listen)
            request.processor, request.embeddings, request.wants_hidden = processor, rows, hidden
            request.keeps_kv = keep_kv
            self._queue.append(request)
            self._changed.notify_all()
        return request

    def exclusive(self, function: Callable[[Runtime], T]) -> T:
        """Run `function` on the driver thread once no request holds a slot (waiting ones go on after it).

        It may use every slot and page: prefixes kept for others are forgotten."""
        return self._wait_for(_Job(function), self._jobs)

    def _aside(self, function: Callable[[Runtime], T]) -> T:
        """Run `function` on the driver thread soon, whatever runs."""
        return self._wait_for(_Job(function), self._side_jobs)

    def _wait_for(self, job: _Job[T], jobs: deque[_Job[Any]]) -> T:
        self._check_process()
        with self._changed:
            self._check_open()
            jobs.append(job)
            self._changed.notify_all()
        return job.wait()

    def between_launches(self, function: Callable[[Runtime], T]) -> T:
        """Run `function` on the driver thread before the next launch; requests keep their slots. It must not reset."""
        return self._wait_for(_Job(function), self._between)

    def start_recording(self, steps: int | None = None, skip: int = 0) -> None:
        """Record the timeline from the next launch on: `steps` steps (None: until it is stopped) after `skip` of them.

        Raises TimelineError when the program was built without the timeline or already records."""
        self.between_launches(lambda runtime: runtime.start_recording(steps, skip))

    def stop_recording(self) -> Recording:
        """What was recorded until the launch that runs now ends; also what a fault cut short. Raises TimelineError."""
        return self.between_launches(lambda runtime: runtime.stop_recording())

    def _bound_steps(self, max_step_ms: float) -> None:
        check_step_bound(max_step_ms)
        if not self.runtime.manifest.paced:
            m = self.runtime.manifest
            raise InvalidRequest(
                f"max_step_ms: this program for {m.target} with max_rows {m.max_rows} was built to keep to no bound; "
                "build it with paced=True (--paced), or leave max_step_ms out"
            )
        runtime, m = self.runtime, self.runtime.manifest
        runtime.step_budget_ns = round(max_step_ms * 1e6)
        runtime.first_chunk = first_chunk(
            runtime.target, float(m.stream_bytes), m.row_flops, max_step_ms * 1e3, m.max_rows
        )

    def kv(self, which: int | Request) -> Kv:
        """Keys and values, as far as they are computed, of a request that runs, or of whatever holds a slot now.

        Raises InvalidRequest when the request holds no slot, or nothing holds the slot. A request that ends gives its
        pages back; `submit(keep_kv=True)` reads them just before."""
        return self._aside(lambda _: self._slots.kv(which))

    def put_kv(self, kv: Kv) -> None:
        """Keep keys and values as a prefix that later requests reuse, until the room is needed.

        Raises InvalidRequest when they do not fit the program, CapacityError when there is no room."""

        def write(runtime: Runtime) -> None:
            check_kv(runtime, kv)
            write_kv(runtime, kv, self._pages.store(kv.tokens))

        self._aside(write)

    def stats(self) -> EngineStats:
        prefix = self._pages.stats
        return EngineStats(
            self._steps, self._launches, self._kernel_tokens, self._slots.tokens, self._number, self._faults, prefix
        )

    def load(self) -> EngineLoad:
        running = sum(1 for _ in self._slots)
        recovering = self._recovering or self._failure is not None
        return EngineLoad(len(self._queue), running, self._pages.free_pages, self._pages.pages, recovering)

    @property
    def closed(self) -> bool:
        """Whether the driver has ended and the memory is free."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether an error has ended it; no request gets in any more, and soon it is closed."""
        return self._failure is not None

    def close(self, timeout_s: float = 120.0) -> None:
        """Fail what still runs with EngineClosed, end the kernel, free its memory. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise MegakernelError(f"the engine did not close within {timeout_s:g} s: its kernel does not end")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _embedded(
        self, prompt_ids: Sequence[int], embeddings: npt.NDArray[Any] | None
    ) -> tuple[Sequence[int], npt.NDArray[np.float32] | None]:
        """Each id below 0 becomes one that no other prompt has, so that nothing takes two embeddings for one token."""
        if embeddings is None:
            return prompt_ids, None
        cols = self.runtime.manifest.input_cols
        if not cols:
            raise InvalidRequest("embeddings: this program takes tokens only; open the model with inputs=True")
        rows = np.asarray(embeddings, np.float32)
        ids = whole_ids(prompt_ids, self.runtime.manifest.vocab, least=-EMBEDDED)
        count = sum(i < 0 for i in ids)
        if rows.shape != (count, cols) or not np.isfinite(rows).all():
            raise InvalidRequest(
                f"embeddings: expected finite numbers [{count}, {cols}], one row for each id below 0, got {rows.shape}"
            )
        return [i if i >= 0 else -1 - next(self._embedding) % EMBEDDED for i in ids], rows

    def _checked(self, prompt_ids: Sequence[int], least: int = 0) -> tuple[int, ...]:
        m = self.runtime.manifest
        ids = tuple(whole_ids(prompt_ids, m.vocab, least=least))
        if not ids:
            raise InvalidRequest("prompt: expected at least one token, got none")
        if len(ids) >= m.max_context:
            raise CapacityError(
                f"prompt: expected fewer than {m.max_context} tokens (max_context), got {len(ids)}; shorten it or open "
                "the model with a larger max_context"
            )
        return ids

    def _check_process(self) -> None:
        """A forked child has no driver thread, and perhaps a lock that nobody will give back."""
        if os.getpid() != self._process:
            raise EngineClosed(
                f"the engine belongs to process {self._process}, this is process {os.getpid()}; open the model here"
            )

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineClosed(
                f"the engine ended by an error ({self._failure}); open the model again"
            ) from self._failure
        if self._closing:
            raise EngineClosed("the engine is closed; open the model again")

    def _wake(self, _request: Request) -> None:
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ the driver thread
    def _drive(self) -> None:
        error: BaseException | None = None
        try:
            while self._wait_for_work():
                self._run_between()
                self._run_side_jobs()
                self._run_jobs()
                self._admit()
                if self._slots:
                    self._run_launch()
        except BaseException as e:  # an unforeseen error ends the engine; every waiting caller gets it
            error = e
        self._end(error)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the engine closes."""
        with self._changed:
            while not (self._closing or self._waiting() or self._slots):
                if not self._changed.wait(self.runtime.check_s):
                    self.runtime.check()
            return not self._closing

    def _waiting(self) -> bool:
        return bool(self._queue or self._jobs or self._between or self._side_jobs)

    def _run_between(self) -> None:
        while self._between:
            self._between.popleft().run(self.runtime)  # an error is the caller's

    def _run_jobs(self) -> None:
        if self._slots:
            return
        while True:
            with self._changed:
                job = self._jobs.popleft() if self._jobs else None
            if job is None:
                return
            job.run(self.runtime)
            self._pages.release_all()
            if job.error is not None:
                self._recover(job.error)

    def _run_side_jobs(self) -> None:
        while self._side_jobs:
            self._side_jobs.popleft().run(self.runtime)

    def _run_launch(self) -> None:
        """One bounded launch, from its start to the last event."""
        self._launches += 1
        self._post_changes()
        try:
            self.runtime.launch(self.steps_per_launch)
            while self.runtime.running():
                self.runtime.wait(POLL_S)
                self._slots.dispatch()
                self._post_changes()
                self._admit()
                self._run_side_jobs()
            report = self.runtime.finish()
        except DeviceFault as fault:
            self._slots.dispatch()
            self._recover(fault)
            return
        posted = self.runtime.pending()
        self._slots.dispatch()
        self._steps = self._base[0] + report.steps_run
        self._kernel_tokens = self._base[1] + report.tokens_out
        held = [o.request.number for o in self._slots if o.request.processor is None]
        if report.exit is ExitReason.IDLE and not posted and held:
            raise MegakernelError(f"the kernel says that it is idle, the engine that requests {held} run")

    def _post_changes(self) -> None:
        if self._closing:
            self._slots.fail(EngineClosed("the engine was closed before the request finished"))
        self._slots.post_changes()

    def _admit(self) -> None:
        """Move requests from the queue into free slots, first come first served."""
        while True:
            with self._changed:
                while self._queue and self._queue[0].done:
                    self._queue.popleft()
                waiting = self._queue[0] if self._queue and not self._jobs and not self._closing else None
            slot = self._slots.free()
            if waiting is None or slot is None or not self._pages.fits(waiting.limit, waiting.reusable):
                return
            if not self._slots.start(waiting, slot):
                return
            with self._changed:
                self._queue.popleft()

    def _recover(self, fault: BaseException) -> None:
        """After a fault (or a failed job): fail the requests in slots, start again from a clean state."""
        self._recovering = True
        what = "the kernel ended" if isinstance(fault, DeviceFault) else "what had the engine to itself failed"
        log.error("%s, the requests that hold a slot fail and it starts again: %s", what, fault)
        self._faults += isinstance(fault, DeviceFault)
        self._slots.clear(fault)
        self._base = (self._steps, self._kernel_tokens)
        self.runtime.reset()
        self._recovering = False

    def _end(self, error: BaseException | None) -> None:
        """The last thing the driver does: nobody is left waiting."""
        with self._changed:
            self._closing = True
            self._failure = error
            left = [*self._queue, *(o.request for o in self._slots)]
            jobs = [*self._jobs, *self._between, *self._side_jobs]
            for waiting in (self._queue, self._jobs, self._between, self._side_jobs):
                waiting.clear()
        if error is not None:
            log.error("the engine ended by an error: %s: %s", type(error).__name__, error)
        reason = error or EngineClosed("the engine was closed before the request finished")
        for request in left:
            request.fail(reason)
        for job in jobs:
            job.fail(reason)
        self.runtime.close()
