"""Answers of a given form: a grammar says before every token which tokens may come. Uses the library llguidance."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.checkpoint import Tokenizer
from megakernel.errors import ApiError, MissingExtra
from megakernel.serve.calls import CallParser
from megakernel.serve.host import Model
from megakernel.serve.schema import ResponseFormat

FIELD = "response_format"
MOST_GRAMMAR = 1 << 17  # characters of a form; a large one takes many seconds to compile
MASK_S = 0.25  # what is allowed at a place takes microseconds, at the first of its kind some milliseconds


class Grammars:
    """Makes processors for one model; its tables of the vocabulary are made at first use."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._tables: Any = None

    def processors(self, form: ResponseFormat, count: int, field: str = FIELD) -> list[Guided]:
        """One for each of `count` choices. Slow (a compilation): not for the event loop. Raises ApiError 400 that
        names `field`."""
        matcher, vocab = self._matcher(form, field), self.model.program.manifest.vocab
        return [Guided(matcher.deep_copy(), vocab) for _ in range(count)]

    def callers(
        self, grammar: str, count: int, parser: Callable[[], CallParser], marks: frozenset[int]
    ) -> list[Caller]:
        """Like `processors`, for calls that a model makes by itself. `marks`: special tokens that a parser reads."""
        matcher = self._matcher(ResponseFormat(type="grammar", grammar=grammar), "tools")
        tokenizer, vocab = self.model.tokenizer, self.model.program.manifest.vocab
        assert tokenizer is not None
        return [Caller(matcher, vocab, parser(), tokenizer, marks) for _ in range(count)]

    def _matcher(self, form: ResponseFormat, field: str) -> Any:
        library = _library()
        grammar = _grammar(library, form)
        if len(grammar) > MOST_GRAMMAR:
            raise _refusal(f"expected at most {MOST_GRAMMAR} characters, got {len(grammar)}", field)
        tables = self._vocabulary(library)
        wrong, notes = library.LLMatcher.validate_grammar_with_warnings(grammar, tables)
        if wrong:
            raise _refusal(notes[0] if notes else "the grammar is not valid", field)
        made = library.LLMatcher(tables, grammar, log_level=0)
        if not made.is_error():
            made.deep_copy().compute_bitmask()  # the slowest one, of which copies keep most: not on the engine's thread
        if made.is_error():
            raise _refusal(made.get_error(), field)
        return made

    def _vocabulary(self, library: Any) -> Any:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ApiError(400, f"{FIELD}: this model has no tokenizer", param=FIELD)
        with self._lock:
            if self._tables is None:
                ends = list(self.model.generation.eos_token_ids) or list(tokenizer.eos_ids)
                self._tables = library.LLTokenizer(
                    tokenizer.raw.to_str(), n_vocab=self.model.program.manifest.vocab, eos_token=ends or None
                )
            return self._tables


class Guided:
    """A processor of the engine: float32 [vocab], 0 for a token that may come and -inf for one that may not."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._taken = 0

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32] | None:
        for token in tokens[self._taken :]:
            self._taken += 1
            if not self._matcher.consume_token(token):
                raise _stopped(self._matcher)
        return None if self._matcher.is_stopped() else _row(self._matcher, self._vocab)


class Caller:
    """A processor that leaves the model free, and keeps it to the grammar of a call from where it begins one."""

    def __init__(
        self, matcher: Any, vocab: int, parser: CallParser, tokenizer: Tokenizer, marks: frozenset[int]
    ) -> None:
        self._start = matcher
        self._matcher: Any = None  # of the call that is being written
        self._parser, self._tokenizer = parser, tokenizer
        self._text = tokenizer.stream(keep=marks)
        self._free = np.zeros(vocab, np.float32)
        self._vocab = vocab
        self._taken = 0
        self._known = False  # this call was begun before

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32] | None:
        for token in tokens[self._taken :]:
            self._taken += 1
            self._take(token)
        return self._free if self._matcher is None else _row(self._matcher, self._vocab)

    def _take(self, token: int) -> None:
        self._parser.push(self._text.push(token))
        begun = self._parser.open
        if begun is None:
            self._matcher, self._known = None, False
        elif self._known:
            if self._matcher is not None and not self._matcher.consume_token(token):
                raise _stopped(self._matcher)
        else:
            self._known = True
            ids = self._tokenizer.encode(begun, add_special=False)
            fresh = self._start.deep_copy()
            if fresh.try_consume_tokens(ids) == len(ids):  # else it is text: the grammar knows no such call
                self._matcher = fresh


def _row(matcher: Any, vocab: int) -> npt.NDArray[np.float32]:
    """Raises ApiError 400 for a grammar that every other sequence would have to wait for."""
    began = time.thread_time()
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
        raise _stopped(matcher)
    if time.thread_time() - began > MASK_S:
        raise _refusal(f"the grammar takes more than {MASK_S:g} s of a processor for a token")
    allowed = np.unpackbits(bits, count=vocab, bitorder="little")
    row = np.zeros(vocab, np.float32)
    row[allowed == 0] = -np.inf
    return row


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as e:
        missing = MissingExtra('a response_format needs llguidance: pip install "megakernel-decode[serve]"')
        raise ApiError(400, f"{FIELD}: {missing}", param=FIELD, code="unsupported_field") from e
    return llguidance


def _grammar(library: Any, form: ResponseFormat) -> str:
    """As the library reads it. JSON has no free white space: a small model can make endless amounts of it."""
    if form.type == "grammar":
        return str(library.LLMatcher.grammar_from_lark(_needed(form.grammar, "grammar")))
    if form.type == "regex":
        return str(library.LLMatcher.grammar_from_regex(_needed(form.regex, "regex")))
    schema: dict[str, Any] = {"type": "object"}
    if form.type == "json_schema":
        schema = _needed(form.json_schema, "json_schema").schema_
    try:
        return str(
            library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
        )
    except ValueError as e:
        raise _refusal(str(e)) from e


def _needed(value: Any, name: str) -> Any:
    if value is None:
        raise ApiError(400, f"{FIELD}.{name}: this field is required", param=f"{FIELD}.{name}")
    return value


def _stopped(matcher: Any) -> ApiError:
    return _refusal(f"the grammar stopped: {matcher.get_error()}")


def _refusal(text: str, field: str = FIELD) -> ApiError:
    return ApiError(400, f"{field}: {text.splitlines()[0][:300] if text else 'not valid'}", param=field)
