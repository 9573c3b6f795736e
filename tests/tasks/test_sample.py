"""Embedding and sampling on the CPU device against their references."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from megakernel.tasks import embedding, sample
from megakernel.tasks.record import FAULT, LAUNCH, MAX_TOP, SAMPLE_RESULT, SLOT, ExitReason, FaultKind
from megakernel.tasks.sample import Case, Params
from megakernel.tasks.task import Addresses, TaskNode

from .harness import Array, Machine, Rows, blank, build, deal, decode_rows, rounded, run_node, step_header


def embedding_of(case: embedding.Case) -> TaskNode:
    return embedding.node(
        "e", cols=case.cols, table="t", output="x", dtype=case.dtype, scale=case.scale, tile_cols=case.tile_cols
    )


def sample_of(vocab: int) -> TaskNode:
    return sample.node("s", vocab=vocab, logits="l", scaled="z", result="r")


@lru_cache(maxsize=1)
def kernel() -> tuple[Path, tuple[TaskNode, ...]]:
    nodes = (*(embedding_of(c) for c in embedding.cases()), sample_of(1))
    return build(nodes), nodes


@pytest.mark.parametrize("case", embedding.cases(), ids=str)
def test_embedding(case: embedding.Case) -> None:
    rng = np.random.default_rng(0)
    table = rounded(rng.standard_normal((case.vocab, case.cols)), case.dtype)
    tokens = rng.integers(0, case.vocab, case.rows)
    tokens[-1] = case.vocab - 1
    binary, nodes = kernel()
    out = run_node(
        binary, nodes, embedding_of(case), Rows(tuple((int(t), 0, i, 0) for i, t in enumerate(tokens))),
        weights={"t": table}, tensors={"x": blank(case.rows, case.cols)}, workers=2,
    )  # fmt: skip
    assert np.array_equal(out["x"], embedding.reference(table.astype(np.float32), tokens, case.scale))


def slots_of(params: Params, count: int) -> Array:
    slots = np.zeros(count, SLOT.dtype)
    o = slots["sampling"]
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    for key in ("temperature", "top_p", "min_p", "top_k", *penalties):
        o[key] = getattr(params, key)
    o["top_logprobs"], o["logprobs"] = params.top_logprobs, 1
    o["seed_low"], o["seed_high"] = params.seed & 0xFFFFFFFF, params.seed >> 32
    return slots


def draw(logits: Array, params: Params, seen: Array, positions: list[int], workers: int = 1) -> Array:
    """SampleResult of each row; `positions` are those of the rows whose logits these are."""
    rows, vocab = logits.shape
    binary, nodes = kernel()
    result = np.full(16 * SAMPLE_RESULT.size, 0xFF, np.uint8)
    out = run_node(
        binary, nodes, sample_of(vocab), decode_rows(positions, range(rows)), weights={}, workers=workers, vocab=vocab,
        tensors={"l": logits, "z": blank(rows, vocab), "r": result},
        extra={"slots": slots_of(params, rows).view(np.uint8), "seen": seen},
    )  # fmt: skip
    assert out["l"].tobytes() == logits.tobytes()
    return out["r"].view(SAMPLE_RESULT.dtype)[:rows]


def inputs(case: Case) -> tuple[Array, Array, list[int]]:
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    logits = (case.spread * rng.standard_normal((case.rows, case.vocab))).astype(np.float32)
    seen = np.where(rng.random((case.rows, case.vocab)) < 0.3, rng.integers(0, 5, (case.rows, case.vocab)), 0)
    seen = np.where(rng.random((case.rows, case.vocab)) < 0.2, seen | 0x8000, seen).astype(np.uint16)
    return logits, seen, [7 + 13 * i for i in range(case.rows)]


@pytest.mark.parametrize("case", sample.cases(), ids=str)
def test_values(case: Case) -> None:
    logits, seen, positions = inputs(case)
    got = draw(logits, case.params, seen, positions, workers=2)
    for r in range(case.rows):
        token = sample.reference(logits[r], case.params, seen[r], positions[r] + 1)
        assert got["token"][r] == token
        x = logits[r].astype(np.float64)
        logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert abs(got["logprob"][r] - logprobs[token]) < 1e-5
        top = min(case.params.top_logprobs, case.vocab)
        assert got["top_count"][r] == top
        order = np.lexsort((np.arange(case.vocab), -logits[r]))[:top]
        assert got["top_token"][r][:top].tolist() == order.tolist()
        assert np.allclose(got["top_logprob"][r][:top], logprobs[order], atol=1e-5)


def test_every_id_can_win_and_ties_go_to_the_lowest() -> None:
    vocab = 131
    for first in range(0, vocab, 16):
        ids = range(first, min(vocab, first + 16))
        logits = np.full((len(ids), vocab), -1e30, np.float32)
        for r, i in enumerate(ids):
            logits[r, i] = -5.0
        seen = np.zeros((len(ids), vocab), np.uint16)
        assert draw(logits, Params(), seen, [0] * len(ids))["token"].tolist() == list(ids)
    ties = np.full((2, vocab), -3.0, np.float32)
    ties[1, [40, 101]] = 2.0
    for params in (Params(), Params(repetition_penalty=1.5), Params(temperature=0.5, top_k=1, top_logprobs=MAX_TOP)):
        got = draw(ties, params, np.zeros((2, vocab), np.uint16), [3, 3])
        if params.temperature == 0.0:
            assert got["token"].tolist() == [0, 40]
        else:  # ids equal to the k-th are all kept
            assert got["token"][1] in (40, 101)
            assert got["top_token"][1][:3].tolist() == [40, 101, 0]


@pytest.mark.parametrize("params", [Params(temperature=1.0), Params(temperature=2.0, top_p=0.8)], ids=str)
def test_distribution(params: Params) -> None:
    """20,000 draws at different positions and seeds follow the kept distribution: chi-square under the 0.1 % bound."""
    logits = np.array([0.3, -1.0, 1.2, 0.0, -0.4, 0.9, -2.0], np.float32)
    z = logits / np.float32(params.temperature)
    p = np.where(sample.kept(z, params), np.exp(z.astype(np.float64)), 0)
    p /= p.sum()
    counts = np.zeros(len(logits))
    binary, nodes = kernel()
    machine = Machine(binary, nodes, max_slots=16, vocab=len(logits))
    at = machine.segment("workspace", {"l": np.tile(logits, (16, 1)), "z": blank(16, 7), "r": np.zeros(2816, np.uint8)})
    machine.queues(deal(sample_of(len(logits)), 1), Addresses({}.__getitem__, at.__getitem__))
    rounds = 1250
    for i in range(rounds):
        slots = slots_of(params, 16)
        slots["sampling"]["seed_low"] = np.arange(16) // 4
        machine.view("slots", np.uint8)[:] = slots.view(np.uint8)
        machine.run_step(decode_rows([4 * i + r % 4 for r in range(16)], range(16)))
        result = machine.view("workspace", np.uint8)[at["r"] : at["r"] + 2816].view(SAMPLE_RESULT.dtype)
        counts += np.bincount(result["token"], minlength=len(logits))
    machine.close()
    drawn = p > 0
    expect = p * 16 * rounds
    assert counts[~drawn].sum() == 0
    chi = ((counts[drawn] - expect[drawn]) ** 2 / expect[drawn]).sum()
    assert chi < 24.3


def test_a_row_is_the_same_alone() -> None:
    case = replace(sample.cases()[-2], rows=5)
    logits, seen, positions = inputs(case)
    whole = draw(logits, case.params, seen, positions, workers=3)
    for r in range(case.rows):
        alone = draw(logits[r : r + 1], case.params, seen[r : r + 1], [positions[r]])
        assert alone["token"][0] == whole["token"][r] and alone["logprob"][0] == whole["logprob"][r]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_a_number_is_a_fault(bad: float) -> None:
    binary, nodes = kernel()
    vocab = 37
    machine = Machine(binary, nodes, vocab=vocab)
    logits = np.zeros((2, vocab), np.float32)
    logits[1, 36] = bad
    at = machine.segment("workspace", {"l": logits, "z": blank(2, vocab), "r": np.zeros(2816, np.uint8)})
    machine.queues(deal(sample_of(vocab), 1), Addresses({}.__getitem__, at.__getitem__))
    machine.view("headers", np.uint8)[-512:] = step_header(decode_rows([4, 9], [0, 1])).reshape(1).view(np.uint8)
    machine.view("launch", LAUNCH.dtype)["published"] = 1
    machine.executable.launch(machine.args())
    assert machine.executable.join(10)
    fault = machine.view("fault", FAULT.dtype)[0]
    assert fault["kind"] == FaultKind.NAN_LOGITS and fault["tile"] == 1 and fault["target"] == 9
    assert machine.view("launch", LAUNCH.dtype)["exit"][0] == ExitReason.FAULT
    machine.close()


def test_philox_known_answer() -> None:
    """The generator's published test vectors (Random123, kat_vectors, philox4x32 10)."""
    assert sample.philox((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    got = sample.philox((ones, ones, ones, ones), (ones << 32) | ones)
    assert got == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
