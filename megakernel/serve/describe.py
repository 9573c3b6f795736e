"""The OpenAPI description, made of the models that check the requests."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from megakernel.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
REFERENCE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = {
    "400": "A field is wrong; param names it.", "401": "The API key is missing or wrong.",
    "403": "The page's origin may not call.", "404": "Unknown model.", "405": "Wrong method.",
    "408": "The body did not come in time.", "413": "The body is too large.", "415": "Not JSON.",
    "429": "The queue is full; see Retry-After.", "500": "The kernel stopped.", "503": "Not ready; see Retry-After.",
    "504": "The deadline passed.",
}  # fmt: skip


def requests_of(path: str) -> dict[str, Any]:
    """What a route adds to its description."""
    reference = {"$ref": REFERENCE.format(model="Error")}
    failures = {
        status: {"description": text, "content": {"application/json": {"schema": reference}}}
        for status, text in ERRORS.items()
        if path in BODIES or status in ("401", "403", "404", "405", "503")
    }
    if path in ("/health", "/ready"):
        failures["503"] = {"description": "Not ready.", "content": {"application/json": {"schema": {"type": "object"}}}}
    good: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in ("/v1/chat/completions", "/v1/completions"):
        good["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/metrics":
        good = {"text/plain": {"schema": {"type": "string"}}}
    made: dict[str, Any] = {"responses": {"200": {"description": "Good.", "content": good}, **failures}}
    if path in BODIES:
        name = {"$ref": REFERENCE.format(model=BODIES[path].__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": name}}}
    return made


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description; made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema([(body, "validation") for body in BODIES.values()], ref_template=REFERENCE)
        components = made.setdefault("components", {}).setdefault("schemas", {})
        components |= {**schemas["$defs"], "Error": ERROR}
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = made
    return app.openapi_schema
