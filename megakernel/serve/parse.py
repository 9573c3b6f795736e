"""From the bytes of a request to a model of schema.py, or an ApiError that names the field."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from megakernel.errors import ApiError
from megakernel.serve.schema import REQUESTS, UNSUPPORTED, Body

T = TypeVar("T", bound=Body)
Path = tuple[str | int, ...]
SHOWN = 5  # problems told in one message


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError past `limit` bytes, without reading on, and after `timeout_s`."""
    try:
        return await asyncio.wait_for(_read(request, limit), timeout_s)
    except asyncio.TimeoutError as e:
        late = f"the body was not complete after {timeout_s:g} s"
        raise ApiError(408, late, kind="timeout_error", code="deadline") from e


async def _read(request: Request, limit: int) -> bytes:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "content-type: expected application/json", param="content-type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "content-encoding: expected none; send the body as it is", param="content-encoding")
    told = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    if told.isdigit() and int(told) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect as e:
        raise ApiError(400, "the client left before the body was complete") from e
    return b"".join(parts)


def parse(kind: type[T], body: bytes) -> T:
    """Raises ApiError 400."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        found = e.errors(include_url=False, include_input=False, include_context=False)
        raise _refusal(found) from None


def _refusal(found: list[ErrorDetails]) -> ApiError:
    told: dict[str, str] = {}  # field -> what is wrong with it
    for error in _of_forms(found):
        path = [part for part in error["loc"] if isinstance(part, int) or part in FIELDS or error["loc"][-1] == part]
        if len(path) > 1 and isinstance(path[-1], str) and path[-1] not in FIELDS and not _is_extra(error):
            path.pop()  # a key of an object
        name, text = ".".join(str(part) for part in path), _text(error, path)
        own, _, rest = text.partition(": ")
        if own in FIELDS and own not in path:  # a check over several fields names its own
            name, text = f"{name}.{own}".lstrip("."), rest
        told.setdefault(name or "body", text)
    shown = [f"{name}: {text}"[:500] for name, text in list(told.items())[:SHOWN]]
    more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    first = next(iter(told))
    code = "unsupported_field" if first in UNSUPPORTED else None
    return ApiError(400, "; ".join(shown) + more, param=first[:200], code=code)


def _of_forms(found: list[ErrorDetails]) -> list[ErrorDetails]:
    """Of a field with several forms, only what is wrong with the form that was meant; else one error, with all forms.

    pydantic tells what is wrong with each form, whose name follows the field's in the path."""
    out: list[ErrorDetails] = []
    forms: dict[Path, dict[str | int, list[ErrorDetails]]] = {}
    for error in found:
        path = error["loc"]
        at = next((i for i, part in enumerate(path[:-1], 1) if part in FORMS), 0)
        if not at:
            out.append(error)
            continue
        errors = forms.setdefault(path[:at], {}).setdefault(path[at], [])
        errors.append({**error, "loc": (*path[:at], *path[at + 1 :])})
    for path, by_form in forms.items():
        fits = {form: _misfit(errors) for form, errors in by_form.items()}
        meant = [by_form[form] for form in fits if fits[form] == max(fits.values())]
        if len({str(errors) for errors in meant}) == 1:
            out += meant[0]
        else:
            text = f"expected {FORMS[str(path[-1])]}"
            out.append({"type": "no_form", "loc": path, "msg": text, "input": None})
    return out


def _misfit(errors: list[ErrorDetails]) -> float:
    """How deep in a value it first was of another type than the form wants; infinite: it is of the form."""
    wrong = [len(e["loc"]) for e in errors if e["type"].endswith("_type") or e["type"] == "literal_error"]
    return min(wrong, default=math.inf)


def _is_extra(error: ErrorDetails) -> bool:
    return error["type"] == "extra_forbidden"


def _text(error: ErrorDetails, path: list[int | str]) -> str:
    if _is_extra(error):
        why = UNSUPPORTED.get(str(path[-1])) if len(path) == 1 else None
        return f"not supported: {why}" if why else "unknown field"
    if error["type"] == "missing":
        return "this field is required"
    return error["msg"].removeprefix("Value error, ")


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    """All fields of all bodies by name."""
    left: list[Any] = list(REQUESTS)
    done: set[Any] = set()
    while left:
        item = left.pop()
        if item in done or not _hashable(item):
            continue
        done.add(item)
        if issubclass(type(item), type) and issubclass(item, BaseModel):
            yield from ((field.alias or name, field) for name, field in item.model_fields.items())
            left += [field.annotation for field in item.model_fields.values()]
        left += get_args(item)


def _hashable(item: Any) -> bool:
    try:
        hash(item)
    except TypeError:
        return False
    return True


def _several(field: FieldInfo) -> bool:
    """Whether a field may be of several forms."""
    return len([kind for kind in get_args(field.annotation) if kind is not type(None)]) > 1 and get_origin(
        field.annotation
    ) in (Union, UnionType)


FIELDS = frozenset(name for name, _ in _fields())  # no other part of a path is shown
FORMS = {name: field.description for name, field in _fields() if _several(field)}
