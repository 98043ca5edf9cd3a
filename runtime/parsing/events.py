"""What a parser makes of a model's tokens: pieces of reasoning, of the answer, and of tool calls."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; calls count from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; together they are the JSON that the model wrote."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


class Parser(Protocol):
    """Reads one choice, token by token; how tokens are grouped into steps makes no difference."""

    reasoning_tokens: int
    """Tokens of thinking so far, markers not counted."""
    in_content: bool
    """Whether the last token belonged to the answer."""

    def feed(self, token: int) -> list[Event]:
        """Take the next token."""
        ...

    def finish(self) -> list[Event]:
        """Hand out what was held back: there are no more tokens."""
        ...
