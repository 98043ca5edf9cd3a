"""Outputs held to a form: what is enforced, beside reasoning and tools, and what is refused."""

import asyncio
import json
import re

import jsonschema
import numpy as np
import pytest
from support.serving import (
    END,
    USER,
    VOCAB,
    Script,
    answered,
    call_text,
    ids,
    serving,
    text_side,
    thought,
    tool,
    wanting,
)

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 150, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "l": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "l"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


class Dice(Script):
    """A model that wants anything, another thing for every seed and place."""

    def __call__(self, context, sampling):
        return np.random.default_rng((sampling.seed, len(context))).normal(size=VOCAB) * 2


async def test_a_model_of_noise_writes_what_the_schema_says():
    async with serving(script=Dice()) as served:
        for seed in range(6):
            whole = await served.chat(
                response_format=schema_format(PERSON), seed=seed, max_tokens=250, reasoning_effort="none"
            )
            choice = whole["choices"][0]
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]+x"}, r"[a-c]{3}-[0-9]+x"),
        ({"choice": ["yes", "no", 'may"be\n']}, r'yes|no|may"be\n'),
        ({"grammar": 'start: "a"+ WORD\nWORD: /[xyz]{2}/'}, r"a+[xyz]{2}"),
        ({"grammar": 'root ::= "q" [0-9] ("," [0-9])? "."'}, r"q[0-9](,[0-9])?\."),
        ({"json": {"enum": [1, "two", None]}}, r'1|"two"|null'),
        ({"json": '{"type": "boolean"}'}, r"true|false"),
        ({"json_object": True}, r"\{[\s\S]*\}"),
    ],
)
async def test_other_forms_on_both_routes(form, pattern):
    async with serving(script=Dice()) as served:
        for seed in range(3):
            bias = {"logit_bias": {str(ids("}")[0]): 6, str(ids('"')[0]): 4, str(ids("x")[0]): 5}}
            body = {"structured_outputs": form, "seed": seed, "max_tokens": 300, **bias}
            text = (await served.complete(**body))["choices"][0]
            chat = (await served.chat(**body, reasoning_effort="none"))["choices"][0]
            for found, finish in (
                (text["text"], text["finish_reason"]),
                (chat["message"]["content"], chat["finish_reason"]),
            ):
                if finish == "stop":
                    assert re.fullmatch(pattern, found), found


async def test_b42_the_form_begins_after_thinking():
    reply = thought('I think {"a": 1} is wrong') + answered('{"name": "Al", "age": 3}')
    async with serving(reply) as served:
        body = {"response_format": schema_format(PERSON)}
        whole = (await served.chat(**body))["choices"][0]
        assert whole["message"]["reasoning"] == 'I think {"a": 1} is wrong'
        assert json.loads(whole["message"]["content"]) == {"name": "Al", "age": 3}
        stream = await served.chat_stream(**body)
        assert (stream.content(), stream.finishes()) == (whole["message"]["content"], ["stop"])
        cut = (await served.chat(**body, max_tokens=len(ids(reply)) - 5))["choices"][0]
        assert cut["finish_reason"] == "length"
        with pytest.raises(json.JSONDecodeError):
            json.loads(cut["message"]["content"])


async def test_a_thinking_model_cannot_end_its_turn_before_the_answer():
    async with serving(script=Dice()) as served:
        whole = await served.chat(
            response_format=schema_format(PERSON), thinking_token_budget=20, max_tokens=300, seed=3
        )
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 20


async def test_a_form_and_tools_leave_both_ways_open():
    tools = [tool("f", x={"type": "integer"})]
    for reply, calls in ((answered('{"name": "A", "age": 1}'), 0), (call_text(("f", {"x": 1})), 1)):
        async with serving(thought("hm") + reply) as served:
            message = await served.message(response_format=schema_format(PERSON), tools=tools)
            assert len(message.get("tool_calls", [])) == calls
            assert (message["content"] is None) is bool(calls)


async def test_several_choices_have_a_form_each():
    async with serving(script=Dice()) as served:
        whole = await served.chat(
            response_format=schema_format(PERSON), n=3, seed=5, max_tokens=300, reasoning_effort="none"
        )
        texts = [each["message"]["content"] for each in whole["choices"]]
        assert len(set(texts)) == 3
        for text in texts:
            jsonschema.validate(json.loads(text), PERSON)


async def test_structural_tags_hold_what_follows_a_trigger():
    form = {
        "type": "structural_tag",
        "triggers": ["<fn="],
        "structures": [{"begin": "<fn=add>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}},
                        "required": ["x"], "additionalProperties": False}, "end": "</fn>"}],
    }  # fmt: skip
    text = 'I call <fn=add>{"x": 12}</fn> now'
    async with serving(answered(text)) as served:
        body = {"response_format": form, "reasoning_effort": "none", "temperature": 0}
        assert (await served.message(**body))["content"] == text
    async with serving(answered('I call <fn=add>{"y": 12}</fn> now')) as served:
        content = (await served.message(**body, max_tokens=60))["content"]
        assert '"y"' not in content
    async with serving(answered("x")) as served:
        for structure in ({"begin": "other", "schema": {}}, {"begin": "<fn=x>", "schema": nested(40)}):
            wrong = {**form, "structures": [structure]}
            assert (await served.refusal(CHAT, {"messages": USER, "response_format": wrong}))[
                "code"
            ] == "invalid_schema"


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(levels):
    defs = {"d0": {"type": "string"}}
    for level in range(1, levels):
        before = {"$ref": f"#/$defs/d{level - 1}"}
        defs[f"d{level}"] = {"allOf": [before, before]}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": defs}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema.json"},
        nested(40),
        {"type": "strin"},
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "no such format"},
        {"type": "string", "pattern": "("},
        {"type": "object", "description": "d" * 600_000},
        {"enum": []},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
async def test_b41_what_cannot_be_enforced_is_refused_at_once(schema):
    async with serving(answered("undisturbed " * 4), seconds=0.002) as served:
        other = asyncio.ensure_future(served.chat_stream())
        async with asyncio.timeout(3):
            for path, base in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
                error = await served.refusal(path, {**base, "response_format": schema_format(schema)})
                assert error["code"] == "invalid_schema"
        assert (await other).content() == "undisturbed " * 4


async def test_b41_legal_recursion_and_doubling_work():
    async with serving(script=Dice()) as served:
        for schema in (TREE, doubling(20)):
            body = {"response_format": schema_format(schema), "max_tokens": 400, "reasoning_effort": "none", "seed": 4}
            choice = (await served.chat(**body))["choices"][0]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)


async def test_b41_tool_parameters_are_bounded_too():
    async with serving(script=Dice(), text=text_side(window=4096)) as served:
        for parameters, code in (
            (nested(40), "invalid_schema"),
            ({"type": "array"}, "invalid_schema"),
            ({"$ref": "#"}, "invalid_schema"),
        ):
            tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
            error = await served.refusal(CHAT, {"messages": USER, "tools": tools, "tool_choice": "required"})
            assert (error["code"], error["param"]) == (code, "tools")
            await served.chat(tools=tools, max_tokens=1)


@pytest.mark.parametrize(
    "form",
    [{"regex": "("}, {"grammar": "start: missing"}, {"grammar": "???"}, {"json": "[1]"}, {"structural_tag": {"a": 1}}],
)
async def test_other_forms_that_are_wrong_are_refused(form):
    async with serving(answered("ok")) as served:
        for path, base in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
            error = await served.refusal(path, {**base, "structured_outputs": form})
            assert (error["code"], error["param"]) == ("invalid_schema", "structured_outputs")


async def test_a_form_takes_logprobs_and_bias_beside_it():
    async with serving([END] * 30) as served:
        found = await served.complete(structured_outputs={"choice": ["yes", "no"]}, logprobs=2, temperature=0)
        assert found["choices"][0]["text"] in ("yes", "no")
        assert all(np.isfinite(found["choices"][0]["logprobs"]["token_logprobs"]))
        biased = await served.complete(
            structured_outputs={"choice": ["yes", "no"]},
            temperature=0,
            logit_bias={str(ids("n")[0]): 90, str(ids("no")[0]): 90},
        )
        assert biased["choices"][0]["text"] == "no"


@pytest.mark.parametrize("text", ["<|END_TEXT|>", "a<|END_TEXT|>b", "<EOS_TOKEN>", "<|START_ACTION|>", "yes"])
@pytest.mark.parametrize("min_tokens", [0, 60])
async def test_marker_texts_in_a_form_are_spelled_out_and_a_form_that_must_end_does(text, min_tokens):
    async with serving([END] * 80) as served:
        for form, expected in (
            ({"choice": [text]}, text),
            ({"regex": re.escape(text)}, text),
            ({"json": {"const": text}}, json.dumps(text)),
            ({"grammar": f"start: {json.dumps(text)}"}, text),
        ):
            body = {"structured_outputs": form, "min_tokens": min_tokens, "max_tokens": 100, "temperature": 0}
            found = (await served.complete(**body))["choices"][0]
            assert (found["text"], found["finish_reason"]) == (expected, "stop")
            found = (await served.chat(**body, reasoning_effort="none"))["choices"][0]
            assert (found["message"]["content"], found["finish_reason"]) == (expected, "stop")


async def test_min_tokens_gives_way_to_an_empty_choice():
    async with serving([END] * 30) as served:
        found = await served.complete(structured_outputs={"choice": [""]}, min_tokens=10)
        assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("", "stop")


async def test_min_tokens_holds_as_long_as_a_form_can_go_on():
    async with serving([wanting(END, ids("a")[0])] * 30) as served:
        found = await served.complete(structured_outputs={"regex": "a*"}, min_tokens=10, max_tokens=20, temperature=0)
        assert found["choices"][0]["text"].startswith("a" * 10)
