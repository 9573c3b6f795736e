"""Sample: one token for each sampled row, in the kernel.

    y[i] = logit + the slot's bias when it has one (-inf for a token that may not come), then penalised:
           repetition (tokens of prompt and output: y / a if y > 0 else y * a), then
           y -= presence * (output count > 0) + frequency * output count
    temperature 0: the largest y; the lowest id among equals
    else z = y / temperature; kept ids: z >= k-th largest z (top_k); of those the fewest with the largest z whose
         probabilities reach top_p, ids equal to the last one included; of those probability >= min_p * the largest;
         token = argmin over kept ids of -log(u[i]) / exp(z[i] - max z), which draws from the kept distribution.
u[i] is uniform in (0, 1), word i % 4 of Philox4x32-10 with key = seed and counter = (position, i / 4, 0, 0), where
position is that of the new token: equal seeds give equal tokens in any batch. Log-probabilities are those of the
logits as the model gave them. A logit that is not a number is a fault.

Philox: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.tasks.record import SAMPLE_RESULT, TILE_ROWS
from megakernel.tasks.struct import Field, Struct
from megakernel.tasks.task import Addresses, Cost, Region, Task, TaskNode, Variant

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SampleConfig(Variant):
    """No compile-time choice yet."""


class Sample(Task):
    """Tile s is sampled row s; a tile past the step's sampled rows does nothing. Columns of `result` are bytes
    shared out in name only: tile s writes row s."""

    name = "sample"
    body = "Sample"
    config = "SampleConfig"
    fields = Struct(
        "SampleFields",
        (
            Field("logits", "u32", doc="offset in the workspace: f32 [sampled][vocab]"),
            Field(
                "scaled", "u32", doc="offset in the workspace: f32 [sampled][vocab], scratch: z, then exp(z - max z)"
            ),
            Field("result", "u32", doc="offset in the workspace: SampleResult[kMaxRows]"),
            Field("vocab", "u32"),
        ),
    )

    @staticmethod
    def reads(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        return (Region(node.tensors["logits"], 0, node.sizes["vocab"]),)

    @staticmethod
    def writes(node: TaskNode, first: int, count: int) -> tuple[Region, ...]:
        def share(tensor: str, cols: int) -> Region:
            return Region(node.tensors[tensor], first * cols // node.tiles, (first + count) * cols // node.tiles)

        return share("scaled", node.sizes["vocab"]), share("result", SAMPLE_RESULT.size)

    @staticmethod
    def cost(node: TaskNode, first: int, count: int, context: int) -> Cost:
        active = 1.0 if first == 0 else 0.0  # one row: only the first tile has work
        return Cost(0.0, active * 4.0 * node.sizes["vocab"], active * 2.0 * node.sizes["vocab"])

    @staticmethod
    def payload(node: TaskNode, at: Addresses) -> Mapping[str, Any]:
        return {
            **{role: at.tensor(node.tensors[role]) for role in ("logits", "scaled", "result")},
            "vocab": node.sizes["vocab"],
        }


def node(name: str, *, vocab: int, logits: str, scaled: str, result: str, max_rows: int = TILE_ROWS) -> TaskNode:
    """Sampling of up to `max_rows` rows.

    Tensors: `logits` f32 [max_rows, vocab]; `scaled` f32 [max_rows, vocab], scratch of this node alone; `result` u8
    [max_rows, SAMPLE_RESULT.size].
    """
    return TaskNode(
        name, Sample, SampleConfig(), max_rows, {"logits": logits, "scaled": scaled, "result": result}, {},
        {"vocab": vocab},
    )  # fmt: skip


@dataclass(frozen=True)
class Params:
    """As the fields of Sampling."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    top_logprobs: int = 0


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds."""
    low, high, mask = seed & 0xFFFFFFFF, seed >> 32, 0xFFFFFFFF
    a, b, c, d = counter
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ low, q & mask, (p >> 32) ^ d ^ high, p & mask
        low, high = (low + 0x9E3779B9) & mask, (high + 0xBB67AE85) & mask
    return a, b, c, d


def uniforms(seed: int, position: int, vocab: int) -> Array:
    """u[i] for every id, float64 [vocab]: 24 bits and a half."""
    words = [w for i in range(-(-vocab // 4)) for w in philox((position, i, 0, 0), seed)]
    return np.asarray((np.array(words[:vocab], np.uint64) >> np.uint64(8)).astype(np.float64) / 2**24 + 2.0**-25)


def penalise(logits: Array, params: Params, seen: Array) -> Array:
    """`seen` as in KernelArgs: bit 15 in the prompt, low bits count output."""
    y = np.asarray(logits, np.float32).copy()
    count = (seen & 0x7FFF).astype(np.float32)
    a = np.float32(params.repetition_penalty)
    y = np.where(seen > 0, np.where(y > 0, y / a, y * a), y)
    y = y - np.float32(params.presence_penalty) * (count > 0) - np.float32(params.frequency_penalty) * count
    return np.asarray(y, np.float32)


def kept(z: Array, params: Params) -> Array:
    """Which ids may be drawn, bool [vocab]; z is float32 and already divided by the temperature."""
    keep = np.ones(len(z), bool)
    if 0 < params.top_k < len(z):
        keep &= z >= np.sort(z)[-params.top_k]
    p = np.where(keep, np.exp(z.astype(np.float64) - z.max()), 0.0)
    if params.top_p < 1.0:
        order = np.sort(z[keep])[::-1]
        mass = np.cumsum(np.exp(order.astype(np.float64) - z.max()))
        last = min(int(np.searchsorted(mass, params.top_p * mass[-1])), len(order) - 1)
        keep &= z >= order[last]
    return np.asarray(keep & (p >= params.min_p), bool)


def reference(logits: Array, params: Params, seen: Array, position: int) -> int:
    """The token of one row; `position` is that of the new token."""
    y = penalise(logits, params, seen)
    if params.temperature == 0.0:
        return int(y.argmax())
    z = (y / np.float32(params.temperature)).astype(np.float32)
    weight = np.where(kept(z, params), np.exp(z.astype(np.float64) - z.max()), 0.0)
    with np.errstate(divide="ignore"):
        return int((-np.log(uniforms(params.seed, position, len(z))) / weight).argmin())


@dataclass(frozen=True)
class Case:
    rows: int
    vocab: int
    params: Params = Params()
    spread: float = 3.0  # standard deviation of the logits


def cases() -> tuple[Case, ...]:
    """Every mode alone and together; vocabularies that no vector width divides."""
    return (
        Case(1, 1),
        Case(16, 49152),
        Case(3, 301, Params(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
        Case(4, 1003, Params(temperature=0.7, seed=5)),
        Case(4, 1003, Params(temperature=1.0, top_k=7, seed=1 << 40)),
        Case(4, 1003, Params(temperature=1.3, top_p=0.9, seed=9)),
        Case(4, 1003, Params(temperature=1.0, min_p=0.05, seed=3)),
        Case(4, 517, Params(0.8, 50, 0.95, 0.01, 1.1, 0.1, 0.1, 77, 20)),
        Case(2, 40, Params(temperature=1.0, top_k=1, seed=2)),
    )
