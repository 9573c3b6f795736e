"""GGUF files: every type against the gguf package's own dequantisation, names, configuration, and every error."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.checkpoint import open_checkpoint
from megakernel.checkpoint.gguf_file import CODECS
from megakernel.checkpoint.gguf_names import llama3_divisors
from megakernel.errors import CheckpointError, MissingExtra

gguf = pytest.importorskip("gguf")
HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCAB = 4, 2, 64, 256, 512, 48
Kind = gguf.GGMLQuantizationType


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion of q and k rows."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def quantised(kind: Any, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Stored bytes [rows, row_bytes] of a tensor of this type."""
    try:
        return np.asarray(gguf.quants.quantize(rng.standard_normal((rows, cols)).astype(np.float32), kind))
    except NotImplementedError:  # the K types: random blocks with small float16 scales
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (rows, cols // block_values, block_bytes), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        places = (-2,) if kind == Kind.Q6_K else (0, 2)
        for at in places:
            blocks[..., at : at + 2 or None] = scale
        return blocks.reshape(rows, -1)


def write_llama(path: Path, kind: Any = None, arch: str = "llama", extra: Callable[[Any], None] | None = None) -> dict:
    """A one-layer model; returns what each tensor should read as, by GGUF name, in GGUF's own row order."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD)
    if extra:
        extra(writer)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    expected: dict[str, np.ndarray] = {}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        expected[f"{name}.weight"] = rng.standard_normal(HIDDEN).astype(np.float32)
        writer.add_tensor(f"{name}.weight", expected[f"{name}.weight"])
    for name, shape in shapes.items():
        full = f"{name}.weight"
        if kind is None:
            expected[full] = rng.standard_normal(shape).astype(np.float32)
            writer.add_tensor(full, expected[full])
        else:
            data = quantised(kind, *shape, rng)
            expected[full] = np.asarray(gguf.quants.dequantize(data, kind))
            writer.add_tensor(full, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", [Kind(number) for number in CODECS], ids=lambda kind: kind.name)
def test_every_type_equals_the_package(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "m.gguf"
    expected = write_llama(path, kind)
    with open_checkpoint(path) as checkpoint:
        down = checkpoint.read("model.layers.0.mlp.down_proj.weight")
        np.testing.assert_array_equal(down, expected["blk.0.ffn_down.weight"])
        assert checkpoint.stored_dtype("model.layers.0.mlp.down_proj.weight").lower() == kind.name.lower()
        part = checkpoint.read("model.embed_tokens.weight", "bf16", rows=slice(5, 31))
        np.testing.assert_array_equal(part, expected["token_embd.weight"][5:31].astype(part.dtype))
        for ours, theirs, heads in (("q", "attn_q", HEADS), ("k", "attn_k", KV_HEADS)):
            name = f"model.layers.0.self_attn.{ours}_proj.weight"
            got = checkpoint.read(name)
            np.testing.assert_array_equal(interleave(got, heads), expected[f"blk.0.{theirs}.weight"])
            for rows in (slice(0, 1), slice(31, 33), slice(60, 101), slice(90, None)):
                np.testing.assert_array_equal(checkpoint.read(name, rows=rows), got[rows])


def test_names_and_config(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    expected = write_llama(path)
    layer = "model.layers.0."
    names = {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"{layer}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.names()) == names
        checkpoint.check_used(names)
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), expected["output_norm.weight"])
        assert checkpoint.tokenizer is None
        wanted = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCAB,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        }
        assert {key: checkpoint.config[key] for key in wanted} == wanted


def test_rope_scaling(tmp_path: Path) -> None:
    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    def llama3(writer: Any) -> None:
        factors = llama3_divisors(HEAD, 100000.0, 8.0, 1.0, 4.0, 8192).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)

    def other(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.full(HEAD // 2, 3.0, np.float32))

    cases: list[tuple[Any, dict[str, Any]]] = [
        (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (llama3, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        (other, {"rope_type": "divisors of rope_freqs.weight that are not Llama 3's"}),
    ]
    for extra, wanted in cases:
        write_llama(tmp_path / "m.gguf", extra=extra)
        with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
            rope = checkpoint.config["rope_parameters"]
            assert {key: rope[key] for key in wanted} == wanted
            assert "rope_freqs.weight" not in checkpoint.names()


def test_other_families(tmp_path: Path) -> None:
    def experts(writer: Any) -> None:
        writer.add_expert_count(3)
        writer.add_tensor("blk.0.ffn_up_exps.weight", np.arange(3 * 2 * 32, dtype=np.float32).reshape(3, 2, 32))
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((3, 32), np.float32))

    expected = write_llama(tmp_path / "m.gguf", arch="qwen3moe", extra=experts)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        second = checkpoint.read("model.layers.0.mlp.experts.1.up_proj.weight")
        np.testing.assert_array_equal(second, np.arange(64, 128, dtype=np.float32).reshape(2, 32))
        assert "model.layers.0.mlp.gate.weight" in checkpoint.names()
        query = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
        np.testing.assert_array_equal(query, expected["blk.0.attn_q.weight"])  # not interleaved
    expected = write_llama(tmp_path / "m.gguf", arch="gemma2")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        norm = checkpoint.read("model.layers.0.pre_feedforward_layernorm.weight")
        np.testing.assert_array_equal(norm, expected["blk.0.ffn_norm.weight"] - 1)
    write_llama(tmp_path / "m.gguf", arch="phi2")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config["architectures"] == ["phi2"]
        assert "model.layers.0.self_attn.q_proj.weight" in checkpoint.names()  # from the gguf package's table
        assert "blk.0.ffn_gate.weight" in checkpoint.names()  # phi2 has no gate: kept, for an error to show


def test_generation_defaults(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)
        writer.add_bos_token_id(1)
        writer.add_float32("general.sampling.temp", 0.5)

    write_llama(tmp_path / "m.gguf", extra=extra)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.generation.eos_token_ids == (2, 5)
        assert checkpoint.generation.bos_token_id == 1
        assert checkpoint.generation.temperature == 0.5


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_llama(path, Kind.Q8_0)
    whole = path.read_bytes()
    for keep in [*range(0, 1200, 13), len(whole) // 2, len(whole) - 32]:
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"truncated|empty"):
            open_checkpoint(path)


def test_not_gguf_and_wrong_versions(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(path)
    for version in (1, 4, 3 << 24):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(CheckpointError, match="unsupported GGUF version"):
            open_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(CheckpointError, match="does not name its architecture"):
        open_checkpoint(path)


def test_unsupported_type_lists_the_known_ones(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_tensor("blk.0.x.weight", np.zeros((1, 84), np.uint8), raw_dtype=Kind.Q2_K)

    write_llama(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.x\.weight(.|\n)*Q4_1(.|\n)*got: Q2_K"):
        open_checkpoint(tmp_path / "m.gguf")


def test_split_files_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", extra=lambda writer: writer.add_uint16("split.count", 2))
    with pytest.raises(CheckpointError, match="llama-gguf-split"):
        open_checkpoint(tmp_path / "m.gguf")


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_tensor("blk.1.attn_q.weight", np.zeros((10, 32), np.float32))

    write_llama(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.weight does not hold whole heads"):
        open_checkpoint(tmp_path / "m.gguf")


def test_missing_extra_names_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "m.gguf", Kind.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.read("model.norm.weight").shape == (HIDDEN,)
        with pytest.raises(MissingExtra, match="pip install"):
            checkpoint.read("model.embed_tokens.weight")
