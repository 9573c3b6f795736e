"""config.json: reading JSON files with clear errors, and one spelling for the rotary embedding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megakernel.checkpoint.message import problem
from megakernel.rope import same_rope

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Keys of a nested `rope_parameters`, one set a layer type."""


def read_json(path: Path) -> Any:
    """The parsed file. Raises CheckpointError with line and column when it is not JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise problem("the file cannot be read", path, got=error.strerror or error) from error
    except UnicodeDecodeError as error:
        raise problem("the file is not UTF-8 text", path, got=error, todo="download it again") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise problem("the file is not valid JSON", path, got=at, todo="download it again") from error


def parse_json(text: str, where: Path) -> Any:
    """`json.loads`, but a key that is there twice raises CheckpointError instead of losing one of the values."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise problem(f"{', '.join(twice[:5])}: there twice", where, expected="each key once", todo="remove one")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise problem("the JSON is nested too deep", where, got=str(error), todo="download it again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The parsed file, which must hold a JSON object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise problem("the file does not hold a JSON object", path, expected="{...}", got=type(value).__name__)
    return value


def normalise_rope(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """`config` with `rope_theta`, `rope_scaling` and `rope_local_base_freq` folded into `rope_parameters`.

    The result has `rope_parameters` {rope_type, ...}, or one such set for each layer type, when the config says
    anything about rotary embedding. A base that it does not state is left out: each family has its own. Raises
    CheckpointError when the two spellings contradict each other.
    """
    out = dict(config)
    old = {key: out.pop(key, None) for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")}
    theta, scaling, local = old.values()
    given = out.get("rope_parameters") or scaling or {}
    for value in (given, scaling or {}):
        if not isinstance(value, Mapping):
            raise problem("rope_parameters is not an object", where, got=repr(value))
    if not same_rope(out.get("rope_parameters"), scaling, theta):
        raise problem("rope_scaling contradicts rope_parameters", where, expected=given, got=scaling, todo="remove one")
    if any(kind in given for kind in LAYER_TYPES):
        bases = dict(zip(LAYER_TYPES, (theta, local)))
        out["rope_parameters"] = {
            kind: _one_rope(value, bases.get(kind), out, where) for kind, value in given.items() if value is not None
        }
    elif local is not None:
        out["rope_parameters"] = {
            "full_attention": _one_rope(given, theta, out, where),
            "sliding_attention": _one_rope({}, local, out, where),
        }
    elif given or theta is not None:
        stated = given.get("rope_theta")
        if theta is not None and stated is not None and theta != stated:
            raise problem(
                "rope_theta contradicts rope_parameters.rope_theta",
                where,
                expected=theta,
                got=stated,
                todo="remove one",
            )
        out["rope_parameters"] = _one_rope(given, theta, out, where)
    return out


def _one_rope(given: Any, theta: Any, config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise problem("rope_parameters is not an object", where, got=repr(given))
    rope = {key: value for key, value in given.items() if key != "type"}
    rope.setdefault("rope_type", given.get("type", "default"))
    stated = rope.get("rope_theta")
    base = theta if stated is None else stated
    if base is not None:
        if isinstance(base, bool) or not isinstance(base, (int, float)) or base <= 0:
            raise problem("rope_theta is not a base", where, expected="a number above 0", got=repr(base))
        rope["rope_theta"] = float(base)
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        original = config.get("original_max_position_embeddings")
        if original is not None:
            rope["original_max_position_embeddings"] = original
        elif config.get("max_position_embeddings") is not None:
            rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return rope
