"""How many rows a step carries, by the cost model.

A step reads every weight once, whatever its rows, and computes with each row: it takes about

    t(rows) = max(weight bytes / bandwidth, rows * operations of a row / rate of all workers)

Up to the rows where both are equal another row is free; many more than that make prompts no faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from megakernel.target import Target
from megakernel.tasks.record import MAX_ROWS, TILE_ROWS
from megakernel.tasks.task import TaskNode

COMPUTE_SHARE = 12  # a full step computes for so many times as long as it streams
MOST_DEFAULT = 128
WORKSPACE_BYTES = 256 << 20  # of a default program on the CPU
GPU_WORKSPACE_BYTES = 512 << 20  # on a GPU: so much, or an eighth of the weights


def row_flops(nodes: Sequence[TaskNode], context: int) -> float:
    """Floating-point operations of one row with `context` tokens in the cache."""
    return sum(n.task.cost(n, 0, n.tiles, context).flops for n in nodes)


def step_us(target: Target, stream_bytes: float, flops: float, rows: int) -> float:
    """The formula above, microseconds; `flops` of one row."""
    return max(stream_bytes / target.stream_gbps / 1e3, rows * flops / (target.worker_gflops * target.workers) / 1e3)


def default_rows(
    target: Target, stream_bytes: float, flops: float, row_bytes: float, *, room: int = MAX_ROWS, alone: bool = False
) -> int:
    """Rows of a program whose user did not say: a power of two whose workspace, `row_bytes` a row, stays small.

    `room`: rows that the target's kernels have room for. `alone`: one sequence at a time. On a GPU such a program gets
    one tile of rows: it is for the least time of a step of one row, which takes longer in a kernel with room for more
    (3 to 4 % on an H200, whose prompts that room makes more than twice as fast)."""
    rows = TILE_ROWS
    if alone and target.backend != "cpu":
        return rows
    most_bytes = WORKSPACE_BYTES if target.backend == "cpu" else max(GPU_WORKSPACE_BYTES, stream_bytes / 8)
    stream = step_us(target, stream_bytes, flops, 0)
    while rows < min(MOST_DEFAULT, room) and step_us(target, 0.0, flops, rows) < COMPUTE_SHARE * stream:
        if 2 * rows * row_bytes > most_bytes:
            break
        rows *= 2
    return rows


def first_chunk(target: Target, stream_bytes: float, flops: float, budget_us: float, max_rows: int) -> int:
    """Prompt rows that fit a step of `budget_us`; at least 1. Measured steps correct it (see advance.py)."""
    rows = max_rows
    while rows > 1 and step_us(target, stream_bytes, flops, rows) > budget_us:
        rows -= 1
    return rows
