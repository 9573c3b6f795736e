"""Which form of tool calls a model has, and the grammar of a call that must come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megakernel.checkpoint import Tokenizer
from megakernel.errors import ApiError
from megakernel.serve.calls import CLOSING, MARKS, CallParser
from megakernel.serve.schema import ChatRequest, NamedTool, ResponseFormat, Tool

HIDDEN = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool_call>", CLOSING)
"""Tokens that some checkpoints call special, though a parser has to read them."""
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models write JSON
FREE_SPACING = {"whitespace_pattern": "[ \\t\\r\\n]{0,16}"}  # where a model began by itself; never endless


def form_of(template: str, wanted: str = "auto") -> str | None:
    """hermes, llama3 or mistral by what the chat template writes; None when it takes no tools."""
    if wanted != "auto":
        return None if wanted == "none" else wanted
    for form in ("mistral", "hermes", "llama3"):
        if MARKS[form] in template:
            return form
    if "tools" not in template:
        return None
    return "llama3" if '"parameters":' in template else "hermes"


class Tools:
    """The tools of one request: how its answers are read, and what they must be."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, wanted: str) -> None:
        """Raises ApiError 400 for a choice that cannot be kept."""
        choice = body.tool_choice
        self._tokenizer = tokenizer
        self.offered = list(body.tools or [])
        if not self.offered and choice not in (None, "none", "auto"):
            raise _refusal("tool_choice", "expected only with tools")
        if choice == "none":
            self.offered = []
        self.form: str | None = None
        self.forced: list[Tool] = []
        self.answer: dict[str, Any] | None = None  # the schema of an answer that makes no call, if it has to fit one
        if not self.offered:
            return
        template = tokenizer.chat.source(tools=True) if tokenizer.chat else ""
        self.form = form_of(template, wanted)
        if wanted != "none" and (self.form is None or "tools" not in template):
            raise _refusal("tools", "the chat template of this model takes no tools")
        if choice not in (None, "auto"):
            if self.form is None:
                raise _refusal("tool_choice", "required and a named function need --tool-call-parser")
            self.forced = self._chosen(choice)
        if self.form is not None and not self.forced:
            self.answer = _answer(body.response_format)
        self._one_only = not body.parallel_tool_calls or bool(self.forced) or self.answer is not None

    def _chosen(self, choice: str | NamedTool) -> list[Tool]:
        if isinstance(choice, str):
            return self.offered
        found = [tool for tool in self.offered if tool.function.name == choice.function.name]
        if not found:
            raise _refusal("tool_choice", f"there is no tool {choice.function.name[:200]!r}")
        return found

    @property
    def marks(self) -> frozenset[int]:
        """Ids of tokens that must be seen as text."""
        if self.form is None:
            return frozenset()
        ids = (self._tokenizer.raw.token_to_id(text) for text in HIDDEN)
        return frozenset(i for i in ids if i is not None)

    @property
    def strict(self) -> bool:
        """Whether calls that the model makes by itself are kept to a grammar."""
        free = self.form is not None and not self.forced and self.answer is None
        return free and any(tool.function.strict for tool in self.offered)

    def parser(self) -> CallParser | None:
        return None if self.form is None else self.new_parser()

    def new_parser(self) -> CallParser:
        assert self.form is not None
        return CallParser(self.form, {tool.function.name for tool in self.offered}, self._one_only)

    def grammar(self) -> str | None:
        """Lark, as llguidance reads it, of the one call that must come, or an answer instead; None if nothing must."""
        if not self.forced and self.answer is None:
            return None
        assert self.form is not None
        calls = [self._call(i, tool) for i, tool in enumerate(self.forced or self.offered)]
        before, after = {
            "hermes": (f'{self._mark("<tool_call>")} "\\n"', f'"\\n" {self._mark(CLOSING)}'),
            "llama3": ("", ""),
            "mistral": (self._mark("[TOOL_CALLS]"), "") if self._named_first
            else (f'{self._mark("[TOOL_CALLS]")} " ["', '"]"'),
        }[self.form]  # fmt: skip
        rules = [f"start: {before} call {after}", "call: " + " | ".join(f"call{i}" for i in range(len(calls)))]
        if self.answer is not None:
            rules[0] += " | answer"
            rules.append(f"answer: %json {json.dumps({**self.answer, 'x-guidance': {'whitespace_flexible': False}})}")
        return "\n".join([*rules, *calls]) + "\n"

    def own_grammar(self) -> str:
        """Lark of what follows where a model begins a call by itself (see CallParser.open), and of anything behind it.

        Arguments of a strict function fit its schema, those of another are an object."""
        calls = " | ".join(f"call{i}" for i in range(len(self.offered)))
        before = '(ws "[")? ' if self.form == "mistral" and not self._named_first else ""
        rules = [f"start: {before}ws call REST", f"call: {calls}", "ws: BLANKS?", r"BLANKS: /[ \t\r\n]{1,16}/"]
        for i, tool in enumerate(self.offered):
            schema = _schema(tool) if tool.function.strict else {"type": "object"}
            if self._named_first:
                rules.append(f"call{i}: {json.dumps(tool.function.name)} {self._mark('[ARGS]')} arguments{i}")
            else:
                texts = [json.dumps(text, ensure_ascii=False) for text in ("name", tool.function.name, self._key)]
                name, function, key = (json.dumps(text) for text in texts)
                parts = ['"{"', name, '":"', function, '","', key, '":"', f"arguments{i}", '"}"']
                rules.append(f"call{i}: {' ws '.join(parts)}")
            rules.append(f"arguments{i}: %json {json.dumps({**schema, 'x-guidance': FREE_SPACING})}")
        return "\n".join([*rules, r"REST: /(.|\n)*/"]) + "\n"

    @property
    def _named_first(self) -> bool:
        """Of mistral: the later of its two forms."""
        template = self._tokenizer.chat.source(tools=True) if self._tokenizer.chat else ""
        return self.form == "mistral" and "[ARGS]" in template

    @property
    def _key(self) -> str:
        return "parameters" if self.form == "llama3" else "arguments"

    def _call(self, i: int, tool: Tool) -> str:
        """The rules of one function's call. Its schema is the root of a JSON grammar, so that its $defs are found."""
        name = tool.function.name
        schema = {**_schema(tool), "x-guidance": SPACING}
        if self._named_first:
            parts = [json.dumps(name), self._mark("[ARGS]"), f"arguments{i}"]
        else:
            head = f'"name": {json.dumps(name, ensure_ascii=False)}, "{self._key}": '
            # The brace by itself, as in JSON: an answer may begin with it too.
            parts = ['"{"', json.dumps(head), f"arguments{i}", '"}"']
        return f"call{i}: {' '.join(parts)}\narguments{i}: %json {json.dumps(schema)}"

    def _mark(self, text: str) -> str:
        """A mark in a grammar: one special token by its id, or text."""
        number = self._tokenizer.raw.token_to_id(text)
        return f"<[{number}]>" if number in self._tokenizer.special_ids else json.dumps(text)


def _answer(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.type != "json_schema":
        raise _refusal("response_format", "expected text, json_object or json_schema beside tools")
    if form.json_schema is None:
        raise _refusal("response_format.json_schema", "this field is required")
    return form.json_schema.schema_


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "additionalProperties": False}


def described(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """As templates expect them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools] or None


def _refusal(field: str, text: str) -> ApiError:
    return ApiError(400, f"{field}: {text}", param=field)
