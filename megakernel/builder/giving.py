"""Which products get their input packed by those who publish it, in steps of several rows on CUDA devices.

Where one product reads a tensor (others may read it too, as what they add to their outputs), who writes the tensor
also publishes it as the product's matrix operand: times the gamma of its norm, in the type of its weights, with the
sums of squares of each eight columns. So the product's workers need not pack it first and hand it to each other. What
is published lies behind the tensor. See device/cuda_packed.cuh.

In steps of more rows who writes gives what one node alone reads, the next one, without a norm: it packs it in the place
of the float32 values. See device/cuda_wide_order.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megakernel.builder.memory import ALIGN, TensorSize
from megakernel.tasks.combine import Combine, CombineConfig
from megakernel.tasks.embedding import Embedding, EmbeddingConfig
from megakernel.tasks.matmul import Epilogue, Matmul, MatmulConfig
from megakernel.tasks.record import TILE_ROWS
from megakernel.tasks.task import DType, TaskNode

CHUNK = 32  # columns of the operand that a row has side by side


def given_bytes(columns: int) -> int:
    """Room behind a tensor for its packed form: of each row the sums of squares of its octets, then the columns, which
    are padded to whole chunks."""
    chunks = -(-columns // CHUNK)
    return ALIGN + TILE_ROWS * chunks * (CHUNK // 8 * 4 + CHUNK * 2)


def give_inputs(
    nodes: Sequence[TaskNode], tensors: Mapping[str, TensorSize]
) -> tuple[tuple[TaskNode, ...], dict[str, TensorSize]]:
    """The nodes with `gives` and `given` where it can be, and the sizes of tensors with room for what is given. Behind
    outputs of products there is room already."""
    made, sizes = list(nodes), dict(tensors)
    for i, reader in enumerate(nodes):
        writer = _giver(nodes, reader)
        if writer is None:
            continue
        name = reader.tensors["input"]
        made[i] = replace(made[i], variant=replace(made[i].variant, given=True))  # type: ignore[call-arg]
        made[writer] = _giving(made[writer], reader)
        if made[writer].task is not Matmul:
            size = sizes[name]
            rows = -(-given_bytes(size.cols) // (4 * size.cols))
            sizes[name] = replace(size, rows=size.rows + rows)
    return tuple(made), sizes


def give_wide(nodes: Sequence[TaskNode]) -> tuple[TaskNode, ...]:
    """The nodes with `gives_wide` and `given_wide` where it can be."""
    made = list(nodes)
    for i, reader in enumerate(nodes[1:], 1):
        v = reader.variant
        if not isinstance(v, MatmulConfig) or not v.given or v.norm or _giver(nodes, reader) != i - 1:
            continue
        writer, name = made[i - 1], reader.tensors["input"]
        if sum(r.tensor == name for n in nodes for r in n.task.reads(n, 0, n.tiles)) != 1:
            continue
        if isinstance(writer.variant, MatmulConfig | CombineConfig):
            chunks = reader.sizes["k_unit"] // CHUNK
            made[i - 1] = replace(writer, variant=replace(writer.variant, gives_wide=chunks))
            made[i] = replace(made[i], variant=replace(v, given_wide=True))
    return tuple(made)


def _giver(nodes: Sequence[TaskNode], reader: TaskNode) -> int | None:
    """The node that can give a product its input."""
    if not isinstance(reader.variant, MatmulConfig):
        return None
    name, k = reader.tensors["input"], reader.sizes["k"]
    if k != reader.sizes["k_unit"] * reader.sizes["units"]:  # nobody would give the padding
        return None
    if sum(n.task is Matmul and n.tensors["input"] == name for n in nodes) > 1:
        return None
    writers = [
        i for i, n in enumerate(nodes) if n.tensors.get("output") == name and n.task in (Matmul, Embedding, Combine)
    ]
    if len(writers) != 1 or sum(_writes(n, name) for n in nodes) != 1:
        return None
    return writers[0] if _can_give(nodes[writers[0]], reader.variant.norm) else None


def _writes(node: TaskNode, name: str) -> bool:
    return any(r.tensor == name for r in node.task.writes(node, 0, node.tiles))


def _can_give(node: TaskNode, normed: bool) -> bool:
    v = node.variant
    if isinstance(v, MatmulConfig):
        return not v.sampled and v.epilogue is not Epilogue.SEND and not (v.norm and normed)
    if isinstance(v, EmbeddingConfig):
        return v.dtype is not DType.F32 and not v.positions and not v.inputs and node.sizes["tile_cols"] % 8 == 0
    return isinstance(v, CombineConfig) and not normed


def _giving(node: TaskNode, reader: TaskNode) -> TaskNode:
    weights = dict(node.weights)
    if "gamma" in reader.weights:
        weights["gamma"] = reader.weights["gamma"]
    v = node.variant
    if isinstance(v, CombineConfig):
        assert isinstance(reader.variant, MatmulConfig)
        return replace(node, variant=replace(v, gives=True, half=reader.variant.dtype is DType.F16))
    assert isinstance(v, MatmulConfig | EmbeddingConfig)
    return replace(node, variant=replace(v, gives=True), weights=weights)
