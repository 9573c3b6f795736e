"""From the bytes of a request to a model of schema.py, or an ApiError that names the field."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from megakernel.errors import ApiError
from megakernel.serve.schema import REQUESTS, UNSUPPORTED, Body

T = TypeVar("T", bound=Body)
SHOWN = 5  # problems told in one message


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError past `limit` bytes, without reading on."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "content-type: expected application/json", param="content-type")
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
    told: dict[str, str] = {}  # field -> what is wrong with it; of a union, its first alternative
    for error in found:
        path = [part for part in error["loc"] if isinstance(part, int) or part in FIELDS or error["loc"][-1] == part]
        if len(path) > 1 and isinstance(path[-1], str) and path[-1] not in FIELDS and not _is_extra(error):
            path.pop()  # the name of a union's alternative
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


def _is_extra(error: ErrorDetails) -> bool:
    return error["type"] == "extra_forbidden"


def _text(error: ErrorDetails, path: list[int | str]) -> str:
    if _is_extra(error):
        why = UNSUPPORTED.get(str(path[-1])) if len(path) == 1 else None
        return f"not supported: {why}" if why else "unknown field"
    if error["type"] == "missing":
        return "this field is required"
    return error["msg"].removeprefix("Value error, ")


def _field_names() -> frozenset[str]:
    """Names of all fields of all bodies, so that a path of a union shows no internal names."""
    names: set[str] = set()
    left: list[Any] = list(REQUESTS)
    done: set[Any] = set()
    while left:
        item = left.pop()
        if item in done or not _hashable(item):
            continue
        done.add(item)
        if issubclass(type(item), type) and issubclass(item, BaseModel):
            names |= {field.alias or name for name, field in item.model_fields.items()}
            left += [field.annotation for field in item.model_fields.values()]
        left += get_args(item)
    return frozenset(names)


def _hashable(item: Any) -> bool:
    try:
        hash(item)
    except TypeError:
        return False
    return True


FIELDS = _field_names()
