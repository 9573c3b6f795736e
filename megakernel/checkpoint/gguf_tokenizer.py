"""The tokenizer that a GGUF file carries in its metadata. Token ids equal llama.cpp's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from megakernel.checkpoint.chat import ChatTemplate
from megakernel.checkpoint.message import problem
from megakernel.checkpoint.tokenizer import BYTE_OF_CHAR, WORD_MARK, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of tokenizer.ggml.token_type."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+|"
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""For each tokenizer.ggml.pre the patterns that cut a text, one after the other (llama-vocab.cpp)."""

WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Here a word that is a token is taken whole, without merges, and a text starts with the begin token."""

MODELS = ("gpt2", "llama")


def build_tokenizer(metadata: Mapping[str, Any], where: Path, eos_ids: tuple[int, ...]) -> Tokenizer | None:
    """The tokenizer of the file; None when it has none. Raises CheckpointError on a kind that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind in (None, "none", "no_vocab") or not tokens:
        return None
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise problem("token_type is not as long as tokens", where, expected=len(tokens), got=len(types))
    if kind == "gpt2":
        raw, begins = _byte_level(metadata, where, tokens)
    elif kind == "llama":
        raw, begins = _sentence_piece(metadata, where, tokens, types), True
    else:
        raise problem("unknown tokenizer model in the GGUF file", where, expected=", ".join(MODELS), got=kind)
    parsed = {USER_DEFINED: False, CONTROL: True, UNKNOWN: True}
    for special in (True, False):
        chosen = [text for text, type_ in zip(tokens, types, strict=True) if parsed.get(type_) is special and text]
        raw.add_tokens([AddedToken(text, special=special, normalized=False) for text in chosen])
    named = {
        f"{name}_token": tokens[number]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if isinstance(number := metadata.get(f"tokenizer.ggml.{key}_token_id"), int) and number < len(tokens)
    }
    return Tokenizer(
        raw,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=eos_ids,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", begins),
        add_eos=metadata.get("tokenizer.ggml.add_eos_token", False),
        eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
        chat=_chat(metadata, named, where),
    )


def _chat(metadata: Mapping[str, Any], named: Mapping[str, str], where: Path) -> ChatTemplate | None:
    templates: dict[str, str] = {}
    for name in metadata.get("tokenizer.chat_templates") or ():
        templates[name] = metadata.get(f"tokenizer.chat_template.{name}", "")
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    return ChatTemplate(templates, named, where) if templates else None


def _byte_level(metadata: Mapping[str, Any], where: Path, tokens: Sequence[str]) -> tuple[RawTokenizer, bool]:
    """GPT-2's kind: cut by patterns, bytes spelled as characters, merges in rank order."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in SPLITS:
        raise problem(
            "unknown pre-tokenizer (tokenizer.ggml.pre) in the GGUF file",
            where,
            expected=", ".join(sorted(SPLITS)),
            got=pre,
            todo="use the Hugging Face folder of the model, whose tokenizer.json says how to cut text",
        )
    merges = [_pair(line) for line in metadata.get("tokenizer.ggml.merges") or ()]
    vocab = {text: number for number, text in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE_WORDS)
    except Exception as error:  # the library raises bare Exception
        raise problem("the merges of the GGUF file do not fit its tokens", where, got=error) from error
    raw = RawTokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell, *_without_absent_bytes(vocab)])
    raw.decoder = decoders.ByteLevel()
    return raw, pre in WHOLE_WORDS


def _without_absent_bytes(vocab: Mapping[str, int]) -> list[pre_tokenizers.PreTokenizer]:
    """Take out bytes that have no token, as llama.cpp does: their neighbours must not be merged with each other."""
    absent = "".join(char for char in BYTE_OF_CHAR if char not in vocab)
    return [pre_tokenizers.Split(Regex(f"[{re.escape(absent)}]"), "removed")] if absent else []


def _pair(line: str) -> tuple[str, str]:
    at = line.find(" ", 1)
    return line[:at], line[at + 1 :]


def _sentence_piece(
    metadata: Mapping[str, Any], where: Path, tokens: Sequence[str], types: Sequence[int]
) -> RawTokenizer:
    """SentencePiece BPE: of all neighbours that form a token, the best-scored pair is merged first."""
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise problem("scores are not as long as tokens", where, expected=len(tokens), got=len(scores))
    ids = {text: number for number, text in enumerate(tokens)}
    whole = {text for text, type_ in zip(tokens, types, strict=True) if type_ in (NORMAL, USER_DEFINED, UNUSED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text in whole:
        score = scores[ids[text]]
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in whole and right in whole:
                ranked.append((-score, ids[text], ids[left], left, right))
    ranked.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=ids,
        merges=[(left, right) for *_, left, right in ranked],
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    raw = RawTokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(WORD_MARK)] if prefix else []
    raw.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", WORD_MARK)])
    after = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if prefix else after)
    return raw
