"""A model to talk to."""

from __future__ import annotations

import operator
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeGuard, overload

import numpy as np
import numpy.typing as npt

from megakernel.builder.build import Plan, make_plan
from megakernel.builder.shard import check_ranks
from megakernel.device.device import Device
from megakernel.devices import open_device
from megakernel.engine import Engine, EngineStats, check_step_bound
from megakernel.errors import CapacityError, InvalidRequest
from megakernel.flow import timeline_of
from megakernel.opening import build, load, target_of, workers_of_rank
from megakernel.origin import Progress, open_origin
from megakernel.output import Encoded, Flow, Output
from megakernel.probe import check_forced, forced_logits
from megakernel.request import Embedded, Processor
from megakernel.runtime import MemoryReport
from megakernel.sampling import SamplingParams
from megakernel.settings import Settings, read_settings
from megakernel.timeline import Timeline

Prompt: TypeAlias = "str | Sequence[int] | Embedded | npt.NDArray[Any]"


class LLM:
    """Opens a model on a device and keeps it resident until `close`; a context manager."""

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | Device = "cpu",
        dtype: str = "bf16",
        kv_dtype: str | None = None,
        max_slots: int = 8,
        max_context: int | None = None,
        max_rows: int | None = None,
        workers: int | None = None,
        target: str | None = None,
        policy: str = "balanced",
        inputs: bool = False,
        hidden: bool = False,
        seed: int = 0,
        kv_pages: int | None = None,
        share_prefixes: bool = True,
        max_step_ms: float | None = None,
        steps_per_launch: int | None = None,
        tp: int = 1,
        tp_processes: bool = False,
        chaos: bool = False,
        trace: bool = False,
        settings: Settings | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`model`: a checkpoint folder, a .gguf file, "demo", or a published shape (random weights of `seed`).

        max_context: tokens of prompt and output together; default 4096, or the model's own limit if that is less.
        inputs: prompts may have embeddings instead of tokens. hidden: what the head reads can be asked for. Either
        takes host memory for every position of every slot.
        kv_dtype: of the KV pages, f32, bf16, f16 or f8; default that of the weights.
        max_rows: tokens that one step computes; default by the cost model.
        workers: resident workers, default all. kv_pages: KV pages for all slots, default every slot's full context.
        tp: devices that run the model together, each with its part of the weights and of the KV cache: GPUs from
        `device` on, or kernels on the processor, which share its cores out. tp_processes: the others in processes.
        trace: the kernel is one that can record its timeline. share_prefixes, max_step_ms: as in `Engine`.
        """
        whole = (("seed", seed, 0), ("kv_pages", kv_pages, 1), ("steps_per_launch", steps_per_launch, 1))
        for name, value, low in whole:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise InvalidRequest(f"{name}: expected an integer of at least {low}, got {value!r}")
        switches = (("inputs", inputs), ("hidden", hidden), ("share_prefixes", share_prefixes), ("chaos", chaos),
                    ("trace", trace), ("tp_processes", tp_processes))  # fmt: skip
        for name, switch in switches:
            if not isinstance(switch, bool):
                raise InvalidRequest(f"{name}: expected True or False, got {switch!r:.80}")
        if max_context == 1 and max_context is not True:
            raise CapacityError("max_context 1: expected at least 2, a token of the prompt and one of output")
        check_step_bound(max_step_ms)
        check_ranks(tp)
        self._settings = chosen = settings or read_settings()
        where = device if isinstance(device, Device) else open_device(device)
        chosen.say(1, f"device {where.name}: {where.availability().description}")
        started = time.perf_counter()
        origin = open_origin(model, seed=seed, dtype=dtype, cache=chosen.cache, progress=progress)
        try:
            opened = time.perf_counter()
            goal = workers_of_rank(target_of(where, target, workers, chosen), tp, workers, chosen)
            options: dict[str, Any] = {
                "dtype": dtype, "kv_dtype": kv_dtype, "max_slots": max_slots, "max_context": max_context,
                "max_rows": max_rows, "policy": policy, "inputs": inputs, "hidden": hidden,
                "paced": max_step_ms is not None, "tp": tp,
            }  # fmt: skip
            self.program = build(origin, goal, where, chosen, progress, **options, chaos=chaos, trace=trace)
            config = dict(origin.config)
            self._plan: Callable[[], Plan] = lambda: make_plan(config, goal, **options)  # what records mean
            self._model, self._device = str(model), where.availability().description
            self._options = {**options, "workers": goal.workers}
            built = time.perf_counter()
            runtime = load(
                self.program, where, origin, chosen, kv_pages=kv_pages, progress=progress,
                processes=str(model) if tp_processes else None, seed=seed,
            )  # fmt: skip
        finally:
            origin.close()
        loaded = time.perf_counter()
        chosen.say(2, f"open {opened - started:.3f} s, build {built - opened:.3f} s, load {loaded - built:.3f} s")
        chosen.say(3, f"{len(self.program.manifest.nodes)} nodes, queues of {self.program.records.shape} records")
        chosen.say(4, self.program.source)
        self.name = origin.name
        self.tokenizer = origin.tokenizer
        self.generation = origin.generation
        try:
            self.engine = Engine(
                runtime,
                stop_ids=origin.generation.eos_token_ids,
                steps_per_launch=steps_per_launch or chosen.steps_per_launch,
                share_prefixes=share_prefixes,
                max_step_ms=max_step_ms,
            )
        except BaseException:
            runtime.close()
            raise

    # ------------------------------------------------------------------------------------------ generating
    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, stream: Literal[False] = False,
        *, processor: Processor | None = None, hidden: bool = False,
    ) -> list[Output]: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None, stream: Literal[True],
        *, processor: Processor | None = None, hidden: bool = False,
    ) -> Iterator[Output]: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None,
        *, stream: Literal[True], processor: Processor | None = None, hidden: bool = False,
    ) -> Iterator[Output]: ...  # fmt: skip

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, stream: bool = False,
        *, processor: Processor | None = None, hidden: bool = False,
    ) -> list[Output] | Iterator[Output]:  # fmt: skip
        """One prompt (a text, token ids, or embeddings) or a list of them. One Output for each prompt in order; with
        `stream`, an Output for every token of any prompt as it comes, whose end cancels what is not read.

        Embeddings: float32 [tokens, hidden], or `Embedded` among tokens. `processor` runs in Python before every token
        of every prompt, which waits for it: slow. `hidden` asks for what the head reads. Raises InvalidRequest,
        CapacityError, DeviceFault, EngineClosed."""
        flow, count = self._flow(prompts, params, stream, processor, hidden)
        if stream:
            return flow.updates()
        last = {output.index: output for output in flow.updates()}
        return [last[i] for i in range(count)]

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None,
        *, processor: Processor | None = None, hidden: bool = False,
    ) -> list[Output]:  # fmt: skip
        """`generate` in an event loop, which goes on meanwhile. Cancelling the task cancels the requests."""
        flow, count = self._flow(prompts, params, False, processor, hidden)
        last = {output.index: output async for output in flow.updates_async()}
        return [last[i] for i in range(count)]

    def astream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None,
        *, processor: Processor | None = None, hidden: bool = False,
    ) -> AsyncIterator[Output]:  # fmt: skip
        """`generate` with `stream` in an event loop: `async for output in llm.astream(...)`. Closing the iterator, or
        cancelling the task, cancels the requests."""
        return self._flow(prompts, params, True, processor, hidden)[0].updates_async()

    def _flow(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None, every_token: bool,
        processor: Processor | None, hidden: bool,
    ) -> tuple[Flow, int]:  # fmt: skip
        chosen = SamplingParams() if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise InvalidRequest(f"params: expected one SamplingParams for all prompts, got {chosen!r:.80}")
        if chosen.stop_texts and self.tokenizer is None:
            raise InvalidRequest(f"stop: {self.name} has no tokenizer, so no text to stop at; use stop_token_ids")
        if processor is not None:
            self._settings.say(1, "a logits processor: Python runs before every token of these prompts, which wait")
        encoded = [self._encode(p) for p in _prompt_list(prompts)]
        return Flow(self.engine, self.tokenizer, encoded, chosen, every_token, processor, hidden), len(encoded)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **template_values: Any,
    ) -> Output:
        """The model's answer to a conversation of {"role": ..., "content": ...} messages."""
        return self.generate(self.chat_prompt(messages, tools, **template_values), params)[0]

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **template_values: Any
    ) -> str:
        """A conversation as text, by the checkpoint's own template."""
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.name} has no tokenizer and so no chat template; give token ids")
        return self.tokenizer.apply_chat_template(messages, tools, True, **template_values)

    def _encode(self, prompt: Prompt) -> Encoded:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest(f"prompt: {self.name} has no tokenizer; give token ids instead of a text")
            return Encoded(prompt, self.tokenizer.encode(prompt))
        if _is_embedding(prompt):
            prompt = Embedded([-1] * len(prompt), np.asarray(prompt))
        ids, rows = (prompt.token_ids, prompt.embeddings) if isinstance(prompt, Embedded) else (prompt, None)
        try:
            if isinstance(ids, (bytes, bytearray, Mapping)) or any(isinstance(i, (bool, np.bool_)) for i in ids):
                raise TypeError(type(ids).__name__)
            return Encoded(None, [operator.index(i) for i in ids], rows)
        except TypeError as error:
            raise InvalidRequest(f"prompt: expected a text or token ids, got {prompt!r:.80}") from error

    # ------------------------------------------------------------------------------------------ looking inside
    def logits(self, token_ids: Sequence[int], start: int = 0) -> npt.NDArray[np.float32]:
        """Float32 logits after token `start` and each one after it, [len(token_ids) - start, vocab].

        The first `start` + 1 tokens are a prompt, the others are forced one a launch: slow, for checking numbers."""
        ids = check_forced(self.program.manifest, token_ids, start)
        return self.engine.exclusive(lambda runtime: forced_logits(runtime, ids, start))

    def start_recording(self, steps: int | None = None, skip: int = 0) -> None:
        """Record the timeline of the next launches: `steps` steps (None: until it is stopped) after `skip` of them.

        Raises TimelineError when the model was opened without `trace`, or records already."""
        self.engine.start_recording(steps, skip)

    def stop_recording(self) -> Timeline:
        """The timeline of what was recorded, also when a fault cut it short. Raises TimelineError."""
        return timeline_of(
            self.engine.stop_recording(),
            self.program,
            self._plan(),
            model=self._model,
            device=self._device,
            options=self._options,
        )

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def memory(self) -> MemoryReport:
        return self.engine.runtime.memory()

    def close(self) -> None:
        """End the workers and free everything. Idempotent."""
        if not self.engine.closed:
            self.engine.close()
            self._settings.say(2, str(self.engine.stats()))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_embedding(prompt: object) -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(prompt, np.ndarray) and prompt.ndim == 2 and prompt.dtype.kind == "f"


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text, a list of ids, a list of texts, a list of lists of ids."""
    if isinstance(prompts, (str, Embedded)) or _is_embedding(prompts):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray, Mapping)):
        raise InvalidRequest(f"prompt: expected a text or token ids, got {prompts!r:.80}")
    items = list(prompts)
    if items and not isinstance(items[0], (str, Sequence, np.ndarray, Embedded)):
        return [items]  # ids of one prompt
    if not items:
        raise InvalidRequest("prompt: expected a text or token ids, got an empty list")
    return items
