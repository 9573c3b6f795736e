"""How the heads of an attention lie in memory where a target wants other sizes than the model's: padded, or in pairs.

A head whose size is no multiple of what the target takes is padded with zeros: its rows of the q, k and v weights, its
columns of the output weights. Zeros add nothing to a product, and what a norm of a head divides by is put right in its
gamma and eps. Rotations whose halves the target cannot keep apart have their two elements side by side: q and k rows
are packed in that order, which leaves every score as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakernel.builder.fuse import Fused, FusedAttention, FusedMatmul, FusedNorm, FusedOperator
from megakernel.errors import LoweringError
from megakernel.target import Target


@dataclass(frozen=True)
class HeadOrder:
    """`size`: elements of a head in the model; `padded`: in memory; `half`: elements `i` and `i + half` are neighbours,
    0: they stay as they are."""

    size: int
    half: int
    padded: int

    @property
    def share(self) -> float:
        """What a mean over the padded head must be divided by to be that over the head."""
        return self.size / self.padded

    def cols(self, stored: int) -> int:
        """Columns of `stored` elements of whole heads."""
        return stored // self.size * self.padded


def head_order(item: FusedAttention, target: Target) -> HeadOrder | None:
    """None where the heads are as in the model."""
    half = item.rope.rotary_dim // 2 if item.rope and not item.rope.interleaved else 0
    paired = half if half % target.rotary_multiple else 0
    padded = -(-item.head_dim // target.head_multiple) * target.head_multiple
    return HeadOrder(item.head_dim, paired, padded) if paired or padded != item.head_dim else None


def head_orders(fused: Sequence[Fused], target: Target) -> tuple[dict[str, HeadOrder], dict[str, HeadOrder]]:
    """By tensor: of q, k and v before and after a norm over all heads; of the outputs. Raises LoweringError where
    something else than a product reads a padded output."""
    projected: dict[str, HeadOrder] = {}
    outputs: dict[str, HeadOrder] = {}
    for item in fused:
        order = head_order(item, target) if isinstance(item, FusedAttention) else None
        if order is None or not isinstance(item, FusedAttention):
            continue
        projected[item.qkv] = order
        for norm in fused:
            if isinstance(norm, FusedNorm) and norm.output == item.qkv:
                projected[norm.input] = order
        if order.padded != order.size:
            outputs[item.output] = order
    for item in fused:
        plain = isinstance(item, FusedMatmul) and item.norm is None and item.residual not in outputs
        read = item.inputs if isinstance(item, FusedOperator) else (getattr(item, "input", ""),)
        padded = [name for name in read if name in outputs]
        if padded and not plain:
            raise LoweringError(
                f"node {item.name}: head_dim {outputs[padded[0]].size} is no multiple of {target.head_multiple}, "
                f"which {target.name} needs where anything but a product reads the heads"
            )
    return projected, outputs
