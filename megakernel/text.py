"""Tokens to text while they come, ending at a stop text that may begin in one token and end in another."""

from __future__ import annotations

from megakernel.checkpoint import TextStream, Tokenizer


class StoppingText:
    """Feed it tokens; it gives text that can no longer become part of a stop text.

    After `stopped` nothing more comes: the stop text and what follows it are cut off. Without a tokenizer all text is
    empty and no stop text is ever found.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...], keep: frozenset[int] = frozenset()) -> None:
        """`keep`: special tokens that are part of the text."""
        self._stream: TextStream | None = tokenizer.stream(keep=keep) if tokenizer else None
        self._stops = stops
        self._held = ""  # decoded, not given out yet
        self.text = ""  # given out so far
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is now certain; may be empty."""
        if self._stream is None or self.stopped:
            return ""
        return self._take(self._stream.push(token), final=False)

    def finish(self) -> str:
        """The rest, at the end of the sequence."""
        if self._stream is None or self.stopped:
            return ""
        return self._take(self._stream.flush(), final=True)

    def _take(self, fresh: str, final: bool) -> str:
        if not self._stops:
            self.text += fresh
            return fresh
        self._held += fresh
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            keep = min(found)
            out, self._held = self._held[:keep], ""
        else:
            keep = len(self._held) - (0 if final else self._possible())
            out, self._held = self._held[:keep], self._held[keep:]
        self.text += out
        return out

    def _possible(self) -> int:
        """Length of the longest end of the held text that some stop text begins with."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
