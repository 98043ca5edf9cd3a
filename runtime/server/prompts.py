"""From messages to a prompt: what a template sees of a conversation, and the way to ids.

Owns the plain form of messages: contents are text, past arguments are objects, nothing that is absent is None.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import from_json, to_json

from runtime.server.bodies import count_containers
from runtime.server.errors import invalid
from runtime.server.protocol import ChatRequest, Message, Text, Tool, ToolCall
from runtime.server.requests import at_most
from runtime.server.service import Service
from runtime.server.template import ChatTemplate, Prompt, TemplateError

_SWITCHES = ("enable_thinking", "thinking", "reasoning")
"""Names under which other models' templates are told whether to think."""
_INLINE_CHARS = 20_000
"""Texts up to this size are encoded on the loop, in about a millisecond; longer ones on a thread."""


async def render_chat(service: Service, body: ChatRequest) -> Prompt:
    """Return the prompt of a chat."""
    return await render_messages(
        service,
        body.messages,
        body.tools,
        template_variables(service, body.chat_template_kwargs, body.reasoning_effort),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
    )


def template_variables(service: Service, given: Mapping[str, Any], effort: str | None = None) -> dict[str, Any]:
    """Return what a template is told besides messages: thinking is switched off in the dialect's own words."""
    variables = dict(given)
    at_most("chat_template_kwargs", len(to_json(variables)), service.config.limits.template_bytes, "bytes")
    if effort == "none" or any(variables.get(name) is False for name in _SWITCHES):
        variables |= dict(service.text.dialect.reasoning_off)
    elif effort is not None:
        variables.setdefault("reasoning_effort", effort)
    return variables


async def render_messages(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    variables: dict[str, Any],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Prompt:
    """Render messages by the checkpoint's template; 400 when it refuses them."""
    template = service.text.template
    if template is None:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    plain = [_plain(message, template, service.config.limits.body_objects) for message in messages]
    declared = [_declared(tool) for tool in tools] or None

    def render() -> Prompt:
        return template.render(
            plain,
            declared,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    size = sum(len(str(each)) for each in (*plain, *(declared or ())))
    try:
        return await asyncio.to_thread(render) if size > _INLINE_CHARS else render()
    except TemplateError as error:
        raise invalid(str(error), error.param) from None


def joined(text: Text) -> str:
    """Return a content as one text; parts are lines."""
    return text if isinstance(text, str) else "\n".join(part.text or part.refusal for part in text)


def _plain(message: Message, template: ChatTemplate, objects: int) -> dict[str, Any]:
    role = message.role
    if role == "developer" and "developer" not in template.source:
        role = "system"  # templates that do not know the newer role would drop the message
    plain: dict[str, Any] = {"role": role, "content": joined(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    thought = message.reasoning or message.reasoning_content or message.thinking
    if thought:
        plain |= {"reasoning": thought, "reasoning_content": thought}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, objects) for call in message.tool_calls]
    if role == "tool":
        plain["tool_call_id"] = message.tool_call_id or ""
    return plain


def _call(call: ToolCall, objects: int) -> dict[str, Any]:
    """A past call with its arguments as an object, which templates dump again.

    What is no object stays what it is: a model may have written it, and the client can only send it back.
    """
    arguments: object = call.function.arguments
    if isinstance(arguments, str):
        at_most(
            "messages",
            count_containers(arguments.encode(), objects),
            objects,
            "objects and lists in a call's arguments",
        )
        with suppress(ValueError):
            arguments = from_json(arguments, allow_inf_nan=False) if arguments.strip() else {}
        arguments = {} if arguments is None else arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _declared(tool: Tool) -> dict[str, Any]:
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}
