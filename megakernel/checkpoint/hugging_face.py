"""A Hugging Face folder: config.json, safetensors (one file or shards), tokenizer and generation files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from megakernel.checkpoint.chat import ChatTemplate
from megakernel.checkpoint.checkpoint import BENIGN_SUFFIXES, TIED_HEADS, Checkpoint
from megakernel.checkpoint.config import normalise_rope, read_object
from megakernel.checkpoint.generation import generation_defaults, token_ids
from megakernel.checkpoint.mapped import MappedFile
from megakernel.checkpoint.message import problem
from megakernel.checkpoint.safetensors_file import read_safetensors
from megakernel.checkpoint.stored import StoredTensor
from megakernel.checkpoint.tokenizer import Tokenizer, load_raw_tokenizer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INNER = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}
"""model_type -> the prefix of everything but the head."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def open_folder(folder: Path) -> Checkpoint:
    """Open the folder. Raises CheckpointError; no file stays open then."""
    path = folder / "config.json"
    if not path.is_file():
        raise problem(
            "the folder is not a checkpoint: config.json is missing",
            folder,
            expected="config.json with *.safetensors, or the path of a .gguf file",
            got=", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "an empty folder",
        )
    config = normalise_rope(read_object(path), path)
    if config.get("quantization_config"):
        raise problem(
            "quantised Hugging Face weights are not supported",
            path,
            expected="f32, bf16 or f16 weights, or a GGUF file",
            got=f"quantization_config {config['quantization_config']}",
            todo="use the unquantised checkpoint, or a GGUF of it",
        )
    settings = _optional(folder / "tokenizer_config.json")
    named = _named_tokens(folder, settings)
    raw = cache(lambda: load_raw_tokenizer(folder / "tokenizer.json"))
    eos = _eos_id(folder, settings, named, raw)
    generation = generation_defaults(folder, _optional(folder / "generation_config.json"), config, eos)
    files: list[MappedFile] = []
    try:
        tensors = _headed(_tensors(folder, files), str(config.get("model_type")))
    except BaseException:
        for file in files:
            file.close()
        raise

    def load() -> Tokenizer | None:
        return load_tokenizer(folder, generation.eos_token_ids, raw)

    return Checkpoint(folder, config, generation, tensors, tuple(files), load)


def load_tokenizer(
    folder: Path, eos_ids: tuple[int, ...] = (), load_raw: Callable[[], RawTokenizer] | None = None
) -> Tokenizer | None:
    """The folder's tokenizer; None when there are no tokenizer files at all. `load_raw` gives tokenizer.json parsed.

    tokenizer.json says how text is cut and, as in transformers 5, which tokens go around it, whatever
    tokenizer_config.json's `add_bos_token` says; that file adds tokens and names them.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
        if others:
            raise problem(
                "the tokenizer has no tokenizer.json",
                folder,
                expected="tokenizer.json",
                got=", ".join(others),
                todo="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it",
            )
        return None
    settings = _optional(folder / "tokenizer_config.json")
    raw = load_raw() if load_raw else load_raw_tokenizer(path)
    named = _named_tokens(folder, settings)
    added = sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    raw.add_tokens([_added(entry) for _, entry in added if raw.token_to_id(entry["content"]) is None])
    raw.add_special_tokens([text for text in named.values() if raw.token_to_id(text) is not None])
    templates = _templates(folder, settings)
    bos = raw.token_to_id(named["bos_token"]) if "bos_token" in named else None
    return Tokenizer(
        raw,
        bos_id=bos,
        eos_ids=eos_ids,
        chat=ChatTemplate(templates, named, folder) if templates else None,
    )


def _tensors(folder: Path, files: list[MappedFile]) -> dict[str, StoredTensor]:
    """Every tensor of the folder; opened files are appended to `files`, also when this raises."""
    index = folder / INDEX
    placed: dict[str, str] | None = None
    if index.is_file():
        placed = read_object(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
            raise problem("the index has no weight_map of tensor names to file names", index, got=repr(placed)[:80])
        shards = sorted(set(placed.values()))
    elif (folder / SINGLE).is_file():
        shards = [SINGLE]
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        found = sorted(path.name for path in folder.iterdir())[:12]
        raise problem(
            "the folder holds no weights",
            folder,
            expected=f"{SINGLE}, or {INDEX} with its shards",
            got=", ".join(found),
            todo="convert .bin or .pth files to safetensors",
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        path = folder / shard
        if Path(shard).name != shard or not path.is_file():
            raise problem(f"shard {shard} is missing", folder, expected=path, todo="download the whole folder again")
        file = MappedFile.open(path)
        files.append(file)
        for name, tensor in read_safetensors(file, BENIGN_SUFFIXES).items():
            if name in tensors:
                other = tensors[name].file.path.name
                raise problem(f"tensor {name} is there twice", folder, got=f"in {other} and in {shard}")
            tensors[name] = tensor
    if placed is not None:
        _check_index(index, placed, tensors)
    return tensors


def _headed(tensors: dict[str, StoredTensor], model_type: str) -> dict[str, StoredTensor]:
    """Names as of the model with its head: some files were written of the model inside, whose names lack a prefix."""
    prefix = INNER.get(model_type)
    if prefix is None or any(name.startswith(prefix) for name in tensors):
        return tensors
    named = {name: name if name in TIED_HEADS else prefix + name for name in tensors}
    return {named[name]: replace(tensor, name=named[name]) for name, tensor in tensors.items()}


def _check_index(index: Path, placed: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, shard in placed.items():
        if name.endswith(BENIGN_SUFFIXES):
            continue
        got = tensors[name].file.path.name if name in tensors else "no file"
        if got != shard:
            raise problem(
                f"the index is wrong about tensor {name}", index, expected=shard, got=got, todo="download it again"
            )


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _added(entry: dict[str, Any]) -> AddedToken:
    flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "normalized", "single_word") if key in entry}
    return AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)


def _text(token: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _named_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token, ...; special_tokens_map.json fills what tokenizer_config.json leaves out."""
    fallback = _optional(folder / "special_tokens_map.json")
    found = {key: _text(settings.get(key, fallback.get(key))) for key in NAMED_TOKENS}
    return {key: text for key, text in found.items() if text}


def _eos_id(
    folder: Path, settings: dict[str, Any], named: dict[str, str], load_raw: Callable[[], RawTokenizer]
) -> int | None:
    """The id of the tokenizer's end token, from the small files when they say it."""
    given = token_ids(settings.get("eos_token_id"), "eos_token_id", folder / "tokenizer_config.json")
    if given:
        return given[0]
    text = named.get("eos_token")
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        if text is not None and _text(entry) == text:
            return int(key)
    if text is None or not (folder / "tokenizer.json").is_file():
        return None
    number: int | None = load_raw().token_to_id(text)
    return number


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; "default" is the ordinary one. Files win over tokenizer_config.json."""
    found: dict[str, str] = {}
    given = settings.get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        found.update({str(entry["name"]): str(entry["template"]) for entry in given})
    legacy = _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return found
