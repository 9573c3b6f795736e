"""Many small models on the CPU device at little cost: one kernel holds the task variants of all of them.

It is compiled with few optimisations: these tests are of numbers, not of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megakernel.builder.build import Plan, assemble, plan_graph
from megakernel.builder.cache import compiled
from megakernel.builder.kernel import kernel_source, variant_text, variants_of
from megakernel.device.cpu import CpuDevice, compile_source, find_compiler
from megakernel.device.device import KernelSource
from megakernel.graph import Graph
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.settings import read_settings
from megakernel.target import Target
from megakernel.tasks.task import TaskNode
from tests.models.families import Array

FLAGS = ("-O1",)


class QuickDevice(CpuDevice):
    """The same code with fewer optimisations."""

    def compiler_id(self, target: Target) -> str:
        return " ".join((super().compiler_id(target), *FLAGS))

    def compile(self, source: KernelSource, include: Path, output: Path) -> None:
        compile_source(source, include, output, find_compiler(), FLAGS)


class Kernel:
    """One kernel for all of these graphs, float32, one slot. fields: of the target, where they differ."""

    def __init__(self, graphs: Iterable[Graph], max_context: int, **fields: Any) -> None:
        self.device = QuickDevice()
        self.target = replace(self.device.target, **fields)
        self.max_context = max_context
        nodes: dict[str, TaskNode] = {}
        for graph in graphs:
            for node in self.plan(graph).lowered.nodes:
                nodes.setdefault(variant_text(node), node)
        kept = tuple(nodes.values())
        self.variants = variants_of(kept)
        self.source = kernel_source(kept, self.target)
        self.binary = compiled(self.source, self.device, read_settings().cache)

    def plan(self, graph: Graph) -> Plan:
        return plan_graph(graph, self.target, dtype="f32", max_slots=1, max_context=self.max_context, max_rows=16)

    def logits(self, graph: Graph, read: Callable[[str, slice], Array], ids: Sequence[int], start: int) -> Array:
        """The first `start` + 1 tokens are a prompt, in chunks of 16 rows; the others come one by one."""
        program = assemble(self.plan(graph), self.source, self.binary, variants=self.variants)
        runtime = Runtime(program, self.device, lambda name, _dtype, rows: read(name, rows))
        try:
            return forced_logits(runtime, ids, start)
        finally:
            runtime.close()
