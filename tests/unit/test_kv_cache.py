"""The page allocator: no page has two owners, none is lost, giving back twice is an error; shared prefixes are those of
the tokens, nothing in use goes away, and what was used longest ago goes first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import CapacityError, InvalidRequest
from megakernel.kv_cache import Lease, PageAllocator


@settings(max_examples=100, deadline=None)
@given(
    pages=st.integers(1, 40),
    page_tokens=st.integers(1, 64),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 500)), max_size=60),
)
def test_pages_have_one_owner_and_none_is_lost(pages: int, page_tokens: int, actions: list[tuple[bool, int]]) -> None:
    kv = PageAllocator(pages, page_tokens)
    held: dict[int, Lease] = {}
    for number, (reserve, amount) in enumerate(actions):
        if reserve:
            need = -(-amount // page_tokens)
            if need > kv.free_pages:
                assert not kv.fits(amount)
                with pytest.raises(CapacityError, match=rf"{amount} tokens need {need} KV pages"):
                    kv.reserve(number, amount)
            else:
                held[number] = kv.reserve(number, amount)
                assert len(held[number].pages) == need and held[number].reused == 0
        elif held:
            kv.release(held.pop(sorted(held)[amount % len(held)]))
        taken = [page for own in held.values() for page in own.pages]
        assert len(set(taken)) == len(taken) and kv.free_pages == pages - len(taken)
        assert all(0 <= page < pages for page in taken)


def test_giving_back_twice_is_an_error_and_frees_nothing() -> None:
    kv = PageAllocator(4, 16)
    one, two = kv.reserve(1, 20), kv.reserve(2, 20)
    with pytest.raises(InvalidRequest, match=r"request 1 gives back KV page \d, which is of request 2"):
        kv.release(replace(one, pages=(*one.pages, two.pages[0])))
    with pytest.raises(InvalidRequest, match="twice"):
        kv.release(replace(one, pages=(one.pages[0], one.pages[0])))
    kv.release(one)
    with pytest.raises(InvalidRequest, match="which is free"):
        kv.release(one)
    with pytest.raises(InvalidRequest, match="which is free"):
        kv.release(Lease(1, (99,)))
    assert kv.free_pages == 2


def test_everything_is_free_after_release_all() -> None:
    kv = PageAllocator(3, 8)
    kv.release(kv.reserve(1, 24), range(24))
    assert kv.cached_pages == 3
    kv.release_all()
    assert sorted(kv.reserve(2, 24, range(24)).pages) == [0, 1, 2] and kv.stats.hits == 0


@pytest.mark.parametrize(("pages", "tokens"), [(0, 8), (4, 0)])
def test_a_pool_has_pages(pages: int, tokens: int) -> None:
    with pytest.raises(CapacityError):
        PageAllocator(pages, tokens)


# ---------------------------------------------------------------------------------------------- shared prefixes
def run(kv: PageAllocator, owner: int, tokens: list[int], limit: int | None = None) -> Lease:
    lease = kv.reserve(owner, limit or len(tokens) + 1, tokens)
    kv.release(lease, tokens)
    return lease


def test_whole_pages_are_shared_and_the_last_token_is_not() -> None:
    kv = PageAllocator(20, 4)
    first = run(kv, 1, list(range(12)))
    again = kv.reserve(2, 16, range(12))
    assert again.pages[:2] == first.pages[:2] and len(again.shared) == 2
    assert again.reused == 11 and again.copy == (first.pages[2], again.pages[2])  # all but the last token
    longer = kv.reserve(3, 16, range(13))
    assert longer.pages[:3] == first.pages[:3] and longer.reused == 12 and longer.copy is None
    assert kv.stats.hits == 2 and kv.stats.hit_tokens == 23 and kv.stats.query_tokens == 37


def test_a_page_that_differs_inside_is_copied() -> None:
    kv = PageAllocator(20, 8)
    first = run(kv, 1, list(range(20)))
    other = kv.reserve(2, 30, [*range(11), 90, 91, 92, 93, 94, 95])
    assert other.reused == 11 and other.copy == (first.pages[1], other.pages[1]) and len(other.shared) == 1
    assert kv.reserve(3, 30, [*range(9), 90, 91]).reused == 8  # one token of a page is as soon computed again
    ended = kv.reserve(4, 30, [*range(20), 5, 5])  # goes on where the other sequence ended, inside a page
    assert ended.reused == 20 and ended.copy == (first.pages[2], ended.pages[2])


def test_the_longest_of_several_continuations_is_found() -> None:
    rng = random.Random(1)
    kv = PageAllocator(400, 8)
    known = [[rng.randrange(3) for _ in range(8)] for _ in range(40)]
    for number, tokens in enumerate(known):
        run(kv, number, tokens)
    for _ in range(200):
        wanted = [rng.randrange(3) for _ in range(7)]
        best = max(next((i for i in range(7) if t[i] != wanted[i]), 7) for t in known)
        lease = kv.reserve(1000, 9, [*wanted, 1])
        assert lease.reused == (best if best >= 2 else 0)
        kv.release(lease)


def test_what_was_used_longest_ago_makes_room() -> None:
    kv = PageAllocator(6, 4)
    a, b, c = ([base + i for i in range(8)] for base in (0, 100, 200))
    run(kv, 1, a, 8)
    run(kv, 2, b, 8)
    run(kv, 3, c, 8)
    assert kv.cached_pages == 6 and kv.free_pages == 6
    kv.release(kv.reserve(4, 8, [*a[:5], 9]))  # needs one page, and `a` is used again: the end of `b` goes
    assert kv.stats.evictions == 1
    assert len(kv.reserve(5, 9, [*b, 1]).shared) == 1
    assert len(kv.reserve(6, 9, [*a, 1]).shared) == 2


def test_pages_in_use_never_make_room() -> None:
    kv = PageAllocator(4, 4)
    run(kv, 1, list(range(8)), 8)
    held = kv.reserve(2, 12, [*range(8), 1])
    assert len(held.shared) == 2 and kv.free_pages == 1
    assert kv.fits(4) and not kv.fits(5)
    assert kv.fits(12, [*range(8), 2]) and not kv.fits(12, [*range(4), 2])
    with pytest.raises(CapacityError, match="8 tokens need 2 KV pages of 4 tokens; 1 of 4 are free"):
        kv.reserve(3, 8)
    with pytest.raises(CapacityError, match="16 tokens need 3 KV pages of 4 tokens beside 1 shared ones"):
        kv.reserve(3, 16, range(5))
    kv.release(held, [*range(8), 1, 2])
    assert kv.free_pages == 4


def test_published_pages_serve_others_while_the_request_runs() -> None:
    kv = PageAllocator(12, 4)
    one = kv.reserve(1, 20, range(10))
    assert kv.reserve(2, 11, range(10)).reused == 0  # not computed yet
    one = kv.publish(one, range(10))
    assert len(one.shared) == 2
    two = kv.reserve(3, 11, range(10))
    assert two.pages[:2] == one.pages[:2] and two.reused == 8
    kv.release(one, range(15))
    assert two.shared[0].users == 1
    kv.release(two, range(10))
    assert kv.reserve(4, 16, range(15)).reused == 14


def test_without_sharing_nothing_is_kept() -> None:
    kv = PageAllocator(8, 4, share=False)
    run(kv, 1, list(range(9)))
    assert kv.cached_pages == 0 and kv.reserve(2, 10, range(9)).reused == 0 and kv.stats.queries == 0
    with pytest.raises(CapacityError, match="sharing is off"):
        kv.store(range(4))


def test_pages_from_outside() -> None:
    kv = PageAllocator(8, 4)
    run(kv, 1, list(range(5)))
    before = kv.stats
    places = kv.store(range(10))
    assert [index for index, _ in places] == [1, 2] and kv.stats == before  # page 0 was known
    lease = kv.reserve(2, 12, [*range(10), 7])
    assert lease.reused == 10 and lease.pages[1] == places[0][1] and lease.copy == (places[1][1], lease.pages[2])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_schedule_reuses_only_what_is_there(data: st.DataObject) -> None:
    """A model of the pool beside it: what each page holds. Every reused token is in its page, in place."""
    page_tokens = data.draw(st.integers(1, 6))
    kv = PageAllocator(data.draw(st.integers(1, 24)), page_tokens)
    holds: dict[int, list[int]] = {}
    running: dict[int, tuple[Lease, list[int], bool]] = {}
    for number in range(1, data.draw(st.integers(1, 40))):
        if running and data.draw(st.booleans()):
            owner = data.draw(st.sampled_from(sorted(running)))
            lease, tokens, published = running.pop(owner)
            if not published and data.draw(st.booleans()):
                running[owner] = (kv.publish(lease, tokens), tokens, True)
                continue
            kv.release(lease, tokens[: data.draw(st.integers(lease.reused, len(tokens)))])
            continue
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30))
        if not kv.fits(len(tokens) + 1, tokens):
            continue
        lease = kv.reserve(number, len(tokens) + 1, tokens)
        if lease.copy:
            holds[lease.copy[1]] = list(holds[lease.copy[0]])
        for at in range(len(tokens)):
            page, place = lease.pages[at // page_tokens], at % page_tokens
            if at < lease.reused:
                assert holds[page][place] == tokens[at]
            else:
                assert at // page_tokens >= len(lease.shared), "a shared page would be written"
                kept = holds.get(page, [])[:place]
                holds[page] = [*kept, tokens[at]]
        running[number] = (lease, tokens, False)
        private = [p for own, _, _ in running.values() for p in own.pages[len(own.shared) :]]
        shared = {p for own, _, _ in running.values() for p in own.pages[: len(own.shared)]}
        assert len(set(private)) == len(private) and not shared & set(private)
        assert kv.free_pages == kv.pages - len(private) - len(shared)
    for lease, _, _ in running.values():
        kv.release(lease)
    assert kv.free_pages == kv.pages
