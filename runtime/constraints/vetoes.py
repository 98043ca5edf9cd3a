"""Ids that alone may come, and words that may not: sequences of ids of which the last is masked behind the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.constraints.stages import Mask
from runtime.request import Constraint


class Vetoes:
    """`allowed`: bitmask of all ids that may come; `words`: sequences that may not be completed, none empty."""

    is_complete = False

    def __init__(self, allowed: Mask, words: Sequence[tuple[int, ...]] = ()) -> None:
        """Begin before the first token."""
        self._allowed, self._words = allowed, words
        self._recent: tuple[int, ...] = ()
        self._kept = max(map(len, words), default=1) - 1

    def mask(self) -> Mask:
        """Bitmask of allowed ids."""
        ends = {word[-1] for word in self._words if self._recent[len(self._recent) - len(word) + 1 :] == word[:-1]}
        if not ends:
            return self._allowed
        flags = np.unpackbits(self._allowed.view(np.uint8), bitorder="little")
        flags[list(ends)] = 0
        return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32, copy=False)

    def accept(self, token: int) -> None:
        """Take note of a token."""
        if self._kept:
            self._recent = (*self._recent, token)[-self._kept :]


class Together:
    """Several constraints at once; complete when one of them is."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        """All at their start."""
        self._parts = parts

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return any(part.is_complete for part in self._parts)

    def mask(self) -> Mask | None:
        """Bitmask of the ids that all of them allow; None: all."""
        masks = [mask for part in self._parts if (mask := part.mask()) is not None]
        return np.bitwise_and.reduce(masks) if masks else None

    def accept(self, token: int) -> None:
        """Take note of a token; ValueError when it was not allowed."""
        for part in self._parts:
            part.accept(token)
