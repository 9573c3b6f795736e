"""The programs that bench.gpu times: this kernel, transformers in a CUDA graph or compiled, and a plain read."""

from __future__ import annotations

import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.device_session import admit, loaded, randomise
from megakernel.builder.build import build_program
from megakernel.devices import open_device

WARM_STEPS = 10
READ_BYTES = 4 << 30  # far beyond every cache


@dataclass(frozen=True)
class Steps:
    """Times between the tokens of one round, microseconds, warm steps left out. `bytes_read`: of a step, where the
    program knows it itself."""

    us: tuple[float, ...]
    tokens: tuple[int, ...] = ()
    launches_per_token: float | None = None
    bytes_read: int = 0


class Program(ABC):
    """Ready to decode `steps` tokens at any context up to `most`; bf16, random weights, batch 1 unless it says more."""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], most: int, steps: int, device: str) -> None: ...

    @abstractmethod
    def run(self, context: int) -> Steps: ...

    @abstractmethod
    def close(self) -> None: ...


class Kernel(Program):
    def __init__(self, config: Mapping[str, Any], most: int, steps: int, device: str, **options: Any) -> None:
        self.steps = steps + WARM_STEPS
        where = open_device(device)
        program = build_program(
            config, where.target, where, cache=Path(tempfile.gettempdir()) / "megakernel", dtype="bf16", max_slots=1,
            max_context=most + self.steps + 2, **options,
        )  # fmt: skip
        self.manifest = program.manifest
        self.runtime = loaded(config, where, program)
        self.runtime.spin_budget_ns = 2_000_000_000

    def run(self, context: int) -> Steps:
        run = self.runtime
        run.reset()
        randomise(run)
        admit(run, 0, [1], context + self.steps + 1, start=context)
        run.launch(self.steps + 8)
        report = run.finish(120.0)
        events = run.events()
        gaps = np.diff(events["time_ns"].astype(np.int64))[WARM_STEPS - 1 :] / 1000.0
        return Steps(
            tuple(float(g) for g in gaps), tuple(int(t) for t in events["token"]), 1.0 / max(1, report.tokens_out)
        )

    def close(self) -> None:
        self.runtime.close()


class Torch(Program):
    """transformers' model on a static cache; a step is one call that writes the next token and position in place.

    `batch` streams at one position, whose tokens follow one another in those of a round."""

    compiled = False

    def __init__(self, config: Mapping[str, Any], most: int, steps: int, device: str, batch: int = 1) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

        self.torch, self.device, self.steps = torch, device, steps
        values = {k: v for k, v in config.items() if k != "transformers_version"}
        made = AutoConfig.for_model(**values)
        factory: Any = AutoModelForCausalLM
        warnings.filterwarnings("ignore", message=".*past_key_values.*")  # a newer release has another name for it
        with torch.device(device):
            self.model = factory.from_config(made, dtype=torch.bfloat16).eval()
        length = -(-(most + steps + WARM_STEPS + 1) // 128) * 128
        self.cache = StaticCache(config=self.model.config, max_cache_len=length)
        self.token = torch.ones((batch, 1), dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.step: Callable[[], None] = self._step
        with torch.inference_mode():
            self._step()  # makes the cache's tensors
            if self.compiled:
                self.step = torch.compile(self._step, mode="max-autotune")
                self._warm()
            elif device.startswith("cuda"):
                self._warm()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
                self.step = graph.replay

    def _step(self) -> None:
        out = self.model(
            input_ids=self.token, past_key_values=self.cache, position_ids=self.position[None], use_cache=True,
            cache_position=self.position,
        )  # fmt: skip
        self.token.copy_(out.logits[:, -1:].argmax(-1))
        self.position.add_(1)

    def _warm(self) -> None:
        if not self.device.startswith("cuda"):
            self.step()
            return
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            for _ in range(4):
                self.step()
        self.torch.cuda.current_stream().wait_stream(side)

    def run(self, context: int) -> Steps:
        torch = self.torch
        with torch.inference_mode():
            torch.manual_seed(context)
            for layer in self.cache.layers:
                layer.keys.normal_()
                layer.values.normal_()
                if hasattr(layer, "cumulative_length"):  # what some releases take the position from
                    self._set_length(layer, context)
            self.token.fill_(1)
            self.position.fill_(context)
            return self._timed()

    def _set_length(self, layer: Any, context: int) -> None:
        if isinstance(layer.cumulative_length, self.torch.Tensor):
            layer.cumulative_length.fill_(context)
        else:
            layer.cumulative_length = context

    def _timed(self) -> Steps:
        tokens, marks = [], []
        for _ in range(self.steps + WARM_STEPS):
            self.step()
            marks.append(_mark(self.torch, self.device))
            tokens.append(self.token.clone())
        times = _between(self.torch, marks)[WARM_STEPS - 1 :]
        return Steps(tuple(times), tuple(int(t) for row in tokens for t in row))

    def close(self) -> None:
        del self.model, self.cache, self.step
        if self.device.startswith("cuda"):
            self.torch.cuda.empty_cache()


class Compiled(Torch):
    compiled = True


class Read(Program):
    """Every byte of a large buffer, once, by all multiprocessors; the bytes of its step are its own."""

    def __init__(self, config: Mapping[str, Any], most: int, steps: int, device: str) -> None:
        import torch

        self.torch, self.steps, self.device = torch, steps, device
        self.bytes = READ_BYTES if device.startswith("cuda") else 64 << 20
        self.data = torch.zeros(self.bytes // 8, dtype=torch.int64, device=device)
        self._kernel = _read_kernel(self.data) if device.startswith("cuda") else lambda: self.data.sum()

    def run(self, context: int) -> Steps:
        marks = []
        for _ in range(min(self.steps, 20) + 1):
            self._kernel()
            marks.append(_mark(self.torch, self.device))
        return Steps(tuple(_between(self.torch, marks)), (), None, self.bytes)

    def close(self) -> None:
        del self.data


READ_SOURCE = """
extern "C" __global__ void plain_read(const uint4* data, int count, unsigned* out) {
  unsigned folded = 0;
  const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 8 * stride) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned long long at = i + j * stride;
      if (at < count) { const uint4 v = __ldcs(data + at); folded ^= v.x ^ v.y ^ v.z ^ v.w; }
    }
  }
  if (folded == 0x9E3779B9u) *out = folded;
}
"""


def _mark(torch: Any, device: str) -> Any:
    """A moment: of the GPU's queue, or of the clock."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(torch: Any, marks: Sequence[Any]) -> list[float]:
    """Microseconds from each moment to the next."""
    pairs = list(pairwise(marks))
    if isinstance(marks[0], float):
        return [(b - a) * 1e6 for a, b in pairs]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairs]


def _read_kernel(data: Any) -> Callable[[], None]:
    """The read as a kernel of its own, compiled by torch."""
    import torch

    kernel = torch.cuda._compile_kernel(READ_SOURCE, "plain_read")
    out = torch.zeros(1, dtype=torch.int32, device=data.device)
    blocks = torch.cuda.get_device_properties(data.device).multi_processor_count * 8
    count = data.numel() * 8 // 16
    return lambda: kernel((blocks, 1, 1), (256, 1, 1), (data, count, out))


PROGRAMS: Mapping[str, type[Program]] = {"megakernel": Kernel, "graph": Torch, "compile": Compiled, "read": Read}
