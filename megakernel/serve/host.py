"""The model behind the server: loads it, opens it again after an end that nobody asked for, says how it is."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from megakernel.builder.program import Program
from megakernel.checkpoint import GenerationDefaults, Tokenizer
from megakernel.engine import Engine
from megakernel.errors import ApiError, MegakernelError
from megakernel.serve.generation import Generation
from megakernel.serve.options import ServeOptions

log = logging.getLogger("megakernel.serve")
RELOAD_PAUSE_S = 1.0  # between attempts to open the model again


class Model(Protocol):
    """What the server needs of an LLM."""

    name: str
    program: Program
    tokenizer: Tokenizer | None
    generation: GenerationDefaults
    engine: Engine

    def close(self) -> None: ...


class Host:
    """States: "loading", "ok", "recovering" (a fault is being cleaned up), "draining", "failed", "closed".

    `start`, `close` and everything about admission are called on the loop's thread; loading runs on its own thread.
    """

    def __init__(self, open_model: Callable[[], Model], options: ServeOptions) -> None:
        self._open = open_model
        self.options = options
        self.model: Model | None = None
        self.failure: Exception | None = None  # why the first load did not succeed
        self.on_failure: Callable[[], None] | None = None
        self.reloads = 0
        self.draining = False
        self._closed = threading.Event()
        self._outstanding = 0  # choices that were admitted here and have not ended
        self._generations: set[Generation] = set()
        self._ended_by: ApiError | None = None  # nothing may run any more
        self._typical_s = 1.0  # of a whole request, for Retry-After
        self._names = options.model_names

    # ------------------------------------------------------------------------------------------ life
    def start(self) -> None:
        threading.Thread(target=self._keep, name="megakernel-host", daemon=True).start()

    def _keep(self) -> None:
        """Open the model, and again whenever its engine ended by itself."""
        while not self._closed.is_set():
            model = self.model
            if model is None or model.engine.closed:
                self._load(first=model is None)
                if self.failure is not None:
                    return
            self._closed.wait(0.05 if self.model and not self.model.engine.closed else RELOAD_PAUSE_S)

    def _load(self, first: bool) -> None:
        started = time.perf_counter()
        try:
            model = self._open()
        except Exception as e:
            log.error("the model did not load: %s", e)
            if first:
                self.failure = e
                if self.on_failure:
                    self.on_failure()
            return
        if self._closed.is_set():
            model.close()
            return
        _set_apart()
        self.reloads += not first
        self.model = model
        if not self._names:
            self._names = (model.name,)
        log.info("model %s is ready after %.1f s", self._names[0], time.perf_counter() - started)

    def end_all(self, reason: ApiError) -> None:
        """What runs, and what would still begin, ends with `reason`."""
        self._ended_by = reason
        for generation in list(self._generations):
            generation.abort(reason)

    def close(self) -> None:
        """Cancel what runs and close the model; blocks until its memory is free. Idempotent."""
        self._closed.set()
        gc.unfreeze()
        if self.model is not None:
            try:
                self.model.close()
            except MegakernelError as e:
                log.error("the model did not close: %s", e)

    @property
    def state(self) -> str:
        model = self.model
        if self._closed.is_set():
            return "closed"
        if self.failure is not None:
            return "failed"
        if model is None:
            return "loading"
        if model.engine.closed or model.engine.failed or model.engine.load().recovering:
            return "recovering"
        return "draining" if self.draining else "ok"

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may use; empty until a model that was not named is open."""
        return self._names

    @property
    def loaded(self) -> Model:
        """The model, ready for requests. Raises ApiError 503."""
        state = self.state
        if state in ("ok", "draining") and self.model is not None:
            return self.model
        model = self.model
        if state == "recovering" and model is not None and not (model.engine.closed or model.engine.failed):
            return model  # the engine queues while it cleans up
        raise ApiError(
            503, f"the model is not ready: {state}", kind="service_unavailable", code="not_ready", retry_after_s=1
        )

    def check_name(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for another model."""
        if name is None:
            return self._names[0]
        if name not in self._names:
            raise ApiError(
                404, f"the model {name[:200]!r} does not exist; this server has {', '.join(self._names)}",
                param="model", code="model_not_found",
            )  # fmt: skip
        return name

    # ------------------------------------------------------------------------------------------ admission
    @property
    def outstanding(self) -> int:
        return self._outstanding

    def admit(self, choices: int) -> None:
        """Raises ApiError 400 when so many sequences can never run, 429 when they cannot now, 503 after `end_all`."""
        if self._ended_by is not None:
            raise self._ended_by
        limit = self.options.max_queue + self.loaded.program.manifest.max_slots
        if choices > limit:
            raise ApiError(
                400, f"n: prompts and choices make {choices} sequences; this server holds at most {limit}", param="n"
            )
        if self._outstanding + choices > limit:
            raise ApiError(
                429, f"{self._outstanding} sequences run or wait; at most {limit} may; try again later",
                kind="rate_limit_error", code="queue_full", retry_after_s=max(1, round(self._typical_s)),
            )  # fmt: skip

    def began(self, generation: Generation) -> None:
        self._outstanding += len(generation.choices)
        self._generations.add(generation)

    def ended(self, generation: Generation) -> None:
        if generation in self._generations:
            self._generations.discard(generation)
            self._outstanding -= len(generation.choices)
            self._typical_s += 0.1 * (time.perf_counter() - generation.started - self._typical_s)


def _set_apart() -> None:
    """What lives as long as the model is no longer searched for garbage: that takes tens of milliseconds, in which no
    thread runs and no token is told."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
