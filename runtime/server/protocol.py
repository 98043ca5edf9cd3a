"""What clients send: request bodies as OpenAI's clients and agents write them.

Strict in types and ranges, so that a wrong value is told instead of bent; tolerant where clients differ: unknown fields
are ignored and null means "not given", at any depth of these models. Owns no limit that an operator may set; those are
checked in `requests.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from runtime.server.fields import (
    MOST_BIASES,
    Count,
    Items,
    Strings,
    TokenId,
    refuse_what_would_be_lost,
    rule,
)

_ID_DIGITS = 10


def _drop_nulls(data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class Body(BaseModel):
    """Base of all: null is like absent, unknown fields are ignored, no silent conversions."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        return _drop_nulls(data)


class TextPart(Body):
    """A part of a message; only text is served."""

    type: Literal["text", "refusal", "input_text", "output_text"] = "text"
    text: str = ""
    refusal: str = ""


Text = str | Items[TextPart]


class FunctionCall(Body):
    """The function of a past call; arguments are JSON text, or by some agents the object itself."""

    name: str
    arguments: str | dict[str, JsonValue] = ""


class ToolCall(Body):
    """A past call."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    tool_calls: Items[ToolCall] = []
    tool_call_id: str | None = None


class Function(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, JsonValue] = {}
    strict: bool = False


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name in a tool choice."""

    name: str


class NamedTool(Body):
    """A tool choice that names its function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class JsonSchema(Body):
    """The schema of a response format."""

    name: str = "schema"
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """How the answer is to be written."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Items[TagStructure] | None = None
    triggers: Items[str] | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise rule("response_format", "a response_format of type json_schema needs json_schema")
        if self.type == "structural_tag" and not (self.structures and self.triggers):
            raise rule("response_format", "a response_format of type structural_tag needs structures and triggers")
        return self


class TagStructure(Body):
    """What follows a trigger: `begin`, JSON of a schema, `end`."""

    begin: str = Field(min_length=1)
    schema_: dict[str, JsonValue] = Field(alias="schema", default={})
    end: str = ""


class StructuredOutputs(Body):
    """Other ways to hold the answer to a form; exactly one."""

    json_: str | dict[str, JsonValue] | None = Field(alias="json", default=None)
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    structural_tag: str | dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            ways = "json, json_object, regex, choice, grammar, structural_tag"
            raise rule("structured_outputs", f"structured_outputs needs exactly one of {ways}")
        return self


class StreamOptions(Body):
    """What a stream reports besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Body):
    """What both generation routes have in common. Fields that are None take the model's default."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**63)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[str, float] = {}
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1, lt=2**63)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count = 0
    stop: Strings = []
    stop_token_ids: Items[TokenId] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None
    bad_words: Items[Annotated[str, Field(min_length=1)]] = []
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)
    cache_salt: str = Field(default="", max_length=256)
    user: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, biases: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if isinstance(biases, dict) and len(biases) > MOST_BIASES:
            raise ValueError(f"has {len(biases)} ids; at most {MOST_BIASES} are read")
        return biases

    @field_validator("logit_bias")
    @classmethod
    def _bias_range(cls, biases: dict[str, float]) -> dict[str, float]:
        for token, bias in biases.items():
            if not (token.isascii() and token.isdigit() and len(token) <= _ID_DIGITS):
                raise ValueError(f"the key {token[:40]!r} is not a token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of {token} is {bias}; needed: -100 to 100")
        return biases

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            both = f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}"
            raise rule("max_tokens", f"{both}; give one of them")
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise rule("min_tokens", f"min_tokens is {self.min_tokens}, but at most {limit} tokens are asked for")
        if self.stream_options is not None and not self.stream:
            raise rule("stream_options", "stream_options needs stream")
        if self.structured_outputs is not None and self.response_format is not None:
            raise rule("structured_outputs", "response_format and structured_outputs exclude each other")
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_be_lost(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        """Fields by which other servers constrain or extend an answer: ignoring them would break a promise."""
        refuse_what_would_be_lost(data)
        return data

    @property
    def form(self) -> StructuredOutputs | ResponseFormat | None:
        """What the answer is held to."""
        return self.structured_outputs or self.response_format

    @property
    def token_limit(self) -> int | None:
        """How many tokens are asked for at most; None: as many as fit, or the route's default."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1)
    tools: Items[Tool] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Count | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool = True
    thinking_token_budget: Count | None = None
    chat_template_kwargs: dict[str, JsonValue] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="before")
    @classmethod
    def _tools_not_empty(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if isinstance(data, dict) and data.get("tools") == []:
            raise rule("tools", "tools is an empty list; leave it out, or declare one")
        return data

    @model_validator(mode="after")
    def _chat_consistent(self) -> ChatRequest:
        choice = self.tool_choice
        if choice not in (None, "none") and not self.tools:
            raise rule("tool_choice", "tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in self.tools}:
            raise rule("tool_choice", f"tool_choice names {choice.function.name!r}, which is not among the tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise rule("top_logprobs", "top_logprobs needs logprobs")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise rule("continue_final_message", "the last message is not the assistant's")
        if self.token_limit == 0:
            raise rule("max_tokens", "max_tokens is 0; a chat needs 1 or more")
        return self


Prompts = str | Items[TokenId] | Items[str] | Items[Items[TokenId]]


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Prompts
    echo: bool = False
    logprobs: Count | None = None
    add_special_tokens: bool = True


class TokenizeRequest(Body):
    """The body of /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1)
    tools: Items[Tool] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise rule("prompt", "needs prompt or messages, one of them")
        return self


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Items[TokenId]


class AbortRequest(Body):
    """The body of /abort: the id of a response, or of the request's header."""

    request_id: str = Field(min_length=1, max_length=256)


ResponseFormat.model_rebuild()
