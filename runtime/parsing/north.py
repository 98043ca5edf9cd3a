"""Cohere's turns, as North Mini Code writes them: thinking, then text or an action block of calls, or both.

Owns the meaning of the markers, which are single tokens: text that merely looks like one is text. A block that was
never opened or closed ends where the next begins. Where the prompt has closed the thinking, words before the first
marker are held until it tells what they are: reasoning when it ends thinking after all, content otherwise, and content
when there are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from runtime.parsing.calls import CallReader
from runtime.parsing.events import Content, Event, Reasoning
from runtime.parsing.vocabulary import Detokenizer, Vocabulary

START_TURN = "<|START_OF_TURN_TOKEN|>"
START_THINKING, END_THINKING = "<|START_THINKING|>", "<|END_THINKING|>"
START_TEXT, END_TEXT = "<|START_TEXT|>", "<|END_TEXT|>"
START_ACTION, END_ACTION = "<|START_ACTION|>", "<|END_ACTION|>"
MARKERS = (START_TURN, START_THINKING, END_THINKING, START_TEXT, END_TEXT, START_ACTION, END_ACTION)

_UNDECIDED_CHARS = 256


class _In(Enum):
    UNDECIDED = auto()  # before any marker
    THINKING = auto()
    BETWEEN = auto()  # blocks; words here are content all the same
    TEXT = auto()
    ACTION = auto()


_OPENS = {START_THINKING: _In.THINKING, START_TEXT: _In.TEXT, START_ACTION: _In.ACTION}
_CLOSES = (END_THINKING, END_TEXT, END_ACTION)


class NorthParser:
    """Reads a choice that continues `prompt`. Without `has_tools` an action block is content."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, has_tools: bool) -> None:
        """Begin where the prompt leaves off."""
        self.reasoning_tokens = 0
        self.in_content = False
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary)
        self._marks = {vocabulary.ids[text]: text for text in (*_OPENS, *_CLOSES)}
        self._reader: CallReader | None = CallReader() if has_tools else None
        self._undecided = ""
        self._undecided_tokens = 0
        self._at = self._start(prompt)

    def feed(self, token: int) -> list[Event]:
        """Take the next token."""
        mark = self._marks.get(token)
        if mark is not None:
            self.in_content = False
            return self._route(self._detokenizer.flush()) + self._turn(mark)
        if token in self._vocabulary.control:
            self.in_content = False
            return self._route(self._detokenizer.flush())
        self.reasoning_tokens += self._at is _In.THINKING
        self._undecided_tokens += self._at is _In.UNDECIDED
        self.in_content = self._at in (_In.UNDECIDED, _In.BETWEEN, _In.TEXT)
        return self._route(self._detokenizer.push(token))

    def finish(self) -> list[Event]:
        """Hand out the rest."""
        return self._route(self._detokenizer.flush()) + self._leave(None)

    def _start(self, prompt: Sequence[int]) -> _In:
        """Where the prompt's last turn leaves off."""
        turn = self._vocabulary.ids[START_TURN]
        for token in reversed(prompt):
            if token == turn:
                break
            mark = self._marks.get(token)
            if mark is not None:
                return _OPENS.get(mark, _In.UNDECIDED if mark == END_THINKING else _In.BETWEEN)
        return _In.UNDECIDED

    def _turn(self, mark: str) -> list[Event]:
        events = self._leave(mark)
        self._at = _OPENS.get(mark, _In.BETWEEN)
        if self._at is _In.ACTION and self._reader is not None:
            self._reader = CallReader(self._reader.next_index)
        return events

    def _leave(self, mark: str | None) -> list[Event]:
        """End the present block, because of `mark` or of the choice."""
        if self._at is _In.ACTION and self._reader is not None:
            return self._reader.finish()
        held, self._undecided = self._undecided, ""
        if mark == END_THINKING and self._at is _In.UNDECIDED:
            self.reasoning_tokens += self._undecided_tokens
            return [Reasoning(held)] if held else []
        return [Content(held)] if held.strip() else []

    def _decide(self) -> list[Event]:
        """So much text without a marker is an answer that lacks its own."""
        held, self._undecided, self._at = self._undecided, "", _In.TEXT
        return [Content(held)]

    def _route(self, text: str) -> list[Event]:
        if not text:
            return []
        match self._at:
            case _In.THINKING:
                return [Reasoning(text)]
            case _In.ACTION if self._reader is not None:
                return self._reader.push(text)
            case _In.UNDECIDED:
                self._undecided += text
                return self._decide() if len(self._undecided) > _UNDECIDED_CHARS else []
            case _In.BETWEEN if not text.strip():
                return []  # the line breaks between blocks are nobody's
            case _:
                return [Content(text)]
