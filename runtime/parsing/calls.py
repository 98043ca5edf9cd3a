"""Reads tool calls, a JSON list of objects or one object, from text that comes in pieces, and streams their arguments.

Owns what happens to what models get wrong. Missing, null or empty parameters are `{}`; parameters that are a JSON text
in a string are that text; keys may come in any order; ids are not read, because the server makes its own. Raw control
characters and unknown escapes in strings are escaped. Anything else is passed on as it was written, so that arguments
which are no JSON fail in the client's parser instead of becoming something that was not meant. An object without a
name, and text that is no call at all, is content.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from runtime.parsing.events import CallArguments, CallEnd, CallStart, Content, Event

_NAMES = frozenset({"tool_name", "name"})
_PARAMETERS = frozenset({"parameters", "arguments"})
_SPACE = " \t\r\n"
_ESCAPES = '"\\/bfnrt'
_HEX = frozenset("0123456789abcdefABCDEF")


class _At(Enum):
    TOP = auto()  # before, between and after calls
    OBJECT = auto()  # in a call, before a key
    COLON = auto()
    VALUE = auto()


class _Value:
    """Follows one JSON value: where it ends, and its text with repaired strings."""

    def __init__(self, *, is_key: bool = False) -> None:
        self.first = ""
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escape = ""
        self._ends = _SPACE + (",]}:" if is_key else ",]}")

    def push(self, char: str) -> str | None:
        """Return the text that `char` completes, perhaps none; None: the value had ended before it."""
        if self._in_string:
            return self._push_in_string(char)
        if self._depth == 0 and char in self._ends:  # behind a number or a literal, or there is no value at all
            self.is_done = True
            return None
        self.first = self.first or char
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth == 0
        return char

    def _push_in_string(self, char: str) -> str:
        if self._escape:
            return self._push_in_escape(char)
        if char == "\\":
            self._escape = char
            return ""
        if char == '"':
            self._in_string = False
            self.is_done = self._depth == 0
        return json.dumps(char)[1:-1] if char < " " else char

    def _push_in_escape(self, char: str) -> str:
        escape = self._escape + char
        is_unicode = escape[1] == "u" and all(digit in _HEX for digit in escape[2:])
        if is_unicode and len(escape) < 6:
            self._escape = escape
            return ""
        self._escape = ""
        if is_unicode or (len(escape) == 2 and char in _ESCAPES):
            return escape
        # An unknown escape is a backslash that should have been escaped; its last character may itself end the string.
        return "\\" + escape[:-1] + self._push_in_string(char)


class CallReader:
    """Reads one block of calls; `first` is the index of its first."""

    def __init__(self, first: int = 0) -> None:
        """Begin before the first call."""
        self.next_index = first
        self._at = _At.TOP
        self._junk: list[str] = []
        self._in_junk = False
        self._start_call()

    def push(self, text: str) -> list[Event]:
        """Take more text of the block."""
        events: list[Event] = []
        for char in text:
            self._push(char, events)
        return _joined(events)

    def finish(self) -> list[Event]:
        """End the block; a call that is not complete stays as far as it came, one without a name so far is dropped."""
        events: list[Event] = []
        if self._at is not _At.TOP and self._name is not None and self._index is None:
            self._argue("", events)
        junk = "".join(self._junk).strip()
        return [*events, Content(junk)] if junk else events

    def _start_call(self) -> None:
        self._raw: list[str] = []  # the object as written, while it has no name
        self._name: str | None = None
        self._index: int | None = None
        self._held: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._streams = False
        self._key: str | None = None
        self._text: list[str] = []
        self._value = _Value()

    def _push(self, char: str, events: list[Event]) -> None:
        if self._at is not _At.TOP and self._name is None:
            self._raw.append(char)
        match self._at:
            case _At.TOP if char == "{":
                self._start_call()
                self._raw.append(char)
                self._at = _At.OBJECT
            case _At.TOP:
                self._in_junk = self._in_junk or char not in _SPACE + "[],"
                if self._in_junk:
                    self._junk.append(char)
            case _At.OBJECT if char == "}":
                self._end_call(events)
            case _At.OBJECT if char not in _SPACE + ",:]":
                self._start_value(None)
                self._push_value(char, events)
            case _At.COLON if char in ",]}":  # a key without a value
                self._at = _At.OBJECT
                self._push_again(char, events)
            case _At.COLON if char not in _SPACE + ":":
                self._start_value(self._key)
                self._push_value(char, events)
            case _At.VALUE:
                self._push_value(char, events)
            case _:
                pass

    def _start_value(self, key: str | None) -> None:
        self._key, self._text, self._value = key, [], _Value(is_key=key is None)
        self._streams, self._at = False, _At.VALUE

    def _push_value(self, char: str, events: list[Event]) -> None:
        piece = self._value.push(char)
        # Objects and lists stream; a string may hold the arguments, and null stands for none, so those are read whole.
        if self._key in _PARAMETERS and not self._has_arguments and self._value.first in ("{", "["):
            self._has_arguments = self._streams = True
        if self._streams:
            self._argue(piece or "", events)
        else:
            self._text.append(piece or "")
        if self._value.is_done:
            self._end_value(events)
            if piece is None:
                self._push_again(char, events)

    def _push_again(self, char: str, events: list[Event]) -> None:
        """Take a character that ended a number or a literal for what it is itself."""
        if self._raw and self._name is None:
            self._raw.pop()
        self._push(char, events)

    def _end_value(self, events: list[Event]) -> None:
        text = "".join(self._text)
        if self._key is None:
            self._key, self._at = _decoded(text), _At.COLON
            return
        if self._key in _NAMES and self._name is None and text.startswith('"'):
            self._name = _decoded(text)
            self._raw.clear()
            if self._has_arguments:
                self._argue("", events)
        elif self._key in _PARAMETERS and not self._has_arguments:
            self._has_arguments = True
            self._argue(_unwrapped(text), events)
        self._at = _At.OBJECT

    def _argue(self, piece: str, events: list[Event]) -> None:
        self._held.append(piece)
        if self._name is None:
            return
        if self._index is None:
            self._index = self.next_index
            self.next_index += 1
            events.append(CallStart(self._index, self._name))
        text = "".join(self._held)
        self._held.clear()
        if text:
            events.append(CallArguments(self._index, text))

    def _end_call(self, events: list[Event]) -> None:
        self._at = _At.TOP
        if self._name is None:
            self._junk += self._raw
            self._in_junk = False
            return
        if not self._has_arguments:
            self._argue("{}", events)
        assert self._index is not None, "a call with a name and arguments has begun"
        events.append(CallEnd(self._index))


def _decoded(text: str) -> str:
    """The string that a JSON string holds, half surrogate pairs replaced; anything else as it is written."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else text


def _unwrapped(text: str) -> str:
    """Arguments that are absent, null, a JSON text inside a string, or something else, which stays as it is."""
    inner = _decoded(text) if text.startswith('"') else text
    if inner.strip() in ("", "null"):
        return "{}"
    try:
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError):
        return text


def _joined(events: list[Event]) -> list[Event]:
    """Join neighbouring pieces of the same call's arguments."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined
