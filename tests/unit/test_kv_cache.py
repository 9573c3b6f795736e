"""The page allocator: no page has two owners, none is lost, giving back twice is an error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import CapacityError, InvalidRequest
from megakernel.kv_cache import PageAllocator


@settings(max_examples=200, deadline=None)
@given(
    pages=st.integers(1, 40),
    page_tokens=st.integers(1, 64),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 500)), max_size=60),
)
def test_pages_have_one_owner_and_none_is_lost(pages: int, page_tokens: int, actions: list[tuple[bool, int]]) -> None:
    kv = PageAllocator(pages, page_tokens)
    held: dict[int, tuple[int, ...]] = {}
    for number, (reserve, amount) in enumerate(actions):
        if reserve:
            need = -(-amount // page_tokens)
            if need > kv.free_pages:
                assert not kv.fits(amount)
                with pytest.raises(CapacityError, match=rf"{amount} tokens need {need} KV pages"):
                    kv.reserve(number, amount)
            else:
                held[number] = kv.reserve(number, amount)
                assert len(held[number]) == need
        elif held:
            owner = sorted(held)[amount % len(held)]
            kv.release(owner, held.pop(owner))
        taken = [page for own in held.values() for page in own]
        assert len(set(taken)) == len(taken) and kv.free_pages == pages - len(taken)
        assert all(0 <= page < pages for page in taken)


def test_giving_back_twice_is_an_error_and_frees_nothing() -> None:
    kv = PageAllocator(4, 16)
    one, two = kv.reserve(1, 20), kv.reserve(2, 20)
    with pytest.raises(InvalidRequest, match=r"request 1 gives back KV page \d, which is of request 2"):
        kv.release(1, (*one, two[0]))
    with pytest.raises(InvalidRequest, match="twice"):
        kv.release(1, (one[0], one[0]))
    kv.release(1, one)
    with pytest.raises(InvalidRequest, match="which is free"):
        kv.release(1, one)
    with pytest.raises(InvalidRequest, match="which is free"):
        kv.release(1, (99,))
    assert kv.free_pages == 2


def test_everything_is_free_after_release_all() -> None:
    kv = PageAllocator(3, 8)
    kv.reserve(1, 24)
    kv.release_all()
    assert sorted(kv.reserve(2, 24)) == [0, 1, 2]


@pytest.mark.parametrize(("pages", "tokens"), [(0, 8), (4, 0)])
def test_a_pool_has_pages(pages: int, tokens: int) -> None:
    with pytest.raises(CapacityError):
        PageAllocator(pages, tokens)
