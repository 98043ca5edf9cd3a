"""From a body to what its output is held to: schemas, other forms, declared tools, a thinking budget.

Owns what a form means beside reasoning and tools. Fails closed: what cannot be enforced is a 400 before anything runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

from runtime.constraints import (
    GrammarError,
    Grammars,
    Rule,
    Staged,
    ThinkingStage,
    ToolSpec,
    answer_grammar,
    mask_without,
)
from runtime.constraints.stages import Stage
from runtime.constraints.tags import structural_tag
from runtime.parsing import DIALECTS, Dialect, Thinking
from runtime.request import Constraint
from runtime.server.config import Limits
from runtime.server.errors import ApiError, invalid
from runtime.server.protocol import ChatRequest, NamedTool, Sampling, StructuredOutputs
from runtime.server.requests import at_most
from runtime.server.service import Service

MakeConstraint = Callable[[], Constraint]
PLAIN_DIALECT = DIALECTS["plain"]


async def text_constraint(service: Service, body: Sampling) -> MakeConstraint | None:
    """Return what makes the constraint of a text completion, None where it has none."""
    rule = _answer_rule(service, body)
    if rule is None:
        return None
    grammar = answer_grammar(PLAIN_DIALECT, service.text.tokenizer.vocabulary, answer=rule)
    return await _compiled(service, grammar, {_form_param(body): [rule]}, list)


async def chat_constraint(service: Service, body: ChatRequest, prompt: Sequence[int]) -> MakeConstraint | None:
    """Return what makes the constraint of a chat's choices, None where they have none.

    A form begins after thinking. Tools are enforced where a call is required, or where one of them is strict.
    """
    dialect, vocabulary = service.text.dialect, service.text.tokenizer.vocabulary
    template = service.text.template
    thinking = dialect.thinking_after(vocabulary, prompt, template.source if template else "")
    rule = _answer_rule(service, body)
    tools, must_call = _tools_to_enforce(service, body, has_rule=rule is not None)
    has_grammar = rule is not None or bool(tools)
    budget = body.thinking_token_budget
    make_stages = partial(_thinking_stages, service, dialect, thinking, budget, has_grammar=has_grammar)
    if not has_grammar:
        return (lambda: Staged(make_stages(), ends=False)) if make_stages() else None
    parallel = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
    try:
        grammar = answer_grammar(dialect, vocabulary, answer=rule, tools=tools, must_call=must_call, parallel=parallel)
        rules = {_form_param(body): [rule] if rule else [], "tools": [each.rule() for each in tools]}
    except GrammarError as error:
        raise invalid_schema(error, "tools") from None
    return await _compiled(service, grammar, rules, make_stages)


async def _compiled(
    service: Service, grammar: str, rules: Mapping[str, Sequence[Rule]], make_stages: Callable[[], list[Stage]]
) -> MakeConstraint:
    """Compile off the loop; `rules` are the parts of the grammar by the parameter that brought them."""

    def compile_all() -> Grammars:
        grammars = service.grammars()
        for param, parts in rules.items():
            try:
                for rule in parts:
                    grammars.check(rule)
            except GrammarError as error:
                raise invalid_schema(error, param) from None
        try:
            grammars.compile(grammar)
        except GrammarError as error:
            raise invalid_schema(error, next(iter(rules))) from None
        return grammars

    grammars = await asyncio.to_thread(compile_all)
    return lambda: Staged([*make_stages(), grammars.compile(grammar)], ends=True)


def _thinking_stages(
    service: Service,
    dialect: Dialect,
    thinking: Thinking,
    budget: int | None,
    *,
    has_grammar: bool,
) -> list[Stage]:
    """The stage of thinking, where there is anything to hold it to."""
    if thinking is Thinking.NONE or dialect.thinking is None or (budget is None and not has_grammar):
        return []
    start, end = (service.text.tokenizer.vocabulary.ids[text] for text in dialect.thinking)
    words = -(-service.text.vocab_size // 32)
    # every id but the markers, and the one that ends thinking: what follows is the grammar's business
    markers = service.text.tokenizer.added - {end}
    allowed = mask_without(markers, service.text.tokenizer.size, words) if has_grammar else None
    opens = start if thinking is Thinking.AHEAD else None
    return [ThinkingStage(close=end, words=words, opens=opens, budget=budget, allowed=allowed)]


def _tools_to_enforce(service: Service, body: ChatRequest, *, has_rule: bool) -> tuple[list[ToolSpec], bool]:
    """The tools a grammar must spell out, and whether one must be called."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return [], False
    must_call = choice == "required" or isinstance(choice, NamedTool)
    if not must_call and not has_rule and not any(tool.function.strict for tool in body.tools):
        return [], False
    named = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [tool.function for tool in body.tools if named in (None, tool.function.name)]
    for each in functions:
        check_schema(each.parameters, service.config.limits, "tools")
    size = sum(len(json.dumps(each.parameters)) for each in functions)
    at_most("tools", size, service.config.limits.schema_bytes, "bytes of schemas")
    return [ToolSpec(each.name, dict(each.parameters), each.strict) for each in functions], must_call


def _answer_rule(service: Service, body: Sampling) -> Rule | None:
    """What the answer's text must follow, None when it is free; ApiError for what is too large or unsupported."""
    form, other, limits = body.response_format, body.structured_outputs, service.config.limits
    markers = service.text.tokenizer.vocabulary.ids
    try:
        if form is not None and form.type == "json_schema":
            assert form.json_schema is not None
            return _schema_rule(form.json_schema.schema_, limits, "response_format")
        if form is not None and form.type == "json_object":
            return Rule.schema({"type": "object"})
        if form is not None and form.type == "structural_tag":
            tag = form.model_dump(by_alias=True)
            check_schema(tag, limits, "response_format")
            return structural_tag(tag, markers)
        if other is None:
            return None
        return _other_rule(other, limits, markers)
    except GrammarError as error:
        raise invalid_schema(error, _form_param(body)) from None


def _form_param(body: Sampling) -> str:
    """The parameter that brings the form of an answer."""
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def _other_rule(other: StructuredOutputs, limits: Limits, markers: Collection[str]) -> Rule:
    if other.json_object:
        return Rule.schema({"type": "object"})
    if other.json_ is not None:
        return _schema_rule(_as_object(other.json_), limits, "structured_outputs")
    if other.structural_tag is not None:
        tag = _as_object(other.structural_tag)
        check_schema(tag, limits, "structured_outputs")
        return structural_tag(tag, markers)
    at_most("structured_outputs", len(json.dumps(other.model_dump())), limits.schema_bytes, "bytes")
    if other.choice is not None:
        return Rule.choice(other.choice)
    return Rule.regex(other.regex) if other.regex is not None else Rule.grammar(other.grammar or "")


def _as_object(value: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise GrammarError("a string was given that holds no JSON object")
    return cast("dict[str, Any]", parsed)


def _schema_rule(schema: dict[str, Any], limits: Limits, param: str) -> Rule:
    check_schema(schema, limits, param)
    return Rule.schema(schema)


def check_schema(schema: dict[str, Any], limits: Limits, param: str) -> None:
    """Refuse a schema that is larger or deeper than the operator allows."""
    depth = _depth(schema)
    if depth > limits.schema_depth:
        raise invalid(f"the schema is nested {depth} deep; the limit is {limits.schema_depth}", param, "invalid_schema")
    size = len(json.dumps(schema))
    if size > limits.schema_bytes:
        raise invalid(f"the schema has {size} bytes; the limit is {limits.schema_bytes}", param, "invalid_schema")


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (
                cast("dict[str, object]", each).values() if isinstance(each, dict) else cast("list[object]", each)
            )
        ]
    return depth


def invalid_schema(error: GrammarError, param: str) -> ApiError:
    """Return the error for a form that cannot be enforced."""
    return invalid(f"the form cannot be enforced: {error}", param, "invalid_schema")
