"""SamplingParams: what is refused and how, and what the kernel is given."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megakernel.errors import InvalidRequest
from megakernel.sampling import SamplingParams
from megakernel.tasks.record import SAMPLING


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "8"),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", None),
        ("top_k", -1), ("top_k", 2.0), ("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.01), ("min_p", 1.5),
        ("repetition_penalty", 0.0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("seed", -1),
        ("seed", 1 << 64), ("logprobs", 21), ("logprobs", -1), ("stop", ""), ("stop", ["a", ""]), ("stop", 5),
        ("stop", [1]), ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("stop_token_ids", ["a"]), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: expected .*, got {re.escape(repr(value))}$"):
        SamplingParams(**{field: value})


def test_defaults_are_greedy() -> None:
    fields = SamplingParams().fields(seed=5)
    assert fields["temperature"] == 0 and fields["logprobs"] == 0 and fields["top_logprobs"] == 0
    assert SAMPLING.unpack(SAMPLING.pack(fields))["seed_low"] == 5


def test_the_kernel_is_given_every_field() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
                            presence_penalty=-1, frequency_penalty=2, seed=(3 << 32) | 9, logprobs=0)  # fmt: skip
    fields = params.fields(seed=1)
    assert set(fields) == {f.name for f in SAMPLING.fields}
    assert (fields["seed_high"], fields["seed_low"], fields["logprobs"], fields["top_logprobs"]) == (3, 9, 1, 0)
    assert SamplingParams(logprobs=20).fields()["top_logprobs"] == 20


def test_seeds_are_drawn_when_not_given() -> None:
    seeds = {(f["seed_low"], f["seed_high"]) for f in (SamplingParams().fields() for _ in range(8))}
    assert len(seeds) == 8


def test_stops_become_tuples() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[3, 3, 4])
    assert params.stop_texts == ("a",) and params.stop_ids == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stop_texts == ("a", "b") and SamplingParams().stop_texts == ()
    assert hash(params) == hash(SamplingParams(stop="a", stop_token_ids=[3, 3, 4]))
