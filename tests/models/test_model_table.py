"""The table of models says what tests check, and the page in docs/ is made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakernel.architectures import find_model
from megakernel.errors import UnknownArchitecture
from megakernel.model_table import CHECKS, model_rows, models_page

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == models_page(), (
        "run python -m megakernel.model_table > docs/models.md"
    )


def test_rows_say_what_tests_check() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from tests.models.families import CASES
    from tests.models.test_gguf_families import CASES as GGUF
    from tests.models.test_random_configs import FAMILIES

    found = {
        "logits": {case.family for case in CASES},
        "gguf": {case.family for _, case in GGUF.values()},
        "random": {family.name for family in FAMILIES},
    }
    assert set(found) == set(CHECKS)
    for row in model_rows():
        family = row.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        assert set(row.checks) == {check for check, names in found.items() if family in names}, row.architecture


def test_an_unknown_architecture_says_what_is_different() -> None:
    config = {
        "architectures": ["Llama5ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 64, "vocab_size": 10, "spiral_attention": 3,
    }  # fmt: skip
    with pytest.raises(
        UnknownArchitecture, match=r"nearest: LlamaForCausalLM, which it is not: .*spiral_attention = 3"
    ):
        find_model(config)
