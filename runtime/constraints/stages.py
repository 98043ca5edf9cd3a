"""A request's constraint as stages that follow each other: thinking, with its budget, then a grammar.

Owns the order and the masks of thinking. A grammar begins after thinking has ended, and where one follows, thinking
cannot end the turn by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]


class Stage(Protocol):
    """A part of a constraint."""

    @property
    def is_done(self) -> bool:
        """Whether the next stage is due."""
        ...

    def mask(self) -> Mask | None:
        """Bitmask of allowed ids, as in `Constraint.mask`."""
        ...

    def accept(self, token: int) -> None:
        """Take note of a token."""
        ...


class Staged:
    """Runs stages one after the other; complete after the last when it `ends`, else free from there on."""

    def __init__(self, stages: Sequence[Stage], *, ends: bool) -> None:
        """Begin with the first stage, if any."""
        self._stages, self._ends = list(stages), ends

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._ends and not self._stages

    def mask(self) -> Mask | None:
        """Bitmask of allowed ids; None: all."""
        return self._stages[0].mask() if self._stages else None

    def accept(self, token: int) -> None:
        """Take note of a token; ValueError when it was not allowed."""
        if not self._stages:
            return
        self._stages[0].accept(token)
        if self._stages[0].is_done:
            self._stages.pop(0)


class ThinkingStage:
    """Thinking up to its end marker `close`, for at most `budget` tokens; `opens`: the marker that must come first.

    `allowed` is the mask while it lasts, None: all ids.
    """

    def __init__(
        self,
        *,
        close: int,
        words: int,
        opens: int | None = None,
        budget: int | None = None,
        allowed: Mask | None = None,
    ) -> None:
        """Begin before the first token of thinking, or before its marker."""
        self.is_done = False
        self._close, self._opens, self._left, self._allowed = close, opens, budget, allowed
        self._close_only = mask_of([close], words)
        self._open_only = None if opens is None else mask_of([opens], words)

    def mask(self) -> Mask | None:
        """Bitmask of allowed ids; None: all."""
        if self._open_only is not None:
            return self._open_only
        return self._close_only if self._left is not None and self._left <= 0 else self._allowed

    def accept(self, token: int) -> None:
        """Take note of a token."""
        if self._open_only is not None:
            if token != self._opens:
                raise ValueError(f"token {token} where only {self._opens} was allowed")
            self._open_only = None
        elif token == self._close:
            self.is_done = True
        elif self._left is not None:
            self._left -= 1


def mask_of(tokens: Collection[int], words: int) -> Mask:
    """Bitmask of `words` words with just these ids."""
    flags = np.zeros(words * 32, dtype=np.bool_)
    flags[list(tokens)] = True
    return _packed(flags)


def mask_without(tokens: Collection[int], size: int, words: int) -> Mask:
    """Bitmask of `words` words with all ids below `size` but these."""
    flags = np.arange(words * 32) < size
    flags[list(tokens)] = False
    return _packed(flags)


def _packed(flags: npt.NDArray[np.bool_]) -> Mask:
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32, copy=False)
