"""A task with an operator of its own, compared and timed against the operators that it replaces.

    MEGAKERNEL_TASKS=examples/double_norm python -m bench.task double_norm

Both graphs are those of the operator's `demo`, on the CPU device and the same weights and rows. A step computes one
row; the two take turns, and the figures are medians over rounds of the time of a launch divided by its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.ending import run
from megakernel.builder.build import build_graph_program
from megakernel.capture import Captured
from megakernel.devices import open_device
from megakernel.errors import InvalidRequest
from megakernel.graph import INPUT, Graph, GraphBuilder, ModelConfig
from megakernel.module import CompiledModule
from megakernel.runtime import Runtime
from megakernel.settings import read_settings
from megakernel.target import Target
from megakernel.tasks.task import Operator, all_operators


@dataclass(frozen=True)
class Timing:
    """tasks: nodes of the program. us_per_step: median. error: relative, against the interpreter in float32."""

    operator: str
    fused: bool
    cols: int
    tasks: int
    us_per_step: float
    error: float


def graph_of(operator: Operator, cols: int, fused: bool) -> Graph:
    config = ModelConfig(operator.name, 1, cols, 0, 1, 1, 1, 1, 1 << 20, False)
    b = GraphBuilder(config)
    return b.finish(operator.demo(b, cols, fused))


def weight(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Near one, the same for both graphs."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (1.0 + 0.2 * rng.standard_normal(shape)).astype(np.float32)


def opened(graph: Graph, steps: int, workers: int | None) -> CompiledModule:
    import torch

    settings, device = read_settings(), open_device("cpu")
    target: Target = device.target.with_workers(workers or device.target.workers)
    program = build_graph_program(
        graph, target, device, cache=settings.cache, dtype="f32", max_slots=1, max_context=steps, max_rows=1
    )
    weights = {t.name: torch.from_numpy(weight(t.name, t.shape)) for t in graph.weights}
    captured = Captured(graph, weights, torch.Size((1,)), False, (INPUT,), {})
    return CompiledModule(captured, Runtime(program, device, captured.read))


def measure(name: str, cols: int, steps: int, rounds: int, workers: int | None = None) -> list[Timing]:
    """Unfused and fused. Raises InvalidRequest for an operator that no task declares."""
    operators = all_operators()
    if name not in operators:
        raise InvalidRequest(
            f"no task declares an operator {name!r}; declared: {', '.join(operators) or 'none'}; set MEGAKERNEL_TASKS "
            "to the folder of yours"
        )
    graphs = [graph_of(operators[name], cols, fused) for fused in (False, True)]
    modules = [opened(graph, steps, workers) for graph in graphs]
    rows = np.random.default_rng(0).standard_normal((steps, cols)).astype(np.float32)
    seconds: list[list[float]] = [[], []]
    outputs: list[Any] = [None, None]
    try:
        for _ in range(rounds + 1):  # the first round is not counted
            for i, module in enumerate(modules):
                began = time.perf_counter()
                outputs[i] = module(rows)
                seconds[i].append(time.perf_counter() - began)
    finally:
        for module in modules:
            module.close()
    found = []
    for i, graph in enumerate(graphs):
        want = graph.interpret(lambda n: weight(n, graphs[0].tensor(n).shape), rows)[graph.output].numpy()
        error = float(np.linalg.norm(outputs[i] - want) / np.linalg.norm(want))
        step = statistics.median(seconds[i][1:]) / steps * 1e6
        found.append(Timing(name, bool(i), cols, len(modules[i].program.manifest.nodes), step, error))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("operator")
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = measure(given.operator, given.cols, given.steps, given.rounds, given.workers)
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    for row in rows:
        kind = "fused" if row.fused else "unfused"
        print(f"{row.operator} {kind:8} {row.tasks:3} tasks {row.us_per_step:8.2f} us a step, error {row.error:.1e}")
    print(f"fused is {rows[0].us_per_step / rows[1].us_per_step:.2f} times as fast")


if __name__ == "__main__":
    run(main)
