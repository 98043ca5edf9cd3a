"""From a body to what its output is held to: schemas, other forms, declared tools, a thinking budget.

Owns what a form means beside reasoning and tools. Fails closed: what cannot be enforced is a 400 before anything runs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from runtime.constraints import (
    GrammarError,
    Rule,
    Staged,
    ThinkingStage,
    Together,
    ToolSpec,
    Vetoes,
    answer_grammar,
    mask_of,
    mask_without,
)
from runtime.constraints.stages import Stage
from runtime.constraints.tags import structural_tag
from runtime.parsing import DIALECTS, Dialect, Thinking
from runtime.request import Constraint
from runtime.server.config import Limits
from runtime.server.errors import ApiError, invalid, unavailable
from runtime.server.protocol import ChatRequest, NamedTool, Sampling, StructuredOutputs
from runtime.server.requests import at_most
from runtime.server.service import Service

T = TypeVar("T")
MakeConstraint = Callable[[], Constraint]
_RULE = re.compile(r"[ \t]*[?!]?\w[^:]*:")
PLAIN_DIALECT = DIALECTS["plain"]


async def text_constraint(service: Service, body: Sampling) -> MakeConstraint | None:
    """Return what makes the constraint of a text completion, None where it has none."""
    if body.form is None:
        return make_vetoes(service, body)
    return await off_loop(service, lambda: _with_vetoes(service, body, _text_form(service, body)))


async def chat_constraint(service: Service, body: ChatRequest, prompt: Sequence[int]) -> MakeConstraint | None:
    """Return what makes the constraint of a chat's choices, None where they have none.

    A form begins after thinking. Tools are enforced where a call is required, or where one of them is strict.
    """
    if body.form is None and not body.tools:
        return _with_vetoes(service, body, _chat_form(service, body, prompt))
    return await off_loop(service, lambda: _with_vetoes(service, body, _chat_form(service, body, prompt)))


async def off_loop(service: Service, build: Callable[[], T]) -> T:
    """Return what `build` makes, on one of few threads, so that grammars never take all of the machine."""
    building = asyncio.get_running_loop().run_in_executor(service.form_threads, build)
    try:
        return await asyncio.wait_for(building, service.config.waits.form_s)
    except TimeoutError:
        raise unavailable("the server has too many grammars to build") from None


def _with_vetoes(service: Service, body: Sampling, form: Form) -> MakeConstraint | None:
    """Hold a form, a thinking budget and vetoes together, where that can be done."""
    vetoes = make_vetoes(service, body)
    if vetoes is None or form.make is None:
        return vetoes or form.make
    if form.has_grammar or body.allowed_token_ids is not None:
        name, other = ("bad_words", "a form or an enforced call") if body.allowed_token_ids is None else (
            "allowed_token_ids", "a form, an enforced call or a thinking budget")  # fmt: skip
        raise invalid(f"{name} cannot be held together with {other}", name)
    make = form.make
    return lambda: Together([make(), vetoes()])


@dataclass(frozen=True)
class Form:
    """What makes a constraint, None where nothing is constrained; `has_grammar`: it may leave few ids or one."""

    make: MakeConstraint | None
    has_grammar: bool = False


def _text_form(service: Service, body: Sampling) -> Form:
    rule = _answer_rule(service, body)
    if rule is None:
        return Form(None)
    grammar = answer_grammar(PLAIN_DIALECT, service.text.tokenizer.vocabulary, answer=rule)
    return _compiled(service, grammar, {_form_param(body): [rule]}, list)


def _chat_form(service: Service, body: ChatRequest, prompt: Sequence[int]) -> Form:
    dialect, vocabulary = service.text.dialect, service.text.tokenizer.vocabulary
    template = service.text.template
    thinking = dialect.thinking_after(vocabulary, prompt, template.source if template else "")
    rule = _answer_rule(service, body)
    tools, must_call = _tools_to_enforce(service, body, has_rule=rule is not None)
    has_grammar = rule is not None or bool(tools)
    budget = body.thinking_token_budget
    make_stages = partial(_thinking_stages, service, dialect, thinking, budget, has_grammar=has_grammar)
    if not has_grammar:
        return Form((lambda: Staged(make_stages(), ends=False)) if make_stages() else None)
    parallel = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
    try:
        grammar = answer_grammar(dialect, vocabulary, answer=rule, tools=tools, must_call=must_call, parallel=parallel)
        rules = {_form_param(body): [rule] if rule else [], "tools": [each.rule() for each in tools]}
    except GrammarError as error:
        raise invalid_schema(error, "tools") from None
    return _compiled(service, grammar, rules, make_stages)


def _compiled(
    service: Service, grammar: str, rules: Mapping[str, Sequence[Rule]], make_stages: Callable[[], list[Stage]]
) -> Form:
    """Compile a grammar; `rules` are its parts by the parameter that brought them."""
    grammars = service.grammars()
    for param, parts in rules.items():
        try:
            for rule in parts:
                grammars.check(rule)
        except GrammarError as error:
            raise invalid_schema(error, param) from None
    try:
        stage = grammars.compile(grammar)
    except GrammarError as error:
        raise invalid_schema(error, next(param for param, parts in rules.items() if parts)) from None
    return Form(lambda: Staged([*make_stages(), stage.copy()], ends=True), has_grammar=True)


def make_vetoes(service: Service, body: Sampling) -> MakeConstraint | None:
    """Return what makes the constraint of allowed_token_ids and bad_words, None without them."""
    text, ids, words = service.text, body.allowed_token_ids, body.bad_words
    if ids is None and not words:
        return None
    size = -(-text.vocab_size // 32)
    if ids is None:
        allowed = mask_without((), text.tokenizer.size, size)
    elif words:
        raise invalid("allowed_token_ids and bad_words exclude each other", "bad_words")
    elif max(ids) >= text.tokenizer.size:
        raise invalid(f"allowed_token_ids has {max(ids)}; ids are below {text.tokenizer.size}", "allowed_token_ids")
    else:
        allowed = mask_of(ids, size)
    at_most("bad_words", len(words), service.config.limits.bad_words, "words")
    at_most("bad_words", max(map(len, words), default=0), service.config.limits.stop_chars, "characters a word")
    # a word is another token at the beginning of a text than behind a space
    spellings = {spelling for word in words for spelling in (word, f" {word.lstrip()}")}
    banned = [tuple(text.tokenizer.encode_plain(spelling)) for spelling in sorted(spellings)]
    return lambda: Vetoes(allowed, banned)


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
    for given in (other.json_, other.structural_tag):
        if isinstance(given, str):
            at_most("structured_outputs", len(given), limits.schema_bytes, "characters")
    if other.json_ is not None:
        return _schema_rule(_as_object(other.json_), limits, "structured_outputs")
    if other.structural_tag is not None:
        tag = _as_object(other.structural_tag)
        check_schema(tag, limits, "structured_outputs")
        return structural_tag(tag, markers)
    given = " | ".join(other.choice or ()) or other.regex or other.grammar or ""
    at_most("structured_outputs", len(given.encode()), limits.grammar_bytes, "bytes")
    if other.choice is not None:
        return Rule.choice(other.choice)
    if other.regex is not None:
        return Rule.regex(other.regex)
    rules = sum(_RULE.match(line) is not None for line in given.splitlines())
    at_most("structured_outputs", rules, limits.grammar_rules, "rules")
    return Rule.grammar(given)


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
    depth, properties = _extent(schema)
    if depth > limits.schema_depth:
        raise invalid(f"the schema is nested {depth} deep; the limit is {limits.schema_depth}", param, "invalid_schema")
    if properties > limits.schema_properties:  # the work grows by the square of one object's
        message = f"the schema has an object with {properties} properties; the limit is {limits.schema_properties}"
        raise invalid(message, param, "invalid_schema")
    size = len(json.dumps(schema))
    if size > limits.schema_bytes:
        raise invalid(f"the schema has {size} bytes; the limit is {limits.schema_bytes}", param, "invalid_schema")


def _extent(value: object) -> tuple[int, int]:
    """How deep plain data is nested, and how many keys the largest object has."""
    depth, most, level = 0, 0, [value]
    while level:
        depth += 1
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                table = cast("dict[str, object]", each)
                most = max(most, len(table))
                inner += table.values()
            elif isinstance(each, list):
                inner += cast("list[object]", each)
        level = inner
    return depth, most


def invalid_schema(error: GrammarError, param: str) -> ApiError:
    """Return the error for a form that cannot be enforced."""
    return invalid(f"the form cannot be enforced: {error}", param, "invalid_schema")
