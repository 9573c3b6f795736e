"""Nodes of every task that have each element type, norm, epilogue, activation and option at least once."""

from __future__ import annotations

from typing import Any

from megakernel.target import Target
from megakernel.tasks import (
    advance,
    attention,
    combine,
    embedding,
    hidden,
    input,
    matmul,
    norm,
    output,
    push,
    receive,
    sample,
)
from megakernel.tasks.matmul import Activation
from megakernel.tasks.task import WEIGHT_TYPES, DType, TaskNode

PIECE = 256  # tokens of an item of attention


def every_task(target: Target) -> list[TaskNode]:
    """For one kernel that holds all of it; nobody runs it."""
    return [
        advance.node("advance", result="r", logits="l", inputs=True, paced=True),
        sample.node("sample", vocab=1003, logits="l", scaled="t", result="r"),
        hidden.node("hidden", cols=96, input="x"),
        input.node("input", cols=96, output="x", width=96, column=0),
        output.node("output", cols=96, input="x", width=96, column=0, result="r"),
        combine.node(
            "combine", heads=6, kv_heads=2, head_dim=64, partials="p", output="y", piece_tokens=PIECE, max_pieces=2,
            shares=2,
        ),
        *_norms(),
        *_exchanges(),
        *(n for kind in WEIGHT_TYPES for n in _of_type(kind, target)),
        *(_attention(kind, target) for kind in DType),
    ]  # fmt: skip


def _norms() -> list[TaskNode]:
    kinds: tuple[tuple[str, str | None, str | None], ...] = (
        ("RMS", None, "x"), ("LAYER", "b", None), ("LAYER", "b", "x"), ("NONE", None, "x"),
    )  # fmt: skip
    return [
        norm.node(
            f"norm {kind} {beta} {residual}", cols=96, input="x", output="y", norming=norm.Norming[kind],
            gamma=None if kind == "NONE" else "g", beta=beta, residual=residual,
        )
        for kind, beta, residual in kinds
    ]  # fmt: skip


def _exchanges() -> list[TaskNode]:
    """Between devices, as these targets do it; with and without a residual, and of logits."""
    found = []
    for sampled, residual in ((False, None), (False, "x"), (True, None)):
        sizes = push.exchange_sizes(cols=96, exchange=0, exchanges=1, buffer=0, rows=16, ranks=2, stamped=True)
        sent = push.node(f"push {sampled}", input="p", sizes=sizes, tile_cols=64, sampled=sampled)
        found += [] if residual else [sent]
        found.append(
            receive.node(
                f"receive {sampled} {residual}", sent=sent, cols=150 if sampled else 96, output="y", tile_cols=64,
                residual=residual,
            )
        )  # fmt: skip
    return found


ALL: dict[str, Any] = {"gamma": "g", "bias": "b", "sampled": True, "softcap": 30.0}
MATMULS: dict[DType, tuple[dict[str, Any], ...]] = {
    DType.BF16: (
        ALL, {"glu": Activation.GELU_TANH}, {"activation": Activation.GELU},
    ),
    DType.F16: (ALL, {"gamma": "g", "glu": Activation.SILU}),
    DType.F32: ({"residual": "x", "bias": "b"}, {"activation": Activation.RELU, "bias": "b"}),
}  # fmt: skip


def _attention(kind: DType, target: Target) -> TaskNode:
    keys: dict[str, Any] = {
        "qkv": "q", "partials": "p", "kv_layer": 0, "kv_dtype": kind, "page_tokens": target.page_tokens,
        "piece_tokens": PIECE, "max_pieces": 2, "splits": 1, "scale": 0.125,
    }  # fmt: skip
    every = {"cos": "c", "sin": "s", "q_gamma": "g", "k_gamma": "g", "softcap": 50.0, "interleaved": True}
    heads, head_dim, options = (6, 64, {}) if kind is DType.F16 else (8, 128, every)
    return attention.node(f"attention {kind}", heads=heads, kv_heads=2, head_dim=head_dim, **options, **keys)


def _of_type(kind: DType, target: Target) -> list[TaskNode]:
    """What has weights."""
    return [
        embedding.node(f"embedding {kind}", cols=96, table="t", output="x", dtype=kind, positions="p", inputs=True),
        *(
            matmul.node(
                f"matmul {kind} {i}", n=96, k=64, input="x", output="y", weight="w", dtype=kind, tile_n=target.tile_n,
                **given,
            )
            for i, given in enumerate(MATMULS[kind])
        ),
    ]  # fmt: skip
