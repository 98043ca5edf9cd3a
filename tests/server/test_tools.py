"""Tool calls and reasoning over HTTP, streamed and whole."""

import json

import pytest
from support.serving import (
    END,
    USER,
    Script,
    answered,
    call_text,
    ids,
    serving,
    text_side,
    thought,
    tokenizer,
    tool,
    wanting,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
F = tool("f", x={"type": "integer"})
G = tool("g")
EASY = [wanting(ids("A")[0], END)] * 400
"""A model that only wants to write A's and end."""


async def both(served, **body):
    """Reasoning, content, calls and finish reason, which must be the same streamed and whole."""
    whole = (await served.chat(**body))["choices"][0]
    stream = await served.chat_stream(**body)
    message = whole["message"]
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", [])]
    identifiers = [each["id"] for each in message.get("tool_calls", [])]
    assert len(set(identifiers)) == len(identifiers)
    assert all(each.startswith("call_") for each in identifiers)
    found = (message.get("reasoning", ""), message["content"] or "", calls, whole["finish_reason"])
    assert found == (stream.reasoning(), stream.content(), stream.calls(), *stream.finishes())
    assert stream.is_done
    assert "<|" not in json.dumps([message, stream.chunks])
    return found


async def test_b28_b30_calls_with_and_without_parameters():
    async with serving(thought("hm") + call_text(("g", {}), ("f", {"x": 1}))) as served:
        assert await both(served, tools=[F, G]) == ("hm", "", [("g", "{}"), ("f", '{"x": 1}')], "tool_calls")
        message = await served.message(tools=[F, G])
        assert message["content"] is None
    async with serving(thought("") + call_text(("g", {}))) as served:
        assert (await both(served, tools=[G]))[2] == [("g", "{}")]


async def test_b33_well_formed_calls_are_never_a_server_error():
    parameters = ["{}", "null", r'"{\"x\": 1}"']
    for written, arguments in zip(parameters, ["{}", "{}", '{"x": 1}'], strict=True):
        text = f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "f", "parameters": {written}}}]<|END_ACTION|>'
        async with serving(thought("") + text) as served:
            assert (await both(served, tools=[F]))[2] == [("f", arguments)]


async def test_b35_prose_with_reasoning_off_and_text_before_a_call():
    async with serving("I will<|END_THINKING|>" + call_text(("f", {"x": 1}))) as served:
        found = await both(served, tools=[F], reasoning_effort="none")
        assert found == ("I will", "", [("f", '{"x": 1}')], "tool_calls")
        hidden = await both(served, tools=[F], reasoning_effort="none", include_reasoning=False)
        assert hidden[:2] == ("", "")
    async with serving(thought("t") + answered("First this.") + call_text(("f", {"x": 1}))) as served:
        assert await both(served, tools=[F]) == ("t", "First this.", [("f", '{"x": 1}')], "tool_calls")


async def test_reasoning_fields_follow_the_servers_switch():
    from runtime.server.config import ServeConfig

    for fields in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
        async with serving(thought("t") + answered("a"), config=ServeConfig(reasoning_fields=fields)) as served:
            message = await served.message()
            assert {name for name in message if name.startswith("reasoning")} == set(fields)


async def test_calls_cut_by_max_tokens_finish_with_length():
    async with serving(thought("") + call_text(("f", {"x": 123456789}))) as served:
        found = await both(served, tools=[F], max_tokens=30)
        assert found[3] == "length"


@pytest.mark.parametrize("left", range(1, 26))
async def test_a_call_cut_anywhere_is_the_same_streamed_and_whole(left):
    said = ids(thought("")) + ids(call_text(("f", {"x": 123456789})))
    async with serving(said) as served:
        found = await both(served, tools=[F], max_tokens=left)
        assert found[3] == "length"
        written = tokenizer().decode(said[:left], skip_special_tokens=True)
        assert [name for name, _ in found[2]] == (["f"] if '"tool_name": "f"' in written else [])


async def test_half_a_surrogate_pair_in_a_call_does_not_break_the_response():
    block = '<|START_ACTION|>[{"tool_name": "\\ud83d", "parameters": "\\ud83d"}, {"tool_name": "f"}]<|END_ACTION|>'
    async with serving(thought("") + block) as served:
        found = await both(served, tools=[F])
        assert found[2][1] == ("f", "{}")
        assert found[2][0][0] == "\ufffd"


async def test_one_call_only_without_parallel_calls():
    async with serving(thought("") + call_text(("f", {"x": 1}), ("g", {}), ("f", {"x": 2}))) as served:
        found = await both(served, tools=[F, G], parallel_tool_calls=False)
        assert found == ("", "", [("f", '{"x": 1}')], "tool_calls")
        await served.idle()


async def test_tool_choice_none_keeps_calls_out():
    start = ids("<|START_ACTION|>")[0]
    script = Script(ids("<|END_THINKING|>"), wanting(start, ids("<|START_TEXT|>")[0]), ids("ok<|END_TEXT|>"))
    async with serving(script=script) as served:
        assert await both(served, tools=[F], tool_choice="none", temperature=0) == ("", "ok", [], "stop")


async def test_without_tools_an_action_is_content():
    async with serving(thought("") + call_text(("f", {}))) as served:
        found = await both(served)
        assert (found[2], found[3], json.loads(found[1])[0]["tool_name"]) == ([], "stop", "f")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("effort", ["none", "high"])
async def test_b31_a_required_call_comes_out_of_a_model_that_wants_prose(choice, effort):
    async with serving(EASY) as served:
        body = {"tools": [F, G], "tool_choice": choice, "temperature": 0, "thinking_token_budget": 5}
        # without these it writes spaces, digits and calls on and on, as the grammar allows
        body["logit_bias"] = {str(ids(char)[0]): bias for char, bias in (("1", 40), ("}", 45), ("]", 45))}
        found = await both(served, **body, reasoning_effort=effort, max_tokens=300)
        reasoning, content, calls, finish = found
        assert finish == "tool_calls"
        assert (content, len(reasoning) <= 5) == ("", True)
        assert calls
        assert calls[0][0] in (("f", "g") if choice == "required" else ("f",))
        assert isinstance(json.loads(calls[0][1]), dict)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
async def test_b32_the_finish_reason_of_a_call_is_always_tool_calls(choice, calls):
    made = [("f", {"x": 1}), ("f", {"x": 2})][:calls]
    async with serving(thought("hm") + call_text(*made)) as served:
        found = await both(served, tools=[F, G], tool_choice=choice)
        expected = 1 if isinstance(choice, dict) else calls
        assert (found[3], len(found[2])) == ("tool_calls", expected)


NAMES = ["get.weather", "get-weather", "9lives", "get", "get_", 'quo"te', "uni\u00e9", "a" * 64]


@pytest.mark.parametrize("name", NAMES)
async def test_any_tool_name_can_be_enforced(name):
    async with serving(thought("") + call_text((name, {})).replace("\\u00e9", "\u00e9")) as served:
        found = await both(served, tools=[tool(each) for each in NAMES], tool_choice="required")
        assert found[2] == [(name, "{}")]


async def test_required_calls_follow_their_schema():
    wrong = thought("") + call_text(("f", {"x": "text"}))
    async with serving(wrong) as served:
        bias = {str(ids("1")[0]): 30}
        calls = (await both(served, tools=[F], tool_choice="required", logit_bias=bias, temperature=0, max_tokens=150))[
            2
        ]
        assert calls[0][0] == "f"
        assert calls[0][1].startswith('{"x": 1')


async def test_a_strict_tool_is_enforced_in_auto_and_text_stays_free():
    strict = tool("f", strict=True, x={"type": "integer", "minimum": 7, "maximum": 9})
    async with serving(thought("") + call_text(("f", {"x": 3}))) as served:
        bias = {str(ids("8")[0]): 10}
        calls = (await both(served, tools=[strict], temperature=0, logit_bias=bias))[2]
        assert json.loads(calls[0][1]) == {"x": 8}
    async with serving(thought("hm") + answered("free text, <any>")) as served:
        assert (await both(served, tools=[strict]))[:3] == ("hm", "free text, <any>", [])


async def test_b43_many_tools_with_large_schemas():
    properties = {f"p{place}": {"type": "string", "description": "d" * 60} for place in range(20)}
    tools = [tool(f"tool_{place}", **properties) for place in range(60)]
    for each in tools:
        each["function"]["parameters"]["required"] = []
    assert len(json.dumps(tools)) > 100_000
    sizes = {"text": text_side(window=150_000), "pages": (20_000, 2_000), "prefill_tokens": (8, 8192)}
    async with serving(thought("") + call_text(("tool_33", {"p3": "x"})), **sizes) as served:
        found = [("tool_33", '{"p3": "x"}')]
        assert (await served.chat_stream(tools=tools)).calls() == found
        assert served.service._grammars is None, "a choice without constraint needs no grammar"
        assert (await served.chat_stream(tools=tools, tool_choice="required")).calls() == found
        many = [
            {**each, "function": {**each["function"], "name": f"{each['function']['name']}_{copy}"}}
            for copy in range(7)
            for each in tools
        ]
        error = await served.refusal(CHAT, {"messages": USER, "tools": many, "tool_choice": "required"})
        assert "the limit is 524288" in error["message"]


async def test_a_thinking_budget_ends_the_thinking():
    text = ids("<|START_TEXT|>ok<|END_TEXT|>")
    script = Script([wanting(ids("A")[0], ids("<|END_THINKING|>")[0])] * 7 + text)
    async with serving(script=script) as served:
        whole = await served.chat(thinking_token_budget=6, temperature=0)
        message = whole["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("AAAAAA", "ok")
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
        none = await served.message(thinking_token_budget=0, temperature=0, max_tokens=5)
        assert "reasoning" not in none
