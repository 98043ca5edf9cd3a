"""The Hermes dialect behind the server: thinking that the model opens, calls one by one, forms without markers."""

import json

import numpy as np
import pytest
from support.hermes import END, hermes_side, hermes_tokenizer
from support.serving import VOCAB, Script, serving, tool

pytestmark = pytest.mark.anyio

F, G = tool("f", x={"type": "integer"}), tool("g.h")
END_ID = hermes_tokenizer().vocabulary.ids[END]
CALLS = "\n".join(
    f"<tool_call>\n{call}\n</tool_call>"
    for call in ('{"name": "f", "arguments": {"x": 1}}', '{"name": "g.h", "arguments": {}}')
)


def ids(text):
    return hermes_tokenizer().encode(text)


def speaking(text):
    return serving([*ids(text), END_ID], text=hermes_side())


async def both(served, **body):
    """Reasoning, content, calls and finish reason, the same streamed and whole."""
    whole = (await served.chat(**body))["choices"][0]
    stream = await served.chat_stream(**body)
    message = whole["message"]
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", [])]
    found = (message.get("reasoning", ""), message["content"] or "", calls, whole["finish_reason"])
    assert found == (stream.reasoning(), stream.content(), stream.calls(), *stream.finishes())
    return found


async def test_thinking_text_and_calls():
    async with speaking(f"<think>\nhm\n</think>\n\nI look.\n{CALLS}") as served:
        found = await both(served, tools=[F, G])
        assert found == ("hm", "I look.", [("f", '{"x": 1}'), ("g.h", "{}")], "tool_calls")
        one = await both(served, tools=[F, G], parallel_tool_calls=False)
        assert one == ("hm", "I look.", [("f", '{"x": 1}')], "tool_calls")


async def test_reasoning_off_is_an_empty_block_in_the_prompt():
    async with speaking("just this") as served:
        assert (await both(served, reasoning_effort="none"))[:2] == ("", "just this")
        body = {"messages": [{"role": "user", "content": "</think> x"}], "reasoning_effort": "none"}
        rendered = (await served.post("/v1/chat/completions/render", body)).json()
        assert rendered["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert rendered["token_ids"].count(hermes_tokenizer().vocabulary.ids["</think>"]) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g.h"}}])
@pytest.mark.parametrize("effort", ["none", "high"])
async def test_a_required_call_comes_out_of_a_model_that_wants_prose(choice, effort):
    wish = np.zeros(VOCAB)
    wish[[ids("A")[0], END_ID]] = 50.0, 49.0
    async with serving([wish] * 400, text=hermes_side()) as served:
        bias = {str(ids(char)[0]): value for char, value in (("1", 40), ("}", 45))} | {str(END_ID): 1}
        body = {"tools": [F, G], "tool_choice": choice, "temperature": 0, "logit_bias": bias, "max_tokens": 200}
        reasoning, content, calls, finish = await both(served, **body, reasoning_effort=effort, thinking_token_budget=4)
        assert (reasoning, content, finish) == ("AAAA" if effort == "high" else "", "", "tool_calls")
        assert calls[0][0] in (("f", "g.h") if choice == "required" else ("g.h",))
        assert isinstance(json.loads(calls[0][1]), dict)


async def test_a_form_begins_after_thinking_that_the_model_opens_itself():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    async with speaking('<think>\n{"b": 2}?\n</think>{"a": 1}') as served:
        assert (await both(served, response_format=form))[:2] == ('{"b": 2}?', '{"a": 1}')
    async with speaking('{"a": 1}') as served:
        assert (await both(served, response_format=form, reasoning_effort="none"))[:2] == ("", '{"a": 1}')


async def test_strict_tools_leave_text_free_before_them():
    strict = tool("f", strict=True, x={"type": "integer", "minimum": 7, "maximum": 9})
    text = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 8}}\n</tool_call>'
    async with speaking("<think>\nhm\n</think>\n\n" + text) as served:
        assert await both(served, tools=[strict]) == ("hm", "Let me see.", [("f", '{"x": 8}')], "tool_calls")
    async with speaking("<think>\nhm\n</think>\n\nno call < at all") as served:
        assert (await both(served, tools=[strict]))[1:3] == ("no call < at all", [])


async def test_tool_choice_none_keeps_calls_out():
    start = ids("<tool_call>")[0]
    wish = np.zeros(VOCAB)
    wish[[start, ids("A")[0]]] = 50.0, 40.0
    script = Script(ids("<think>\n</think>"), wish, [END_ID])
    async with serving(script=script, text=hermes_side()) as served:
        found = await both(served, tools=[F], tool_choice="none", temperature=0)
        assert found[1:3] == ("A", [])
