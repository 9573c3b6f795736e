"""Values of a wrong type or out of range, from Python and from files: each is an error that names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel import LLM, SamplingParams, compile
from megakernel.architectures import find_model
from megakernel.checkpoint import open_checkpoint
from megakernel.checkpoint.demo import _not_downloaded
from megakernel.errors import (
    CapacityError,
    CheckpointError,
    InvalidRequest,
    MegakernelError,
    TargetError,
    UnsupportedConfig,
)
from megakernel.origin import open_origin
from megakernel.rope import rope_spec
from megakernel.target import find_target

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 11,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"max_slots": 1.5}, CapacityError, "max_slots: expected an integer, got 1.5"),
        ({"max_slots": "8"}, CapacityError, "max_slots: expected an integer, got '8'"),
        ({"max_slots": True}, CapacityError, "max_slots: expected an integer, got True"),
        ({"max_context": 1.5}, CapacityError, "max_context: expected an integer, got 1.5"),
        (
            {"max_context": 1},
            CapacityError,
            "max_context 1: expected at least 2, a token of the prompt and one of output",
        ),
        ({"max_context": True}, CapacityError, "max_context: expected an integer, got True"),
        ({"max_rows": "4"}, CapacityError, "max_rows: expected an integer"),
        ({"workers": 0}, TargetError, "workers: expected an integer from 1 to 4096, got 0"),
        ({"workers": 2.5}, TargetError, "workers: expected an integer from 1 to 4096, got 2.5"),
        ({"workers": 4097}, TargetError, "workers: expected an integer from 1 to 4096, got 4097"),
        ({"seed": -1}, InvalidRequest, "seed: expected an integer of at least 0, got -1"),
        ({"kv_pages": 0}, InvalidRequest, "kv_pages: expected an integer of at least 1, got 0"),
        ({"kv_pages": 1.5}, InvalidRequest, "kv_pages: expected"),
        ({"steps_per_launch": 0}, InvalidRequest, "steps_per_launch: expected an integer of at least 1, got 0"),
        ({"target": "cpu"}, TargetError, "unknown target 'cpu'"),
        ({"policy": "best"}, MegakernelError, "unknown policy 'best'"),
        ({"dtype": "fp8"}, MegakernelError, "fp8"),
        ({"max_rows": 0}, CapacityError, "max_rows 0: a step carries 1 to 512 rows"),
        ({"max_step_ms": 0}, InvalidRequest, "max_step_ms: expected more than 0, at most 1e.09, got 0"),
        ({"max_step_ms": float("nan")}, InvalidRequest, "max_step_ms: expected more than 0, .* got nan"),
        ({"max_step_ms": float("inf")}, InvalidRequest, "max_step_ms: expected more than 0, .* got inf"),
        ({"max_step_ms": 1e30}, InvalidRequest, "max_step_ms: expected more than 0, .* got 1e.30"),
        ({"max_step_ms": "5"}, InvalidRequest, "max_step_ms: expected more than 0, .* got '5'"),
        ({"max_step_ms": True}, InvalidRequest, "max_step_ms: expected more than 0, .* got True"),
        ({"target": "sm_90a"}, TargetError, "target sm_90a is one of cuda, device cpu one of cpu: give only one"),
        ({"target": "gfx942"}, TargetError, "target gfx942 is one of hip, device cpu one of cpu: give only one"),
        ({"device": None}, MegakernelError, "device: expected a Device or the name of one (cpu, .*), got None"),
        ({"device": 3}, MegakernelError, "device: expected a Device or the name of one (cpu, .*), got 3"),
        ({"inputs": "x"}, InvalidRequest, "inputs: expected True or False, got 'x'"),
        ({"share_prefixes": 1}, InvalidRequest, "share_prefixes: expected True or False, got 1"),
        ({"trace": None}, InvalidRequest, "trace: expected True or False, got None"),
        ({"device": "gpu"}, MegakernelError, "gpu"),
    ],
)
def test_the_arguments_of_llm(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words.replace("(", r"\(").replace(")", r"\)")):
        LLM("smollm2-135m", **options)


def test_a_target_that_the_device_cannot_build() -> None:
    with pytest.raises(TargetError, match="target sm_90a is one of cuda, device cpu one of cpu"):
        compile("smollm2-135m", target="sm_90a", device="cpu")


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5), temperature=np.float32(0.5), top_k=np.int32(3), stop_token_ids=[np.int64(7)]
    )
    assert params.fields(seed=1)["top_k"] == 3 and params.stop_ids == (7,)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor <"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0, "high_freq_factor": 4.0}, "0 < low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": -1, "high_freq_factor": 4}, "0 < low_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta above 1"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 0}, "beta_fast and beta_slow above 0"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "false"}, "truncate: expected true or false, got 'false'"),
    ],
)
def test_rotary_parameters_that_make_no_sense(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedConfig, match=words):
        rope_spec({"original_max_position_embeddings": 64, **parameters}, 16, 128, partial=False)


@pytest.mark.parametrize("names", [{"LlamaForCausalLM": 1}, 7, [3], "", []])
def test_architectures_of_another_type(names: Any) -> None:
    with pytest.raises(CheckpointError, match=r"architectures|architecture none"):
        find_model({**CONFIG, "architectures": names})


def write(folder: Path, config: dict[str, Any]) -> Path:
    from safetensors.numpy import save_file

    from megakernel.architectures import parameter_shapes
    from megakernel.builder.build import build_graph

    shapes = parameter_shapes(build_graph(CONFIG))
    save_file({n: np.ones(s, np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_more_layers_than_tensors_is_seen_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"100000 layers, the checkpoint 11 tensors"):
        open_origin(write(tmp_path, {**CONFIG, "num_hidden_layers": 100000}), cache=tmp_path)


def test_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    file = write(tmp_path, CONFIG) / "model.safetensors"
    open_checkpoint(tmp_path).close()
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    with pytest.raises(CheckpointError, match="bytes follow the last tensor"):
        open_checkpoint(tmp_path)


def test_json_that_is_nested_too_deep(tmp_path: Path) -> None:
    write(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deep"):
        open_checkpoint(tmp_path)


def test_a_model_that_is_not_there_lists_what_can_be_built(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llama-3\.2-1b") as error:
        open_origin("no-such-model", cache=tmp_path)
    assert "qwen3-30b-a3b" not in str(error.value)


def test_a_full_disk_is_not_the_network(tmp_path: Path) -> None:
    log = ["ERROR: Exception:", "Traceback", "OSError: [Errno 28] No space left on device"]
    assert "make room" in str(_not_downloaded(tmp_path, log, 2)) and "No space" in str(
        _not_downloaded(tmp_path, log, 2)
    )
    assert "check the network" in str(_not_downloaded(tmp_path, ["ERROR: No matching distribution"], 1))


def test_workers_of_a_target() -> None:
    assert find_target("sm_90a").with_workers(4096).workers == 4096
    with pytest.raises(TargetError, match="got True"):
        find_target("sm_90a").with_workers(True)


@pytest.mark.parametrize("how", [">/dev/full", ">&-"])
def test_standard_output_that_cannot_be_written(how: str) -> None:
    line = f"{sys.executable} -m megakernel models {how}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    if how == ">/dev/full":
        assert done.returncode == 1 and "cannot be written" in done.stderr
