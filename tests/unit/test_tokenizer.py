"""Tokenizers: ids against llama.cpp and transformers, streaming, special tokens, chat templates, errors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from megakernel.checkpoint import Tokenizer, fetch_demo, open_checkpoint
from megakernel.checkpoint.gguf_tokenizer import SPLITS, build_tokenizer
from megakernel.checkpoint.hugging_face import load_tokenizer
from megakernel.checkpoint.tokenizer import LONG
from megakernel.errors import CheckpointError, InvalidRequest

CORPUS = [
    "the quick brown fox jumps over the lazy dog 0123456789",
    "def f(x): return x + 1",
    "héllo wörld ½ 你好 👩‍👩‍👧",
]
TEXTS = [*CORPUS, "", " ", "  two  spaces ", "\n\n\ttabs", "naïve 🏳️‍🌈 x²", "a" * 40, "<s>", "x</s>y"]
EXPECTED = json.loads((Path(__file__).parent / "test_tokenizer_ids.json").read_text(encoding="utf-8"))
"""Texts and the ids that llama.cpp gives them with the demo model's vocabulary."""


def byte_level(folder: Path, bos: bool = True) -> Path:
    """Train a small byte-level BPE and save tokenizer.json."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|user|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS * 4, trainer)
    raw.add_tokens([AddedToken("<plain tag>", normalized=False)])
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    raw.save(str(folder / "tokenizer.json"))
    return folder


def loaded(folder: Path, **settings: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **settings})
    )
    tokenizer = load_tokenizer(folder, (1,))
    assert tokenizer is not None
    return tokenizer


def sentence_piece(add_space_prefix: bool = True) -> dict[str, Any]:
    """GGUF metadata of a small SentencePiece vocabulary with byte fallback."""
    words = ["▁", "a", "b", "ab", "▁ab", "c", "abc", "▁abc", "▁▁", "h", "e", "l", "o", "he", "ll", "llo", "hello"]
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)] + [("[tool]", 0.0, 4)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def in_gguf(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = build_tokenizer(metadata, Path("m.gguf"), (2,))
    assert tokenizer is not None
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    stream = tokenizer.stream(skip_special)
    parts = [stream.push(number) for number in ids]
    return "".join(parts) + stream.flush()


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    """The tokenizer of the demo model; skips with the reason when it cannot be had."""
    try:
        path = fetch_demo(Path.home() / ".cache" / "megakernel")
    except CheckpointError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    tokenizer = open_checkpoint(path).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("row", EXPECTED, ids=lambda row: ascii(row["text"][:12]))
def test_demo_ids_equal_llama_cpp(demo: Tokenizer, row: dict[str, Any]) -> None:
    assert demo.encode(row["text"]) == row["ids"]
    assert streamed(demo, row["ids"], False) == demo.decode(row["ids"], False)


def test_long_texts_have_the_ids_of_their_own_way(demo: Tokenizer) -> None:
    """Those that are encoded while other threads run, as those that are not."""
    text = "Über 12 Häuser, <|im_start|> and  two   blanks 👩‍🚀.\n" * 100
    assert len(text) >= LONG
    for parse in (True, False):
        raw = demo.raw if parse else demo._literal
        assert demo.encode(text, False, parse) == raw.encode(text, add_special_tokens=False).ids
    assert demo.encode(text, False, True) != demo.encode(text, False, False)


def test_demo_facts(demo: Tokenizer) -> None:
    assert (demo.bos_id, demo.eos_ids, demo.vocab_size) == (1, (2,), 49152)
    assert demo.token(2) == "<|im_end|>"
    text = demo.apply_chat_template([{"role": "user", "content": "Hi ½"}])
    assert text.endswith("<|im_start|>user\nHi ½<|im_end|>\n<|im_start|>assistant\n")
    ids = demo.encode(text)
    assert ids[0] == 1
    assert ids[1] != 1
    assert ids.count(2) == 2
    assert demo.decode(ids, skip_special=False) == text
    assert "<|im_start|>" not in demo.decode(ids)
    assert 2 not in demo.encode("<|im_end|>", parse_special=False)


def test_equal_to_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for settings in ({}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}):
        ours = loaded(byte_level(tmp_path), tokenizer_class="PreTrainedTokenizerFast", **settings)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text in TEXTS:
            assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
            if not text.startswith("<s>"):
                assert ours.encode(text) == theirs.encode(text), settings
            ids = ours.encode(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


def test_round_trip_and_random_ids(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path))
    draw = random.Random(0)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size + 5) for _ in range(draw.randrange(12))]
        for skip in (True, False):
            assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)
            assert tokenizer.decode(ids, skip) == tokenizer.raw.decode(ids, skip_special_tokens=skip)


def test_a_stream_holds_back_unfinished_characters(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path))
    spelled = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("é👍")[0][0]
    ids = [tokenizer.raw.token_to_id(char) for char in spelled]
    stream = tokenizer.stream()
    assert [stream.push(number) for number in ids] == ["", "é", "", "", "", "👍"]
    assert stream.flush() == ""
    stream = tokenizer.stream()
    assert [stream.push(number) for number in ids[:4]] == ["", "é", "", ""]
    assert stream.flush() == "\ufffd"


def test_begin_token_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path))
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("<s>a")[:2] == tokenizer.encode("a")[:2]
    assert tokenizer.encode("<s>a").count(0) == 1
    assert tokenizer.encode("<s>a", add_special=False).count(0) == 1
    assert tokenizer.encode("<s>a", parse_special=False).count(0) == 1
    assert len(tokenizer.encode("<s>a", parse_special=False)) > 3


def test_tokens_of_the_settings_file_are_added(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    count = loaded(folder).vocab_size
    added = {str(count): {"content": "<new>", "special": True}}
    tokenizer = loaded(folder, added_tokens_decoder=added)
    assert tokenizer.encode("a<new>", add_special=False)[-1] == count
    assert tokenizer.vocab_size == count + 1
    assert tokenizer.token(count + 1) is None
    assert tokenizer.decode([count]) == ""


def test_end_token_comes_from_the_tokenizer_file(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    loaded(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.generation.eos_token_ids == (1,)
        assert checkpoint.tokenizer is not None
        assert checkpoint.tokenizer.eos_ids == (1,)
        assert checkpoint.tokenizer is checkpoint.tokenizer


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 1"):
        loaded(byte_level(tmp_path)).encode("a\ud800")


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json(.|\n)*tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_sentence_piece() -> None:
    tokenizer = in_gguf(sentence_piece())

    def tokens(text: str, **how: bool) -> list[str | None]:
        return [tokenizer.token(number) for number in tokenizer.encode(text, **how)]

    assert tokens("ab") == ["<s>", "▁ab"]
    assert tokens("abc") == ["<s>", "▁abc"]
    assert tokens("hello", add_special=False) == ["▁", "hello"]
    assert tokens("é", add_special=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert tokens("[tool]ab</s>", add_special=False) == ["[tool]", "▁ab", "</s>"]
    for text in ("hello abc", "  hello", "é ½ 👍 a", "", "ab\nab"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert streamed(tokenizer, ids) == text
    plain = in_gguf(sentence_piece(add_space_prefix=False))
    assert [plain.token(number) for number in plain.encode("ab")] == ["<s>", "ab"]
    assert plain.decode(plain.encode(" ab")) == " ab"


def test_bytes_without_a_token_are_dropped_and_separate_their_neighbours() -> None:
    tokens = ["Ġ", "a", "b", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
    }
    tokenizer = in_gguf(metadata)
    assert tokenizer.encode("ab") == [3]
    assert tokenizer.encode("azb") == [1, 2]


def test_unknown_kinds_are_named() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "mystery"}
    with pytest.raises(CheckpointError, match=r"smollm(.|\n)*got: mystery"):
        in_gguf(metadata)
    assert {"smollm", "llama-bpe", "gpt-2", "qwen2"} <= SPLITS.keys()
    with pytest.raises(CheckpointError, match="got: rwkv"):
        in_gguf({**metadata, "tokenizer.ggml.model": "rwkv"})
    with pytest.raises(CheckpointError, match="do not fit"):
        in_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"]})
    with pytest.raises(CheckpointError, match="token_type is not as long"):
        in_gguf({**metadata, "tokenizer.ggml.token_type": [1, 1]})
    with pytest.raises(CheckpointError, match="scores are not as long"):
        in_gguf({**sentence_piece(), "tokenizer.ggml.scores": []})
    assert build_tokenizer({}, Path("m.gguf"), ()) is None


TEMPLATE = """{%- for m in messages %}
    {%- if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
<|user|>{{ m['content'] | trim }}</s>
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% generation %}{{ bos_token }}{% endgeneration %}
{{ strftime_now('%Y') | length }}{{ extra }}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MESSAGES = [{"role": "user", "content": " é <b>&'\" "}] * 5


@pytest.mark.parametrize("tools", [None, [{"name": "<f>", "é": 1}]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_equals_transformers(tmp_path: Path, tools: Any, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = loaded(byte_level(tmp_path), chat_template=TEMPLATE)
    ours = tokenizer.apply_chat_template(MESSAGES, tools, prompt, extra="!")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False, extra="!"
    )
    assert ours == theirs


def test_chat_template_places(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert loaded(folder, chat_template=named).apply_chat_template(MESSAGES) == "D"
    assert loaded(folder, chat_template=named).apply_chat_template(MESSAGES, [{}]) == "T"
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert loaded(folder, chat_template="C").apply_chat_template(MESSAGES) == "J"
    (folder / "chat_template.jinja").write_text("F")
    assert loaded(folder, chat_template="C").apply_chat_template(MESSAGES) == "F"


def test_chat_errors(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    with pytest.raises(CheckpointError, match="no chat template"):
        loaded(folder).apply_chat_template(MESSAGES)
    with pytest.raises(CheckpointError, match=r"not valid Jinja(.|\n)*line 1"):
        loaded(folder, chat_template="{% if %}").apply_chat_template(MESSAGES)
    with pytest.raises(InvalidRequest, match="no such role"):
        loaded(folder, chat_template=TEMPLATE).apply_chat_template([{"role": "bad", "content": ""}])
    with pytest.raises(InvalidRequest, match="cannot render"):
        loaded(folder, chat_template="{{ messages.append(1) }}").apply_chat_template(MESSAGES)
    with pytest.raises(InvalidRequest, match="cannot render"):
        loaded(folder, chat_template="{{ messages.__class__.__mro__ }}{{ ''.__class__() }}").apply_chat_template([])
