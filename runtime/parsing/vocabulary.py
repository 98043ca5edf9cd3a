"""What token ids stand for, and the way from ids back to text while they arrive.

Owns the bytes of every token of a byte-level vocabulary. A character whose bytes are split over tokens is handed out
whole, with its last byte; bytes that are no UTF-8 become one replacement character a faulty stretch, as everywhere.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[id]`: bytes of a token, empty where an id has none; `control`: ids that are no text.

    `ids`: the added tokens by their text, control or not: markers are looked up there.
    """

    pieces: tuple[bytes, ...]
    control: frozenset[int]
    ids: dict[str, int]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id beyond the tokenizer, which a padded model may emit."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def text_of(self, tokens: Iterable[int], *, skip_control: bool = True) -> str:
        """Return the text of whole tokens."""
        kept = (each for each in tokens if not (skip_control and each in self.control))
        return b"".join(map(self.bytes_of, kept)).decode("utf-8", "replace")


class Detokenizer:
    """Turns the tokens of one choice into text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Begin before the first token."""
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes, perhaps none."""
        return self._decoder.decode(self._vocabulary.bytes_of(token))

    def flush(self) -> str:
        """Return what is left: the beginning of a character that was never completed, if anything."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
