"""Text as it streams: stop strings, characters, lengths, usage, errors."""

import json

import numpy as np
import pytest
from support.serving import (
    END,
    VOCAB,
    Script,
    answered,
    bytewise,
    call_text,
    ids,
    serving,
    text_side,
    thought,
    tokenizer,
    tool,
)

pytestmark = pytest.mark.anyio


def pieces(*texts: str) -> list[int]:
    """One token a text; each must be a token."""
    found = [ids(text) for text in texts]
    assert all(len(tokens) == 1 for tokens in found), found
    return [tokens[0] for tokens in found]


async def both_modes(served, seed, **body):
    """Text, finish reason and completion tokens of a completion, streamed and not; they must agree."""
    whole = await served.complete(seed=seed, **body)
    stream = await served.complete_stream(seed=seed, stream_options={"include_usage": True}, **body)
    choice = whole["choices"][0]
    assert stream.is_done
    assert (stream.text(), stream.finishes()) == (choice["text"], [choice["finish_reason"]])
    assert stream.usages() == [whole["usage"]] or stream.usages()[0]["prompt_tokens_details"]["cached_tokens"] > 0
    return choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]


async def test_b01_the_start_of_a_stop_string_does_not_leak():
    async with serving(*"ABCDEF") as served:
        assert await both_modes(served, 1, stop=["CDEF"], max_tokens=20) == ("AB", "stop", 6)


async def test_b01_held_back_text_is_released_when_the_match_fails():
    async with serving("ABCDX", *"CDE") as served:
        assert await both_modes(served, 1, stop=["CDEF"], max_tokens=8) == ("ABCDXCDE", "length", 8)


async def test_b02_a_stop_string_that_spans_tokens_ends_the_row():
    reply = [*ids("one "), *ids("two th"), *ids("ree four"), *ids(" and more and more words come")]
    async with serving(reply, seconds=0.02) as served:
        upto = len(ids("one ")) + len(ids("two th")) + len(ids("ree"))
        text, finish, tokens = await both_modes(served, 1, stop=["two three"], max_tokens=50)
        assert (text, finish) == ("one ", "stop")
        assert tokens <= upto
        await served.idle()
        assert served.engine.stats().generated_tokens <= 2 * (tokens + 2), "the row went on"


@pytest.mark.parametrize(
    "text", ["\N{WAVING HAND SIGN}", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "e\u0301a", "a\u00e9\u4e2db"]
)
async def test_b03_a_character_split_over_tokens_comes_whole(text):
    async with serving(bytewise(text)) as served:
        stream = await served.complete_stream(max_tokens=40)
        assert stream.text() == text
        assert "\ufffd" not in json.dumps(stream.chunks, ensure_ascii=False)


async def test_b03_plain_text_is_not_delayed():
    async with serving("hello there") as served:
        stream = await served.complete_stream(max_tokens=40)
        texts = [chunk["choices"][0]["text"] for chunk in stream.chunks]
        assert texts[:-1] == [tokenizer().decode([token]) for token in ids("hello there")]


async def test_b03_bytes_that_are_no_text_end_as_replacement_characters():
    half = bytewise("\N{WAVING HAND SIGN}")[:2]
    async with serving([*half, *ids("x"), *half]) as served:
        assert (await served.complete(max_tokens=40))["choices"][0]["text"] == "\ufffdx\ufffd"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "text"])
async def test_b04_a_prompt_beyond_the_window_is_a_400_before_any_byte(route, stream):
    async with serving("x" * 500, text=text_side(window=128)) as served:
        path, body = "/v1/completions", {"prompt": [5] * 128, "max_tokens": 1}
        if route == "chat":
            path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "ab " * 200}]}
        error = await served.refusal(path, {**body, "stream": stream})
        assert (error["code"], error["param"]) == (
            "context_length_exceeded",
            "prompt" if route == "text" else "messages",
        )
        assert "128" in error["message"]
        assert (await served.complete(max_tokens=2))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_b04_generation_ends_at_the_window(stream):
    async with serving("x" * 500, text=text_side(window=128)) as served:
        body = {"prompt": [5] * 40, "max_tokens": 1000}
        if stream:
            found = await served.complete_stream(**body, stream_options={"include_usage": True})
            assert found.is_done
            finish, usage = found.finishes(), found.usages()[0]
        else:
            whole = await served.complete(**body)
            finish, usage = [whole["choices"][0]["finish_reason"]], whole["usage"]
        assert (finish, usage["completion_tokens"], usage["total_tokens"]) == (["length"], 88, 128)
        assert (await served.chat(max_tokens=2))["choices"][0]["finish_reason"] == "length"


async def test_b06_nothing_to_generate_is_answered():
    async with serving(END) as served:
        echoed = await served.complete(prompt="hello", max_tokens=0, echo=True, logprobs=1)
        choice = echoed["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids("hello")) == len(choice["logprobs"]["tokens"])
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert echoed["usage"]["completion_tokens"] == 0
        empty = await served.complete(max_tokens=0)
        assert (empty["choices"][0]["text"], empty["choices"][0]["finish_reason"]) == ("", "length")
        ended = await served.complete(max_tokens=1)
        assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
        assert (await served.refusal("/v1/chat/completions", {"messages": [], "max_tokens": 0}))["param"] == "messages"


async def test_b07_a_failure_inside_one_stream_is_one_error_event_and_the_others_finish():
    script = Script()
    bad = np.full(VOCAB, np.nan)
    script.on(1, thought("ok"), answered("one"))
    script.on(2, ids("a"), ids("b"), bad)
    script.on(3, thought("ok"), answered("three"))
    async with serving(script=script) as served:
        before = await served.metric("counterpoint:stream_errors_total")
        import asyncio

        one, two, three = await asyncio.gather(*(served.chat_stream(seed=seed) for seed in (1, 2, 3)))
        assert (one.content(), three.content()) == ("one", "three")
        assert one.is_done
        assert three.is_done
        assert len(two.errors()) == 1
        assert two.errors()[0]["type"] == "server_error"
        assert not two.is_done
        assert "error" in two.chunks[-1]
        assert await served.metric("counterpoint:stream_errors_total") == before + 1
        assert await served.metric("vllm:corrupted_requests_total") == 1


async def test_b07_a_failure_before_the_first_byte_is_a_status():
    async with serving(np.full(VOCAB, np.nan)) as served:
        for stream in (False, True):
            error = await served.refusal("/v1/completions", {"prompt": "x", "stream": stream}, status=500)
            assert error["code"] == "server_error"


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
async def test_b08_usage_counts_tokens_however_they_come(n, steps):
    async with serving(thought("hm"), answered("a longer answer than one step"), max_steps=steps) as served:
        whole = await served.chat(n=n, seed=1)
        stream = await served.chat_stream(n=n, seed=1, stream_options={"include_usage": True})
        last = stream.chunks[-1]
        assert (last["choices"], len(stream.usages())) == ([], 1)
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        each = len(ids(thought("hm") + answered("a longer answer than one step"))) + 1
        assert last["usage"]["completion_tokens"] == n * each
        assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == n * len(ids("hm"))


async def test_b08_usage_in_every_chunk_when_asked():
    async with serving(answered("abc")) as served:
        stream = await served.chat_stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert len(stream.usages()) == len(stream.chunks)
        counts = [usage["completion_tokens"] for usage in stream.usages()]
        assert counts == sorted(counts)


async def test_b09_no_usage_chunk_that_nobody_asked_for():
    async with serving(answered("abc")) as served:
        for options in ({}, {"stream_options": {"include_usage": False}}):
            stream = await served.chat_stream(**options)
            assert all(chunk["choices"] for chunk in stream.chunks)
            assert stream.usages() == []
        body = {"prompt": "x", "stream": False, "stream_options": {"include_usage": True}}
        assert (await served.refusal("/v1/completions", body))["param"] == "stream_options"


async def test_b10_every_choice_has_one_role_its_own_text_and_one_finish():
    script = Script()
    script.on(7, thought("one"), answered("first"), choice=0)
    script.on(7, thought("two"), answered("second " * 100), choice=1)
    script.on(7, thought("three"), call_text(("f", {"x": 1})), choice=2)
    async with serving(script=script) as served:
        options = {"n": 3, "seed": 7, "max_tokens": 120, "tools": [tool("f", x={"type": "integer"})]}
        stream = await served.chat_stream(**options, stream_options={"include_usage": True})
        assert [stream.finishes(index) for index in range(3)] == [["stop"], ["length"], ["tool_calls"]]
        for index in range(3):
            deltas = stream.deltas(index)
            assert deltas[0] == {"role": "assistant"}
            assert not any("role" in delta for delta in deltas[1:])
        assert [stream.reasoning(index) for index in range(3)] == ["one", "two", "three"]
        assert stream.content(0) == "first"
        assert stream.content(1).startswith("second second")
        assert stream.calls(2) == [("f", '{"x": 1}')]
        assert len(stream.usages()) == 1
        whole = await served.chat(**options)
        assert [each["finish_reason"] for each in whole["choices"]] == ["stop", "length", "tool_calls"]
        assert whole["usage"]["prompt_tokens"] == stream.usages()[0]["prompt_tokens"], "a prompt counts once"


async def test_b11_a_stop_string_waits_for_min_tokens():
    reply = [*pieces("a", "\n"), *pieces(*"bcdefghijklm"), *pieces("\n"), *pieces("n")]
    async with serving(reply) as served:
        text, finish, tokens = await both_modes(served, 1, stop=["\n"], min_tokens=10, max_tokens=40)
        assert (text, finish, tokens) == ("a\nbcdefghijklm", "stop", 15)
        assert (await both_modes(served, 2, stop=["\n"], max_tokens=40))[0] == "a"


async def test_a_stop_string_may_be_kept():
    async with serving("one two three four") as served:
        kept = await both_modes(served, 1, stop=["two"], include_stop_str_in_output=True, max_tokens=40)
        assert kept[:2] == ("one two", "stop")
        whole = await served.complete(seed=2, stop=["two", "three"], max_tokens=40)
        assert whole["choices"][0]["stop_reason"] == "two"


async def test_stop_strings_do_not_apply_to_reasoning_or_calls():
    async with serving(thought("stop here"), call_text(("f", {"x": "stop"}))) as served:
        message = await served.message(stop=["stop"], tools=[tool("f", x={"type": "string"})])
        assert message["reasoning"] == "stop here"
        assert message["tool_calls"][0]["function"]["arguments"] == '{"x": "stop"}'


async def test_b37_absent_things_are_absent():
    async with serving(thought("thinking about it"), answered("done")) as served:
        stream = await served.chat_stream(tools=[tool("f")])
        for delta in stream.deltas():
            assert None not in delta.values()
            assert "" not in delta.values()
            assert [] not in delta.values()
            assert len(set(delta) - {"reasoning_content"}) <= 1
        assert stream.deltas()[-1] == {}


async def test_a_waiting_stream_is_kept_alive_and_the_first_byte_comes_with_the_comment():
    from runtime.server.config import ServeConfig, Waits

    config = ServeConfig(waits=Waits(keep_alive_s=0.05))
    async with serving(answered("hello"), config=config, seconds=0.15) as served:
        stream = await served.chat_stream()
        assert stream.comments >= 1
        assert stream.content() == "hello"
