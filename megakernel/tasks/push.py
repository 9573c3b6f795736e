"""Push: this rank's part of an exchange into the window of every peer.

window of each peer, buffer[rank, r, c] = input[r, c]       buffer [ranks, rows, cols] float32

Then the peer's counter of this sender gets the number of tiles: the peer knows that all is there when it has reached
the tiles of the node times the step. With `stamped` there is no counter: an element is 8 bytes, the float and in the
high half the stamp of exchange and step, stored as one. With `sampled` the rows are those whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Exchange, Region, Task, TaskNode, Variant, tile_columns

FLOAT_BYTES, STAMPED_BYTES = 4, 8  # of an element in a window
EXCHANGE_SIZES = ("exchange", "exchanges", "buffer", "rows", "ranks", "element", "cols")  # of a node that sends


@dataclass(frozen=True)
class PushConfig(Variant):
    sampled: bool = False
    stamped: bool = False


class Push(Task):
    """Tile t sends columns `[t * tile_cols, (t + 1) * tile_cols)` of every row. It writes no workspace."""

    name = "push"
    awaits_values = True
    body = "Push"
    config = "PushConfig"
    fields = Struct(
        "PushFields",
        (
            Field("buffer", "u64", doc="offset in every window: [ranks][rows][cols] elements"),
            Field("input", "u32", doc="offset in the workspace: f32 [rows][cols]"),
            Field("exchange", "u32", doc="its number"),
            Field("exchanges", "u32", doc="of a step"),
            Field("rows", "u32", doc="rows that the buffer has room for"),
            Field("cols", "u32"),
            Field("tile_cols", "u32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["input"], *tile_columns(node, first, count)),)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return ()

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        low, high = tile_columns(node, first, count)
        sent = float((high - low) * (node.sizes["ranks"] - 1) * node.sizes["element"])
        return Cost(other_bytes=4.0 * (high - low), link_bytes=sent)

    @staticmethod
    def sends(node: TaskNode) -> Exchange | None:
        return exchange_of(node)

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        sizes = ("buffer", "exchange", "exchanges", "rows", "cols", "tile_cols")
        return {"input": at.tensor(node.tensors["input"]), **{key: node.sizes[key] for key in sizes}}


def exchange_of(node: TaskNode) -> Exchange:
    """The exchange of a node with the sizes of `node` below."""
    s = node.sizes
    size = s["element"] * s["ranks"] * s["rows"] * s["cols"]
    return Exchange(s["exchange"], s["buffer"], s["buffer"] + size, s["element"] == STAMPED_BYTES)


def exchange_sizes(
    *, cols: int, exchange: int, exchanges: int, buffer: int, rows: int, ranks: int, stamped: bool
) -> dict[str, int]:  # fmt: skip
    """What a node that sends says of its exchange. `buffer`: byte offset in every window, with room for `rows` rows of
    `cols` columns of each rank. `exchanges`: how many a step has."""
    element = STAMPED_BYTES if stamped else FLOAT_BYTES
    values = (exchange, exchanges, buffer, rows, ranks, element, cols)
    return dict(zip(EXCHANGE_SIZES, values, strict=True))


def node(
    name: str, *, input: str, sizes: Mapping[str, int], tile_cols: int, sampled: bool = False, layer: int = -1
) -> TaskNode:  # fmt: skip
    """Tensor `input`: f32 [rows, cols]. `sizes`: the `exchange_sizes`."""
    cols = sizes["cols"]
    width = min(cols, tile_cols)
    config = PushConfig(sampled, sizes["element"] == STAMPED_BYTES)
    return TaskNode(
        name, Push, config, -(-cols // width), {"input": input}, {}, {**sizes, "tile_cols": width}, {}, layer
    )  # fmt: skip
