"""Text to token ids and back, with streaming, on top of the `tokenizers` library."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from megakernel.checkpoint.chat import ChatTemplate
from megakernel.checkpoint.message import problem
from megakernel.errors import InvalidRequest

WORD_MARK = "\u2581"
"""SentencePiece's visible space."""
LONG = 4096
"""Characters from which on a text is encoded by `encode_batch`: other threads run meanwhile, not so with `encode`."""


class Tokenizer:
    """`add_bos` / `add_eos`: True or False decide; None leaves it to the raw tokenizer's post-processor."""

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        eos_id: int | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        self.raw = raw
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.chat = chat
        self._prefix, self._suffix = _frame(raw)
        if add_bos is not None and bos_id is not None:
            self._prefix = [bos_id] if add_bos else []
        if add_eos is not None and eos_id is not None:
            self._suffix = [eos_id] if add_eos else []
        self._pieces = _piece_decoder(raw)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token."""
        return max(self.raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `decode` leaves out."""
        added = self.raw.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _literal(self) -> RawTokenizer:
        """A copy that reads the text of a special token as ordinary text."""
        copy = RawTokenizer.from_str(self.raw.to_str())
        copy.encode_special_tokens = True
        return copy

    def token(self, number: int) -> str | None:
        """The token's own spelling; None for an id without one (padding of the embedding)."""
        return self.raw.id_to_token(number)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids. May be empty for an empty text.

        add_special: put the begin (and end) token that the model was trained with around it; a text that already
        starts with the begin token, such as a rendered chat, does not get a second one. parse_special: special
        tokens written out in the text become their ids; False keeps them as text (for untrusted input).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has a lone surrogate at character {error.start}: it cannot be written as UTF-8"
            ) from error
        raw = self.raw if parse_special else self._literal
        if len(text) < LONG:
            ids: list[int] = raw.encode(text, add_special_tokens=False).ids
        else:
            ids = raw.encode_batch([text], add_special_tokens=False)[0].ids
        if not add_special:
            return ids
        repeated = bool(self._prefix) and ids[: len(self._prefix)] == self._prefix
        return ([] if repeated else list(self._prefix)) + ids + self._suffix

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text. Bytes that are not UTF-8 become U+FFFD; ids without a token give nothing."""
        stream = self.stream(skip_special)
        return stream.push_all(list(ids)) + stream.flush()

    def token_bytes(self, number: int) -> bytes:
        """The bytes that a token adds to a text, special tokens spelled out; empty for an id without a token."""
        if self._pieces is not None:
            return self._pieces.piece(number)
        text: str = self.raw.decode([number], skip_special_tokens=False) if self.token(number) is not None else ""
        return text.encode("utf-8")

    def stream(self, skip_special: bool = True, keep: frozenset[int] = frozenset()) -> TextStream:
        """A new decoder of one sequence, fed id by id. `keep`: special tokens that are not skipped."""
        skipped = self.special_ids - keep if skip_special else frozenset[int]()
        return TextStream(self.raw, self._pieces, skipped)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as text for `encode`. Raises CheckpointError when the checkpoint has no template."""
        if self.chat is None:
            raise problem("the checkpoint has no chat template", "tokenizer", todo="give the prompt as plain text")
        return self.chat.render(messages, tools, add_generation_prompt, kwargs)


class TextStream:
    """Pieces of text as tokens arrive. What `push` and `flush` return adds up to `decode` of all ids.

    With a decoder made of bytes (`pieces`) each push costs the same; otherwise the whole sequence is decoded again.
    """

    def __init__(self, raw: RawTokenizer, pieces: PieceDecoder | None, skipped: frozenset[int]) -> None:
        self._raw = raw
        self._pieces = pieces
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = pieces is not None and pieces.strip_first_space
        self._ids: list[int] = []
        self._sent = ""

    def push(self, number: int) -> str:
        """The text that token `number` completes; may be empty."""
        if self._pieces is None:
            return self.push_all([number])
        return "" if number in self._skipped else self._stripped(self._utf8.decode(self._pieces.piece(number)))

    def push_all(self, numbers: Sequence[int]) -> str:
        """`push` of several ids at once."""
        kept = [number for number in numbers if number not in self._skipped]
        if self._pieces is not None:
            return self._stripped(self._utf8.decode(b"".join(map(self._pieces.piece, kept))))
        self._ids += kept
        return self._new_text(final=False) if kept else ""

    def flush(self) -> str:
        """The rest, at the end of the sequence: an unfinished character gives U+FFFD."""
        if self._pieces is not None:
            return self._stripped(self._utf8.decode(b"", final=True))
        return self._new_text(final=True)

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _new_text(self, final: bool) -> str:
        whole = self._raw.decode(self._ids, skip_special_tokens=False)
        if not whole.startswith(self._sent) or (whole.endswith("\ufffd") and not final):
            return ""
        fresh = whole[len(self._sent) :]
        self._sent = whole
        return fresh


class PieceDecoder:
    """The bytes each token stands for, when text is just those bytes one after the other."""

    def __init__(self, raw: RawTokenizer, byte_level: bool, strip_first_space: bool) -> None:
        self.strip_first_space = strip_first_space
        self._raw = raw
        self._byte_level = byte_level
        self._cache: dict[int, bytes] = {}

    def piece(self, number: int) -> bytes:
        known = self._cache.get(number)
        if known is None:
            token = self._raw.id_to_token(number) if number >= 0 else None
            known = self._cache[number] = b"" if token is None else self._bytes(token)
        return known

    def _bytes(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                return token.encode("utf-8")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(WORD_MARK, " ").encode("utf-8")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the other 68 from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def load_raw_tokenizer(path: Path) -> RawTokenizer:
    """tokenizer.json, with any training-time padding and truncation switched off. Raises CheckpointError."""
    try:
        raw = RawTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise problem("the tokenizer cannot be read", path, got=error, todo="download it again") from error
    raw.no_padding()
    raw.no_truncation()
    return raw


def _frame(raw: RawTokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    for probe in ("a", "1", "."):
        inner = raw.encode(probe, add_special_tokens=False).ids
        whole = raw.encode(probe, add_special_tokens=True).ids
        for at in range(len(whole) - len(inner) + 1):
            if inner and whole[at : at + len(inner)] == inner:
                return whole[:at], whole[at + len(inner) :]
    return [], []


def _piece_decoder(raw: RawTokenizer) -> PieceDecoder | None:
    """A PieceDecoder when the raw decoder is one of the two byte-wise kinds, else None."""
    if raw.decoder is None:
        return None
    state = json.loads(raw.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(raw, byte_level=True, strip_first_space=False)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0] != SPACE_STEP:
        return None
    if kinds[3:] == []:
        return PieceDecoder(raw, byte_level=False, strip_first_space=False)
    if steps[3:] == [STRIP_STEP]:
        return PieceDecoder(raw, byte_level=False, strip_first_space=True)
    return None


SPACE_STEP = {"type": "Replace", "pattern": {"String": WORD_MARK}, "content": " "}
STRIP_STEP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
