"""Four q-heads to a KV head, whole through LLM; tests/models has the other ratios and every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakernel.llm import LLM
from megakernel.sampling import SamplingParams
from tests.program.tiny import random_ids, random_model, reference_logits, relative_error, saved

pytest.importorskip("transformers")
PROMPT, DECODED = 45, 32


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_prefill_and_decode_equal_transformers(tied: bool, tmp_path: Path) -> None:
    """head_dim is not hidden / heads; the vocabulary is odd; chunks of the prompt, then tokens one by one."""
    model = random_model(
        num_attention_heads=8, num_key_value_heads=2, head_dim=24, hidden_size=104, vocab_size=331,
        tie_word_embeddings=tied,
    )  # fmt: skip
    ids = random_ids(PROMPT + DECODED, 331)
    expected = reference_logits(model, ids)
    with LLM(saved(model, tmp_path / "model"), dtype="f32", max_slots=2, max_context=128) as llm:
        assert relative_error(llm.logits(ids, PROMPT - 1), expected[PROMPT - 1 :]) <= 2e-5
        (output,) = llm.generate([ids[:PROMPT]], SamplingParams(max_tokens=1))
    assert output.token_ids[0] == int(expected[PROMPT - 1].argmax())
