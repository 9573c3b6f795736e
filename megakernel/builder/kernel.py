"""The generated translation unit: includes, a type list of task variants, one entry. No algorithm is in here."""

from __future__ import annotations

from collections.abc import Sequence

from megakernel.device.device import KernelSource
from megakernel.target import Target
from megakernel.tasks.attention import Attention
from megakernel.tasks.matmul import Matmul
from megakernel.tasks.record import TILE_ROWS, c_header
from megakernel.tasks.task import TASKS_FOLDER, TaskNode, all_fields, device_half

ABI_HEADER = "megakernel_abi.h"
LANGUAGE_MODEL = frozenset({"advance", "attention", "combine", "embedding", "matmul", "norm", "sample"})
"""Tasks that every language model has: devices may have bodies of their own for them, so they are always declared."""


def variants_of(nodes: Sequence[TaskNode]) -> tuple[str, ...]:
    """The distinct task variants in order of first use; the index is the opcode."""
    return tuple(dict.fromkeys(variant_text(n) for n in nodes))


def variant_text(node: TaskNode) -> str:
    """C++ type of a node's task, e.g. `Matmul<MatmulConfig{.tile_n = 32}>`."""
    return f"{node.task.body}<{node.task.config}{node.variant.cpp()}>"


def stages_before_pages(nodes: Sequence[TaskNode], target: Target) -> int:
    """Most units that a worker streams of a product that an attention reads. They are the only ones that some of its
    warps may not have read when others are at the attention's pages, because that has its input when all before was
    done. Tiles are dealt evenly, give or take one."""
    read = {n.tensors["qkv"] for n in nodes if n.task is Attention}
    products = [n for n in nodes if n.task is Matmul and n.tensors["output"] in read]
    return max((n.sizes["units"] * (-(-n.tiles // target.workers) + 1) for n in products), default=0)


def kernel_source(
    nodes: Sequence[TaskNode], target: Target, *, capacity: int = TILE_ROWS, chaos: bool = False, trace: bool = False
) -> KernelSource:
    """Source of the kernel that runs these nodes on this target; a step has room for `capacity` rows."""
    halves = [device_half(task) for task in {n.task for n in nodes}]
    outside = sorted(str(path) for path in halves if path.parent != TASKS_FOLDER)
    files = sorted({path.stem for path in halves if path.parent == TASKS_FOLDER} | LANGUAGE_MODEL)
    variants = variants_of(nodes)
    ranks = next((n.sizes["ranks"] for n in nodes if n.task.sends(n) or n.task.receives(n)), 1)
    lines = [
        "// Generated: a list of task variants. The algorithms are in the headers.",
        f"#define MEGAKERNEL_UNITS {max((n.sizes.get('units', 1) for n in nodes), default=1)}  // of the longest input",
        f"#define MEGAKERNEL_BEFORE_PAGES {stages_before_pages(nodes, target)}  // see `stages_before_pages`",
        f'#include "{ABI_HEADER}"',
        f'#include "megakernel/device/{target.backend}.h"',
        f'#include "megakernel/device/{target.backend}_peer.h"',
        *(f'#include "megakernel/tasks/{name}.cuh"' for name in files),
        *(f'#include "{path}"' for path in outside),
        "#include MEGAKERNEL_DRIVER",  # of the device: how its workers play their roles
        "",
        "namespace megakernel::tasks {",
        "using Tasks = TaskList<",
        ",\n".join(f"    {v}" for v in variants) + ">;",
        "}  // namespace megakernel::tasks",
        "",
        "MEGAKERNEL_ENTRY(megakernel::tasks::Tasks)",
        "",
    ]
    header = c_header(all_fields(), capacity, ranks)
    return KernelSource("\n".join(lines), {ABI_HEADER: header}, target, chaos, trace)
