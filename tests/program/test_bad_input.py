"""What people get wrong: each ends in one message that says what, where and what was expected, and leaves no file.

Through LLM and through the command line, on the real CPU device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from megakernel import cli
from megakernel.checkpoint import fetch_demo, open_checkpoint
from megakernel.device.cpu import find_compiler
from megakernel.errors import (
    BuildError,
    CapacityError,
    CheckpointError,
    DeviceUnavailable,
    LoweringError,
    MegakernelError,
    NoCompiler,
    UnknownArchitecture,
    UnsupportedConfig,
)
from megakernel.llm import LLM
from megakernel.settings import Settings, read_settings
from tests.program.tiny import successor_model

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parents[2]
VOCAB, CONTEXT = 131, 64
UP = "model.layers.0.mlp.up_proj.weight"


def command(*arguments: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env=env)


def check_message(text: str, words: tuple[str, ...]) -> None:
    assert "Traceback" not in text
    for word in words:
        assert word.lower() in text.lower(), f"{word!r} is not in: {text}"


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


# ---------------------------------------------------------------------------------------------- the checkpoint
def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


def set_item(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name][2, 5] = value

    return change


@dataclass(frozen=True)
class Bad:
    name: str
    spoil: Callable[[Path], object]
    error: type[MegakernelError]
    words: tuple[str, ...]
    options: tuple[str, ...] = ()  # of the command line; LLM gets the same


F32 = ("--dtype", "f32")
CHECKPOINTS = (
    Bad("no_config", lambda f: (f / "config.json").unlink(), CheckpointError, ("config.json is missing",)),
    Bad("config_no_json", lambda f: (f / "config.json").write_text("{"), CheckpointError, ("not valid JSON", "line 1")),
    Bad("no_weights", lambda f: (f / "model.safetensors").unlink(), CheckpointError, ("no weights", "safetensors")),
    Bad("empty_weights", lambda f: cut(f, 0), CheckpointError, ("model.safetensors",)),
    Bad("truncated_header", lambda f: cut(f, 100), CheckpointError, ("model.safetensors",)),
    Bad("truncated_weights", lambda f: cut(f, -64), CheckpointError, ("model.safetensors", "bytes")),
    Bad(
        "integer_weights", lambda f: edit_tensors(f, lambda t: t.update({UP: t[UP].astype(np.int32)})),
        CheckpointError, (UP, "I32"),
    ),
    Bad(
        "missing_tensor", lambda f: edit_tensors(f, lambda t: t.pop(UP)), CheckpointError, ("1 missing", UP),
    ),
    Bad(
        "left_over_tensor",
        lambda f: edit_tensors(f, lambda t: t.update({"model.layers.0.mlp.extra": np.zeros(3, np.float32)})),
        CheckpointError, ("1 left over", "model.layers.0.mlp.extra"),
    ),
    Bad(
        "fewer_layers_in_the_file", lambda f: edit_config(f, num_hidden_layers=2), CheckpointError,
        ("missing", "model.layers.1."),
    ),
    Bad(
        "config_contradicts_a_shape", lambda f: edit_config(f, intermediate_size=48), CheckpointError,
        ("shape", "expected: [48, 64]", "got: [32, 64]"),
    ),
    Bad(
        "unknown_architecture", lambda f: edit_config(f, architectures=["MambaForCausalLM"]), UnknownArchitecture,
        ("MambaForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"),
    ),
    Bad(
        "no_architecture", lambda f: edit_config(f, architectures="absent", model_type="absent"), UnknownArchitecture,
        ("LlamaForCausalLM",),
    ),
    Bad("unknown_field", lambda f: edit_config(f, use_alibi=True), UnsupportedConfig, ("use_alibi = True",)),
    Bad("theta_text", lambda f: edit_config(f, rope_theta="x"), CheckpointError, ("rope_theta", "got: 'x'")),
    Bad("theta_zero", lambda f: edit_config(f, rope_theta=0), CheckpointError, ("rope_theta", "above 0", "got: 0")),
    Bad(
        "rope_of_a_kind", lambda f: edit_config(f, rope_parameters={"full_attention": 3}), CheckpointError,
        ("rope_parameters is not an object", "got: 3"),
    ),
    Bad("activation_list", lambda f: edit_config(f, hidden_act=["silu"]), UnsupportedConfig, ("hidden_act", "silu")),
    Bad("size_of_zero", lambda f: edit_config(f, hidden_size=0), UnsupportedConfig, ("hidden_size", "got 0")),
    Bad("nan", lambda f: edit_tensors(f, set_item(UP, np.nan)), CheckpointError, (UP, "nan", "[2, 5]"), F32),
    Bad("infinity", lambda f: edit_tensors(f, set_item(UP, -np.inf)), CheckpointError, (UP, "-inf", "[2, 5]"), F32),
    Bad("context", lambda f: None, CapacityError, ("max_context 1025", "1024"), ("--max-context", "1025")),
    Bad("no_context", lambda f: None, CapacityError, ("max_context 0",), ("--max-context", "0")),
    Bad("dtype", lambda f: None, LoweringError, ("dtype 'int4'", "f32, bf16"), ("--dtype", "int4")),
)  # fmt: skip


@pytest.mark.parametrize("bad", CHECKPOINTS, ids=lambda b: b.name)
def test_a_bad_checkpoint(bad: Bad, tmp_path: Path) -> None:
    model, cache = successor_model(tmp_path / "model", VOCAB), tmp_path / "cache"
    bad.spoil(model)
    before = files(model)
    shared = read_settings().cache if bad.name in ("nan", "infinity") else cache  # these compile first
    options = {bad.options[i][2:].replace("-", "_"): bad.options[i + 1] for i in range(0, len(bad.options), 2)}
    typed = {k: int(v) if v.isdigit() else v for k, v in options.items()}
    with pytest.raises(bad.error) as caught:
        LLM(model, settings=Settings(cache=shared), **typed)
    check_message(str(caught.value), bad.words)
    result = command(
        "generate", model, "--token-ids", "1,2", *bad.options, "--json", env={"MEGAKERNEL_CACHE": str(shared)}
    )
    assert result.exit_code == 1
    check_message(result.stderr, bad.words)
    (line,) = result.stdout.splitlines()
    said = json.loads(line)
    assert said["error"] == bad.error.__name__ and said["message"] == str(caught.value)
    assert files(model) == before and not (shared == cache and files(tmp_path) - before - {"model", "cache"} - {
        f"model/{name}" for name in before
    })  # fmt: skip


def test_a_number_that_does_not_fit(tmp_path: Path) -> None:
    """The file is closed while the error still holds a view into it."""
    model = successor_model(tmp_path, VOCAB)
    edit_tensors(model, set_item(UP, 1e6))
    with pytest.raises(CheckpointError) as caught, open_checkpoint(model) as checkpoint:
        checkpoint.read(UP, "f16")
    check_message(str(caught.value), (UP, "float16", "got: 1000000"))


def test_a_gguf_that_is_cut_short(tmp_path: Path) -> None:
    try:
        whole = fetch_demo(read_settings().cache)
    except MegakernelError as why:
        pytest.skip(f"no GGUF file here: {why}")
    path = tmp_path / "short.gguf"
    with whole.open("rb") as source:
        for size in (0, 3, 20, 5000, 3_000_000, 50_000_000):
            source.seek(0)
            path.write_bytes(source.read(size))
            with pytest.raises(CheckpointError) as caught:
                LLM(path, settings=Settings(cache=tmp_path / "cache"))
            check_message(str(caught.value), ("short.gguf",))
    result = command("generate", path, "hi", env={"MEGAKERNEL_CACHE": str(tmp_path / "cache")})
    assert result.exit_code == 1
    check_message(result.stderr, ("short.gguf", "error:"))
    assert files(tmp_path) == {"short.gguf"}


# ---------------------------------------------------------------------------------------------- the request
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return successor_model(tmp_path_factory.mktemp("good") / "model", VOCAB)


def generate(model: Path, *arguments: object) -> Result:
    return command("generate", model, "--dtype", "f32", "--max-context", CONTEXT, *arguments, "--json")


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("--token-ids", ""), "InvalidRequest", ("prompt", "empty")),
        (("--token-ids", "5,131"), "InvalidRequest", ("0 to 130", "got 131 at place 1")),
        (("--token-ids", "-1"), "InvalidRequest", ("0 to 130", "got -1")),
        (("--token-ids", ",".join(["1"] * CONTEXT)), "CapacityError", ("fewer than 64 tokens", "got 64")),
        (("--token-ids", ",".join(["1"] * (CONTEXT + 1))), "CapacityError", ("fewer than 64 tokens", "got 65")),
        (("a text",), "InvalidRequest", ("no tokenizer", "token ids")),
        (("--token-ids", "1", "--temperature", "-0.5"), "InvalidRequest", ("temperature", "got -0.5")),
        (("--token-ids", "1", "--temperature", "nan"), "InvalidRequest", ("temperature", "got nan")),
        (("--token-ids", "1", "--top-p", "0"), "InvalidRequest", ("top_p", "got 0.0")),
        (("--token-ids", "1", "--top-p", "1.5"), "InvalidRequest", ("top_p", "got 1.5")),
        (("--token-ids", "1", "--top-k", "-3"), "InvalidRequest", ("top_k", "got -3")),
        (("--token-ids", "1", "--min-p", "2"), "InvalidRequest", ("min_p", "got 2.0")),
        (("--token-ids", "1", "--repetition-penalty", "0"), "InvalidRequest", ("repetition_penalty", "got 0.0")),
        (("--token-ids", "1", "--presence-penalty", "9"), "InvalidRequest", ("presence_penalty", "got 9.0")),
        (("--token-ids", "1", "--frequency-penalty", "-9"), "InvalidRequest", ("frequency_penalty", "got -9.0")),
        (("--token-ids", "1", "--max-tokens", "0"), "InvalidRequest", ("max_tokens", "got 0")),
        (("--token-ids", "1", "--logprobs", "21"), "InvalidRequest", ("logprobs", "got 21")),
        (("--token-ids", "1", "--seed", "-1"), "InvalidRequest", ("seed", "got -1")),
    ],
    ids=lambda v: "-".join(v)[:40] if isinstance(v, tuple) and v[0].startswith("-") else "",
)
def test_a_bad_request(model: Path, arguments: tuple[str, ...], kind: str, words: tuple[str, ...]) -> None:
    result = generate(model, *arguments)
    assert result.exit_code == 1, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["error"] == kind
    check_message(said["message"], words)
    check_message(result.stderr, words)


def test_a_prompt_of_the_context_less_one(model: Path) -> None:
    result = generate(model, "--token-ids", ",".join(["1"] * (CONTEXT - 1)))
    assert result.exit_code == 0
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["token_ids"] == [2] and said["finish_reason"] == "length"


@pytest.mark.parametrize("value", ["-7", "three", "inf"])
def test_an_option_that_is_no_number_is_usage(model: Path, value: str) -> None:
    result = generate(model, "--token-ids", "1", "--max-tokens", value)
    assert result.exit_code == (1 if value == "-7" else 2) and "max" in result.stderr.lower()
    check_message(result.stderr, ())


# ---------------------------------------------------------------------------------------------- the cache folder
def build(model: Path, cache: Path, *arguments: object, **env: str) -> Result:
    return command("build", model, "--dtype", "f32", *arguments, env={"MEGAKERNEL_CACHE": str(cache), **env})


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory; skips where this user may not mount one."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("size", ["4k", "64k"])
def test_a_full_disk(model: Path, tmp_path: Path, size: str) -> None:
    with mounted(tmp_path / "small", f"size={size}") as small:
        result = build(model, small)
        assert result.exit_code == 1, result.output
        check_message(result.stderr, ("cannot write", str(small), "MEGAKERNEL_CACHE"))
        left = [p for p in small.rglob("*") if p.is_file()]
        assert not left, left
        if size == "4k":
            with pytest.raises(BuildError, match="cannot write"):
                LLM(model, dtype="f32", settings=Settings(cache=small))


def test_a_full_disk_for_a_saved_program(model: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=40k") as small:
        result = build(model, read_settings().cache, "--output", small / "program")
        assert result.exit_code == 1, result.output
        check_message(result.stderr, ("error:", str(small)))
        assert files(small) == set()


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "fixed", "size=1m,ro") as fixed:
        result = build(model, fixed / "cache")
        assert result.exit_code == 1, result.output
        check_message(result.stderr, ("cannot write", "MEGAKERNEL_CACHE"))
        result = build(model, read_settings().cache, "--output", fixed / "program")
        assert result.exit_code == 1, result.output
        check_message(result.stderr, ("error:", "program"))


def test_a_file_in_the_place_of_a_folder(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    for cache in (place, place / "below"):
        result = build(model, cache)
        assert result.exit_code == 1, result.output
        check_message(result.stderr, (str(place),))
    result = build(model, read_settings().cache, "--output", place / "program")
    assert result.exit_code == 1, result.output
    check_message(result.stderr, (str(place),))
    assert place.read_text() == "mine" and files(tmp_path) == {"file"}


def test_a_program_is_not_written_over(model: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    result = build(model, read_settings().cache, "--output", tmp_path / "there")
    assert result.exit_code == 1 and files(tmp_path) == {"there"}
    check_message(result.stderr, ("exists", "there"))


# ---------------------------------------------------------------------------------------------- the compiler
def test_no_compiler(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "ziglang" else find(name, *more)
    )
    words = ("no C++ compiler", "MEGAKERNEL_CXX", "g++", "clang++", "ziglang")
    with pytest.raises((NoCompiler, DeviceUnavailable)) as caught:
        LLM(model, settings=Settings(cache=tmp_path / "cache"))
    check_message(str(caught.value), words)
    result = build(model, tmp_path / "cache")
    assert result.exit_code == 1 and files(tmp_path) <= {"cache"}
    check_message(result.stderr, words)
    result = command("devices", "--json")
    assert result.exit_code == 0 and "no C++ compiler" in result.stdout
    for words in (("schedule", model), ("source", model), ("source", model, "--device", "cpu")):  # these need none
        result = command(*words, env={"MEGAKERNEL_CACHE": str(tmp_path / "cache")})
        assert result.exit_code == 0, result.output


def test_a_compiler_that_is_not_there(model: Path, tmp_path: Path) -> None:
    result = build(model, tmp_path / "cache", MEGAKERNEL_CXX="/no/such/compiler")
    assert result.exit_code == 1 and files(tmp_path) <= {"cache"}
    check_message(result.stderr, ("MEGAKERNEL_CXX", "/no/such/compiler"))


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exit 1", ("MEGAKERNEL_CXX",)),
        ('case "$*" in *--version*) echo "fake 1";; *) echo "kernel.cpp:1: error: boom" >&2; exit 1;; esac', ("boom",)),
        (r"printf '\377 boom' >&2; exit 1", ("MEGAKERNEL_CXX",)),
        (r'case "$*" in *--version*) printf "\377 1\n";; *) printf "\377 boom" >&2; exit 1;; esac', ("boom",)),
        ("echo fake 1", ("ended without an error", "MEGAKERNEL_CXX")),
    ],
    ids=["does_not_start", "fails", "does_not_start_and_says_no_text", "fails_and_says_no_text", "writes_nothing"],
)
def test_a_compiler_that_fails(model: Path, tmp_path: Path, body: str, words: tuple[str, ...]) -> None:
    result = build(model, tmp_path / "cache", MEGAKERNEL_CXX=script(tmp_path / "cc", body))
    assert result.exit_code == 1, result.output
    check_message(result.stderr, words)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


# ---------------------------------------------------------------------------------------------- several processes
def start(model: Path, cache: Path, **env: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "megakernel", "generate", str(model), "--token-ids", "1", "--max-tokens", "3"]
    return subprocess.Popen(
        [*line, "--dtype", "f32", "--workers", "1", "--json"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, "MEGAKERNEL_CACHE": str(cache), **env},
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> list[int]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    tokens: list[int] = json.loads(out.splitlines()[-1])["token_ids"]
    return tokens


def test_a_build_killed_in_the_middle(model: Path, tmp_path: Path) -> None:
    """Compiler and process are killed while the kernel is compiled; the next process builds it."""
    real = " ".join(find_compiler())
    flag, cache = tmp_path / "compiling", tmp_path / "cache"
    slow = script(
        tmp_path / "cc",
        f'case "$*" in *--version*) exec {real} "$@";; esac\n[ -e {flag} ] && exec {real} "$@"\ntouch {flag}\nsleep 60',
    )
    first = start(model, cache, MEGAKERNEL_CXX=slow)
    deadline = time.monotonic() + 60
    while not flag.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert flag.exists(), "it never compiled"
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert finished(start(model, cache, MEGAKERNEL_CXX=slow)) == [2, 3, 4]
    assert len([p for p in (cache / "kernels").iterdir() if not p.name.startswith(".")]) == 1


def test_two_processes_build_the_same_program_at_once(model: Path, tmp_path: Path) -> None:
    both = [start(model, tmp_path / "cache") for _ in range(2)]
    assert [finished(p) for p in both] == [[2, 3, 4]] * 2
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1
    assert finished(start(model, tmp_path / "cache")) == [2, 3, 4]
