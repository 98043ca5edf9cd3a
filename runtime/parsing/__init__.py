"""Streaming parsers on token ids: what a model's turn says is reasoning, what is answer, and what calls tools."""

from runtime.parsing.dialect import DIALECTS, CallStyle, Dialect, Thinking, choose_dialect
from runtime.parsing.events import CallArguments, CallEnd, CallStart, Content, Event, Parser, Reasoning
from runtime.parsing.plain import PlainParser
from runtime.parsing.vocabulary import Detokenizer, Vocabulary

__all__ = [
    "DIALECTS",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "CallStyle",
    "Content",
    "Detokenizer",
    "Dialect",
    "Event",
    "Parser",
    "PlainParser",
    "Reasoning",
    "Thinking",
    "Vocabulary",
    "choose_dialect",
]
