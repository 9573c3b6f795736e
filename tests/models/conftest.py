"""The models of this folder's tests, made, saved and opened once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megakernel import LLM
from megakernel.checkpoint import open_checkpoint
from tests.models.families import Array, Case, config_of, find, ids_of, reference, save


@dataclass(frozen=True)
class Subject:
    """A saved model, its configuration and weights as transformers wrote them, and its logits after every token."""

    path: Path
    config: Mapping[str, Any]  # as config.json states it
    full: Mapping[str, Any]  # with every default filled in
    weights: Mapping[str, Array]
    ids: list[int]
    expected: Array


def make(case: Case, folder: Path) -> Subject:
    """A model, saved in `folder`."""
    model = case.model()
    path = save(model, folder)
    with open_checkpoint(path) as checkpoint:
        weights = {tensor: checkpoint.read(tensor) for tensor in checkpoint.names()}
        config = dict(checkpoint.config)
    ids = ids_of(model)
    return Subject(path, config, config_of(model), weights, ids, reference(model, ids))


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    made: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in made:
            made[name] = make(find(name), tmp_path_factory.mktemp("models") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def opened() -> Iterator[Callable[[Path], LLM]]:
    """A float32 program of a checkpoint on the CPU device; one is open at a time."""
    from tests.models.quick import QuickDevice

    device, kept = QuickDevice(), dict[Path, LLM]()

    def get(path: Path) -> LLM:
        if path not in kept:
            for llm in kept.values():
                llm.close()
            kept.clear()
            kept[path] = LLM(path, device=device, dtype="f32", max_slots=2, max_context=256)
        return kept[path]

    yield get
    for llm in kept.values():
        llm.close()
