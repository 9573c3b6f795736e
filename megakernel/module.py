"""A torch module as a megakernel: captured, compiled, and called with tensors."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megakernel.builder.build import build_graph_program
from megakernel.builder.program import Program
from megakernel.device.device import Device
from megakernel.devices import open_device
from megakernel.errors import CaptureError, InvalidRequest, LoweringError, MegakernelError, MissingExtra
from megakernel.graph import TOKENS
from megakernel.opening import target_and_compiler, target_of
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.settings import Settings, read_settings
from megakernel.tasks.record import MAX_ROWS, SAMPLING, SLOT, CommandKind, SlotStatus

if TYPE_CHECKING:
    import torch

    from megakernel.capture import Captured

Floats = npt.NDArray[np.float32]


def from_module(
    module: torch.nn.Module,
    example_inputs: Sequence[Any],
    *,
    device: str | Device = "cpu",
    dtype: str | None = None,
    max_slots: int = 4,
    max_context: int = 512,
    max_rows: int = MAX_ROWS,
    workers: int | None = None,
    target: str | None = None,
    policy: str = "balanced",
    settings: Settings | None = None,
) -> CompiledModule:
    """`module` on a device, for inputs like `example_inputs`: float rows `[..., cols]` and token ids `[...]`.

    The leading dimensions may differ from the example's, but not their number; where rows attend to each other the last
    one is the sequence, of at most `max_context` rows. `dtype` is that of the weights and of the KV cache: "f32" by
    default on a processor, "bf16" on a GPU, or "f16"; everything else is float32. `max_slots`: sequences that are
    computed together.

    Raises CaptureError naming the first operator that is not supported and its source line, and what `LLM` raises.
    """
    chosen = settings or read_settings()
    where = device if isinstance(device, Device) else open_device(device)
    goal = target_of(where, target, workers, chosen)
    captured = _captured(module, example_inputs)
    program = _build(
        captured, goal, where, chosen, dtype=dtype, max_slots=max_slots, max_context=max_context, max_rows=max_rows,
        policy=policy,
    )  # fmt: skip
    runtime = Runtime(program, where, captured.read, spin_budget_ns=chosen.spin_budget_ns)
    return CompiledModule(captured, runtime)


def compile_module(
    module: torch.nn.Module, example_inputs: Sequence[Any], *, target: str, workers: int | None = None,
    settings: Settings | None = None, **options: Any,
) -> Program:  # fmt: skip
    """The program of a module for a target whose hardware need not be here. `options` as of `from_module`."""
    chosen = settings or read_settings()
    where, goal = target_and_compiler(target, None, workers, chosen)
    return _build(_captured(module, example_inputs), goal, where, chosen, **options)


def _captured(module: torch.nn.Module, example_inputs: Sequence[Any]) -> Captured:
    try:
        from megakernel.capture import capture
    except ModuleNotFoundError as e:
        raise MissingExtra("capturing a module needs torch: pip install 'megakernel-decode[torch]'") from e
    return capture(module, example_inputs)


def _build(captured: Captured, target: Any, device: Device, settings: Settings, **options: Any) -> Program:
    graph = captured.graph
    options = {"max_slots": 4, "max_context": 512, **options}
    options["dtype"] = options.get("dtype") or ("f32" if target.backend == "cpu" else "bf16")
    try:
        name = graph.config.architecture
        return build_graph_program(graph, target, device, cache=settings.cache, name=name, **options)
    except LoweringError as e:
        raise CaptureError(f"{graph.config.architecture}: {_with_source(str(e), captured)}") from e


def _with_source(words: str, captured: Captured) -> str:
    """The words with the source line of the first node that they name."""
    found = [
        (m.start(), name) for name in captured.sources if (m := re.search(rf"(?<![\w.]){re.escape(name)}\b", words))
    ]
    return f"{words}; {captured.sources[min(found)[1]]}" if found else words


class CompiledModule:
    """A callable that computes the module's outputs; a context manager. One call at a time, from any thread."""

    def __init__(self, captured: Captured, runtime: Runtime) -> None:
        """Owns the runtime."""
        self.graph = captured.graph
        self.program = runtime.program
        self.runtime = runtime
        self._rank = len(captured.lead)
        self._sequence = captured.sequence
        self._tokens = any(TOKENS in node.inputs for node in self.graph.nodes)
        self._order = captured.inputs
        self._lock = threading.Lock()
        self._request = 0

    def __call__(self, *inputs: Any) -> Any:
        """The module's output, or a tuple of them: torch tensors when the first input is one, else numpy arrays.

        Raises InvalidRequest for inputs that do not fit, and DeviceFault."""
        floats, ids, lead = self._checked(inputs)
        length = lead[-1] if self._sequence else max(1, min(self.runtime.manifest.max_context, int(np.prod(lead))))
        rows = int(np.prod(lead))
        parts = [slice(at, min(rows, at + length)) for at in range(0, rows, length)]
        out = np.empty((rows, self.runtime.manifest.output_cols), np.float32)
        with self._lock:
            for at in range(0, len(parts), self.runtime.manifest.max_slots):
                self._run(parts[at : at + self.runtime.manifest.max_slots], floats, ids, out)
        return self._split(out, lead, _is_torch(inputs[0]))

    def _checked(self, inputs: Sequence[Any]) -> tuple[Floats | None, npt.NDArray[np.int32] | None, tuple[int, ...]]:
        """Rows of all float inputs side by side, the token ids, and the leading dimensions."""
        if len(inputs) != len(self._order):
            raise InvalidRequest(f"expected {len(self._order)} inputs ({', '.join(self._order)}), got {len(inputs)}")
        lead: tuple[int, ...] | None = None
        floats, ids = [], None
        for name, given in zip(self._order, inputs):
            data = _array(given)
            own = data.shape if name == TOKENS else data.shape[:-1]
            lead = own if lead is None else lead
            cols = None if name == TOKENS else self.graph.tensor(name).cols
            if len(own) != self._rank or own != lead or (cols is not None and data.shape[-1:] != (cols,)):
                wanted = "" if cols is None else f", with {cols} columns"
                raise InvalidRequest(
                    f"input {name}: expected {self._rank} leading dimensions, the same for all inputs{wanted}; got "
                    f"{list(data.shape)}"
                )
            if name == TOKENS:
                ids = self._ids(data.reshape(-1))
            else:
                floats.append(np.ascontiguousarray(data, np.float32).reshape(-1, data.shape[-1]))
                if np.isnan(floats[-1]).any():
                    raise InvalidRequest(f"input {name} holds NaN")
        assert lead is not None
        if self._sequence and lead[-1] > self.runtime.manifest.max_context:
            most = self.runtime.manifest.max_context
            raise InvalidRequest(f"a sequence of {lead[-1]} rows: max_context is {most}; give from_module a larger one")
        return (np.concatenate(floats, 1) if floats else None), ids, lead

    def _ids(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        vocab = self.graph.config.vocab
        if ids.dtype.kind not in "iu" or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab):
            raise InvalidRequest(f"token ids: expected whole numbers from 0 to {vocab - 1}")
        return ids.astype(np.int32)

    # ------------------------------------------------------------------------------------------ running
    def _run(
        self, parts: Sequence[slice], floats: Floats | None, ids: npt.NDArray[np.int32] | None, out: Floats
    ) -> None:
        """One launch after another until these sequences, a slot each, are done."""
        run = self.runtime
        for slot, part in enumerate(parts):
            if floats is not None:
                run.set_rows(slot, floats[part])
            run.set_prompt(slot, [0] * (part.stop - part.start) if ids is None else ids[part].tolist())
            self._admit(slot, part.stop - part.start)
        left = len(parts)
        try:
            while left:
                run.launch(sum(part.stop - part.start for part in parts))
                before = left
                report = run.finish()
                left -= len(run.events())
                if left == before and not report.steps_run:
                    raise MegakernelError(f"the kernel of {run.manifest.name} ran no step; this is a defect")
        except MegakernelError:
            run.reset()
            raise
        for slot, part in enumerate(parts):
            out[part] = run.rows(slot, part.stop - part.start)

    def _admit(self, slot: int, length: int) -> None:
        m = self.runtime.manifest
        first = slot * m.pages_per_slot
        self.runtime.set_pages(slot, range(first, first + -(-length // m.page_tokens)))
        self._request = self._request % 0xFFFFFFFE + 1
        greedy = np.frombuffer(SAMPLING.pack(SamplingParams().fields(seed=0)), SAMPLING.dtype)[0]
        state = {
            "status": SlotStatus.ACTIVE, "request": self._request, "prompt_length": length, "limit": length + 1,
            "sampling": greedy,
        }  # fmt: skip
        packed = np.frombuffer(SLOT.pack(state), SLOT.dtype)[0]
        self.runtime.post({"kind": CommandKind.ADMIT, "slot": slot, "request": self._request, "state": packed})

    def _split(self, out: Floats, lead: tuple[int, ...], as_torch: bool) -> Any:
        at, found = 0, []
        for name in self.graph.outputs:
            cols = self.graph.tensor(name).cols
            part = np.ascontiguousarray(out[:, at : at + cols]).reshape(*lead, cols)
            found.append(_tensor(part) if as_torch else part)
            at += cols
        return found[0] if len(found) == 1 else tuple(found)

    def close(self) -> None:
        """End the workers and free the memory. Idempotent."""
        self.runtime.close()

    def __enter__(self) -> CompiledModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_torch(given: Any) -> bool:
    return type(given).__module__.split(".")[0] == "torch"


def _array(given: Any) -> npt.NDArray[Any]:
    """A torch tensor of any device and type, or anything that numpy takes."""
    if not _is_torch(given):
        return np.asarray(given)
    data = given.detach().cpu()
    array: npt.NDArray[Any] = (data.float() if data.is_floating_point() else data).numpy()
    return array


def _tensor(array: Floats) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)
