"""OpenAI's JSON forms of answers and of chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from json.encoder import JSONEncoder, encode_basestring
from typing import Any, Protocol

from megakernel.checkpoint import Tokenizer
from megakernel.request import Token
from megakernel.serve.calls import CallParser, Piece

_encoder = JSONEncoder(ensure_ascii=False, separators=(",", ":"))
NO_LOGPROBS = b',"logprobs":null'
NOT_ENDED = b',"finish_reason":null'


def dumps(value: Any) -> bytes:
    return _encoder.encode(value).encode("utf-8", "replace")


def quoted(value: str) -> bytes:
    """`dumps` of a text."""
    return encode_basestring(value).encode("utf-8", "replace")


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


DONE = event(b"[DONE]")


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Form(Protocol):
    """How one endpoint writes its answers. `text` is all of a choice, `delta` what is new of it.

    with_ids: the ids of the tokens are shown. every_token: each token makes a chunk, also one without text."""

    with_ids: bool

    @property
    def every_token(self) -> bool: ...

    def whole(self, choices: Sequence[dict[str, Any]], used: dict[str, int]) -> dict[str, Any]: ...
    def choice(self, index: int, text: str, tokens: Sequence[Token], reason: str | None) -> dict[str, Any]: ...
    def opening(self, index: int) -> bytes: ...
    def chunk(self, index: int, delta: str, tokens: Sequence[Token], reason: str | None) -> bytes: ...
    def usage_chunk(self, used: dict[str, int]) -> bytes: ...


class Base:
    """Identity of one answer, and the beginning that all its chunks share."""

    prefix = ""
    object = ""
    chunk_object = ""

    def __init__(
        self, model: str, fingerprint: str, tokenizer: Tokenizer | None, logprobs: int | None, with_usage: bool
    ) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self.with_ids = False  # token ids beside the text
        head = self._head(self.chunk_object)
        self._start = b"data: " + dumps(head)[:-1] + b',"choices":[{"index":'
        self._end = b"}]" + (b',"usage":null' if with_usage else b"") + b"}\n\n"

    @property
    def every_token(self) -> bool:
        return self.with_ids or self._logprobs is not None

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint,
        }  # fmt: skip

    def whole(self, choices: Sequence[dict[str, Any]], used: dict[str, int]) -> dict[str, Any]:
        return {**self._head(self.object), "choices": list(choices), "usage": used}

    def usage_chunk(self, used: dict[str, int]) -> bytes:
        return event(dumps({**self._head(self.chunk_object), "choices": [], "usage": used}))

    def _chunk(self, index: int, body: bytes, logprobs: Any, reason: str | None, tokens: Sequence[Token] = ()) -> bytes:
        told = b',"logprobs":' + dumps(logprobs) if logprobs else NO_LOGPROBS
        ids = b',"token_ids":[%b]' % b",".join([b"%d" % t.id for t in tokens]) if self.with_ids else b""
        ended = b',"finish_reason":"%b"' % reason.encode() if reason else NOT_ENDED
        return b"%b%d,%b%b%b%b%b" % (self._start, index, body, told, ids, ended, self._end)

    def _ids(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"token_ids": [t.id for t in tokens]} if self.with_ids else {}

    def _spelled(self, number: int) -> tuple[str, list[int]]:
        raw = self._tokenizer.token_bytes(number) if self._tokenizer else b""
        return raw.decode("utf-8", "replace") or (f"token_id:{number}" if self._tokenizer is None else ""), list(raw)


def _delta(piece: Piece) -> dict[str, Any]:
    """A piece of a call as a stream has it."""
    if piece.name is None:
        return {"index": piece.call, "function": {"arguments": piece.text}}
    function = {"name": piece.name, "arguments": piece.text}
    return {"index": piece.call, "id": piece.id, "type": "function", "function": function}


def _calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Whole calls from their pieces."""
    made: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            made.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        if piece.call is not None:
            made[piece.call]["function"]["arguments"] += piece.text
    return made


class ChatForm(Base):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.new_parser: Callable[[], CallParser | None] = lambda: None  # of tool calls, for each choice
        self._parsers: dict[int, CallParser | None] = {}

    def choice(self, index: int, text: str, tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        parser = self.new_parser()
        if parser is not None:
            pieces = [*parser.push(text), *parser.finish()]
            message["content"] = "".join(p.text for p in pieces if p.call is None) or (None if parser.calls else "")
            if parser.calls:
                message["tool_calls"] = _calls(pieces)
                reason = "tool_calls" if reason == "stop" else reason
        told = self._told(tokens)
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason, **self._ids(tokens)}

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', None, None)

    def chunk(self, index: int, delta: str, tokens: Sequence[Token], reason: str | None) -> bytes:
        """Of a choice with tools none, one or several chunks: what may begin a call waits for what follows."""
        told = self._told(tokens)
        if index not in self._parsers:
            self._parsers[index] = self.new_parser()
        parser = self._parsers[index]
        if parser is None:
            return self._content(index, delta, told, reason, tokens)
        pieces = parser.finish() if reason is not None else parser.push(delta)
        if tokens and (told or self.with_ids) and not pieces:
            pieces = [Piece("")]
        out = []
        for piece in pieces:
            if piece.call is None:
                out.append(self._content(index, piece.text, told, None, tokens))
            else:
                body = b'"delta":{"tool_calls":[' + dumps(_delta(piece)) + b"]}"
                out.append(self._chunk(index, body, told, None, tokens))
            told, tokens = None, ()  # they were shown
        if reason is not None:
            out.append(self._content(index, "", None, "tool_calls" if parser.calls and reason == "stop" else reason))
        return b"".join(out)

    def _content(self, index: int, delta: str, told: Any, reason: str | None, tokens: Sequence[Token] = ()) -> bytes:
        body = b'"delta":{"content":' + quoted(delta) + b"}" if delta or told or tokens else b'"delta":{}'
        return self._chunk(index, body, told, reason, tokens)

    def _told(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        content = [
            {**self._entry(t.id, t.logprob or 0.0), "top_logprobs": [self._entry(i, value) for i, value in t.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, number: int, logprob: float) -> dict[str, Any]:
        text, raw = self._spelled(number)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}


class CompletionForm(Base):
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefixes: dict[int, str] = {}  # choice -> prompt that `echo` puts before it
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, text: str, tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        return {
            "index": index, "text": self.prefixes.get(index, "") + text,
            "logprobs": self._told(index, tokens), "finish_reason": reason, **self._ids(tokens),
        }  # fmt: skip

    def opening(self, index: int) -> bytes:
        text = self.prefixes.get(index)
        return self._chunk(index, b'"text":' + dumps(text), None, None) if text else b""

    def chunk(self, index: int, delta: str, tokens: Sequence[Token], reason: str | None) -> bytes:
        return self._chunk(index, b'"text":' + quoted(delta), self._told(index, tokens), reason, tokens)

    def _told(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        names, offsets = [], []
        for token in tokens:
            names.append(self._spelled(token.id)[0])
            offsets.append(offset)
            offset += len(names[-1])
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [max(t.logprob or 0.0, -9999.0) for t in tokens],
            "top_logprobs": [{self._spelled(i)[0]: max(v, -9999.0) for i, v in t.top} for t in tokens],
            "text_offset": offsets,
        }
