"""Structural tags: free text in which a trigger begins JSON that a schema describes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llguidance import StructTag

from runtime.constraints.grammar import GrammarError, Rule


def structural_tag(form: dict[str, Any], markers: Collection[str]) -> Rule:
    """Read {"triggers": [..], "structures": [{"begin", "schema", "end"}]}; `markers`: texts that are tokens."""
    structures, triggers = form.get("structures"), form.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise GrammarError("a structural tag needs lists of structures and triggers")
    if not all(isinstance(each, str) and each for each in triggers):
        raise GrammarError("a trigger is a text")
    tags = [_tag(each, triggers) for each in structures]
    is_token = all(tag.trigger in markers for tag in tags)
    return Rule.lark(StructTag.to_grammar(tags, assume_special=is_token))


def _tag(structure: Any, triggers: list[str]) -> StructTag:  # noqa: ANN401 - what the client sent
    if not isinstance(structure, dict):
        raise GrammarError("a structure is an object with begin, schema and end")
    begin, schema, end = structure.get("begin"), structure.get("schema", {}), structure.get("end", "")
    if not (isinstance(begin, str) and isinstance(schema, dict) and isinstance(end, str)):
        raise GrammarError("a structure is an object with begin, schema and end")
    trigger = max((each for each in triggers if begin.startswith(each)), key=len, default=None)
    if trigger is None:
        raise GrammarError(f"no trigger begins the structure {begin[:40]!r}")
    grammar = Rule.schema(schema).body["json_schema"]
    assert isinstance(grammar, dict)
    return StructTag(trigger=trigger, begin=begin, grammar=grammar, end=end)
