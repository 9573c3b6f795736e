"""Published shapes with random weights on a device: numbers against torch, and step times against the byte floor.

    python -m bench.device_session models [NAME ...] [--device cuda] [--file FILE] [--budget SECONDS]
    python -m bench.device_session models --table --file FILE
    python -m bench.device_session models llama-3.2-1b --positions 7 32 511 1024 4095 16000

Weights are drawn by torch from a seed and their names, rounded to bf16, the same for all three: the kernel, the
interpreter in float32, and the interpreter in bfloat16. A row is printed and appended to FILE as soon as it is known;
shapes that FILE has are skipped and none is begun after the budget, so the table can be made in pieces.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.ending import run
from megakernel.architectures import (
    NUMPY_DTYPES,
    find_model,
    known_models,
    parameter_shapes,
    shape_config,
    shape_names,
)  # fmt: skip
from megakernel.bench import plain_read_gbps, step_bytes
from megakernel.builder.build import build_program
from megakernel.device.device import Device
from megakernel.devices import open_device
from megakernel.errors import CapacityError, MegakernelError
from megakernel.graph import Graph
from megakernel.interpret import Interpreter
from megakernel.probe import FORCED, forced_logits
from megakernel.runtime import Runtime
from megakernel.sampling import SamplingParams
from megakernel.tasks.record import SAMPLING, SLOT, CommandKind, SlotStatus

CEILING_GBPS = 4556.0  # a plain read on an H200, measured
PROMPT, DECODED = 24, 8  # tokens whose logits are compared: the last of the prompt and those decoded one by one
CONTEXTS = (32, 512)
WARM = 10  # steps whose time is not counted


@dataclass(frozen=True)
class Row:
    """error, torch_error: relative 2-norm of logits against float32, mean over tokens, of the kernel and of torch in
    bfloat16. us, floor_us: of a step, at each of `contexts`. note: why there are none."""

    name: str
    device: str
    error: float = 0.0
    torch_error: float = 0.0
    contexts: tuple[int, ...] = ()
    us: tuple[float, ...] = ()
    floor_us: tuple[float, ...] = ()
    seconds: float = 0.0
    note: str = ""


class Weights:
    """Normal weights with deviation 1 / sqrt(columns), vectors near what leaves their input as it is."""

    def __init__(self, graph: Graph, device: str) -> None:
        import torch

        self._torch, self._device = torch, device
        self._shapes = parameter_shapes(graph)
        norms = [n for n in graph.nodes if n.op in ("rms_norm", "layer_norm")]
        self._centres = {n.inputs[1]: 1.0 - float(n.attrs.get("offset", 0.0)) for n in norms}
        self._host = lru_cache(maxsize=4)(self._download)

    def __call__(self, name: str) -> Any:
        """The tensor in bfloat16 on torch's device."""
        shape = self._shapes[name]
        generator = self._torch.Generator(device=self._device).manual_seed(zlib.crc32(name.encode()))
        out = self._torch.empty(shape, dtype=self._torch.bfloat16, device=self._device)
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.05
        return out.normal_(self._centres.get(name, 0.0), spread, generator=generator)

    def _download(self, name: str) -> npt.NDArray[Any]:
        bits = self(name).cpu().view(self._torch.int16).numpy()
        return bits.view(NUMPY_DTYPES["bf16"])

    def read(self, name: str, dtype: str, rows: slice) -> npt.NDArray[Any]:
        return np.asarray(self._host(name)[rows].astype(NUMPY_DTYPES[dtype]))


def measure(
    name: str, config: Mapping[str, Any], device: Device, *, contexts: Sequence[int] = CONTEXTS, steps: int = 60
) -> Row:
    """One shape. Raises CapacityError when it does not fit."""
    began = time.perf_counter()
    torch_device = "cuda" if device.name.startswith("cuda") else "cpu"
    graph = find_model(config).build(config)
    weights = Weights(graph, torch_device)
    program = build_program(
        config, device.target, device, cache=Path(tempfile.gettempdir()) / "megakernel", dtype="bf16", max_slots=1,
        max_context=max(contexts) + 2 * (steps + WARM),
    )  # fmt: skip
    ids = [int(i) for i in np.random.default_rng(0).integers(0, graph.config.vocab, PROMPT + DECODED)]
    run = Runtime(program, device, weights.read, spin_budget_ns=5_000_000_000)
    try:
        got = forced_logits(run, ids, PROMPT - 1)
        us = tuple(step_us(run, context, steps) for context in contexts)
    finally:
        run.close()
    rows = range(PROMPT - 1, len(ids))
    want, rounded = (reference(graph, weights, ids, rows, torch_device, dtype) for dtype in ("float32", "bfloat16"))
    gbps = CEILING_GBPS if torch_device == "cuda" else plain_read_gbps(1 << 28, device.target.workers)
    floors = tuple(step_bytes(program.manifest, context + steps // 2) / gbps / 1e3 for context in contexts)
    return Row(
        name, device.name, error(got, want), error(rounded, want), tuple(contexts), us, floors,
        time.perf_counter() - began,
    )  # fmt: skip


def reference(
    graph: Graph, weights: Callable[[str], Any], ids: Sequence[int], rows: Sequence[int], device: str, dtype: str
) -> npt.NDArray[np.float32]:
    """Logits of the tokens `rows`; weights are made again and again, so that any model fits."""
    out = Interpreter(graph, weights, device=device, dtype=dtype, forget=True).step(ids)["logits"]
    logits: npt.NDArray[np.float32] = out[list(rows)].float().cpu().numpy()
    return logits


def error(got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]) -> float:
    """Mean over tokens; NaN stays NaN."""
    return float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).mean())


def position_errors(
    name: str, config: Mapping[str, Any], device: Device, positions: Sequence[int]
) -> Iterator[tuple[int, float, float]]:
    """Of the logits of the token decoded at each position, behind a prompt: the errors of the kernel and of torch bf16
    against float32, as in `Row`."""
    torch_device = "cuda" if device.name.startswith("cuda") else "cpu"
    graph = find_model(config).build(config)
    weights = Weights(graph, torch_device)
    program = build_program(
        config, device.target, device, cache=Path(tempfile.gettempdir()) / "megakernel", dtype="bf16", max_slots=1,
        max_context=max(positions) + 2,
    )  # fmt: skip
    drawn = np.random.default_rng(0).integers(0, graph.config.vocab, max(positions) + 1)
    ids = [int(i) for i in drawn]
    got = []
    run = Runtime(program, device, weights.read, spin_budget_ns=5_000_000_000)
    try:
        for at in positions:
            run.reset()
            got.append(forced_logits(run, ids[: at + 1], at - 1)[1:])
    finally:
        run.close()
    want, rounded = (
        reference(graph, weights, ids, positions, torch_device, dtype) for dtype in ("float32", "bfloat16")
    )
    for i, at in enumerate(positions):
        here = slice(i, i + 1)
        yield at, error(got[i], want[here]), error(rounded[here], want[here])


def step_us(run: Runtime, context: int, steps: int) -> float:
    """Median microseconds of a greedy step with `context` tokens, all zeros, in the cache."""
    m = run.manifest
    run.reset()
    run.set_pages(0, range(m.pages_per_slot))
    run.set_prompt(0, [1])
    greedy = np.frombuffer(SAMPLING.pack(SamplingParams().fields(seed=0)), SAMPLING.dtype)[0]
    state = {
        "status": SlotStatus.ACTIVE, "request": FORCED, "position": context, "prompt_length": context, "last_token": 1,
        "limit": context + steps + WARM + 1, "sampling": greedy,
    }  # fmt: skip
    packed = np.frombuffer(SLOT.pack(state), SLOT.dtype)[0]
    run.post({"kind": CommandKind.ADMIT, "slot": 0, "request": FORCED, "state": packed})
    run.launch(steps + WARM + 1)
    run.finish(120.0)
    gaps = np.diff(run.events()["time_ns"].astype(np.int64))[WARM:] / 1000.0
    return float(np.median(gaps))


def run_shapes(
    names: Sequence[str],
    device: Device,
    file: Path,
    budget_s: float,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Row]:
    """Rows of this piece. `configs`: instead of the published ones, for tests."""
    began, rows = time.perf_counter(), []
    done = {row.name for row in read(file) if row.device == device.name}
    for name in names:
        if name in done:
            continue
        if time.perf_counter() - began > budget_s:
            print(f"budget of {budget_s:.0f} s is used up; {name} and what follows is left for the next piece")
            break
        try:
            row = measure(name, configs[name] if configs else shape_config(name), device)
        except CapacityError as e:
            row = Row(name, device.name, note=f"does not fit: {str(e).splitlines()[0]}")
        except MegakernelError as e:
            row = Row(name, device.name, note=f"{type(e).__name__}: {str(e).splitlines()[0]}")
        print(table([row], header=not rows), flush=True)
        rows.append(row)
        with file.open("a") as out:
            out.write(json.dumps(asdict(row)) + "\n")
    return rows


def read(file: Path) -> list[Row]:
    raw = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [Row(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}) for entry in raw]


def table(rows: Sequence[Row], header: bool = True) -> str:
    """Markdown."""
    lines = []
    if header:
        lines += [
            "| shape | context | error of the kernel | of torch bf16 | us a step | floor | times the floor |",
            "|---|---|---|---|---|---|---|",
        ]
    for row in rows:
        if row.note:
            lines.append(f"| {row.name} | | | | | | {row.note} |")
        for i, context in enumerate(row.contexts):
            numbers = f"{row.error:.2e} | {row.torch_error:.2e}" if i == 0 else " | "
            ratio = row.us[i] / row.floor_us[i]
            lines.append(
                f"| {row.name} | {context} | {numbers} | {row.us[i]:.1f} | {row.floor_us[i]:.1f} | {ratio:.2f} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="models", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="published shapes; all of them by default, small ones first")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--file", type=Path, default=Path("models.jsonl"))
    parser.add_argument("--budget", type=float, default=360.0, help="seconds after which no shape is begun")
    parser.add_argument("--positions", type=int, nargs="*", help="only print the errors of tokens decoded at these")
    parser.add_argument("--table", action="store_true", help="only print the table of FILE")
    given = parser.parse_args(argv)
    if given.table:
        print(table(read(given.file)))
        return
    names = given.names or sorted(shape_names(), key=size)
    if given.positions:
        for name in names:
            for at, own, torch_error in position_errors(
                name, shape_config(name), open_device(given.device), given.positions
            ):
                print(
                    f"{name}, position {at}: error of the kernel {own:.2e}, of torch bf16 {torch_error:.2e}", flush=True
                )
        return
    run_shapes(names, open_device(given.device), given.file, given.budget)


def size(name: str) -> int:
    """Elements of a shape's weights; none for an architecture that is not known."""
    config = shape_config(name)
    if not set(config["architectures"]) & known_models().keys():
        return 0
    shapes = parameter_shapes(find_model(config).build(config)).values()
    return sum(int(np.prod(shape)) for shape in shapes)


if __name__ == "__main__":
    run(main)
