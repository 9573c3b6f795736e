"""The kernel for CUDA on the host: logits of the interpreter, the same tokens alone and in a batch.

An index, a fragment's order, a barrier that nobody completes or a sum that depends on the batch shows here, whether
a step has one row or several. Caches and fences are not imitated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.device_session import admit, generate, randomise
from megakernel.architectures import random_weights
from megakernel.builder import dealing
from megakernel.builder.build import build_graph, build_program
from megakernel.errors import DeviceFault
from megakernel.probe import forced_logits
from megakernel.runtime import Runtime
from megakernel.tasks.record import LAUNCH
from tests.cuda.emulated import EmulatedCuda
from tests.gpu.machine import prompts

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 288,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 131,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip
ONE_LAYER: Mapping[str, Any] = {**LLAMA, "num_hidden_layers": 1}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "one unit": LLAMA,
    # Of more than 8 rows an input of three units does not fit the room, and each worker has many blocks of tiles: it
    # passes through again and again.
    "three units": {
        **LLAMA, "hidden_size": 2304, "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32,
    },
    "units of 1,024 columns": {**LLAMA, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1},
    "heads of 96, padded units": {
        **LLAMA, "num_hidden_layers": 1, "num_attention_heads": 6, "head_dim": 96, "intermediate_size": 1184,
    },
    "normed heads of 128": {
        **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 128,
        "attention_bias": False,
    },
}  # fmt: skip


def opened(
    config: Mapping[str, Any], cache: Path, workers: int, piece_tokens: int | None = None, **options: Any
) -> tuple[Runtime, Any, Any]:
    device, graph = EmulatedCuda(workers), build_graph(config)
    target = device.target if piece_tokens is None else replace(device.target, piece_tokens=piece_tokens)
    weights = random_weights(graph, seed=3, dtype="bf16")
    chosen = {"dtype": "bf16", "max_context": 192, "max_slots": 3, "max_rows": 16, **options}
    program = build_program(config, target, device, cache=cache, **chosen)
    return Runtime(program, device, weights.read, spin_budget_ns=60_000_000_000), graph, weights


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated-cuda")


SLOW = ("one unit", "units of 1,024 columns")  # what they have others have, in the default run


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[pytest.mark.slow] * (s in SLOW)) for s in sorted(SHAPES)])
def test_logits_and_batches(shape: str, cache: Path) -> None:
    """A prompt in a step of 11 rows, and a row; sequences together and alone."""
    run, graph, weights = opened(SHAPES[shape], cache, 2)
    ids = prompts(run.manifest.vocab, (12,))[0]
    try:
        got = forced_logits(run, ids, 10)
        given, count = prompts(run.manifest.vocab, (8, 1)), 1 if shape == "three units" else 2  # its steps are long
        together = generate(run, given, count)
        assert together == [generate(run, [p], count)[0] for p in given]
    finally:
        run.close()
    want = graph.interpret(weights, ids)["logits"].numpy()[10:]
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 0.02, error


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 64, "chaos": True},
        pytest.param({"max_rows": 64}, marks=pytest.mark.slow),
        pytest.param({"chaos": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_same_tokens_with_delays_and_in_wide_steps(options: dict[str, Any], cache: Path) -> None:
    tokens = []
    for changed in ({}, options):
        run = opened(ONE_LAYER, cache, 2, **changed)[0]
        run.chaos_seed = 7
        try:
            tokens.append(generate(run, prompts(run.manifest.vocab, (66, 3)), 2))
        finally:
            run.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("shape", "workers", "options"),
    [
        ("one unit", 3, {"chaos": True}),
        pytest.param("one unit", 1, {}, marks=pytest.mark.slow),
        pytest.param("units of 1,024 columns", 5, {}, marks=pytest.mark.slow),
        pytest.param("heads of 96, padded units", 5, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_same_bits_where_products_are_dealt_by_shares(
    shape: str, workers: int, options: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All products that may be, in wide steps of 2, 3 and 4 tiles of rows, against narrow steps."""
    config = {**SHAPES[shape], "num_hidden_layers": 1}
    narrow = opened(config, cache, 2, max_rows=16)[0]
    monkeypatch.setattr(dealing, "pays", lambda *sizes: True)
    dealt = opened(config, cache, workers, max_rows=64, **options)[0]
    assert sum("dealt = true" in v for v in dealt.manifest.variants) >= 2
    try:
        for length in (17, 33, 70):
            ids, got = prompts(narrow.manifest.vocab, (length,))[0], []
            for run in (narrow, dealt):
                run.reset()
                got.append(forced_logits(run, ids, length - 1).view(np.uint32))
            assert (got[0] == got[1]).all()
    finally:
        narrow.close()
        dealt.close()


@pytest.mark.parametrize("kv_dtype", ["bf16", pytest.param("f8", marks=pytest.mark.slow)])
def test_same_bits_where_rows_of_a_prompt_go_to_several_workers(kv_dtype: str, cache: Path) -> None:
    """Steps of 64 and of 36 rows, dealt in stretches to six workers, and steps of 16."""
    found = []
    for workers, rows in ((2, 16), (6, 64)):
        run = opened({**LLAMA, "num_key_value_heads": 1}, cache, workers, max_rows=rows, kv_dtype=kv_dtype)[0]
        try:
            found.append(forced_logits(run, prompts(run.manifest.vocab, (101,))[0], 99).tobytes())
        finally:
            run.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_same_tokens_on_any_number_of_workers(workers: int, cache: Path) -> None:
    tokens = []
    for count in (2, workers):
        run = opened(ONE_LAYER, cache, count)[0]
        try:
            tokens.append(generate(run, prompts(run.manifest.vocab, (18, 3)), 2))
        finally:
            run.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(("rows", "shares"), [(16, 2), pytest.param(64, 4, marks=pytest.mark.slow)])
def test_rows_of_a_head_on_several_workers(rows: int, shares: int, cache: Path) -> None:
    """Rows of two and three pieces, all in a step and one, with one tile of `combine` a head and with more; the second
    layer reads what the first made of each row."""
    config = {**LLAMA, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    logits = []
    for room, workers, tiles in ((8, 2, 1), (rows, 2 * shares, shares)):
        run = opened(config, cache, workers, max_rows=room, piece_tokens=64)[0]
        assert any(f".shares = {tiles}," in variant for variant in run.manifest.variants)
        try:
            logits.append(forced_logits(run, prompts(run.manifest.vocab, (133,))[0], 131))
        finally:
            run.close()
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize(
    ("begins", "rows", "workers"),
    [
        ((900, 40), (1, 1), 2),
        ((900, 640, 100, 577, 512, 700), (1,) * 6, 2),
        pytest.param((900, 640, 100, 577, 512, 30, *range(500, 620, 10)), (1,) * 18, 8, marks=pytest.mark.slow),
        pytest.param((860, 610), (30, 9), 3, marks=pytest.mark.slow),
    ],
)
def test_rows_of_many_pieces(begins: tuple[int, ...], rows: tuple[int, ...], workers: int, cache: Path) -> None:
    """More pieces than a worker has warps. All warps add them, or each those of some rows and heads; in narrow steps,
    in wide ones and where rows of a prompt go in stretches. Four steps, so that what a step left must be cleared."""
    config = {
        **LLAMA, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    found = []
    for room, count in ((1, 2), (64, workers)):
        run = opened(config, cache, count, max_rows=room, max_slots=18, max_context=960, piece_tokens=64)[0]
        together = list(range(len(begins)))
        logits = np.empty((len(begins), run.manifest.vocab), np.float32)
        try:
            for slots in [together] if room > 1 else [[i] for i in together]:
                run.reset()
                randomise(run, weights=False)
                for i in slots:
                    given = prompts(run.manifest.vocab, (begins[i] + rows[i],))[0]
                    given[-1] = 1 + i
                    admit(run, i, given, len(given) + 4, start=begins[i])
                run.launch(4 if room > 1 else 3 + rows[slots[0]])
                run.finish()
                logits[slots] = run.tensor("logits")[: len(slots)]
        finally:
            run.close()
        found.append(logits.view(np.uint32))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [(128, 2), pytest.param(96, 4, marks=pytest.mark.slow), pytest.param(64, 1, marks=pytest.mark.slow)],
)
def test_rows_of_fewer_columns_than_the_loaders_share(hidden: int, heads: int, cache: Path) -> None:
    """Inputs of one to three chunks, of which some loaders bring nothing: six steps in a launch, of one row and two."""
    config = {
        **ONE_LAYER, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    run = opened(config, cache, 1)[0]
    given, found = prompts(run.manifest.vocab, (4, 2)), []
    try:
        for sequences in (given, given[:1]):
            tokens = generate(run, sequences, 6)[0]
            found.append((tokens, run.tensor("logits")[0].tobytes()))
    finally:
        run.close()
    assert found[0] == found[1]


def test_a_bound_keeps_steps_of_a_paced_program_short(cache: Path) -> None:
    """A bound that no prompt row fits: one at a time beside the other sequence."""
    made = []
    run = opened(ONE_LAYER, cache, 2, max_rows=4, paced=True)[0]
    assert run.manifest.paced
    given = prompts(run.manifest.vocab, (1, 6))
    try:
        for run.step_budget_ns in (0, 1):
            run.first_chunk = 1
            tokens = generate(run, given, 4)
            made.append((tokens, run.buffer("launch").host.view(LAUNCH.dtype)[0]["steps_run"]))
    finally:
        run.close()
    (free, few), (bounded, many) = made
    assert free == bounded and (few, many) == (5, 7)  # the second prompt: 3 rows in the first step, 3 more, or 1, 1, 1


def test_a_worker_that_never_starts_is_a_fault(cache: Path) -> None:
    """Nothing is waited for without end."""
    run = opened(ONE_LAYER, cache, 2)[0]
    run.spin_budget_ns = 1_000_000_000
    run.device.leave_out(1)
    try:
        with pytest.raises(DeviceFault, match=r"budget|roll"):
            generate(run, prompts(run.manifest.vocab, (3,)), 2)
    finally:
        run.close()
