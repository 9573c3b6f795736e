"""Models and folders that the tests of whole programs share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from megakernel.checkpoint import fetch_demo, open_checkpoint
from megakernel.errors import MegakernelError
from megakernel.llm import LLM
from megakernel.settings import Settings, read_settings

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Ms. Novak,\n\nThank you for your letter of 3 May 2021 about",
    "中文和日本語 are",
)
QUESTIONS = ("Explain in two sentences why the sky is blue.", "Write a haiku about the ocean.")


@dataclass(frozen=True)
class Subject:
    """The model of the numerical tests: SmolLM2, or a random one where it cannot be fetched."""

    path: Path
    real: bool

    @cached_property
    def prompts(self) -> list[list[int]]:
        if not self.real:
            from tests.program.tiny import random_ids

            return [random_ids(5 + 3 * i, seed=i) for i in range(8)]
        with open_checkpoint(self.path) as checkpoint:
            tokenizer = checkpoint.tokenizer
            assert tokenizer is not None
            chats = [tokenizer.apply_chat_template([{"role": "user", "content": q}], None, True) for q in QUESTIONS]
            return [tokenizer.encode(text) for text in (*TEXTS, *chats)]

    def reference(self, dtype: Any = None) -> Any:
        """transformers' model with the same dequantised weights, in torch's `dtype` (default float32)."""
        import torch
        import transformers

        with open_checkpoint(self.path) as checkpoint:
            fields = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type", "dtype")}
            config = transformers.LlamaConfig(**fields)
            model = transformers.LlamaForCausalLM(config).eval()
            state = {name: torch.from_numpy(checkpoint.read(name, "f32")) for name in checkpoint.names()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return model.to(dtype or torch.float32)


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    try:
        return Subject(fetch_demo(read_settings().cache), True)
    except MegakernelError as why:
        warnings.warn(f"a random tiny model stands in for the demo model: {why}", stacklevel=1)
        from tests.program.tiny import random_model, saved

        return Subject(saved(random_model(spread=0.08), tmp_path_factory.mktemp("subject") / "tiny"), False)


@pytest.fixture(scope="session")
def subject_f32(subject: Subject) -> Iterator[LLM]:
    with LLM(subject.path, dtype="f32", max_slots=8, max_context=512) as llm:
        yield llm


@pytest.fixture(scope="session")
def subject_bf16(subject: Subject) -> Iterator[LLM]:
    with LLM(subject.path, dtype="bf16", max_slots=8, max_context=512) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of tests.program.tiny.SIZES."""
    from tests.program.tiny import random_model, saved

    return saved(random_model(), tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def patient() -> Callable[..., Settings]:
    """Settings of this machine with another time limit of waits."""
    return lambda spin_ms: replace(read_settings(), spin_ms=spin_ms)
