"""The parser of models without turns of their own, and of text completions: every token is answer."""

from __future__ import annotations

from runtime.parsing.events import Content, Event
from runtime.parsing.vocabulary import Detokenizer, Vocabulary


class PlainParser:
    """Hands out text; control tokens are left out unless `keep_control`."""

    def __init__(self, vocabulary: Vocabulary, *, keep_control: bool = False) -> None:
        """Begin before the first token."""
        self.reasoning_tokens = 0
        self.in_content = True
        self._detokenizer = Detokenizer(vocabulary)
        self._dropped: frozenset[int] = frozenset() if keep_control else vocabulary.control

    def feed(self, token: int) -> list[Event]:
        """Take the next token."""
        text = self._detokenizer.flush() if token in self._dropped else self._detokenizer.push(token)
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Hand out the rest."""
        text = self._detokenizer.flush()
        return [Content(text)] if text else []
