"""Pages of the KV pool: who owns which. A request reserves every page it can ever need before it starts."""

from __future__ import annotations

from megakernel.errors import CapacityError, InvalidRequest


class PageAllocator:
    """`pages` pages of `page_tokens` tokens. Not thread-safe; the engine's driver thread uses it."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        if pages < 1 or page_tokens < 1:
            raise CapacityError(f"expected at least one page of one token, got {pages} pages of {page_tokens} tokens")
        self.pages = pages
        self.page_tokens = page_tokens
        self._free = list(range(pages - 1, -1, -1))  # a stack: the page freed last is taken first
        self._owner: list[int | None] = [None] * pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens; 0 for none."""
        return -(-tokens // self.page_tokens)

    def fits(self, tokens: int) -> bool:
        return self.pages_for(tokens) <= len(self._free)

    def reserve(self, owner: int, tokens: int) -> tuple[int, ...]:
        """Pages for `tokens` tokens, in the order of their positions; all or nothing. Raises CapacityError."""
        count = self.pages_for(tokens)
        if count > len(self._free):
            raise CapacityError(
                f"{tokens} tokens need {count} KV pages of {self.page_tokens} tokens; {len(self._free)} of "
                f"{self.pages} are free; wait for another request to end, or give the engine more"
            )
        taken = tuple(self._free.pop() for _ in range(count))
        for page in taken:
            self._owner[page] = owner
        return taken

    def release(self, owner: int, pages: tuple[int, ...]) -> None:
        """Give pages back. Raises InvalidRequest when one is not the owner's (freed twice, say); then frees none."""
        for page in pages:
            holder = self._owner[page] if 0 <= page < self.pages else None
            if holder != owner:
                state = "free" if holder is None else f"of request {holder}"
                raise InvalidRequest(f"request {owner} gives back KV page {page}, which is {state}")
        if len(set(pages)) != len(pages):
            raise InvalidRequest(f"request {owner} gives back a KV page twice: {pages}")
        for page in reversed(pages):
            self._owner[page] = None
            self._free.append(page)

    def release_all(self) -> None:
        """Every page is free again, after a fault."""
        self._free = list(range(self.pages - 1, -1, -1))
        self._owner = [None] * self.pages
