"""Routes that need no engine: text to ids, ids to text, and the prompt that a request would have."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response

from runtime.server.completions import encode_prompts
from runtime.server.errors import invalid
from runtime.server.logprobs import token_text
from runtime.server.prompts import render_chat, render_messages, template_variables
from runtime.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from runtime.server.replies import Json
from runtime.server.requests import check_chat_limits, check_conversation, check_limits
from runtime.server.service import Service


async def tokenize(service: Service, _request: Request, body: TokenizeRequest) -> Response:
    """Encode a text, in which markers count as tokens, or a chat's prompt."""
    service.check_model(body.model)
    tokenizer = service.text.tokenizer
    if body.messages is None:
        assert body.prompt is not None
        prompt, special = body.prompt, body.add_special_tokens
        tokens = await asyncio.to_thread(lambda: tokenizer.encode(prompt, add_special_tokens=special))
    else:
        check_conversation(body.messages, body.tools, service.config.limits)
        rendered = await render_messages(
            service,
            body.messages,
            body.tools,
            template_variables(service, body.chat_template_kwargs),
            add_generation_prompt=body.add_generation_prompt,
        )
        tokens = list(rendered.tokens)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.text.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [token_text(tokenizer.vocabulary, token) for token in tokens]
    return Json(answer)


async def detokenize(service: Service, _request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of ids, markers written out."""
    service.check_model(body.model)
    if body.tokens and max(body.tokens) >= service.text.vocab_size:
        raise invalid(f"token id {max(body.tokens)}; ids are below {service.text.vocab_size}", "tokens")
    decode = service.text.tokenizer.decode
    return Json({"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)})


async def render_chat_prompt(service: Service, request: Request, body: ChatRequest) -> Response:
    """Return the prompt that a chat would have, as text and as ids."""
    model = service.check_model(body.model)
    check_chat_limits(body, service.config.limits)
    prompt = await render_chat(service, body)
    head = {"request_id": request.state.request_id, "model": model}
    return Json({**head, "prompt": prompt.text, "token_ids": prompt.tokens})


async def render_completion_prompts(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Return the prompts that a completion would have."""
    model = service.check_model(body.model)
    check_limits(body, service.config.limits)
    prompts = await encode_prompts(service, body)
    head = {"request_id": request.state.request_id, "model": model}
    decode = service.text.tokenizer.decode
    return Json(
        [{**head, "prompt": decode(prompt, skip_special_tokens=False), "token_ids": list(prompt)} for prompt in prompts]
    )
