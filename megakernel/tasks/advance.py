"""Advance: ends a step. Takes the sampled tokens, reports them, takes commands, and makes the next step's header.

For each row of the step its slot's position moves past it. A sampled token is stored as the slot's next token, counted
in `seen` when the slot has a penalty, and written to the token ring; it finishes its slot when it is a stop token
(Finish.STOP, the token is reported) or when it is the last that the slot's limit allows (Finish.LENGTH). Then the
mailbox: ADMIT puts a sequence into a slot, CANCEL frees one and reports EventKind.RETIRED, OPEN lets a gated slot (one
whose bias the host makes anew for every token) sample up to another position. The next step computes one
row for each slot that is past its prompt, then as many prompt tokens as rows are left, in slot order; the last token
of a prompt is a sampled row. With no row to compute the launch ends (ExitReason.IDLE), at the step limit too (STEPS).

A paced program shares the rows that are left evenly among the prompts, so that a short prompt does not wait for a long
one, and keeps steps that carry both kinds of rows under `step_budget_ns`: such a step has at most `chunk` prompt rows,
first as many as the cost model says; a step that took nearly as long shrinks it, one that took clearly less lets it
grow. Neither changes what a row computes.

The devices of a program of several ranks have the same slots and make the same headers. What they could see
differently, how many commands there are and how many prompt rows fit, rank 0 decides and writes into the windows of the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megakernel.tasks.record import NONE, SAMPLE_RESULT
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant


@dataclass(frozen=True)
class AdvanceConfig(Variant):
    """`paced`: prompts share the rows evenly, and a step keeps to its budget; else prompts go in slot order."""

    inputs: bool = False  # whether a prompt may have ids below 0, which stand for rows of the host
    paced: bool = False


class Advance(Task):
    """One tile, the last of a step: everything else of the step comes before it."""

    name = "advance"
    body = "Advance"
    config = "AdvanceConfig"
    fields = Struct(
        "AdvanceFields",
        (
            Field("result", "u32", doc="offset in the workspace: SampleResult[kMaxRows]"),
            Field(
                "logits", "u32", doc="offset in the workspace, or kNone; for a device that finds the largest by itself"
            ),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["result"], 0, SAMPLE_RESULT.size),)

    @staticmethod
    def may_await(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        """Where every row wants its largest logit only, what `sample` writes is not looked at."""
        logits = node.tensors.get("logits")
        return () if logits is None else (Region(logits, 0, node.sizes["vocab"]),)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return ()

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        return Cost(other_bytes=1024.0, flops=100.0)

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        logits = node.tensors.get("logits")
        return {"result": at.tensor(node.tensors["result"]), "logits": NONE if logits is None else at.tensor(logits)}


def node(
    name: str, *, result: str, logits: str | None = None, vocab: int = 0, inputs: bool = False, paced: bool = False
) -> TaskNode:
    """The end of a step. Tensor `result`: what `sample` wrote; `logits`: what it read, of `vocab` columns."""
    tensors = {"result": result} if logits is None else {"result": result, "logits": logits}
    return TaskNode(name, Advance, AdvanceConfig(inputs, paced), 1, tensors, sizes={"vocab": vocab})
