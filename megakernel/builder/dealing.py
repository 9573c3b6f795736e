"""Which products of wide steps are dealt by shares on CUDA devices.

A worker needs all rows of a product's input for its tiles. Where these are few and the input is long, it brings far
more input than weights. Of a product that is dealt it multiplies one share (an eighth of the columns) of eight times as
many tiles instead, and workers exchange what comes of it: float32 sums of each (tile, share), behind the product's
output. See device/cuda_wide.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megakernel.builder.giving import CHUNK
from megakernel.builder.memory import TensorSize
from megakernel.tasks.matmul import Epilogue, MatmulConfig
from megakernel.tasks.record import TILE_ROWS, row_capacity
from megakernel.tasks.task import TaskNode

SHARES = 8  # of the columns: consumers of a worker
GROUP = 8  # tiles for which a worker brings its input once, twice as many of a product that is dealt
HAND_OFF_BYTES = 96 << 10  # what a worker of an H200 brings in the 3 us that an exchange between workers takes


def deal_products(
    nodes: Sequence[TaskNode], tensors: Mapping[str, TensorSize], workers: int, max_rows: int
) -> tuple[tuple[TaskNode, ...], dict[str, TensorSize]]:
    """The nodes with `dealt` where it pays, and the sizes of their outputs with room for the sums."""
    made, sizes = list(nodes), dict(tensors)
    for i, node in enumerate(nodes):
        v = node.variant
        if not isinstance(v, MatmulConfig) or v.sampled or v.epilogue in (Epilogue.GLU, Epilogue.SEND):
            continue
        unit, units = node.sizes["k_unit"], node.sizes["units"]
        # Each share has a chunk.
        if unit < SHARES * CHUNK or not pays(node.tiles, workers, unit * units * v.dtype.bytes):
            continue
        made[i] = replace(node, variant=replace(v, dealt=True))
        size = sizes[node.tensors["output"]]
        behind = -(-sums_bytes(node.tiles * v.tile_n, row_capacity(max_rows)) // (4 * size.cols))
        sizes[node.tensors["output"]] = replace(size, rows=size.rows + behind)
    return tuple(made), sizes


def sums_bytes(columns: int, rows: int) -> int:
    return SHARES * columns * rows * 4


def pays(tiles: int, workers: int, row_bytes: int) -> bool:
    """In the smallest of wide steps; the more rows, the more it pays. `row_bytes`: of a row of the input."""
    rows, own = 2 * TILE_ROWS, -(-tiles // workers)
    brought = row_bytes * rows * -(-own // GROUP)
    dealt = row_bytes * rows // SHARES * -(-own * SHARES // (2 * GROUP))
    exchanged = 2 * sums_bytes(own * 8, rows)  # out and in
    return brought - dealt - exchanged > HAND_OFF_BYTES
