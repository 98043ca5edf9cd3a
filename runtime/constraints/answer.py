"""The grammar of a whole answer in a dialect: text in its markers, calls of declared tools, or either.

Owns how calls are spelled. Rules are named by number, so a tool may have any name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.constraints.grammar import GrammarError, Rule, assemble, quote
from runtime.parsing import CallStyle, Dialect, Vocabulary

_LEXICON = r"""
WS: /[ \n]{0,40}/
CALL_ID: /[0-9]{1,4}/
ANYTHING: /(.|\n)*/
"""


@dataclass(frozen=True)
class ToolSpec:
    """A function that may be called. Without `strict`, keywords of its schema that are not supported are left out."""

    name: str
    parameters: dict[str, object]
    strict: bool = False

    def rule(self) -> Rule:
        """Return the grammar of its arguments."""
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise GrammarError(f"the parameters of tool {self.name!r} have type {kind!r}; needed: an object")
        return Rule.schema({**self.parameters, "type": "object"}, lenient=not self.strict)


def answer_grammar(
    dialect: Dialect,
    vocabulary: Vocabulary,
    *,
    answer: Rule | None = None,
    tools: Sequence[ToolSpec] = (),
    must_call: bool = False,
    parallel: bool = True,
) -> str:
    """Return the grammar of a turn after its thinking.

    `answer`: what text must follow, None: any text. With `tools` the turn may be calls instead, and `must_call` leaves
    no other way; without `parallel` it is one call. GrammarError where the dialect has no markers for it.
    """
    rules: dict[str, Rule] = {}
    lines: list[str] = []
    ways: list[str] = []
    if not must_call:
        text = "@answer" if answer is not None else "ANYTHING"
        if answer is not None:
            rules["answer"] = answer
        ways.append(_enclosed(dialect.answer, text, vocabulary))
    if tools:
        if dialect.calls is None:
            raise GrammarError(f"the {dialect.name} dialect has no tool calls")
        for idx, tool in enumerate(tools):
            rules[f"arguments_{idx}"] = tool.rule()
        lines.append("call: " + " | ".join(_call(dialect.call_style, idx, tool) for idx, tool in enumerate(tools)))
        before = "ANYTHING " if not must_call and dialect.answer is None and answer is None else ""
        ways.append(before + _calls(dialect, vocabulary, parallel=parallel))
    return assemble("\n".join(["start: " + " | ".join(ways), *lines]) + _LEXICON, rules)


def _calls(dialect: Dialect, vocabulary: Vocabulary, *, parallel: bool) -> str:
    if dialect.call_style is CallStyle.LIST:
        more = ' (WS "," WS call)*' if parallel else ""
        return _enclosed(dialect.calls, f'"[" WS call{more} WS "]"', vocabulary)
    block = _enclosed(dialect.calls, r'"\n" call "\n"', vocabulary)
    return rf'{block} ("\n" {block})*' if parallel else block


def _call(style: CallStyle, idx: int, tool: ToolSpec) -> str:
    name = json.dumps(tool.name, ensure_ascii=False)
    head, close = quote('{"name": ' + name + ', "arguments": '), quote("}")
    if style is CallStyle.LIST:
        head = " CALL_ID ".join((quote('{"tool_call_id": "'), quote('", "tool_name": ' + name + ', "parameters": ')))
    return f"{head} @arguments_{idx} {close}"


def _enclosed(markers: tuple[str, str] | None, body: str, vocabulary: Vocabulary) -> str:
    if markers is None:
        return f"({body})"
    start, end = (_terminal(marker, vocabulary) for marker in markers)
    return f"({start} {body} {end})"


def _terminal(marker: str, vocabulary: Vocabulary) -> str:
    token = vocabulary.ids.get(marker)
    return quote(marker) if token is None else f"<[{token}]>"
