"""Hugging Face folders: values, row slices, sharding, configuration, generation defaults, and every error."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from megakernel.checkpoint import Checkpoint, open_checkpoint
from megakernel.checkpoint.config import normalise_rope
from megakernel.errors import CheckpointError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def save_llama(folder: Path, dtype: str = "f32", shard: str | None = None, **changes: Any) -> dict[str, Any]:
    """Save a tiny random Llama; returns its tensors as float32 arrays."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**values, **changes})).to(TORCH[dtype])
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return {name: value.float().numpy() for name, value in model.state_dict().items()}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], header: dict[str, Any] | None = None) -> None:
    """A file by hand, so that its header can be wrong."""
    entries, data = {}, b""
    for name, value in tensors.items():
        entries[name] = {
            "dtype": "F32",
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + value.nbytes],
        }
        data += value.tobytes()
    text = json.dumps(header if header is not None else entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def folder_with(tmp_path: Path, config: dict[str, Any] | None = None) -> Path:
    """A folder with one small weight file and a configuration."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": np.arange(12, dtype=np.float32).reshape(4, 3)})
    return tmp_path


@pytest.mark.parametrize("shard", [None, "8KB"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_values_equal_what_was_saved(tmp_path: Path, dtype: str, shard: str | None) -> None:
    saved = save_llama(tmp_path, dtype, shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard is not None)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == tuple(sorted(saved))
        for name, value in saved.items():
            assert checkpoint.shape(name) == value.shape
            assert checkpoint.stored_dtype(name) == dtype
            for wanted, numpy_type in NUMPY.items():
                got = checkpoint.read(name, wanted)
                assert got.dtype == numpy_type
                np.testing.assert_array_equal(got, value.astype(numpy_type))
        checkpoint.check_used(saved)


def test_rows(tmp_path: Path) -> None:
    saved = save_llama(tmp_path)["model.embed_tokens.weight"]
    with open_checkpoint(tmp_path) as checkpoint:
        for rows in (slice(0, 0), slice(3, 17), slice(40, None), slice(None, 5), slice(48, 48)):
            np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight", rows=rows), saved[rows])
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight", rows=slice(2, 9)), np.ones(7))
        for bad in (slice(0, 49), slice(-1, 3), slice(0, 8, 2), slice(9, 8)):
            with pytest.raises(CheckpointError, match=r"rows of model\.embed_tokens\.weight"):
                checkpoint.read("model.embed_tokens.weight", rows=bad)


def test_rounding_is_to_nearest_even_and_nan_stays(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    values = np.array(
        [[1 + 2**-8, 1 + 3 * 2**-8, np.nan, np.inf], [1 + 2**-11, 1 + 3 * 2**-11, -0.0, 1e-40]], np.float32
    )
    write_safetensors(folder / "model.safetensors", {"a.weight": values})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read("a.weight", "bf16")[0, :2].astype(float).tolist() == [1.0, 1 + 2**-6]
        assert checkpoint.read("a.weight", "f16")[1, :2].astype(float).tolist() == [1.0, 1 + 2**-9]
        for dtype in NUMPY:
            got = checkpoint.read("a.weight", dtype)
            assert np.isnan(got[0, 2])
            assert np.isinf(got[0, 3])


def test_f16_overflow_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    write_safetensors(folder / "model.safetensors", {"a.weight": np.array([[1.0, 1e6]], np.float32)})
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"a\.weight: a value is too large"),
    ):
        checkpoint.read("a.weight", "f16")


def test_peak_memory_of_a_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    write_safetensors(folder / "model.safetensors", {"a.weight": np.ones((8192, 2048), np.float32)})
    with open_checkpoint(folder) as checkpoint:
        tracemalloc.start()
        got = checkpoint.read("a.weight", "bf16")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= 1.3 * got.nbytes


def test_a_tensor_without_dimensions_and_an_empty_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    write_safetensors(folder / "model.safetensors", {"s": np.array(2.5, np.float32), "e": np.zeros((0, 3), np.float32)})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read("s").shape == ()
        assert float(checkpoint.read("s")) == 2.5
        assert checkpoint.read("e").shape == (0, 3)


def test_config_of_both_styles(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
        assert checkpoint.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    scaling = {"type": "yarn", "factor": 4.0}
    old = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 64, "partial_rotary_factor": 0.5}
    new = normalise_rope(old, tmp_path)
    assert new["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
    }
    assert "rope_theta" not in new
    assert "rope_scaling" not in new
    assert normalise_rope(new, tmp_path) == new
    local = normalise_rope({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, tmp_path)["rope_parameters"]
    assert local["full_attention"]["rope_theta"] == 1e6
    assert local["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert "rope_theta" not in normalise_rope({"rope_scaling": scaling}, tmp_path)["rope_parameters"]
    assert "rope_parameters" not in normalise_rope({"n_embd": 4}, tmp_path)
    with pytest.raises(CheckpointError, match="contradicts"):
        normalise_rope({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, tmp_path)
    both = {"rope_theta": 5e5, "rope_parameters": new["rope_parameters"], "rope_scaling": scaling}
    with pytest.raises(CheckpointError, match="rope_scaling contradicts rope_parameters"):
        normalise_rope(both, tmp_path)
    same = {**both, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}
    assert normalise_rope(same, tmp_path)["rope_parameters"]["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (7, None, None, (7,)),
        ([7, 8], 7, None, (7, 8)),
        (None, [3, 4], None, (3, 4)),
        (None, None, None, ()),
        ([9], 3, 4, (9, 3, 4)),
    ],
)
def test_end_tokens(tmp_path: Path, generation: Any, config: Any, tokenizer: Any, expected: tuple[int, ...]) -> None:
    folder = folder_with(tmp_path, {"eos_token_id": config})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "top_k": 5, "top_p": 1}))
    if tokenizer is not None:
        entry = {str(tokenizer): {"content": "<e>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "added_tokens_decoder": entry}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.generation.eos_token_ids == expected
        assert checkpoint.generation.top_k == 5
        assert checkpoint.generation.top_p == 1.0
        assert checkpoint.generation.temperature is None


def test_bad_generation_values(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    for values, key in (({"eos_token_id": "x"}, "eos_token_id"), ({"top_k": 1.5}, "top_k"), ({"top_p": "a"}, "top_p")):
        (folder / "generation_config.json").write_text(json.dumps(values))
        with pytest.raises(CheckpointError, match=key):
            open_checkpoint(folder)


def test_check_used(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"architectures": ["X"], "tie_word_embeddings": True})
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensors = {"model.embed_tokens.weight": table, "a.rotary_emb.inv_freq": table[0], "lm_head.weight": table}
    write_safetensors(folder / "model.safetensors", tensors)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check_used(["model.embed_tokens.weight"])
        with pytest.raises(CheckpointError, match=r"1 missing: b\.weight; 1 left over: model\.embed_tokens\.weight"):
            checkpoint.check_used(["b.weight", "lm_head.weight"])
    write_safetensors(folder / "model.safetensors", {**tensors, "lm_head.weight": table + 1})
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match=r"left over: lm_head\.weight"):
        checkpoint.check_used(["model.embed_tokens.weight"])


def test_expect_and_unknown_names(tmp_path: Path) -> None:
    with open_checkpoint(folder_with(tmp_path)) as checkpoint:
        checkpoint.expect("a.weight", (4, 3))
        with pytest.raises(CheckpointError, match=r"a\.weight(.|\n)*expected: \[3, 4\](.|\n)*got: \[4, 3\]"):
            checkpoint.expect("a.weight", (3, 4))
        with pytest.raises(CheckpointError, match=r"b\.weight is missing(.|\n)*nearest: a\.weight"):
            checkpoint.shape("b.weight")
        with pytest.raises(CheckpointError, match="as 'f64'"):
            checkpoint.read("a.weight", "f64")


def test_close(tmp_path: Path) -> None:
    checkpoint: Checkpoint = open_checkpoint(folder_with(tmp_path))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("a.weight")


def test_fingerprint(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)

    def fingerprint() -> str:
        with open_checkpoint(folder) as checkpoint:
            return checkpoint.fingerprint

    first = fingerprint()
    assert first == fingerprint()
    folder_with(folder, {"hidden_size": 1})
    second = fingerprint()
    write_safetensors(folder / "model.safetensors", {"b.weight": np.ones((4, 3), np.float32)})
    assert len({first, second, fingerprint()}) == 3


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(tmp_path / "x.txt")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)


def test_bad_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    for text, message in (
        ("{", "line 1, column 2"),
        ("[]", "not hold a JSON object"),
        ('{"a":1,"a":2}', "there twice"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        open_checkpoint(folder)
    folder_with(folder, {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(CheckpointError, match="gptq"):
        open_checkpoint(folder)


def test_truncated_safetensors(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for keep in range(0, len(whole), 7):
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"truncated|empty"):
            open_checkpoint(folder)
    path.write_bytes(whole[: len(whole) - 1])
    with pytest.raises(CheckpointError, match=r"tensor a\.weight ends beyond it"):
        open_checkpoint(folder)


def test_damaged_safetensors_headers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    path = folder / "model.safetensors"
    cases: list[tuple[Any, str]] = [
        ({"a": {"dtype": "F32", "shape": [2]}}, "tensor a is damaged"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a: data_offsets do not match"),
        ({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, "unsupported dtype(.|\n)*F8_E4M3"),
        ([], "not an object"),
    ]
    for header, message in cases:
        write_safetensors(path, {"a": np.zeros(2, np.float32)}, header)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    path.write_bytes(struct.pack("<Q", 4) + b"nope")
    with pytest.raises(CheckpointError, match="not JSON"):
        open_checkpoint(folder)


def test_integer_buffers_with_benign_names_are_left_out(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    header = {"x.position_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
    write_safetensors(folder / "model.safetensors", {"a": np.zeros(2, np.float32)}, header)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names() == ()


def test_bad_index(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(folder)
    one = np.ones((2, 2), np.float32)
    write_safetensors(folder / "one.safetensors", {"a": one})
    write_safetensors(folder / "two.safetensors", {"b": one})
    index = folder / "model.safetensors.index.json"
    cases = [
        ("{", "not valid JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "a: there twice"),
        ('{"weight_map": {"a": "three.safetensors"}}', r"shard three\.safetensors is missing"),
        ('{"weight_map": {"a": "../one.safetensors"}}', "is missing"),
        ('{"weight_map": {"a": "two.safetensors"}}', "wrong about tensor a"),
        ('{"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}', "wrong about tensor c"),
    ]
    for text, message in cases:
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    index.unlink()
    write_safetensors(folder / "two.safetensors", {"a": one})
    with pytest.raises(CheckpointError, match="tensor a is there twice"):
        open_checkpoint(folder)
