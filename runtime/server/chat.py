"""POST /v1/chat/completions: how a chat's response is written, whole and in chunks.

Owns the shape of deltas: the role first, then what there is and nothing else; a call's first delta has its id, type,
name and empty arguments, later ones a piece of the arguments.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request, Response

from runtime.parsing import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from runtime.server.choices import ScoredToken, Step
from runtime.server.forms import chat_constraint
from runtime.server.generation import Ticket, answer
from runtime.server.logprobs import chat_logprobs
from runtime.server.prompts import render_chat
from runtime.server.protocol import ChatRequest, NamedTool
from runtime.server.requests import Identity, Wishes, check_chat_limits, choices_of
from runtime.server.service import Service

_BANNED = -100.0


async def create_chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer a chat."""
    model = service.check_model(body.model)
    check_chat_limits(body, service.config.limits)
    service.ready_engine()
    prompt = await render_chat(service, body)
    wishes = await chat_wishes(service, body, prompt.tokens)
    identity = Identity.new("chatcmpl", request.state.request_id, model)
    choices = choices_of(service, body, identity, [prompt.tokens], wishes)
    ticket = Ticket(service, identity, request.state.key, [len(prompt.tokens)])
    reply = ChatReply(service, body, identity, prompt.tokens)
    return await answer(request, ticket, body, choices, reply)


async def chat_wishes(service: Service, body: ChatRequest, prompt: Sequence[int]) -> Wishes:
    """Return what a chat wants of its choices."""
    text = service.text
    has_tools = bool(body.tools) and body.tool_choice != "none"
    return Wishes(
        make_parser=partial(text.dialect.make_parser, text.tokenizer.vocabulary, has_tools=has_tools),
        default_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        one_call=not body.parallel_tool_calls or isinstance(body.tool_choice, NamedTool),
        make_constraint=await chat_constraint(service, body, prompt),
        bias=_no_calls(service) if body.tool_choice == "none" else {},
    )


def _no_calls(service: Service) -> dict[int, float]:
    """Keep the model from beginning a call."""
    calls = service.text.dialect.calls
    token = service.text.tokenizer.vocabulary.ids.get(calls[0]) if calls else None
    return {} if token is None else {token: _BANNED}


@dataclass
class _Whole:
    """What a choice of a response that is sent whole has gained."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


class ChatReply:
    """Writes one chat's response."""

    def __init__(self, service: Service, body: ChatRequest, identity: Identity, prompt: Sequence[int]) -> None:
        """Begin with nothing written."""
        self._prompt_ids = {"prompt_token_ids": list(prompt)} if body.return_token_ids else {}
        self._has_ids = body.return_token_ids
        self._vocabulary = service.text.tokenizer.vocabulary
        self._reasoning_fields = service.config.reasoning_fields if body.include_reasoning else ()
        self._has_logprobs = body.logprobs
        self._head = {"id": identity.id, "created": identity.created, "model": identity.model}
        self._started: set[int] = set()
        self._whole: defaultdict[int, _Whole] = defaultdict(_Whole)

    def chunks(self, step: Step) -> list[dict[str, Any]]:
        """Return the stream's chunks for a step."""
        index = step.choice.index
        deltas: list[dict[str, Any]] = []
        if index not in self._started:
            self._started.add(index)
            deltas.append({"role": "assistant"})
        deltas += [delta for each in _merged(step.events) if (delta := self._delta(each))]
        if step.scored and not any("content" in delta for delta in deltas):
            deltas.append({"content": ""})
        chunks = [self._chunk(index, delta) for delta in deltas]
        if step.scored:
            choice = next(each["choices"][0] for each in chunks if "content" in each["choices"][0]["delta"])
            choice["logprobs"] = chat_logprobs(self._vocabulary, step.scored)
        if step.finish is not None:
            chunks.append(self._chunk(index, {}, _end(step)))
        if self._has_ids and step.tokens:
            chunks = chunks or [self._chunk(index, {})]
            chunks[0]["choices"][0]["token_ids"] = step.tokens
        if chunks:
            chunks[0] |= self._prompt_ids
            self._prompt_ids = {}
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the stream's last chunk."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def add(self, step: Step) -> None:
        """Take a step of a response that is sent whole."""
        whole = self._whole[step.choice.index]
        whole.scored += step.scored
        whole.tokens += step.tokens
        for each in step.events:
            match each:
                case Reasoning(text):
                    whole.reasoning.append(text)
                case Content(text):
                    whole.content.append(text)
                case CallStart(name=name):
                    whole.calls.append({"id": _call_id(), "type": "function", "function": {"name": name}})
                    whole.arguments.append([])
                case CallArguments(index, text):
                    whole.arguments[index].append(text)
                case CallEnd():
                    pass
        if step.finish is not None:
            whole.end = _end(step)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response."""
        choices = [self._choice(index, whole) for index, whole in sorted(self._whole.items())]
        return {**self._head, "object": "chat.completion", "choices": choices, **self._prompt_ids, "usage": usage}

    def _choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        content = "".join(whole.content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not whole.calls else None}
        if whole.reasoning:
            message |= dict.fromkeys(self._reasoning_fields, "".join(whole.reasoning))
        if whole.calls:
            for call, arguments in zip(whole.calls, whole.arguments, strict=True):
                call["function"]["arguments"] = "".join(arguments)
            message["tool_calls"] = whole.calls
        logprobs = chat_logprobs(self._vocabulary, whole.scored) if self._has_logprobs else None
        ids = {"token_ids": whole.tokens} if self._has_ids else {}
        return {"index": index, "message": message, "logprobs": logprobs, **ids, **whole.end}

    def _chunk(self, index: int, delta: dict[str, Any], end: dict[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, **(end or {})}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Reasoning(text):
                return dict.fromkeys(self._reasoning_fields, text) or None
            case Content(text):
                return {"content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": _call_id(), "type": "function", "function": function}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnd():
                return None


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _end(step: Step) -> dict[str, Any]:
    reason = step.choice.stop_reason
    return {"finish_reason": step.finish, **({} if reason is None else {"stop_reason": reason})}


def _merged(events: Sequence[Event]) -> list[Event]:
    """Join neighbouring pieces of the same kind, when a step brought several tokens."""
    merged: list[Event] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case Reasoning(before), Reasoning(text):
                merged[-1] = Reasoning(before + text)
            case Content(before), Content(text):
                merged[-1] = Content(before + text)
            case CallArguments(index, before), CallArguments(other, text) if index == other:
                merged[-1] = CallArguments(index, before + text)
            case _:
                merged.append(event)
    return merged
