"""Chat templates: Jinja in a sandbox, with the extensions that published templates rely on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megakernel.checkpoint.message import problem
from megakernel.errors import InvalidRequest


class TemplateRefusal(jinja2.TemplateError):
    """A template called raise_exception."""


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (as its base class declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """Templates by name ("default", "tool_use", ...) and the texts of the named tokens that they may use."""

    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    where: Path

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        values: Mapping[str, Any],
    ) -> str:
        """The text of a conversation. Raises InvalidRequest when the template refuses it."""
        try:
            template = _environment().from_string(self._choose(tools))
        except jinja2.TemplateSyntaxError as error:
            raise problem(
                "the chat template is not valid Jinja", self.where, got=f"line {error.lineno}: {error.message}"
            ) from error
        try:
            return template.render(
                **{
                    **self.named_tokens,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **values,
                }
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}\n  where: {self.where}\n"
                f"  got: roles {[message.get('role') for message in messages if isinstance(message, Mapping)]}"
            ) from error

    def source(self, tools: bool) -> str:
        """The Jinja text that `render` uses with or without tools; empty when there is none."""
        names = ("tool_use", "default") if tools else ("default",)
        return next((self.templates[name] for name in names if name in self.templates), "")

    def _choose(self, tools: Sequence[Any] | None) -> str:
        for name in (("tool_use",) if tools else ()) + ("default",):
            if name in self.templates:
                return self.templates[name]
        names = ", ".join(sorted(self.templates))
        raise problem("the checkpoint has no default chat template", self.where, expected="default", got=names)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
