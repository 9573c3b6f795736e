"""How one request samples and when it ends. A value, checked when it is made."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from megakernel.errors import InvalidRequest
from megakernel.tasks.record import MAX_TOP

SEED_LIMIT = 1 << 64
PENALTY_LIMIT = 2.0
BIAS_LIMIT = 1e4


@dataclass(frozen=True)
class SamplingParams:
    """Raises InvalidRequest naming field, expected and got.

    max_tokens: most tokens to generate; the context may end the output earlier.
    temperature: 0 takes the likeliest token (the smallest id of equals). top_k 0, top_p 1 and min_p 0 are off.
    repetition_penalty: of tokens in prompt or output, 1 is off. presence_penalty, frequency_penalty: of tokens in
    the output, -2 to 2. seed: None draws one; the same seed gives the same tokens in any batch.
    logprobs: None for none, 0 for the token's own, n for the n likeliest beside it, at most 20.
    stop: texts that end the output and are cut off it. stop_token_ids: more tokens that end it, besides the
    checkpoint's own, which ignore_eos leaves out. logit_bias: added to the logits of these token ids.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, (1 << 31) - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        _number("presence_penalty", self.presence_penalty, -PENALTY_LIMIT, PENALTY_LIMIT)
        _number("frequency_penalty", self.frequency_penalty, -PENALTY_LIMIT, PENALTY_LIMIT)
        if self.seed is not None:
            _integer("seed", self.seed, 0, SEED_LIMIT - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP)
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", "True or False", self.ignore_eos)
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # made a tuple of str when checked

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.stop_token_ids  # type: ignore[return-value]  # made a tuple of int when checked

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        return self.logit_bias  # type: ignore[return-value]  # made a tuple of pairs when checked

    def fields(self, seed: int | None = None) -> dict[str, Any]:
        """Values of the kernel's Sampling structure. `seed` is taken when the request has none of its own."""
        chosen = self.seed if self.seed is not None else seed if seed is not None else secrets.randbits(64)
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": self.top_k,
            "top_logprobs": self.logprobs or 0,
            "logprobs": int(self.logprobs is not None),
            "seed_low": chosen & 0xFFFFFFFF,
            "seed_high": chosen >> 32,
            "biased": int(bool(self.bias)),
        }


def whole_ids(token_ids: Sequence[int], vocab: int, what: str = "prompt", least: int = 0) -> list[int]:
    """The ids as ints. Raises InvalidRequest for what is no id of the vocabulary; `what` begins its sentence."""
    try:
        ids = [operator.index(i) for i in token_ids]
    except TypeError as e:
        raise InvalidRequest(f"{what}: expected token ids, got {token_ids!r:.80}") from e
    for at, number in enumerate(ids):
        if not least <= number < vocab:
            raise InvalidRequest(f"{what}: expected token ids from 0 to {vocab - 1}, got {number} at place {at}")
    return ids


def _wrong(name: str, expected: str, got: object) -> InvalidRequest:
    return InvalidRequest(f"{name}: expected {expected}, got {got!r}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise _wrong(name, f"an integer from {low} to {high}", value)


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (above_low and value <= low):  # type: ignore[operator]
        span = f"above {low:g}, at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise _wrong(name, f"a number {span}", value)


def _texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise _wrong("stop", "a text or several, none empty", value)
    return items


def _token_ids(value: object) -> tuple[int, ...]:
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else None
    good = items is not None and all(isinstance(i, Integral) and not isinstance(i, bool) for i in items)
    if items is None or not good or not all(0 <= i < 1 << 31 for i in items):
        raise _wrong("stop_token_ids", "token ids", value)
    return tuple(dict.fromkeys(int(i) for i in items))


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple):
        raise _wrong("logit_bias", "a number for each of some token ids", value)
    for number, bias in pairs:
        _integer("logit_bias", number, 0, (1 << 31) - 1)
        _number("logit_bias", bias, -BIAS_LIMIT, BIAS_LIMIT)
    return pairs
