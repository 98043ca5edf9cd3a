"""The ways in which model families mark thinking, text and tool calls in their turns, and which one a checkpoint uses.

Owns the registry. A dialect is data for whoever builds grammars and prompts, and makes the parser of a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from megakernel.config import ConfigError
from runtime.parsing import hermes, north
from runtime.parsing.events import Parser
from runtime.parsing.hermes import HermesParser
from runtime.parsing.north import NorthParser
from runtime.parsing.plain import PlainParser
from runtime.parsing.vocabulary import Vocabulary


class Thinking(Enum):
    """What a prompt says of the reasoning that follows it."""

    OPEN = auto()  # the prompt has begun it
    AHEAD = auto()  # the model begins it itself
    NONE = auto()


class CallStyle(Enum):
    """How calls are written between their markers."""

    LIST = auto()  # one block, a JSON list of objects with tool_call_id, tool_name and parameters
    EACH = auto()  # a block a call, one JSON object with name and arguments


class MakeParser(Protocol):
    """Makes the parser of a choice that continues `prompt`."""

    def __call__(self, vocabulary: Vocabulary, prompt: Sequence[int], *, has_tools: bool) -> Parser:
        """Return a new parser."""
        ...


@dataclass(frozen=True)
class Dialect:
    """Markers are (start, end) pairs of added tokens' texts. `reasoning_off`: what a template is told to skip thinking.

    `answer` encloses text where the dialect marks it. `needs`: tokens by which a checkpoint is recognised.
    """

    name: str
    make_parser: MakeParser
    needs: tuple[str, ...] = ()
    turn: str = ""
    thinking: tuple[str, str] | None = None
    answer: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    call_style: CallStyle = CallStyle.EACH
    reasoning_off: tuple[tuple[str, bool], ...] = ()
    thinks_unasked: Callable[[str], bool] = lambda _template: False

    def thinking_after(self, vocabulary: Vocabulary, prompt: Sequence[int], template: str) -> Thinking:
        """Say whether the model thinks after this prompt, as far as markers and the template tell."""
        if self.thinking is None:
            return Thinking.NONE
        turn = vocabulary.ids.get(self.turn)
        start, end = (vocabulary.ids.get(text) for text in self.thinking)
        for token in reversed(prompt):
            if token == turn:
                break
            if token in (start, end):
                return Thinking.OPEN if token == start else Thinking.NONE
        return Thinking.AHEAD if self.thinks_unasked(template) else Thinking.NONE


def _plain(vocabulary: Vocabulary, prompt: Sequence[int], *, has_tools: bool) -> Parser:
    del prompt, has_tools  # there are no markers to tell anything by
    return PlainParser(vocabulary)


NORTH = Dialect(
    name="north",
    make_parser=NorthParser,
    needs=north.MARKERS,
    turn=north.START_TURN,
    thinking=(north.START_THINKING, north.END_THINKING),
    answer=(north.START_TEXT, north.END_TEXT),
    calls=(north.START_ACTION, north.END_ACTION),
    call_style=CallStyle.LIST,
    reasoning_off=(("reasoning", False),),
)
HERMES = Dialect(
    name="hermes",
    make_parser=HermesParser,
    needs=(hermes.START_TURN,),
    turn=hermes.START_TURN,
    thinking=(hermes.THINK, hermes.END_THINK),
    calls=(hermes.CALL, hermes.END_CALL),
    reasoning_off=(("enable_thinking", False),),
    thinks_unasked=lambda template: "enable_thinking" in template,
)
PLAIN = Dialect(name="plain", make_parser=_plain)

DIALECTS = {dialect.name: dialect for dialect in (NORTH, HERMES, PLAIN)}


def choose_dialect(name: str, vocabulary: Vocabulary) -> Dialect:
    """Return the dialect of that name, or for "auto" the first whose tokens the vocabulary has."""
    if name == "auto":
        return next(each for each in DIALECTS.values() if all(text in vocabulary.ids for text in each.needs))
    dialect = DIALECTS.get(name)
    if dialect is None:
        raise ConfigError(f"`parser` is {name!r}; needed: auto, {', '.join(DIALECTS)}")
    missing = [text for text in dialect.needs if text not in vocabulary.ids]
    if missing:
        raise ConfigError(f"`parser` is {name!r}, but the tokenizer has no token {missing[0]}")
    return dialect
