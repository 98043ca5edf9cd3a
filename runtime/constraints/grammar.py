"""Grammars that outputs must follow, on llguidance: it needs no GPU and no torch, and its work is bounded by fuel.

Owns limits, compilation and the bitmask of a running grammar. Fails closed: what cannot be enforced is an error.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from runtime.parsing import Vocabulary

# The defaults bound a step to about 15 ms; messages name no state. The engine itself panics at 65536 symbols.
_LIMITS = LLParserLimits(verbose_errors=False, max_grammar_size=60_000)
_CACHED = 128
_MESSAGE_CHARS = 300
_WHITE_SPACE = r"[ \n]{0,40}"
"""Between JSON tokens: bounded, or a model may write line breaks until its budget is gone."""


class GrammarError(ValueError):
    """A grammar that is not supported, too large, or matches nothing; the message is fit for its sender."""


@dataclass(frozen=True)
class Rule:
    """One named part of a grammar, as llguidance takes it: a Lark text or a JSON schema."""

    body: dict[str, object]

    @classmethod
    def schema(cls, schema: dict[str, object], *, lenient: bool = False) -> Rule:
        """JSON that a schema describes; `lenient` leaves out keywords that are not supported, instead of failing."""
        options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient, "coerce_one_of": lenient}
        return cls({"json_schema": {**_without_names(schema), "x-guidance": options}})

    @classmethod
    def lark(cls, text: str) -> Rule:
        """Build from a grammar in Lark's syntax, as llguidance reads it."""
        return cls({"lark_grammar": text})

    @classmethod
    def regex(cls, pattern: str) -> Rule:
        """Text that a regular expression matches as a whole."""
        return cls({"lark_grammar": json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]})

    @classmethod
    def grammar(cls, text: str) -> Rule:
        """Build from a grammar in Lark's syntax, or in llama.cpp's."""
        # the converter looks at a run of empty lines once for every line of it
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return cls.lark(grammar_from("grammar", "\n".join(lines)))
        except (ValueError, IndexError, RecursionError) as error:
            raise GrammarError(_first_line(str(error))) from None

    @classmethod
    def choice(cls, texts: Collection[str]) -> Rule:
        """One of several texts."""
        return cls.lark("start: " + " | ".join(quote(text) for text in texts))


def quote(text: str) -> str:
    """Return a text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def assemble(main: str, rules: dict[str, Rule]) -> str:
    """Return a grammar whose start rule is in `main`, a Lark text that refers to `rules` as @NAME."""
    named = [{"name": name, **rule.body} for name, rule in rules.items()]
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *named]})


def _without_names(schema: dict[str, object]) -> dict[str, object]:
    """Leave out the root's address: references would be looked up under it."""
    return {key: value for key, value in schema.items() if key not in ("$schema", "$id", "x-guidance")}


class _Tokens:
    """A vocabulary as llguidance wants to see it: added tokens are no text, and no text is encoded as one of them."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]], ends: list[int]) -> None:
        self.tokens = list(vocabulary.pieces)
        self.special_token_ids = sorted(vocabulary.ids.values())
        self.eos_token_id = ends[0] if ends else 0
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Grammars:
    """Compiles grammars for one vocabulary and remembers the last ones. Safe to use from any thread."""

    def __init__(
        self, vocabulary: Vocabulary, encode: Callable[[str], list[int]], vocab_size: int, end_ids: Collection[int]
    ) -> None:
        """Take a vocabulary and its way of encoding plain text; `end_ids` are allowed where a text may end."""
        ends = [each for each in sorted(end_ids) if each < vocab_size]
        tokens = TokenizerWrapper(_Tokens(vocabulary, encode, ends))
        self._tokenizer = LLTokenizer(tokens, n_vocab=vocab_size, eos_token=ends or None)
        self._words = -(-vocab_size // 32)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def check(self, rule: Rule) -> None:
        """Raise GrammarError when a rule by itself cannot be used or matches nothing; in a grammar that shows late."""
        self._matcher(json.dumps({"grammars": [rule.body]}))

    def compile(self, grammar: str) -> GrammarStage:
        """Return a grammar at its start; GrammarError when it cannot be used. May take a second for a large one."""
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._matcher(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        return GrammarStage(matcher, self._words).copy()

    def _matcher(self, grammar: str) -> LLMatcher:
        with _calm():
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                raise GrammarError(_first_line(matcher.get_error()))
            return matcher


def version() -> str:
    """Return the grammar engine's name and version."""
    return f"llguidance {llguidance.__version__}"


def _first_line(message: str) -> str:
    text = message.partition("\n")[0].strip()[:_MESSAGE_CHARS]
    if "panic" in text or "too big" in text:
        return "it is too large"
    return text if not text.startswith("NoExtension") else "nothing matches it"


@contextmanager
def _calm() -> Iterator[None]:
    """Make an error of the library's panics, which are no `Exception` and would end whatever thread they are met on."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError("the grammar engine gave up on it") from None


class GrammarStage:
    """A grammar under way; done when nothing may follow but an end id."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        """Take a matcher of one's own; masks have `words` words."""
        self._matcher, self._words = matcher, words

    def copy(self) -> GrammarStage:
        """Return another one that has come as far."""
        with _calm():
            return GrammarStage(self._matcher.deep_copy(), self._words)

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and cannot go on."""
        return self._matcher.is_stopped()

    def mask(self) -> npt.NDArray[np.int32]:
        """Bitmask of allowed ids; end ids are among them where the text may end."""
        with _calm():
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype="<i4")[: self._words]
            if self._matcher.is_error():
                raise GrammarError(f"the grammar gave up: {_first_line(self._matcher.get_error())}")
            return mask

    def accept(self, token: int) -> None:
        """Take note of a token; ValueError when it was not allowed."""
        with _calm():
            if not self._matcher.consume_token(token):
                raise ValueError(f"token {token} is not what the grammar allows")
