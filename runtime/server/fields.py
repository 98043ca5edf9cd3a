"""What request bodies are made of: lists and numbers that are bounded, rules, and the fields of other servers."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MOST_BIASES = 2**16

RULE = "rule"
"""Type of the errors that say themselves which parameter is meant."""


def rule(param: str, message: str) -> PydanticCustomError:
    """Return the error of a rule about several fields, `param` among them."""
    return PydanticCustomError(RULE, "{message}", {"message": message, "param": param})


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong item is told: looking at millions of them would stop the server."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


def _one_or_many(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    return [value] if isinstance(value, str) else value


Strings = Annotated[Items[Annotated[str, Field(min_length=1)]], BeforeValidator(_one_or_many)]

_ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "guided_json": ((), "; use structured_outputs.json"),
    "guided_regex": ((), "; use structured_outputs.regex"),
    "guided_choice": ((), "; use structured_outputs.choice"),
    "guided_grammar": ((), "; use structured_outputs.grammar"),
    "json_schema": ((), "; use structured_outputs.json"),
    "regex": ((), "; use structured_outputs.regex"),
    "ebnf": ((), "; use structured_outputs.grammar"),
    "grammar": ((), "; use structured_outputs.grammar"),
    "logits_processors": ((), ""),
    "best_of": ((), ""),
    "use_beam_search": ((), ""),
    "length_penalty": ((1,), ""),
    "typical_p": ((1,), ""),
    "mirostat": ((), ""),
    "dry_multiplier": ((), ""),
    "xtc_probability": ((), ""),
    "suffix": ((), ""),
    "prompt_embeds": ((), "; use prompt"),
    "documents": ((), "; put them into messages"),
    "chat_template": ((), "; the operator chooses it"),
    "functions": ((), "; use tools"),
    "function_call": ((), "; use tool_choice"),
}
"""Fields of other servers, values that say nothing, and what to use instead."""
_NUMBERS_ELSEWHERE = {
    "prompt_logprobs": "; use echo and logprobs of /v1/completions",
    "truncate_prompt_tokens": "; shorten the prompt",
}
"""The same, where 0 says something too."""


def refuse_what_would_be_lost(data: Any) -> None:  # noqa: ANN401 - whatever the client sent
    """Refuse fields by which other servers constrain or change an answer: ignoring them would break a promise."""
    if not isinstance(data, dict):
        return
    for name, (neutral, instead) in _ELSEWHERE.items():
        value = data.get(name)
        if value and value not in neutral and not (name == "best_of" and value == data.get("n", 1)):
            raise rule(name, f"{name} is not supported{instead}")
    for name, instead in _NUMBERS_ELSEWHERE.items():
        if data.get(name) is not None:
            raise rule(name, f"{name} is not supported{instead}")
