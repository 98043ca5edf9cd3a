"""A checkpoint's chat template: messages and tools become a prompt in which only the template writes markers.

Owns which template is used and that no text of a request turns into control tokens. Marker texts in a request are split
by a character that the request does not contain, the template renders them like any other text, and the character is
taken out again before the text between the template's own markers is encoded as plain text.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, cast

import jinja2
from pydantic_core import to_json

from megakernel.config import ConfigError, read_json
from runtime.server.tokenizer import TextTokenizer

FILE = "chat_template.jinja"
_SPLITTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode's noncharacters: no text for interchange has them, and a request that has them all is refused."""
_RECENT_PROMPTS = 8
_RESERVED = frozenset(
    {
        "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "return_assistant_tokens_mask", "raise_exception", "strftime_now",
    }
)  # fmt: skip


_COMPARED = frozenset({"role", "type", "system", "developer", "user", "assistant", "tool", "function"})


class TemplateError(ValueError):
    """The messages are not what the template takes; the message is fit for their sender. `param`: what to change."""

    def __init__(self, message: str, param: str = "messages") -> None:
        """Say what was refused, and in which of a body's fields it stands."""
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: its text, with markers written out, and its ids."""

    text: str
    tokens: tuple[int, ...]


class ChatTemplate:
    """One template with the tokenizer it was written for; safe to use from any thread."""

    def __init__(self, source: str, origin: str, tokenizer: TextTokenizer, special_texts: dict[str, str]) -> None:
        """Take a template's text; ConfigError when it is none. `special_texts`: its bos_token and so on."""
        self.source, self.origin = source, origin
        self._tokenizer, self._special_texts = tokenizer, special_texts
        # A router asks for a prompt's ids before it sends the same chat.
        self._recent: OrderedDict[bytes, Prompt] = OrderedDict()
        self._is_timeless = "strftime_now" not in source
        self._lock = Lock()
        self._seams = Seams(tokenizer.vocabulary.ids)
        try:
            self.render([{"role": "user", "content": ""}], None)
        except TemplateError as error:
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise ConfigError(f"{origin}: {error.__cause__}") from None

    @classmethod
    def load(cls, folder: Path, tokenizer: TextTokenizer, override: Path | None = None) -> ChatTemplate | None:
        """Read `override`, else the folder's template file, else the tokenizer config's template; None without any."""
        settings = _settings(folder)
        special = {
            name: text
            for name, value in settings.items()
            if name.endswith("_token") and (text := value.get("content") if isinstance(value, dict) else value)
        }
        special = {name: text for name, text in special.items() if isinstance(text, str)}
        path = override or folder / FILE
        if override is not None or path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), str(path), tokenizer, special)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: not a readable template: {error}") from None
        source = settings.get("chat_template")
        if isinstance(source, list):
            named = {each["name"]: each["template"] for each in cast("list[dict[str, str]]", source)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, f"{folder / 'tokenizer_config.json'}: chat_template", tokenizer, special)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> Prompt:
        """Render a prompt; TemplateError when the template refuses."""
        reserved = (_RESERVED | set(self._special_texts)) & set(variables or ())
        if reserved:
            raise TemplateError(f"chat_template_kwargs may not set {min(reserved)!r}", "chat_template_kwargs")
        switches = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        key = hashlib.sha256(to_json((messages, tools, variables, switches))).digest()
        with self._lock:
            prompt = self._recent.get(key)
        if prompt is None:
            prompt = self._render_and_encode((messages, tools, variables), switches)
        with self._lock:
            if self._is_timeless:
                self._recent[key] = prompt
                self._recent.move_to_end(key)
            if len(self._recent) > _RECENT_PROMPTS:
                self._recent.popitem(last=False)
        return prompt

    def _render_and_encode(self, given: tuple[Any, Any, Any], switches: dict[str, bool]) -> Prompt:
        splitter = self._splitter(given)
        messages, tools, variables = _split(given, self._seams, splitter) if splitter else given
        text = self._render(messages, tools, {**(variables or {}), **switches})
        if splitter and splitter in text:
            return Prompt(text.replace(splitter, ""), tuple(self._encode_split(text, splitter)))
        return Prompt(text, tuple(self._tokenizer.encode(text)))

    def _render(self, messages: Any, tools: Any, variables: dict[str, Any]) -> str:  # noqa: ANN401 - plain data
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - it brings torch along

        try:
            rendered, _ = render_jinja_template(
                [messages], tools=tools, chat_template=self.source, **{**self._special_texts, **variables}
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses the messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(f"the chat template cannot render the messages: {error}") from error
        return rendered[0]

    def _splitter(self, given: object) -> str | None:
        """A character to split markers with that no text has; None where no text has a marker or a part of one."""
        texts = list(_texts(given))
        if not any(self._seams.of(text) for text in texts):
            return None
        for splitter in _SPLITTERS:
            if not any(splitter in text for text in texts):
                return splitter
        raise TemplateError("the messages hold marker texts and every noncharacter of Unicode")

    def _encode_split(self, text: str, splitter: str) -> list[int]:
        encoding = self._tokenizer.spans(text)
        tokens: list[int] = []
        begin = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._tokenizer.added:
                tokens += self._tokenizer.encode_plain(text[begin:start].replace(splitter, ""))
                tokens.append(token)
                begin = end
        return tokens + self._tokenizer.encode_plain(text[begin:].replace(splitter, ""))


def _texts(value: object) -> Iterator[str]:
    """All strings in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("list[object]", value):
            yield from _texts(item)


def _split(value: Any, seams: Seams, splitter: str) -> Any:  # noqa: ANN401 - plain data of any kind
    """The same data with `splitter` at every seam; words that templates compare with have none."""
    if isinstance(value, str):
        if value in _COMPARED:
            return value
        pieces, begin = [], 0
        for seam in seams.of(value):
            pieces.append(value[begin:seam])
            begin = seam
        return splitter.join([*pieces, value[begin:]])
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        return {_split(key, seams, splitter): _split(item, seams, splitter) for key, item in table.items()}
    if isinstance(value, (list, tuple)):
        return [_split(item, seams, splitter) for item in cast("list[Any]", value)]
    return value


class Seams:
    """Where a text is split so that no marker is in it, nor made of its end or beginning and what is beside."""

    def __init__(self, markers: Iterable[str]) -> None:
        """Take the texts of all markers."""
        longest_first = sorted(markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._heads = {marker[:size] for marker in longest_first for size in range(1, len(marker))}
        self._tails = {marker[size:] for marker in longest_first for size in range(1, len(marker))}
        self._reach = max(map(len, longest_first), default=0)

    def of(self, text: str) -> list[int]:
        """Return places in the text, in order: behind the first character of what could become a marker."""
        if self._marker is None or not text:
            return []
        found: set[int] = set()
        match = self._marker.search(text)
        while match:
            found.add(match.start() + 1)
            match = self._marker.search(text, match.start() + 1)
        sizes = range(1, min(self._reach, len(text) + 1))
        found |= {len(text) - size + 1 for size in sizes if text[-size:] in self._heads}
        found |= {0 for size in sizes if text[:size] in self._tails}
        return sorted(found)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}
