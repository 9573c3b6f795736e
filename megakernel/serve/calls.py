"""Tool calls out of a model's text while it comes: the same calls and content however the text is cut.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several one after the other
    llama3   {"name": ..., "parameters": {...}} at the beginning or behind <|python_tag|>, several with ; between
    mistral  [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} of later models

A call counts when it names a function that was offered; anything else stays text, as the model wrote it.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

MARKS = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
CLOSING = "</tool_call>"
BLANKS = " \t\r\n"
LONGEST_NAME = 512
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
BEGUN = re.compile(r'\{\s*"name"\s*:\s*"')  # of a form without a mark
NAMED = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")  # name[ARGS]{


@dataclass(frozen=True)
class Piece:
    """Text for the reader (`call` is None), or more of a call's arguments; the first of a call has `name` and `id`."""

    text: str
    call: int | None = None
    name: str | None = None
    id: str | None = None


class Balance:
    """Finds the end of a JSON object or list that comes in parts. `depth`: brackets that are open before it."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._string = self._escaped = False

    def end(self, text: str) -> int | None:
        """Index behind the closing bracket, or None when it is not in this part."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._escaped, self._string = char == "\\", char != '"'
            elif char == '"':
                self._string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if self._depth == 0 and char in "}]":
                    return at + 1
        return None


class CallParser:
    """One answer. `push` takes text as it is decoded (marks spelled out), `finish` gives what was held back.

    one_only: what follows the first call is left out. Ids are new and random, as the format's templates want them."""

    def __init__(self, form: str, names: Collection[str], one_only: bool = False) -> None:
        self._form = form
        self._mark = MARKS[form]
        self._names = names
        self._one_only = one_only
        self._held = ""  # not decided yet
        self._raw = ""  # in front of it, and text again if no call follows
        self._blanks = ""  # behind the last text: left out when a call follows
        self._behind_call = False  # no text since the last call: blanks are left out
        self._out: list[Piece] = []
        self._balance = Balance()
        self._object = True  # the arguments are inside of the call's own object
        self._state: Callable[[], bool] = self._lead if form == "llama3" else self._text
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        while self._held and self._state():
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        if self._state in (self._text, self._lead, self._call):
            self._say(self._raw + self._held)
        if not self.calls and self._blanks:
            self._out.append(Piece(self._blanks))
        self._held = self._raw = self._blanks = ""
        return self._taken()

    @property
    def open(self) -> str | None:
        """None while no call is being written; else the text of it that is not read yet.

        A call begins behind its mark; llama3, whose mark may also stand before code, with `{"name": "`."""
        if self._state in (self._arguments, self._tail):
            return ""
        if self._form == "llama3":
            return self._held if self._state == self._call and BEGUN.match(self._held) else None
        return self._held if self._state == self._call or (self._state == self._lead and self._raw) else None

    # ------------------------------------------------------------------ states: each says whether it went on
    def _text(self) -> bool:
        at = self._held.find(self._mark)
        if at < 0:
            keep = _beginning(self._held, self._mark)
            self._say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        self._say(self._held[:at])
        self._move(at + len(self._mark), self._mark)
        self._state = self._lead
        return True

    def _lead(self) -> bool:
        """Behind a mark, or where a call may stand without one."""
        rest = self._held.lstrip(BLANKS)
        if not rest:
            return False
        blanks = self._held[: len(self._held) - len(rest)]
        if rest[0] == "{" or (self._form == "mistral" and rest[0] != "["):
            self._move(len(blanks), blanks)
            self._state = self._call
        elif self._form == "mistral" and not self._raw.endswith("["):
            self._move(len(blanks) + 1, blanks + "[")
        elif self._form == "llama3" and rest.startswith(self._mark):
            self._move(len(blanks) + len(self._mark), blanks + self._mark)
        elif self._form == "llama3" and self._mark.startswith(rest):
            return False
        else:
            self._no_call()
        return True

    def _call(self) -> bool:
        found = HEAD.match(self._held) or (NAMED.match(self._held) if self._form == "mistral" else None)
        if found is not None:
            self._object = self._held[0] == "{"
            name = json.loads(found[1], strict=False) if self._object else found[1]
            if name not in self._names:
                return self._no_call()
            self._start(name, "")
            self._held, self._balance, self._state = self._held[found.end() :], Balance(), self._arguments
            return True
        if self._held[0] != "{":
            return self._no_call() if len(self._held) > LONGEST_NAME or "\n" in self._held else False
        end = Balance().end(self._held) if "}" in self._held else None
        if end is None:
            return False
        name, arguments = _read(self._held[:end])
        if name not in self._names:
            return self._no_call()
        self._start(name, arguments)
        self._held, self._state = self._held[end:], self._after
        return True

    def _arguments(self) -> bool:
        end = self._balance.end(self._held)
        self._out.append(Piece(self._held[:end], self.calls - 1))
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._balance, self._state = Balance(1), self._tail if self._object else self._after
        return end is not None

    def _tail(self) -> bool:
        """What is left of the call's object."""
        end = self._balance.end(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._state = self._after
        return end is not None

    def _after(self) -> bool:
        """Behind a call: another one, or text."""
        if self._one_only:
            self._held = ""
            return False
        self._held = self._held.lstrip(BLANKS + {"hermes": "", "llama3": ";,", "mistral": ",]"}[self._form])
        if not self._held or (self._form == "hermes" and CLOSING.startswith(self._held) and self._held != CLOSING):
            return False
        if self._form == "hermes":
            self._held = self._held.removeprefix(CLOSING)
        self._raw, self._state = "", self._text
        if self._form == "llama3" or (self._form == "mistral" and self._held[0] == "{"):
            self._state = self._lead
        return True

    # ------------------------------------------------------------------ parts
    def _move(self, count: int, raw: str) -> None:
        """Take characters off that are text again if no call follows."""
        self._held, self._raw = self._held[count:], self._raw + raw

    def _no_call(self) -> bool:
        self._say(self._raw)
        self._raw, self._state = "", self._text
        return True

    def _start(self, name: str, arguments: str) -> None:
        self._out.append(Piece(arguments, self.calls, name, _id(self._form)))
        self.calls += 1
        self._behind_call = True
        self._raw = self._blanks = ""

    def _say(self, text: str) -> None:
        text = self._blanks + text
        if self._behind_call:
            text = text.lstrip(BLANKS)
        kept = text.rstrip(BLANKS)
        self._blanks = text[len(kept) :]
        if kept:
            self._behind_call = False
            self._out.append(Piece(kept))

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of the text that the mark begins with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _read(text: str) -> tuple[str, str]:
    """Name and arguments of a whole call, its keys in any order; ("", "") of anything else."""
    try:
        made = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return "", ""
    name = made.get("name")
    arguments = made.get("arguments", made.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
        return "", ""
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _id(form: str) -> str:
    if form == "mistral":  # its templates refuse any other length
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
