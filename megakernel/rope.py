"""Rotary embedding: the frequencies of every scaling rule, and tables of cosines and sines.

Formulas: Su et al. 2021 (default), Chen et al. 2023 (linear), Llama 3.1 (llama3), Peng et al. 2023 (yarn), Ding et
al. 2024 (longrope: one table up to the original context, another beyond; the length of the whole table decides). The
frequencies and the angle `position * frequency` are rounded to float32 step by step as Hugging Face transformers
rounds them, because at position 65536 that rounding moves an angle by up to 0.004; cosine and sine of the rounded
angle are then taken in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.errors import GraphError, UnsupportedConfig

Floats = npt.NDArray[np.float32]

PARAMETERS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        }
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "long_factor", "short_factor"}
    ),
}  # fmt: skip
"""Parameters of each rope_type beside rope_type, rope_theta and partial_rotary_factor."""

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_INERT = frozenset({"original_max_position_embeddings"})  # said by some checkpoints for rules that do not use it


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding. The first `rotary_dim` elements of a head are rotated, the rest pass through.

    interleaved: pair (2i, 2i + 1) is rotated by frequency i; otherwise pair (i, i + rotary_dim / 2).
    original_max_positions: context before scaling (llama3, yarn, longrope); for dynamic, the last position it is
    defined for. attention_factor: cosines and sines are multiplied by it (yarn, longrope).
    short_divisors, long_divisors: of each frequency in a table of up to, and of more than original_max_positions.
    """

    rotary_dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("short_divisors", "long_divisors"):  # lists where a saved program was read
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.rope_type not in PARAMETERS:
            raise UnsupportedConfig(f"rope_type {self.rope_type!r} is unknown; known: {', '.join(PARAMETERS)}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise UnsupportedConfig(f"rotary embedding of {self.rotary_dim} elements; expected an even number above 0")
        if not self.theta > 0 or not self.factor > 0:
            raise UnsupportedConfig(f"rope_theta {self.theta} and factor {self.factor} must be above 0")
        if self.rope_type in ("llama3", "yarn", "dynamic", "longrope") and self.original_max_positions < 1:
            raise UnsupportedConfig(f"rope_type {self.rope_type} needs original_max_position_embeddings")
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UnsupportedConfig(
                f"rope_type llama3: expected 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )
        if self.rope_type == "yarn" and not (self.theta > 1 and self.beta_fast > 0 and self.beta_slow > 0):
            raise UnsupportedConfig(
                f"rope_type yarn: expected rope_theta above 1, beta_fast and beta_slow above 0, got {self.theta}, "
                f"{self.beta_fast} and {self.beta_slow}"
            )
        for name in ("short_divisors", "long_divisors") if self.rope_type == "longrope" else ():
            if len(getattr(self, name)) != self.rotary_dim // 2:
                got = len(getattr(self, name))
                raise UnsupportedConfig(f"rope_type longrope needs {self.rotary_dim // 2} {name}, got {got}")

    def frequencies(self, length: int = 0) -> Floats:
        """Radians per position, float32 [rotary_dim / 2], in a table of that many positions."""
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        powers = np.power(np.float64(np.float32(self.theta)), exponent.astype(np.float64)).astype(np.float32)
        plain: Floats = np.float32(1) / powers
        if self.rope_type == "linear":
            plain = plain / np.float32(self.factor)
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(plain, powers)
        if self.rope_type == "longrope":
            divisors = self.long_divisors if length > self.original_max_positions else self.short_divisors
            return np.asarray(np.float32(1) / (np.array(divisors, np.float32) * powers), np.float32)
        return plain

    def at(self, positions: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Cosines and sines at those positions, each float32 [positions, rotary_dim / 2], attention factor included.

        The last position is that of a table whose length decides between the two rules of longrope.
        """
        where = np.asarray(positions).reshape(-1, 1)
        if self.rope_type == "dynamic" and where.size and where.max() >= self.original_max_positions:
            raise GraphError(
                f"dynamic rotary embedding has one table up to position {self.original_max_positions - 1}, "
                f"got {int(where.max())}; shorten the context"
            )
        length = int(where.max()) + 1 if where.size else 0
        angles = (where.astype(np.float32) * self.frequencies(length)).astype(np.float64)
        scale = np.float32(self.attention_factor)
        return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale

    def table(self, max_positions: int) -> tuple[Floats, Floats]:
        """`at` positions 0 to max_positions - 1."""
        return self.at(np.arange(max_positions))

    def _llama3(self, plain: Floats) -> Floats:
        """Long wavelengths are divided by `factor`, short ones kept, a blend between."""
        low, high = np.float32(self.low_freq_factor), np.float32(self.high_freq_factor)
        original, factor = np.float32(self.original_max_positions), np.float32(self.factor)
        wavelength = np.float32(2 * math.pi) / plain
        longest = np.float32(self.original_max_positions / self.low_freq_factor)
        shortest = np.float32(self.original_max_positions / self.high_freq_factor)
        scaled = np.where(wavelength > longest, plain / factor, plain)
        smooth = (original / wavelength - low) / (high - low)
        blend = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
        between = (wavelength >= shortest) & (wavelength <= longest)
        return np.where(between, blend, scaled)

    def _yarn(self, plain: Floats, powers: Floats) -> Floats:
        """Frequencies that turn more than beta_fast times in the original context are kept, slow ones interpolated."""
        low, high = self._yarn_dimension(self.beta_fast), self._yarn_dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        index = np.arange(self.rotary_dim // 2, dtype=np.float32)
        ramp = np.clip((index - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
        keep = np.float32(1) - ramp
        interpolated = np.float32(1) / (np.float32(self.factor) * powers)
        out: Floats = interpolated * (np.float32(1) - keep) + plain * keep
        return out

    def _yarn_dimension(self, rotations: float) -> float:
        """The dimension whose frequency makes that many turns in the original context."""
        turns = math.log(self.original_max_positions / (rotations * 2 * math.pi))
        return (self.rotary_dim * turns) / (2 * math.log(self.theta))


def rope_spec(
    parameters: Mapping[str, Any], head_dim: int, max_positions: int, *, partial: bool, interleaved: bool = False
) -> RopeSpec:
    """The RopeSpec of a config's `rope_parameters` (rope_type, rope_theta, factor, ...).

    partial: whether the family rotates only a part of a head when partial_rotary_factor says so.
    Raises UnsupportedConfig for an unknown rope_type, or a parameter that it does not understand or lacks.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in PARAMETERS:
        raise UnsupportedConfig(f"rope_parameters.rope_type {kind!r} is unknown; known: {', '.join(PARAMETERS)}")
    unknown = sorted(set(given) - PARAMETERS[kind] - _COMMON - _INERT)
    if unknown:
        raise UnsupportedConfig(f"rope_parameters of rope_type {kind!r}: {', '.join(unknown)} not understood")
    if kind not in ("default", "longrope") and "factor" not in given:
        raise UnsupportedConfig(f"rope_parameters of rope_type {kind!r} lacks factor")
    fraction = _number(given, "partial_rotary_factor", 1.0)
    if fraction != 1.0 and not partial:
        raise UnsupportedConfig(f"partial_rotary_factor {fraction}: this architecture rotates whole heads")
    original = int(_number(given, "original_max_position_embeddings", max_positions))
    factor = _number(given, "factor", max_positions / max(1, original) if kind == "longrope" else 1.0)
    return RopeSpec(
        rotary_dim=int(head_dim * fraction),
        theta=_number(given, "rope_theta", 10000.0),
        rope_type=kind,
        interleaved=interleaved,
        factor=factor if kind != "dynamic" else 1.0,
        low_freq_factor=_number(given, "low_freq_factor", 1.0),
        high_freq_factor=_number(given, "high_freq_factor", 4.0),
        original_max_positions=0 if kind in ("default", "linear") else max_positions if kind == "dynamic" else original,
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        truncate=_flag(given, "truncate", True),
        attention_factor=_attention_factor(given, kind, factor, original),
        short_divisors=_divisors(given, "short_factor") if kind == "longrope" else (),
        long_divisors=_divisors(given, "long_factor") if kind == "longrope" else (),
    )


def same_rope(parameters: Mapping[str, Any] | None, scaling: Mapping[str, Any] | None, theta: Any) -> bool:
    """Whether a config's `rope_scaling`, the older key, says what its `rope_parameters` says. One of them may be empty.

    A base may stand beside rope_scaling (`theta`). Which of two that differ was meant cannot be known: transformers
    takes the older one whole, and with it the family's own base.
    """
    if not parameters or not scaling:
        return True

    def plain(given: Mapping[str, Any]) -> dict[str, Any]:
        kind = given.get("rope_type", given.get("type", "default"))
        return {**{key: value for key, value in given.items() if key != "type"}, "rope_type": kind}

    beside = {} if theta is None else {"rope_theta": theta}
    return plain({**beside, **parameters}) == plain({**beside, **scaling})


def _divisors(given: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = given.get(key)
    if not isinstance(values, (list, tuple)) or not values:
        raise UnsupportedConfig(f"rope_parameters.{key}: expected a list of numbers, got {values!r}")
    return tuple(_number({key: value}, key, 1.0) for value in values)


def _attention_factor(given: Mapping[str, Any], kind: str, factor: float, original: int) -> float:
    """The factor on cosines and sines: as stated, or 0.1 ln(factor) + 1 or the ratio of two such terms (yarn), or
    sqrt(1 + ln(factor) / ln(original context)) (longrope)."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in given:
        return _number(given, "attention_factor", 1.0)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = _number(given, "mscale", 0.0), _number(given, "mscale_all_dim", 0.0)
    return term(over) / term(under) if over and under else term(1.0)


def _flag(given: Mapping[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise UnsupportedConfig(f"rope_parameters.{key}: expected true or false, got {value!r}")
    return value


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UnsupportedConfig(f"rope_parameters.{key}: expected a number, got {value!r}")
    return float(value)
