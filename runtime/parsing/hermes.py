"""The Hermes style, as Qwen3 writes it: `<think>` around reasoning, `<tool_call>` around one JSON object a call.

Owns its markers: single tokens where the tokenizer has them, else found in the text. Inside a block only its end tag
counts. Line breaks just inside tags and between blocks belong to the style and are dropped; other white space stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from runtime.parsing.calls import CallReader
from runtime.parsing.events import Content, Event, Reasoning
from runtime.parsing.find import Finder, Hit
from runtime.parsing.vocabulary import Detokenizer, Vocabulary

START_TURN = "<|im_start|>"
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_TAGS = (THINK, END_THINK, CALL, END_CALL)


class _In(Enum):
    CONTENT = auto()
    THINKING = auto()
    CALL = auto()


_BEGINS = {THINK: _In.THINKING, CALL: _In.CALL}
_ENDS = {_In.THINKING: END_THINK, _In.CALL: END_CALL}


class HermesParser:
    """Reads a choice that continues `prompt`. Without `has_tools` a call is content."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, has_tools: bool) -> None:
        """Begin where the prompt leaves off."""
        self.reasoning_tokens = 0
        self.in_content = False
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary)
        tags = _TAGS if has_tools else (THINK, END_THINK)
        self._marks = {vocabulary.ids[tag]: tag for tag in tags if tag in vocabulary.ids}
        self._finder = Finder([tag for tag in tags if tag not in vocabulary.ids])
        self._reader = CallReader()
        self._space = ""  # white space whose fate the next text decides
        self._fresh = True  # nothing of the present block was handed out
        self._at = self._start(prompt)

    def feed(self, token: int) -> list[Event]:
        """Take the next token."""
        mark = self._marks.get(token)
        if mark is not None and self._counts(mark):
            self.in_content = False
            return self._found(self._detokenizer.flush()) + self._route(self._finder.flush()) + self._turn(mark)
        if token in self._vocabulary.control:
            self.in_content = False
            return self._found(self._detokenizer.flush())
        self.reasoning_tokens += self._at is _In.THINKING
        self.in_content = self._at is _In.CONTENT
        return self._found(self._detokenizer.push(token))

    def finish(self) -> list[Event]:
        """Hand out the rest."""
        events = self._found(self._detokenizer.flush()) + self._route(self._finder.flush())
        if self._at is _In.CALL:
            return events + self._reader.finish()
        return events + self._emit(self._take_space())

    def _start(self, prompt: Sequence[int]) -> _In:
        """Where the prompt's last turn leaves off."""
        turn = self._vocabulary.ids.get(START_TURN)
        for token in reversed(prompt):
            if token == turn:
                break
            mark = self._marks.get(token)
            if mark is not None:
                return _In.THINKING if mark == THINK else _In.CONTENT
        return _In.CONTENT

    def _found(self, text: str) -> list[Event]:
        """Route text, looking for tags that are no tokens."""
        events: list[Event] = []
        found = self._finder.push(text) if text else ""
        while isinstance(found, Hit):
            counts = self._counts(found.needle)
            events += self._route(found.before if counts else found.before + found.needle)
            if counts:
                events += self._turn(found.needle)
            found = self._finder.push(found.after)
        return events + self._route(found)

    def _counts(self, mark: str) -> bool:
        """Whether a tag is one here; inside a block all but its end are text."""
        return _ENDS.get(self._at, mark) == mark

    def _turn(self, mark: str) -> list[Event]:
        events: list[Event] = self._reader.finish() if self._at is _In.CALL else []
        self._space, self._fresh = "", True
        self._at = _BEGINS.get(mark, _In.CONTENT)
        if self._at is _In.CALL:
            self._reader = CallReader(self._reader.next_index)
        return events

    def _route(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._at is _In.CALL:
            return self._reader.push(text)
        text = self._take_space() + text
        if self._fresh:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        self._space = text[len(kept) :]
        return self._emit(kept)

    def _take_space(self) -> str:
        space, self._space = self._space, ""
        return space

    def _emit(self, text: str) -> list[Event]:
        if not text:
            return []
        self._fresh = False
        return [Reasoning(text)] if self._at is _In.THINKING else [Content(text)]
