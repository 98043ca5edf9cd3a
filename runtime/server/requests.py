"""From a body to what runs: operator's limits, sampling, stopping, one engine request a choice.

Owns every check that needs the model or the operator's limits. Refuses to run anything.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.parsing import Parser
from runtime.request import Constraint, Request, Stopping
from runtime.sampling import SamplingParams
from runtime.server.choices import Choice, StopRules
from runtime.server.config import Limits
from runtime.server.errors import invalid, too_long
from runtime.server.protocol import ChatRequest, Message, Sampling, Tool
from runtime.server.service import Service

_COLDEST = 1e-5
"""Temperatures below are greedy: logits divided by them are infinite."""


@dataclass(frozen=True)
class Identity:
    """What a response calls itself."""

    id: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, request_id: str, model: str) -> Identity:
        """Return an identity that carries the request's id."""
        return cls(f"{prefix}-{request_id}", model, int(time.time()))


def check_limits(body: Sampling, limits: Limits) -> None:
    """Refuse what exceeds the operator's limits; the message names the limit."""
    at_most("n", body.n, limits.choices)
    at_most("stop", len(body.stop), limits.stops, "strings")
    at_most("stop", max(map(len, body.stop), default=0), limits.stop_chars, "characters a string")
    at_most("stop_token_ids", len(body.stop_token_ids), limits.stop_token_ids, "ids")
    at_most("logit_bias", len(body.logit_bias), limits.logit_biases, "ids")
    if limits.output_tokens is not None and body.token_limit is not None:
        at_most("max_tokens", body.token_limit, limits.output_tokens)


def check_chat_limits(body: ChatRequest, limits: Limits) -> None:
    """Like `check_limits`, for what only chats have."""
    check_limits(body, limits)
    check_conversation(body.messages, body.tools, limits)
    at_most("top_logprobs", body.top_logprobs or 0, limits.logprobs)


def check_conversation(messages: Sequence[Message], tools: Sequence[Tool], limits: Limits) -> None:
    """Refuse more messages or tools than the operator allows."""
    at_most("messages", len(messages), limits.messages, "messages")
    at_most("tools", len(tools), limits.tools, "tools")


def at_most(param: str, found: int, limit: int, what: str = "") -> None:
    """Refuse what is more than a limit."""
    if found > limit:
        raise invalid(f"{param} is {found}{what and ' ' + what}; the limit is {limit}", param)


@dataclass(frozen=True)
class Wishes:
    """What a route adds to a body. `default_tokens`: when none are asked for; None: what fits. `bias`: added by id."""

    make_parser: Callable[[Sequence[int]], Parser]
    default_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    one_call: bool = False
    make_constraint: Callable[[], Constraint] | None = None
    bias: Mapping[int, float] = field(default_factory=dict)


def choices_of(
    service: Service, body: Sampling, identity: Identity, prompts: Sequence[Sequence[int]], wishes: Wishes
) -> list[Choice]:
    """Return `n` choices for every prompt, in order."""
    rules = StopRules(tuple(body.stop), body.include_stop_str_in_output, body.min_tokens, wishes.one_call)
    base_seed = secrets.randbits(63) if body.seed is None else body.seed % 2**63
    deadline = time.monotonic() + service.config.waits.total_s
    nonce = secrets.token_hex(4)
    choices: list[Choice] = []
    for place, prompt in enumerate(prompts):
        stopping = _stopping(service, body, len(prompt), wishes.default_tokens)
        for number in range(body.n):
            index = place * body.n + number
            request = Request(
                id=f"{identity.id}-{nonce}-{index}",
                prompt=tuple(prompt),
                sampling=_sampling(service, body, choice_seed(base_seed, number), wishes.bias),
                stopping=stopping,
                logprobs=wishes.logprobs,
                prompt_logprobs=wishes.prompt_logprobs,
                constraint=wishes.make_constraint() if wishes.make_constraint else None,
                priority=body.priority,
                salt=body.cache_salt,
                group=f"{identity.id}-{nonce}" if body.n * len(prompts) > 1 else None,
                deadline=deadline,
            )
            choices.append(Choice(index, request, wishes.make_parser(prompt), rules))
    return choices


def choice_seed(base: int, number: int) -> int:
    """The first choice has the seed itself, so that n = 1 is a part of every n."""
    if number == 0:
        return base
    return int.from_bytes(hashlib.sha256(f"{base}/{number}".encode()).digest()[:8], "big") % 2**63


def _sampling(service: Service, body: Sampling, seed: int, bias: Mapping[int, float]) -> SamplingParams:
    defaults, vocab, size = service.text.defaults, service.text.vocab_size, service.text.tokenizer.size
    biases = {int(token): float(each) for token, each in body.logit_bias.items()}
    outside = [token for token in biases if token >= size]
    if outside:
        raise invalid(f"logit_bias has the token id {outside[0]}; ids are below {size}", "logit_bias")

    def pick(name: str, given: float | None, otherwise: float) -> float:
        return float(given if given is not None else defaults.get(name, otherwise))

    temperature, top_k = pick("temperature", body.temperature, 1.0), int(pick("top_k", body.top_k, 0))
    return SamplingParams(
        temperature=temperature if temperature >= _COLDEST else 0.0,
        top_p=pick("top_p", body.top_p, 1.0),
        top_k=top_k if 0 < top_k < vocab else 0,
        min_p=pick("min_p", body.min_p, 0.0),
        seed=seed,
        presence_penalty=float(body.presence_penalty),
        frequency_penalty=float(body.frequency_penalty),
        repetition_penalty=pick("repetition_penalty", body.repetition_penalty, 1.0),
        logit_bias=tuple(sorted((biases | dict(bias)).items())),
    )


def _stopping(service: Service, body: Sampling, prompt_tokens: int, default_tokens: int | None) -> Stopping:
    limits, text = service.config.limits, service.text
    room = text.max_model_len - prompt_tokens
    needed = 0 if body.token_limit == 0 else max(1, body.min_tokens)
    if room < needed:
        raise too_long(
            f"this model's maximum context length is {text.max_model_len} tokens; "
            f"the prompt has {prompt_tokens} and the answer needs {needed} or more",
            "messages" if isinstance(body, ChatRequest) else "prompt",
        )
    outside = [token for token in body.stop_token_ids if token >= text.vocab_size]
    if outside:
        raise invalid(f"stop_token_ids has {outside[0]}; ids are below {text.vocab_size}", "stop_token_ids")
    wanted = body.token_limit if body.token_limit is not None else default_tokens
    bounds = [bound for bound in (wanted, limits.output_tokens) if bound is not None]
    return Stopping(
        max_tokens=min([room, *bounds]),
        min_tokens=body.min_tokens,
        end_ids=text.end_ids,
        stop_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )
