"""Finds strings in text that arrives in pieces, and says how much of the end may still become one.

Owns the automata (Knuth, Morris and Pratt 1977), one a string. Which string is found does not depend on how the text
was cut: it is the one that ends first, and of those that end together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hit:
    """A string that was found: which one, the text before it that was not handed out yet, and the text behind it."""

    needle: str
    before: str
    after: str


class Finder:
    """Looks for any of `needles`, none empty."""

    def __init__(self, needles: Sequence[str]) -> None:
        """Begin before the first character."""
        self._needles = sorted(set(needles), key=len, reverse=True)
        self._fallbacks = [_fallbacks(needle) for needle in self._needles]
        self._matched = [0] * len(self._needles)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str | Hit:
        """Take `text`; return what can be handed out, or the first hit, after which the finder starts afresh.

        A string whose last character comes while not `armed` is text like any other.
        """
        if not self._needles:
            return text
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            found = self._step(buffer[position])
            if found is not None and armed:
                self._held, self._matched = "", [0] * len(self._needles)
                return Hit(found, buffer[: position + 1 - len(found)], buffer[position + 1 :])
        # A whole string that was not wanted is no beginning of itself; only shorter ones are held back.
        keep = max(self._matched)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Return what was held back: the text has ended."""
        held, self._held, self._matched = self._held, "", [0] * len(self._needles)
        return held

    def _step(self, char: str) -> str | None:
        found: str | None = None
        for idx, needle in enumerate(self._needles):
            fallbacks, matched = self._fallbacks[idx], self._matched[idx]
            while matched and needle[matched] != char:
                matched = fallbacks[matched - 1]
            matched += needle[matched] == char
            if matched == len(needle):
                found = found or needle
                matched = fallbacks[-1]
            self._matched[idx] = matched
        return found


def _fallbacks(needle: str) -> list[int]:
    """Length of the longest proper prefix of `needle[: i + 1]` that is also its suffix, for every i."""
    table = [0] * len(needle)
    matched = 0
    for position in range(1, len(needle)):
        while matched and needle[position] != needle[matched]:
            matched = table[matched - 1]
        matched += needle[position] == needle[matched]
        table[position] = matched
    return table
