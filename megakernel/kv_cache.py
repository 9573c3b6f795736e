"""Pages of the KV pool: who uses which, and which hold a prefix that another sequence may use.

A page in use belongs to one request, or is shared: it holds keys and values of a whole page of tokens at the end of a
known prefix, and any number of requests read it. Shared pages form a tree; the children of a node are the pages that
continue its prefix, found by their tokens. A page that nobody uses any more stays in the tree until room is needed;
then the one that was used longest ago and that no other continues goes first.

A request reserves every page it can ever need before it starts, so nothing that runs is ever disturbed.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megakernel.errors import CapacityError, InvalidRequest

Tokens = tuple[int, ...]
COPY_PART = 4  # a page is copied when at least this part of it is of use; fewer tokens are as soon computed again


@dataclass(eq=False)
class _Node:
    """A page of the tree. `tokens`: what it holds; fewer than a page only at the end of a sequence, and then nobody
    uses the page itself: it is copied."""

    page: int
    tokens: Tokens
    parent: _Node | None
    users: int = 0
    used: int = 0  # when it was last taken or given back
    children: dict[Tokens, _Node] = field(default_factory=dict)
    order: list[Tokens] = field(default_factory=list)  # of the children, sorted


@dataclass(frozen=True)
class Lease:
    """Pages of one request, in the order of their positions.

    reused: tokens at the start whose keys and values are there. copy: (from, to) of a page whose first tokens are to be
    copied before the request starts, or None."""

    owner: int
    pages: tuple[int, ...]
    shared: tuple[_Node, ...] = ()
    reused: int = 0
    copy: tuple[int, int] | None = None


@dataclass(frozen=True)
class PrefixStats:
    """Since the pool was made: requests that asked, those that found something, tokens asked and found, pages that made
    room for others."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class PageAllocator:
    """`pages` pages of `page_tokens` tokens. Not thread-safe; the engine's driver thread uses it."""

    def __init__(self, pages: int, page_tokens: int, *, share: bool = True) -> None:
        """`share`: keep prefixes for others."""
        if pages < 1 or page_tokens < 1:
            raise CapacityError(f"expected at least one page of one token, got {pages} pages of {page_tokens} tokens")
        self.pages = pages
        self.page_tokens = page_tokens
        self.share = share
        self.stats = PrefixStats()
        self.release_all()

    def release_all(self) -> None:
        """Every page is free again and no prefix is known, after a fault."""
        self._free = list(range(self.pages - 1, -1, -1))  # a stack: the page freed last is taken first
        self._owner: list[int | None] = [None] * self.pages
        self._root = _Node(-1, (), None)
        self._clock = 0
        self._unused = 0  # nodes without users
        self._old: list[tuple[int, int, _Node]] = []  # heap of (used, order, node) that may be evicted; some are stale

    @property
    def free_pages(self) -> int:
        """Pages that no request uses."""
        return len(self._free) + self._unused

    @property
    def cached_pages(self) -> int:
        """Pages of the tree that no request uses."""
        return self._unused

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens; 0 for none."""
        return -(-tokens // self.page_tokens)

    def fits(self, tokens: int, prompt: Sequence[int] = ()) -> bool:
        """Whether `reserve` would find its pages now."""
        nodes, _ = self._find(prompt)
        return self._fits(self.pages_for(tokens), nodes)

    def reserve(self, owner: int, tokens: int, prompt: Sequence[int] = ()) -> Lease:
        """Pages for `tokens` tokens that begin with `prompt`; all or nothing. Raises CapacityError.

        The last token of the prompt is never reused: somebody must compute what follows it."""
        nodes, partial = self._find(prompt)
        count = self.pages_for(tokens)
        if not self._fits(count, nodes):
            shared = f" beside {len(nodes)} shared ones" if nodes else ""
            raise CapacityError(
                f"{tokens} tokens need {count - len(nodes)} KV pages of {self.page_tokens} tokens{shared}; "
                f"{self._room(nodes)} of {self.pages} are free; wait for another request to end or give the engine "
                "more"
            )
        for node in nodes:
            self._take(node)
        source, length = partial
        copied = length if source is not None and COPY_PART * length >= self.page_tokens else 0
        if source is not None and copied:
            self._touch(source)  # so that making room takes others first; what it holds stays until the copy anyway
        fresh = tuple(self._fresh(owner) for _ in range(count - len(nodes)))
        copy = (source.page, fresh[0]) if source is not None and copied else None
        reused = len(nodes) * self.page_tokens + copied
        self._count(len(prompt), reused)
        return Lease(owner, (*(n.page for n in nodes), *fresh), tuple(nodes), reused, copy)

    def publish(self, lease: Lease, tokens: Sequence[int]) -> Lease:
        """Let others use the whole pages of `tokens`, which the lease holds and has computed; the lease goes on."""
        if not self.share:
            return lease
        nodes = list(lease.shared)
        for index in range(len(nodes), len(tokens) // self.page_tokens):
            page = lease.pages[index]
            found = self._insert(nodes[-1] if nodes else self._root, page, self._part(tokens, index))
            if found is None:  # somebody else's page holds the same: this one stays private
                break
            self._owner[page] = None
            self._unused += 1
            self._take(found)
            nodes.append(found)
        return Lease(lease.owner, lease.pages, tuple(nodes), lease.reused, lease.copy)

    def release(self, lease: Lease, tokens: Sequence[int] = ()) -> frozenset[int]:
        """Give pages back; `tokens`: those whose keys and values are in them, kept for others. The pages so kept.

        Raises InvalidRequest when a page is not the owner's (freed twice, say); then frees none."""
        self._check(lease)
        own = lease.pages[len(lease.shared) :]
        for node in reversed(lease.shared):
            self._leave(node)
        kept = self._keep(lease, tokens) if self.share else set()
        for page in reversed(own):
            self._owner[page] = None
            if page not in kept:
                self._free.append(page)
        return frozenset(kept)

    def store(self, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Pages for keys and values that come from outside: (index of the page in `tokens`, page) of each that is to be
        filled now; the others are there. Raises CapacityError when there is no room beside what requests use."""
        if not self.share:
            raise CapacityError("keys and values of a prefix cannot be kept: prefix sharing is off")
        before = self.stats
        lease = self.reserve(0, len(tokens), tokens)
        self.stats = replace(before, evictions=self.stats.evictions)  # nobody asked for a prefix
        kept = self.release(lease, tokens)
        return tuple((index, page) for index, page in enumerate(lease.pages) if page in kept)

    # ------------------------------------------------------------------------------------------ the tree
    def _part(self, tokens: Sequence[int], index: int) -> Tokens:
        return tuple(tokens[index * self.page_tokens : (index + 1) * self.page_tokens])

    def _find(self, prompt: Sequence[int]) -> tuple[list[_Node], tuple[_Node | None, int]]:
        """The nodes of the longest known prefix, and the page that holds most of what follows with how many tokens."""
        usable = len(prompt) - 1
        nodes: list[_Node] = []
        at = self._root
        while self.share and (len(nodes) + 1) * self.page_tokens <= usable:
            child = at.children.get(self._part(prompt, len(nodes)))
            if child is None:
                break
            nodes.append(child)
            at = child
        first = len(nodes) * self.page_tokens
        return nodes, self._longest(at, tuple(prompt[first : min(usable, first + self.page_tokens)]))

    @staticmethod
    def _longest(node: _Node, wanted: Tokens) -> tuple[_Node | None, int]:
        """The child with the longest common prefix: one of the neighbours in sorted order."""
        best: tuple[_Node | None, int] = (None, 0)
        place = bisect.bisect_left(node.order, wanted)
        for tokens in node.order[max(0, place - 1) : place + 1]:
            same = next((i for i, (a, b) in enumerate(zip(tokens, wanted)) if a != b), min(len(tokens), len(wanted)))
            if same > best[1]:
                best = (node.children[tokens], same)
        return best

    def _insert(self, parent: _Node, page: int, tokens: Tokens) -> _Node | None:
        """A new node, or None when the tree has as much already; a page that holds less makes way."""
        place = bisect.bisect_left(parent.order, tokens)
        after = parent.order[place] if place < len(parent.order) else ()
        if after[: len(tokens)] == tokens:
            return None
        before = parent.order[place - 1] if place else ()
        if before and tokens[: len(before)] == before:  # only the end of a sequence is shorter than a page
            self._evict(parent.children[before])
            place -= 1
        node = _Node(page, tokens, parent, used=self._tick())
        parent.children[tokens] = node
        parent.order.insert(place, tokens)
        return node

    def _keep(self, lease: Lease, tokens: Sequence[int]) -> set[int]:
        """Pages of an ended request that stay in the tree."""
        kept: set[int] = set()
        at = lease.shared[-1] if lease.shared else self._root
        for index in range(len(lease.shared), self.pages_for(len(tokens))):
            part, page = self._part(tokens, index), lease.pages[index]
            made = self._insert(at, page, part)
            if made is not None:
                kept.add(page)
                self._unused += 1
                self._offer(made)
            known = made or at.children.get(part)
            if known is None or len(part) < self.page_tokens:
                break
            at = known
        return kept

    # ------------------------------------------------------------------------------------------ users and room
    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _touch(self, node: _Node) -> None:
        node.used = self._tick()
        self._offer(node)

    def _take(self, node: _Node) -> None:
        node.used = self._tick()
        self._unused -= node.users == 0
        node.users += 1

    def _leave(self, node: _Node) -> None:
        node.users -= 1
        node.used = self._tick()
        if node.users == 0:
            self._unused += 1
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        if node.users == 0 and not node.children:
            heapq.heappush(self._old, (node.used, self._tick(), node))
            if len(self._old) > 8 * self.pages:  # mostly stale by now
                self._old = [entry for entry in self._old if self._current(entry)]
                heapq.heapify(self._old)

    def _current(self, entry: tuple[int, int, _Node]) -> bool:
        used, _order, node = entry
        known = node.parent is not None and node.parent.children.get(node.tokens) is node
        return known and node.used == used and node.users == 0 and not node.children

    def _evict(self, node: _Node) -> None:
        """Take a page that nobody uses and that no other continues out of the tree."""
        parent = node.parent
        assert parent is not None and node.users == 0 and not node.children
        del parent.children[node.tokens]
        parent.order.pop(bisect.bisect_left(parent.order, node.tokens))
        self._unused -= 1
        self._free.append(node.page)
        if parent is not self._root:
            self._offer(parent)

    def _fresh(self, owner: int) -> int:
        while not self._free:
            entry = heapq.heappop(self._old)
            if self._current(entry):
                self._evict(entry[2])
                self.stats = replace(self.stats, evictions=self.stats.evictions + 1)
        page = self._free.pop()
        self._owner[page] = owner
        return page

    def _room(self, nodes: Sequence[_Node]) -> int:
        return self.free_pages - sum(n.users == 0 for n in nodes)

    def _fits(self, count: int, nodes: Sequence[_Node]) -> bool:
        return count - len(nodes) <= self._room(nodes)

    def _count(self, asked: int, found: int) -> None:
        s = self.stats
        if self.share and asked:
            self.stats = PrefixStats(
                s.queries + 1, s.hits + (found > 0), s.query_tokens + asked, s.hit_tokens + found, s.evictions
            )

    def _check(self, lease: Lease) -> None:
        own = lease.pages[len(lease.shared) :]
        for page in own:
            holder = self._owner[page] if 0 <= page < self.pages else None
            if holder != lease.owner:
                state = "free" if holder is None else f"of request {holder}"
                raise InvalidRequest(f"request {lease.owner} gives back KV page {page}, which is {state}")
        if len(set(own)) != len(own):
            raise InvalidRequest(f"request {lease.owner} gives back a KV page twice: {own}")
        for node in lease.shared:
            if node.users < 1:
                raise InvalidRequest(f"request {lease.owner} gives back KV page {node.page}, which nobody uses")
