"""What a checkpoint says about how to generate: stop tokens, sampling defaults, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel.checkpoint.message import problem


@dataclass(frozen=True)
class GenerationDefaults:
    """Values a request may override. None: the checkpoint does not say.

    `eos_token_ids` may be empty. It is the union, without repeats, of generation_config.json, config.json and the
    tokenizer's own end token, in this order: a later file adds stop tokens and never removes one.
    For every other value the first of the two files that has it wins.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None


def token_ids(value: Any, key: str, where: Path) -> tuple[int, ...]:
    """`value` of an end-token field: an id, a list of ids, or None for none."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise problem(f"{key} is not a token id", where, expected="an id, a list of ids, or null", got=repr(value))
    return tuple(items)


def generation_defaults(
    where: Path, generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None
) -> GenerationDefaults:
    """Merge generation_config.json and config.json (either may be empty) with the tokenizer's end token."""
    found: list[int] = []
    for source in (generation, config):
        found += token_ids(source.get("eos_token_id"), "eos_token_id", where)
    found += [] if tokenizer_eos is None else [tokenizer_eos]

    def first(key: str, kind: type) -> Any:
        for source in (generation, config):
            value = source.get(key)
            if value is None:
                continue
            wrong = isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float)
            if wrong or kind(value) != value:
                raise problem(f"{key} has the wrong type", where, expected=kind.__name__, got=repr(value))
            return kind(value)
        return None

    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(found)),
        bos_token_id=first("bos_token_id", int),
        pad_token_id=first("pad_token_id", int),
        do_sample=first("do_sample", bool),
        temperature=first("temperature", float),
        top_k=first("top_k", int),
        top_p=first("top_p", float),
        min_p=first("min_p", float),
        repetition_penalty=first("repetition_penalty", float),
        max_length=first("max_length", int),
        max_new_tokens=first("max_new_tokens", int),
    )
