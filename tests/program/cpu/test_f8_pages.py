"""Programs with 8-bit pages on the CPU device: near the reference, and the same bits however a sequence is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megakernel.bench import step_bytes
from megakernel.engine import Engine
from megakernel.errors import InvalidRequest

from .conftest import TINY, Open, reference
from .test_batches import alone, answer, params, prompt
from .test_prefixes import hits, sequence

pytestmark = pytest.mark.timeout(200)
F8 = {"kv_dtype": "f8"}


def test_logits_stay_close(opened: Open, tiny: Path) -> None:
    pytest.importorskip("torch")
    ids = prompt(15, 120)
    graph, weights = reference(tiny)
    want = graph.interpret(weights, ids)["logits"].numpy()

    def error(**options: str) -> float:
        got = opened(**options).logits(ids)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    half, eight = error(kv_dtype="bf16"), error(**F8)
    assert 8 * half < eight < 32 * half and eight < 0.1, "four bits less"


def test_rows_and_workers_change_no_bits(opened: Open) -> None:
    ids = prompt(1, 330)
    token_by_token, more_workers = {"max_step_ms": 1e-6}, {"workers": 3}
    want = alone(opened(**F8), ids, params(9))
    assert all(alone(opened(**F8, **options), ids, params(9)) == want for options in (token_by_token, more_workers))


def test_a_batch_gives_what_each_gives_alone(opened: Open) -> None:
    llm = opened(**F8, share_prefixes=False)
    work = [(prompt(i, 1 + (i * 29) % 120), params(6 + i, seed=i or None)) for i in range(12)]
    want = [alone(llm, *item) for item in work]
    requests = [llm.engine.submit(*item) for item in work]
    assert [answer(r) for r in requests] == want


@pytest.mark.parametrize("same", [31, 40, 79, 96])
def test_a_prefix_that_ends_inside_a_page(opened: Open, same: int) -> None:
    stem = prompt(1, 100)
    other = [*stem[:same], *((t + 1) % TINY["vocab_size"] for t in stem[same:]), 5, 6, 7]
    want = alone(opened(**F8, share_prefixes=False), other, params(20))
    llm = opened(**F8)
    alone(llm, stem, params(4))
    assert alone(llm, other, params(20)) == want and hits(llm.engine) > 0


def pages_of(engine: Engine, layer: int) -> set[bytes]:
    """All that are not empty."""
    found = engine.exclusive(lambda runtime: [runtime.page(layer, p).tobytes() for p in range(runtime.kv_pages)])
    return {page for page in found if any(page)}


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_exported_and_imported_again(opened: Open, tp: int) -> None:
    """The same bytes in other pages, and the same tokens after them."""
    llm = opened(**F8, tp=tp)
    kv = sequence(llm, prompt(14, 50), 15)
    assert kv.keys.dtype.name == kv.values.dtype.name == "bfloat16" and kv.keys.shape == (3, 64, 2, 16)
    after = [*kv.tokens, 9]
    want = alone(opened(**F8, tp=tp, share_prefixes=False), after, params(30))
    two = opened(**F8, tp=tp)
    two.engine.put_kv(kv)
    assert alone(two, after, params(30)) == want and hits(two.engine) == 64
    other = sequence(two, after, 1)
    for layer in range(3):
        one, other_pages = (pages_of(engine, layer) for engine in (llm.engine, two.engine))
        assert len(one & other_pages) == 2, "both whole pages"
    for name in ("keys", "values"):
        assert getattr(other, name)[:, :64].tobytes() == getattr(kv, name).tobytes()


def test_wider_pages_take_them_exactly(opened: Open) -> None:
    """The values of 8-bit pages in pages of bf16; pages of 8 bits take no other type than that."""
    ids = prompt(14, 64)
    kv = sequence(opened(**F8), ids, 1)
    wide = opened(kv_dtype="bf16")
    wide.engine.put_kv(kv)
    other = sequence(wide, [*ids, 3], 1)
    assert other.keys[:, :64].tobytes() == kv.keys.tobytes() and other.values[:, :64].tobytes() == kv.values.tobytes()
    with pytest.raises(InvalidRequest, match=r"expected keys of shape.*in bf16, got .* float32"):
        opened(**F8).engine.put_kv(replace(kv, keys=kv.keys.astype(np.float32)))


def test_memory_and_bytes_of_a_step(opened: Open) -> None:
    """Of a token and KV head: 16 elements of one byte and an exponent, of its key and of its value."""
    small, wide = opened(**F8).program.manifest, opened(kv_dtype="bf16").program.manifest
    assert small.kv_dtype == "f8" and small.kv_unit_bytes == small.page_tokens * 2 * (16 + 1)
    assert wide.kv_unit_bytes == wide.page_tokens * 2 * 16 * 2
    assert step_bytes(small, 100) - step_bytes(small, 0) == 100 * 3 * 2 * 2 * (16 + 1)
    assert step_bytes(wide, 100) - step_bytes(wide, 0) == 100 * 3 * 2 * 2 * 16 * 2
