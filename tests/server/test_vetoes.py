"""Ids that alone may come, words that may not, and the ids themselves in a response."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.serving import END, USER, VOCAB, answered, ids, serving, thought, tokenizer, wanting

from runtime.constraints import Vetoes, mask_of, mask_without
from runtime.sampling import allowed_ids

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = -(-VOCAB // 32)


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), max_size=5),
    st.lists(st.integers(0, 4), max_size=20),
)
def test_a_word_is_banned_just_where_it_would_be_completed(words, said):
    vetoes = Vetoes(mask_without((), 40, 2), words)
    for place in range(len(said) + 1):
        allowed = set(np.flatnonzero(allowed_ids(vetoes.mask(), 64)))
        before = tuple(said[:place])
        assert allowed == {
            token for token in range(40) if not any((*before, token)[-len(word) :] == word for word in words)
        }
        if place < len(said):
            vetoes.accept(said[place])


def test_allowed_ids_are_the_only_ones():
    vetoes = Vetoes(mask_of([3, 31, 32, 63], 2))
    for token in (3, 63):
        assert list(np.flatnonzero(allowed_ids(vetoes.mask(), 64))) == [3, 31, 32, 63]
        vetoes.accept(token)


async def test_allowed_ids_hold_for_every_token_on_both_routes():
    way, no = ids("way")[0], ids("no")[0]
    async with serving([wanting(END, no, way)] * 9) as served:
        for stream in (False, True):
            body = {"allowed_token_ids": [way, no], "max_tokens": 4, "temperature": 0}
            if stream:
                assert (await served.complete_stream(**body)).text() == "nononono"
            else:
                assert (await served.complete(**body))["choices"][0]["text"] == "nononono"
        found = await served.chat(allowed_token_ids=[way], max_tokens=3, temperature=0, reasoning_effort="none")
        assert found["choices"][0]["message"]["content"] == "waywayway"
        # an end id counts like any other: min_tokens gives way where nothing else may come
        found = await served.complete(allowed_token_ids=[END], min_tokens=2, max_tokens=4)
        assert found["choices"][0]["finish_reason"] == "stop"


async def test_bad_words_do_not_come_whole():
    cat, other = ids(" cat"), ids(" dog")
    assert len(cat) > 1, "a word of several tokens is what is hard"
    script = [wanting(token, other[0]) for token in cat] + ids(" end")
    async with serving(script) as served:
        free = (await served.complete(temperature=0))["choices"][0]["text"]
        held = (await served.complete(temperature=0, bad_words=["cat"]))["choices"][0]["text"]
        assert ("cat" in free, "cat" in held) == (True, False)
        assert held.startswith(tokenizer().decode(cat[:-1]))
        chat = await served.message(
            temperature=0, bad_words=["cat", "x"], reasoning_effort="none", thinking_token_budget=3
        )
        assert "cat" not in chat["content"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"allowed_token_ids": [5], "bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [5], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
        ({"bad_words": ["x"], "structured_outputs": {"choice": ["x"]}}, "bad_words"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x"] * 200}, "bad_words"),
        ({"bad_words": ["x" * 2000]}, "bad_words"),
    ],
)
async def test_what_cannot_be_held_is_refused(body, param):
    async with serving(answered("ok")) as served:
        for path, base in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
            assert (await served.refusal(path, {**base, **body}))["param"] == param
        if "response_format" not in body and "allowed_token_ids" in body and body["allowed_token_ids"] == [5]:
            return
        error = await served.refusal(CHAT, {"messages": USER, "allowed_token_ids": [5], "thinking_token_budget": 1})
        assert error["param"] == "allowed_token_ids"


async def test_ids_come_with_the_response_when_asked_for():
    said = thought("hm") + answered("well")
    async with serving(said, max_steps=3) as served:
        render = await served.post(CHAT + "/render", {"messages": USER})
        generated = [*ids(said), END]
        whole = await served.chat(return_token_ids=True, n=2)
        assert whole["prompt_token_ids"] == render.json()["token_ids"]
        assert [each["token_ids"] for each in whole["choices"]] == [generated] * 2
        stream = await served.chat_stream(return_token_ids=True, n=2)
        assert [chunk["prompt_token_ids"] for chunk in stream.chunks if "prompt_token_ids" in chunk] == [
            whole["prompt_token_ids"]
        ]
        for index in range(2):
            choices = [each for chunk in stream.chunks for each in chunk["choices"] if each["index"] == index]
            assert [token for each in choices for token in each.get("token_ids", [])] == generated
        text = await served.complete(prompt=["x", "the"], return_token_ids=True)
        assert [each["prompt_token_ids"] for each in text["choices"]] == [ids("x"), ids("the")]
        assert [each["token_ids"] for each in text["choices"]] == [generated] * 2
        stream = await served.complete_stream(return_token_ids=True)
        choices = [chunk["choices"][0] for chunk in stream.chunks]
        assert [each["prompt_token_ids"] for each in choices if "prompt_token_ids" in each] == [ids("x")]
        assert [token for each in choices for token in each.get("token_ids", [])] == generated
        for silent in (await served.chat(), await served.complete()):
            assert "token_ids" not in str(silent)
