"""POST /v1/completions: texts or token ids go on; how the response is written, whole and in chunks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import Request, Response

from runtime.parsing import Content, PlainParser
from runtime.request import TokenLogprobs
from runtime.server.choices import Step
from runtime.server.errors import invalid
from runtime.server.forms import text_constraint
from runtime.server.generation import Ticket, answer
from runtime.server.logprobs import CompletionLogprobs
from runtime.server.protocol import CompletionRequest
from runtime.server.requests import Identity, Wishes, at_most, check_limits, choices_of
from runtime.server.service import Service

_DEFAULT_TOKENS = 16


async def create_completion(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer a completion."""
    model = service.check_model(body.model)
    check_limits(body, service.config.limits)
    at_most("logprobs", body.logprobs or 0, service.config.limits.logprobs)
    service.ready_engine()
    prompts = await encode_prompts(service, body)
    wishes = await text_wishes(service, body)
    identity = Identity.new("cmpl", request.state.request_id, model)
    choices = choices_of(service, body, identity, prompts, wishes)
    ticket = Ticket(service, identity, request.state.key, [len(prompt) for prompt in prompts])
    reply = CompletionReply(service, body, identity, prompts)
    return await answer(request, ticket, body, choices, reply)


async def text_wishes(service: Service, body: CompletionRequest) -> Wishes:
    """Return what a completion wants of its choices."""
    vocabulary = service.text.tokenizer.vocabulary
    return Wishes(
        make_parser=lambda _prompt: PlainParser(vocabulary, keep_control=not body.skip_special_tokens),
        default_tokens=_DEFAULT_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        make_constraint=await text_constraint(service, body),
    )


async def encode_prompts(service: Service, body: CompletionRequest) -> list[Sequence[int]]:
    """Return the ids of every prompt; in a text, markers count as tokens."""
    given, tokenizer = body.prompt, service.text.tokenizer
    if isinstance(given, str):
        texts = [given]
    elif given and isinstance(given[0], str):
        texts = cast("list[str]", given)
    else:
        nested = bool(given) and isinstance(given[0], list)
        prompts = cast("list[Sequence[int]]", given if nested else [given])
        return _checked(service, prompts)
    at_most("prompt", len(texts), service.config.limits.prompts, "prompts")
    encoded = await asyncio.to_thread(
        lambda: [tokenizer.encode(text, add_special_tokens=body.add_special_tokens) for text in texts]
    )
    return _checked(service, encoded)


def _checked(service: Service, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    at_most("prompt", len(prompts), service.config.limits.prompts, "prompts")
    vocab = service.text.vocab_size
    for prompt in prompts:
        if not prompt:
            raise invalid("a prompt is empty; it needs one token or more", "prompt")
        if max(prompt) >= vocab:
            raise invalid(f"the prompt has the token id {max(prompt)}; ids are below {vocab}", "prompt")
    return list(prompts)


@dataclass
class _Whole:
    text: list[str] = field(default_factory=list)
    scored: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


class CompletionReply:
    """Writes one completion's response."""

    def __init__(
        self, service: Service, body: CompletionRequest, identity: Identity, prompts: Sequence[Sequence[int]]
    ) -> None:
        """Begin with nothing written."""
        self._tokenizer = service.text.tokenizer
        self._body, self._prompts = body, prompts
        self._head = {"id": identity.id, "object": "text_completion", "created": identity.created}
        self._head["model"] = identity.model
        self._started: set[int] = set()
        self._whole: defaultdict[int, _Whole] = defaultdict(_Whole)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(
            lambda: CompletionLogprobs(self._tokenizer.vocabulary)
        )

    def chunks(self, step: Step) -> list[dict[str, Any]]:
        """Return the stream's chunks for a step."""
        index = step.choice.index
        is_first = index not in self._started
        text, scored = self._gained(step)
        chunks: list[dict[str, Any]] = []
        ids = self._ids(index, step.tokens, is_first=is_first)
        if text or scored or ids:
            logprobs = self._logprobs[index].take(scored) if self._body.logprobs is not None else None
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **ids}
            chunks.append(self._chunk(choice))
        if step.finish is not None:
            chunks.append(self._chunk({"index": index, "text": "", "logprobs": None, **_end(step)}))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the stream's last chunk."""
        return {**self._head, "choices": [], "usage": usage}

    def add(self, step: Step) -> None:
        """Take a step of a response that is sent whole."""
        whole = self._whole[step.choice.index]
        text, scored = self._gained(step)
        whole.text.append(text)
        whole.scored += scored
        whole.tokens += step.tokens
        if step.finish is not None:
            whole.end = _end(step)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response."""
        has_logprobs = self._body.logprobs is not None
        choices = [
            {
                "index": index,
                "text": "".join(whole.text),
                "logprobs": self._logprobs[index].take(whole.scored) if has_logprobs else None,
                **self._ids(index, whole.tokens, is_first=True),
                **whole.end,
            }
            for index, whole in sorted(self._whole.items())
        ]
        return {**self._head, "choices": choices, "usage": usage}

    def _ids(self, index: int, tokens: list[int], *, is_first: bool) -> dict[str, list[int]]:
        """What return_token_ids adds; the prompt's come once."""
        if not self._body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self._prompts[index // self._body.n])} if is_first else {}
        return prompt | ({"token_ids": tokens} if tokens or is_first else {})

    def _gained(self, step: Step) -> tuple[str, list[tuple[int, TokenLogprobs | None]]]:
        """Text and scored tokens of a step; an echoed prompt comes before the first."""
        index = step.choice.index
        text = "".join(each.text for each in step.events if isinstance(each, Content))
        scored: list[tuple[int, TokenLogprobs | None]] = [(each.token, each.logprobs) for each in step.scored]
        if self._body.echo and index not in self._started:
            prompt = self._prompts[index // self._body.n]
            text = self._tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens) + text
            scored = [*zip(prompt, step.prompt_logprobs or (), strict=False), *scored]
        self._started.add(index)
        return text, scored

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [choice]}


def _end(step: Step) -> dict[str, Any]:
    reason = step.choice.stop_reason
    return {"finish_reason": step.finish, **({} if reason is None else {"stop_reason": reason})}
