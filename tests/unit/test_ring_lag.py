"""How far a consumer may be behind the pages of attention (docs/memory-model.md): a model of the ring's barriers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import pytest

from megakernel.architectures import shape_config
from megakernel.builder.build import make_plan
from megakernel.builder.kernel import stages_before_pages
from megakernel.target import TARGETS

STAGES, CONSUMERS = 12, 8
Steps = Generator[None, None, None]


@dataclass
class Barrier:
    """Its phase completes when so many have arrived."""

    count: int
    arrived: int = 0
    phase: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1

    def complete(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class Ring:
    """A product of `before` stages, then an item of `pages`. Each consumer waits for every stage of the product, and
    for one page. `late`: pages are given back after the consumers have met."""

    before: int
    pages: int
    late: bool
    full: list[Barrier] = field(default_factory=lambda: [Barrier(1) for _ in range(STAGES)])
    empty: list[Barrier] = field(default_factory=lambda: [Barrier(CONSUMERS) for _ in range(STAGES)])
    holds: list[int] = field(default_factory=lambda: [-1] * STAGES)
    met: int = 0
    wrong: int = 0

    def producer(self) -> Steps:
        for i in range(self.before + self.pages + STAGES):
            slot, parity = i % STAGES, i // STAGES % 2
            while not self.empty[slot].complete(parity ^ 1):
                yield
            self.holds[slot] = i
            self.full[slot].arrive()

    def read(self, i: int) -> Steps:
        while not self.full[i % STAGES].complete(i // STAGES % 2):
            yield
        self.wrong += self.holds[i % STAGES] != i

    def consumer(self, number: int) -> Steps:
        for i in range(self.before):
            yield from self.read(i)
            yield
            self.empty[i % STAGES].arrive()
        own = range(self.before, self.before + self.pages)
        yield from self.read(own[number * self.pages // CONSUMERS])
        if not self.late:
            self.give_back(own)
        self.met += 1
        while self.met < CONSUMERS:
            yield
        if self.late:
            self.give_back(own)

    def give_back(self, pages: range) -> None:
        for i in pages:
            self.empty[i % STAGES].arrive()

    def run(self, slow: int) -> bool:
        """With one consumer that moves only when nobody else can. Whether all ended and read what was meant."""
        others = [self.producer(), *(self.consumer(i) for i in range(CONSUMERS) if i != slow)]
        last = self.consumer(slow)
        for _ in range(10 * (self.before + self.pages)):
            for _ in range(4 * STAGES):
                others = [g for g in others if next(g, 0) is None]
            if next(last, 0) is not None:
                break
        for _ in range(4 * STAGES):
            others = [g for g in others if next(g, 0) is None]
        return self.met == CONSUMERS and self.wrong == 0


@pytest.mark.parametrize("pages", [1, 4, 8])
@pytest.mark.parametrize("late", [False, True])
def test_pages_may_be_given_back_before_the_group_meets_where_all_fits_the_ring(pages: int, late: bool) -> None:
    for before in range(1, 3 * STAGES, 3):
        good = all(Ring(before, pages, late).run(slow) for slow in range(CONSUMERS))
        assert good or not (late or before + pages <= STAGES), (before, pages, late)


def test_pages_given_back_early_where_it_does_not_fit_the_ring() -> None:
    """The fault that random delays found: what a slow warp has yet to read is overwritten, or nobody goes on."""
    assert not all(Ring(16, 8, late=False).run(slow) for slow in range(CONSUMERS))


def test_what_is_counted_before_the_pages() -> None:
    target = TARGETS["sm_90a"]
    for name, most in (("llama-3.2-1b", 8), ("llama-3.2-3b", 18)):
        plan = make_plan(
            {**shape_config(name), "num_hidden_layers": 1}, target, dtype="bf16", max_context=512, max_slots=1
        )
        nodes = plan.lowered.nodes
        assert stages_before_pages(nodes, target) == most
        for queue in plan.schedule.queues:
            for entry in queue:
                node = nodes[entry.node]
                if node.name.endswith("attention.qkv"):
                    assert entry.count * node.sizes["units"] <= most


@dataclass
class WideRing(Ring):
    """Wide products of so many slices each, `pages` stages after each: the producer fills those and every second stage
    of a product, the loader the others. `meets`: it begins a product when the consumers have."""

    slices: tuple[int, ...] = ()
    meets: bool = True
    begun: int = 0  # by consumers, over all products

    def fill(self, i: int) -> Steps:
        slot, parity = i % STAGES, i // STAGES % 2
        while not self.empty[slot].complete(parity ^ 1):
            yield
        self.holds[slot] = i
        self.full[slot].arrive()
        yield

    def products(self) -> list[tuple[range, range]]:
        """Of each the stages of its slices, then those after it."""
        made, at = [], 0
        for count in self.slices:
            made.append((range(at, at + 2 * count), range(at + 2 * count, at + 2 * count + self.pages)))
            at = made[-1][1].stop
        return made

    def producer(self) -> Steps:
        for own, after in self.products():
            for i in (*own[::2], *after):
                yield from self.fill(i)

    def loader(self) -> Steps:
        for product, (own, _) in enumerate(self.products()):
            while self.meets and self.begun < CONSUMERS * (product + 1):
                yield
            for i in own[1::2]:
                yield from self.fill(i)

    def consumer(self, number: int) -> Steps:
        for own, after in self.products():
            self.begun += 1
            for i in own[::2]:
                yield from self.read(i)
                yield from self.read(i + 1)
                yield
                self.give_back(range(i, i + 2))
            for i in after:
                yield from self.read(i)
                yield
                self.give_back(range(i, i + 1))
        self.met += 1

    def run(self, slow: int) -> bool:
        """With one of producer, loader and consumers that moves only when nobody else can."""
        roles = [self.producer(), self.loader(), *(self.consumer(i) for i in range(CONSUMERS))]
        last = roles.pop(slow)
        for _ in range(2 * sum(2 * n + self.pages for n in self.slices)):
            for _ in range(3 * STAGES):
                roles = [g for g in roles if next(g, 0) is None]
            next(last, 0)
        return self.met == CONSUMERS and self.wrong == 0


WIDE = [((1, 1, 1, 1, 1), 0), ((1, 2, 3), 1), ((16, 3, 64), 5), ((2, 16, 2), 13), ((8, 1, 8), 40), ((7, 16), 12)]


@pytest.mark.parametrize(("slices", "pages"), WIDE, ids=str)
def test_a_wide_product_whose_stages_two_roles_fill(slices: tuple[int, ...], pages: int) -> None:
    for slow in range(2 + CONSUMERS):
        assert WideRing(0, pages, late=True, slices=slices).run(slow), slow


def test_a_loader_that_is_ahead_of_the_consumers_fills_what_is_still_read() -> None:
    assert not all(WideRing(0, 40, late=True, slices=(8, 1, 8), meets=False).run(2 + i) for i in range(CONSUMERS))
