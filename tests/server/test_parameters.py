"""Parameters: what they do, their ranges, and what is said about wrong ones."""

import asyncio
import json
import math

import numpy as np
import pytest
from support.serving import END, USER, VOCAB, Script, answered, ids, serving, text_side, thought, wanting

pytestmark = pytest.mark.anyio

A, B, C, D, E = (ids(letter)[0] for letter in "ABCDE")
OTHER_END = ids("<EOS_TOKEN>")[0]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

OPTIONAL = [
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "n", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "structured_outputs", "response_format",
    "stream", "stream_options", "priority", "cache_salt", "user", "logprobs", "metadata", "store",
]  # fmt: skip
CHAT_ONLY = [
    "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "reasoning_effort", "include_reasoning",
    "thinking_token_budget", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
]  # fmt: skip


async def test_b05_null_means_not_given():
    async with serving(answered("ok")) as served:
        for path, base, names in (
            (CHAT, {"messages": USER}, [*OPTIONAL, *CHAT_ONLY]),
            (TEXT, {"prompt": "x"}, [*OPTIONAL, "echo", "suffix", "best_of", "add_special_tokens"]),
        ):
            for given in [*([name] for name in names), names]:
                response = await served.post(path, {**base, **dict.fromkeys(given)})
                assert response.status_code == 200, (given, response.text)


async def test_null_inside_messages_and_tools_means_not_given():
    async with serving(answered("ok")) as served:
        nulls = {"name": None, "tool_calls": None, "tool_call_id": None, "reasoning": None}
        tools = [
            {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
        ]
        assert (await served.message(messages=[{**USER[0], **nulls}], tools=tools))["content"] == "ok"


async def test_b12_min_tokens_holds_off_every_end_token():
    steps = [wanting(OTHER_END, END, A)] * 40
    async with serving(steps, text=text_side(end_ids=(END, OTHER_END))) as served:
        bias = {"logit_bias": {str(OTHER_END): 100}, "temperature": 0}
        held = await served.complete(min_tokens=4, max_tokens=32, **bias)
        assert (held["choices"][0]["text"], held["choices"][0]["finish_reason"]) == ("AAAA", "stop")
        assert held["usage"]["completion_tokens"] == 5
        at_once = await served.complete(max_tokens=32, **bias)
        assert (at_once["choices"][0]["text"], at_once["usage"]["completion_tokens"]) == ("", 1)


async def test_b13_ignore_eos_goes_on_but_the_users_own_stop_id_still_ends():
    script = Script([END, OTHER_END] * 32)
    script.on(5, [END] * 7, B, [END] * 90)
    async with serving(script=script, text=text_side(end_ids=(END, OTHER_END))) as served:
        found = await served.complete(ignore_eos=True, max_tokens=64)
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (64, "length")
        own = await served.complete(ignore_eos=True, max_tokens=64, stop_token_ids=[B], seed=5)
        assert (own["usage"]["completion_tokens"], own["choices"][0]["finish_reason"]) == (8, "stop")
        assert own["choices"][0]["stop_reason"] == B
        assert own["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    "bias", [{"-1": 1}, {str(VOCAB): 1}, {"1000000000": 1}, {"abc": 1}, {"5": 1e9}, {"5": "x"}, {"5": 101}]
)
async def test_b14_a_wrong_logit_bias_is_told_and_disturbs_nobody(bias):
    async with serving(answered("undisturbed " * 4), seconds=0.002) as served:
        other = asyncio.ensure_future(served.chat_stream())
        for path, base in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
            error = await served.refusal(path, {**base, "logit_bias": bias})
            assert error["param"].startswith("logit_bias")
            assert next(iter(bias)) in json.dumps(error)
        assert (await other).content() == "undisturbed " * 4


async def test_b14_not_a_number_is_refused_too():
    async with serving("A") as served:
        raw = '{"prompt": "x", "logit_bias": {"5": NaN}}'
        response = await served.post(TEXT, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_b15_logit_bias_acts_on_every_token_also_the_first(stream):
    async with serving([wanting(A, B)] * 20) as served:
        body = {"temperature": 0, "max_tokens": 3, "n": 2}

        async def texts(**bias):
            if stream:
                found = await served.complete_stream(**body, logit_bias=bias)
                return [found.text(0), found.text(1)]
            return [each["text"] for each in (await served.complete(**body, logit_bias=bias))["choices"]]

        assert await texts() == ["AAA", "AAA"]
        assert await texts(**{str(A): -100}) == ["BBB", "BBB"]
        assert await texts(**{str(C): 100}) == ["CCC", "CCC"]


async def test_b16_a_logprob_of_minus_infinity_is_a_finite_number():
    hard = np.full(VOCAB, -np.inf)
    hard[A] = 0.0
    async with serving([hard] * 40) as served:
        text = await served.post(TEXT, {"prompt": "x", "logprobs": 5, "top_k": 1, "max_tokens": 2})
        chat = await served.post(
            CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 5, "max_tokens": 2, "reasoning_effort": "none"}
        )
        for response in (text, chat):
            assert response.status_code == 200
            body = json.loads(response.text, parse_constant=pytest.fail)
            numbers = [value for value in _numbers(body["choices"][0]["logprobs"]) if isinstance(value, float)]
            assert min(numbers) == -9999.0
            assert all(map(math.isfinite, numbers))


def _numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [value]


async def test_b17_prompt_logprobs_are_those_before_any_filter():
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=VOCAB) for _ in range(64)]
    script = Script()
    script.__class__ = type("ByLength", (Script,), {"__call__": lambda _self, context, _sampling: rows[len(context)]})
    async with serving(script=script) as served:
        prompt = [A, B, C, D]
        found = await served.complete(prompt=prompt, echo=True, logprobs=1, temperature=1, top_k=1, max_tokens=1)
        logprobs = found["choices"][0]["logprobs"]
        for place in range(1, 4):
            row = rows[place]
            expected = row[prompt[place]] - np.log(np.exp(row).sum())
            assert logprobs["token_logprobs"][place] == pytest.approx(expected)
        assert logprobs["tokens"][:4] == list("ABCD")
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


async def test_b18_a_seed_gives_the_same_text_whatever_runs_beside_it():
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=VOCAB) * 3 for _ in range(256)]
    script = Script()
    script.__class__ = type("ByLength", (Script,), {"__call__": lambda _self, context, _sampling: rows[len(context)]})
    async with serving(script=script, pages=(16, 16), rows=4) as served:
        wanted = {"prompt": [A, B], "seed": 42, "temperature": 0.8, "max_tokens": 30}

        async def text(**body):
            return (await served.complete(**{**wanted, **body}))["choices"][0]["text"]

        alone = await text()
        neighbours = [{"prompt": [C] * place, "max_tokens": 40} for place in (1, 9, 20)]
        for extra in ({}, {"seed": 42}, {"temperature": 0}):
            beside = [asyncio.ensure_future(served.complete(**each, **extra)) for each in neighbours]
            assert await text() == alone
            await asyncio.gather(*beside)
        assert await text(seed=43) != alone
        both = await served.complete(**wanted, n=2)
        assert both["choices"][0]["text"] == alone, "the first of several choices has the seed itself"
        assert both["choices"][1]["text"] != alone
        assert served.engine.stats().preemptions > 0, "the pool is small enough to preempt"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"n": 1_000_000}, "n"),
        (TEXT, {"logprobs": 100_000}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
        (TEXT, {"stop": ["x"] * 10_000}, "stop"),
        (TEXT, {"stop": ["x" * 10_000]}, "stop"),
        (TEXT, {"stop_token_ids": [1] * 10_000}, "stop_token_ids"),
        (TEXT, {"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
        (CHAT, {"messages": USER * 10_000}, "messages"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": f"f{place}"}} for place in range(600)]}, "tools"),
        (TEXT, {"prompt": ["x"] * 65}, "prompt"),
        (TEXT, {"prompt": [[1]] * 65}, "prompt"),
    ],
)
async def test_b22_absurd_sizes_are_refused_with_the_limit(path, body, param):
    async with serving(answered("ok")) as served:
        base = {"messages": USER} if path == CHAT else {"prompt": "x"}
        async with asyncio.timeout(5):
            error = await served.refusal(path, {**base, **body})
        assert error["param"] == param
        assert "limit is" in error["message"]


async def test_b22_max_tokens_beyond_the_window_ends_at_the_window():
    async with serving(ids("x") * 1200) as served:
        assert (await served.complete(max_tokens=2**31))["choices"][0]["finish_reason"] == "length"


async def test_b22_a_large_body_is_413_however_it_is_sent():
    async def chunks():
        for _ in range(60):
            yield b" " * 100_000

    async with serving(answered("ok")) as served:
        for content in (b" " * 5_000_000, chunks()):
            response = await served.post(CHAT, content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
            assert "4194304" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"min_tokens": 7, "max_tokens": 6}, "min_tokens"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"best_of": 4}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "tail"}, "suffix"),
    ],
)
async def test_wrong_values_are_a_400_that_names_the_parameter(body, param):
    async with serving(answered("ok")) as served:
        for path, base in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
            assert (await served.refusal(path, {**base, **body}))["param"] == param


@pytest.mark.parametrize("top_k", [-1, 0, None, VOCAB + 1])
async def test_top_k_can_be_off_in_several_ways(top_k):
    async with serving([wanting(A, B)] * 9) as served:
        assert (await served.complete(top_k=top_k, max_tokens=2, temperature=0))["choices"][0]["text"] == "AA"


async def test_top_k_one_and_temperature_zero_are_greedy():
    tied = np.zeros(VOCAB)
    tied[[A, B]] = 5.0
    async with serving([tied] * 90) as served:
        for options in ({"top_k": 1}, {"temperature": 0}, {"temperature": 0, "top_p": 0.9}, {"temperature": 1e-320}):
            assert (await served.complete(max_tokens=8, **options))["choices"][0]["text"] == "A" * 8


async def test_penalties_look_at_what_was_generated():
    async with serving([wanting(A, B, C, D)] * 9) as served:
        found = await served.complete(max_tokens=4, temperature=0, presence_penalty=2.0)
        assert found["choices"][0]["text"] == "ABAA", "a tie goes to the lower id"
        repeated = await served.complete(prompt=[A], max_tokens=2, temperature=0, repetition_penalty=1.5)
        assert repeated["choices"][0]["text"] == "BC"


async def test_prompts_may_be_texts_ids_or_lists_of_both():
    async with serving("ok") as served:
        for prompt, count in (("AB", 1), (["AB", "CD"], 2), ([A, B], 1), ([[A, A], [B, C], [D, D]], 3)):
            found = await served.complete(prompt=prompt, n=2, max_tokens=4)
            assert [each["index"] for each in found["choices"]] == list(range(2 * count))
            assert {each["text"] for each in found["choices"]} == {"ok"}
        echoed = await served.complete(prompt=["AB", "CD"], echo=True, n=2, max_tokens=4)
        assert [each["text"] for each in echoed["choices"]] == ["ABok", "ABok", "CDok", "CDok"]
        for wrong in ([], [[]], "", [VOCAB], ["a", 5], [[5], "a"], [-1]):
            assert (await served.refusal(TEXT, {"prompt": wrong}))["param"].startswith("prompt")


async def test_special_tokens_are_left_out_unless_asked_for():
    async with serving("a<|END_TEXT|>b") as served:
        assert (await served.complete(max_tokens=9))["choices"][0]["text"] == "ab"
        kept = await served.complete(max_tokens=9, skip_special_tokens=False)
        assert kept["choices"][0]["text"] == "a<|END_TEXT|>b"


async def test_chat_logprobs_are_those_of_the_answer():
    reply = thought("hm") + answered("AB")
    async with serving(reply) as served:
        whole = await served.chat(logprobs=True, top_logprobs=2)
        tokens = whole["choices"][0]["logprobs"]["content"]
        assert [each["token"] for each in tokens] == ["A", "B"]
        assert [each["bytes"] for each in tokens] == [[65], [66]]
        assert [len(each["top_logprobs"]) for each in tokens] == [2, 2]
        assert (await served.chat())["choices"][0]["logprobs"] is None
        stream = await served.chat_stream(logprobs=True, top_logprobs=2)
        streamed = [
            each["choices"][0]["logprobs"]["content"] for each in stream.chunks if "logprobs" in each["choices"][0]
        ]
        assert [each["token"] for content in streamed for each in content] == ["A", "B"]


async def test_both_routes_take_both_names_of_max_tokens():
    async with serving(ids("x") * 90) as served:
        for name in ("max_tokens", "max_completion_tokens"):
            assert (await served.complete(**{name: 3}))["usage"]["completion_tokens"] == 3
            assert (await served.chat(**{name: 3}))["usage"]["completion_tokens"] == 3
        assert (await served.complete())["usage"]["completion_tokens"] == 16


async def test_cache_salt_separates_prefixes():
    async with serving("ok") as served:
        prompt = [A] * 40
        for salt, cached in (("", False), ("", True), ("tenant", False), ("tenant", True)):
            usage = (await served.complete(prompt=prompt, cache_salt=salt, max_tokens=1))["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is cached, salt
