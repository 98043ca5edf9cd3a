"""Clients that mean harm: bodies and grammars that cost much, heads that never end, errors that nobody foresaw."""

import asyncio
import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.serving import USER, Script, answered, error_of, ids, listening, serving, thought, wanting

from runtime.server.bodies import count_containers
from runtime.server.config import Limits, ServeConfig
from runtime.server.run import TEXT_THREADS

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HEAD = '{"messages": [{"role": "user", "content": "x"}], '


def filled(before, item, after, size=3_900_000):
    return (before + ",".join([item] * ((size - len(before)) // (len(item) + 1))) + after).encode()


@pytest.mark.parametrize(
    ("path", "before", "item", "after"),
    [
        (TEXT, '{"prompt": [', "-1", "]}"),
        (TEXT, '{"prompt": [', "null", "]}"),
        (TEXT, '{"prompt": ["a",', "1", "]}"),
        (TEXT, '{"prompt": [', "[]", "]}"),
        (CHAT, '{"messages": [', "1", "]}"),
        (CHAT, '{"messages": [', "{}", "]}"),
        (CHAT, '{"messages": [', '{"role": "user"}', "]}"),
        (CHAT, '{"messages": [{"role": "user", "content": [', "{}", "]}]}"),
        (CHAT, '{"messages": [{"role": "user", "content": [', "1", "]}]}"),
        (CHAT, '{"messages": [{"role": "assistant", "tool_calls": [', "1", "]}]}"),
        (CHAT, HEAD + '"tools": [', "1", "]}"),
        (CHAT, HEAD + '"stop": [', "1", "]}"),
        (CHAT, HEAD + '"stop_token_ids": [', '""', "]}"),
        (CHAT, HEAD + '"structured_outputs": {"choice": [', "1", "]}}"),
        (CHAT, HEAD + '"structured_outputs": {"choice": [', '""', "]}}"),
        (CHAT, HEAD + '"chat_template_kwargs": {"x": [', "1", "]}}"),
        (CHAT, HEAD + '"ignored": [', "{}", "]}"),
        ("/detokenize", '{"tokens": [', '""', "]}"),
    ],
    ids=lambda value: value[-20:],
)
async def test_a_body_of_millions_of_items_is_refused_and_stops_nobody(path, before, item, after):
    async with serving(answered("ok")) as served:
        body, longest = filled(before, item, after), 0.0

        async def watch():
            nonlocal longest
            while True:
                begin = time.monotonic()
                await asyncio.sleep(0.001)
                longest = max(longest, time.monotonic() - begin)

        watching = asyncio.ensure_future(watch())
        response = await served.post(path, content=body)
        watching.cancel()
        assert response.status_code == 400, response.text
        assert len(error_of(response)["message"]) < 300
        assert longest < 2.0, "it took 4 to 40 s"


async def test_long_texts_at_once_take_few_threads():
    async with listening(answered("ok")) as served:
        body = {"prompt": "a b " * 200_000}
        found = await asyncio.gather(*(served.post("/tokenize", body) for _ in range(3 * TEXT_THREADS)))
        assert {response.json()["count"] for response in found} == {found[0].json()["count"]}
        assert sum(each.name.startswith("text") for each in threading.enumerate()) == TEXT_THREADS


async def test_many_biases_are_refused_before_they_are_read():
    async with serving(answered("ok")) as served:
        error = await served.refusal(TEXT, {"prompt": "x", "logit_bias": {str(each): "" for each in range(200_000)}})
        assert (error["param"], "at most 65536" in error["message"]) == ("logit_bias", True)


async def test_brackets_in_texts_are_no_objects():
    async with serving(answered("ok")) as served:
        code = 'if (x) { y["\\"] = [{}]; }\n' * 4000
        for path, name in ((CHAT, "messages"), (TEXT, "prompt")):
            value = [{"role": "user", "content": code}] if path == CHAT else code
            error = await served.refusal(path, {name: value})
            assert error["code"] == "context_length_exceeded"


JSON = st.recursive(
    st.none() | st.integers() | st.text('"\\{}[]ab\n\u00e9'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\{['), inner),
)


def containers(value):
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(JSON, st.booleans())
def test_containers_are_counted_as_a_parser_counts_them(value, ascii_only):
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert count_containers(raw, 0) == containers(value)
    assert count_containers(raw, 10**9) >= containers(value)


def test_counting_takes_time_by_the_length_alone():
    for raw in (b'"' + b'\\"' * 2_000_000, b'"' * 4_000_001 + b"{", b'"\\' * 2_000_000, b'"{' * 2_000_000):
        begin = time.perf_counter()
        count_containers(raw, 0)
        assert time.perf_counter() - begin < 20, "it would take hours if it looked at a byte twice"


RULES = "\n".join(f'r{number} ::= "a{number}" r{number + 1} | "b"' for number in range(17_000))


@pytest.mark.parametrize(
    ("form", "limit"),
    [
        ({"grammar": f'root ::= r0\n{RULES}\nr17000 ::= "z"'}, "bytes"),
        ({"grammar": "start: a0\n" + "\n".join(f'a{number}: "x"' for number in range(600))}, "rules"),
        ({"regex": "a" * 70_000}, "bytes"),
        ({"choice": ["word"] * 20_000}, "bytes"),
        ({"json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(9000)}}}, ""),
    ],
    ids=["llama.cpp", "rules", "regex", "choice", "schema"],
)
async def test_a_form_that_takes_long_to_build_is_refused_and_stops_nobody(form, limit):
    async with serving(thought("") + answered("undisturbed " * 4), seconds=0.002) as served:
        other = asyncio.ensure_future(served.chat_stream())
        async with asyncio.timeout(3):
            for path, base in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
                error = await served.refusal(path, {**base, "structured_outputs": form})
                assert error["param"] == "structured_outputs"
                assert (
                    ("limit is" in error["message"] and limit in error["message"])
                    if limit
                    else (error["code"] == "invalid_schema")
                )
        assert (await other).content() == "undisturbed " * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_that_leads_where_nothing_fits_is_the_clients_error(stream):
    dead_end = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}},
                "required": ["b"], "additionalProperties": False}}}  # fmt: skip
    for form in ({"json": {"anyOf": [dead_end, {"const": 1}]}}, {"grammar": "start: " + "/[ab]*/ " * 500}):
        async with serving([wanting(ids('{"b')[0], ids("a")[0])] * 200) as served:
            body = {"prompt": "x", "structured_outputs": form, "temperature": 0, "stream": stream, "max_tokens": 40}
            response = await served.post(TEXT, body)
            if response.status_code == 200:
                continue  # an engine that follows it to max_tokens is right too
            assert (response.status_code, error_of(response)["code"]) == (400, "invalid_schema")


async def test_a_constraint_that_gives_up_is_a_400_and_disturbs_nobody(monkeypatch):
    def gives_up(_stage):
        raise ValueError("secret words of the answer")

    async with serving(answered("ok " * 20), seconds=0.002) as served:
        alone = await served.complete()
        other = asyncio.ensure_future(served.complete())
        monkeypatch.setattr("runtime.constraints.grammar.GrammarStage.mask", gives_up)
        error = await served.refusal(TEXT, {"prompt": "x", "structured_outputs": {"regex": "a*"}})
        assert (error["code"], "secret" in error["message"]) == ("invalid_schema", False)
        assert (await other)["choices"] == alone["choices"]


async def test_empty_lines_of_a_grammar_cost_nothing():
    async with serving(answered("ok")) as served:
        async with asyncio.timeout(3):
            found = await served.complete(structured_outputs={"grammar": "root ::= \n" + "\n" * 30_000 + '"yes"'})
        assert found["choices"][0]["text"] == "yes"


async def test_grammars_wait_for_a_thread_no_longer_than_the_operator_says():
    from runtime.server.config import Waits

    async with serving(answered("ok"), config=ServeConfig(waits=Waits(form_s=0.05))) as served:
        blocked = [served.service.form_threads.submit(time.sleep, 0.5) for _ in range(2)]
        response = await served.post(TEXT, {"prompt": "x", "structured_outputs": {"regex": "a"}})
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        assert "retry-after" in response.headers
        for each in blocked:
            await asyncio.wrap_future(each)


HUGE = "1" + "0" * 400
LONG = "1" * 5000


@pytest.mark.parametrize(
    "field",
    [
        *(
            f'"{name}": {HUGE}'
            for name in ("top_k", "n", "max_tokens", "min_tokens", "seed", "priority", "temperature")
        ),
        f'"stop_token_ids": [{HUGE}]',
        f'"allowed_token_ids": [{HUGE}]',
        f'"thinking_token_budget": {HUGE}',
        f'"logprobs": true, "top_logprobs": {HUGE}',
        f'"logit_bias": {{"{LONG}": 1}}',
        f'"logit_bias": {{"1": {HUGE}}}',
        f'"top_k": {LONG}',
        f'"chat_template_kwargs": {{"x": {LONG}}}',
        '"temperature": 1e999',
    ],
    ids=lambda field: field[:24],
)
async def test_numbers_beyond_any_use_are_a_400(field):
    async with serving(answered("ok")) as served:
        response = await served.post(CHAT, content=(HEAD + field + "}").encode())
        assert response.status_code == 400, response.text
        assert len(error_of(response)["message"]) < 300


class PanicException(BaseException):  # what extension modules raise is called so, and is no Exception
    pass


@pytest.mark.parametrize("error", [RuntimeError("secret words"), RecursionError("secret"), PanicException("secret")])
async def test_an_error_that_nobody_foresaw_has_the_documented_shape(error, monkeypatch, caplog):
    def fails(_service, _name):
        raise error

    async with listening(answered("ok")) as served:
        with monkeypatch.context() as patch:
            patch.setattr("runtime.server.service.Service.check_model", fails)
            for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
                response = await served.client.post(path, json=body, headers={"X-Request-Id": "mine"})
                assert (response.status_code, error_of(response)["code"]) == (500, "server_error")
                assert response.headers["x-request-id"] == "mine"
                assert "secret" not in response.text
        assert await served.metric("counterpoint:http_requests_total", route=CHAT, status="500") == 1
        logged = [record for record in caplog.records if record.message == "a request failed"]
        assert [(record.request_id, record.error) for record in logged] == [("mine", type(error).__name__)] * 3
        assert all("check_model" in record.trace and "secret" not in record.trace for record in logged)
        assert (await served.client.post(CHAT, json={"messages": USER})).status_code == 200


async def test_a_panic_on_the_engines_thread_ends_it_and_hangs_nobody():
    script = Script(thought(""), ids("ab"))
    async with listening(script=script, dies=True, seconds=0.002) as served:

        def panics(_calls):
            raise PanicException

        script.on_call = panics
        response = await served.client.post(CHAT, json={"messages": USER})
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")


async def exchange(served, data, *, close=False):
    """Send bytes on a socket of their own; everything that comes back."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    if close:
        writer.write_eof()
    async with asyncio.timeout(5):
        found = await reader.read()
    writer.close()
    return found


def error_in(raw, status):
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), raw
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


async def test_heads_are_bounded_in_size_and_time(monkeypatch):
    monkeypatch.setattr("runtime.server.connection.HEAD_SECONDS", 0.2)
    async with listening(answered("ok")) as served:
        assert error_in(await exchange(served, b"NO HTTP\r\n\r\n"), 400) == "invalid_http"
        endless = b"GET /health HTTP/1.1\r\nX: " + b"a" * 400_000
        assert error_in(await exchange(served, endless), 431) == "headers_too_large"
        for slow in (
            b"",
            b"GET /hea",
            b"GET /health HTTP/1.1\r\nHost: x\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /",
        ):
            begin = time.monotonic()
            found = await exchange(served, slow)
            assert found.startswith(b"HTTP/1.1 200") if slow.endswith(b"GET /") else not found
            assert 0.1 < time.monotonic() - begin < 3
        # a body may take longer than a head
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": "x"}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        await asyncio.sleep(0.4)
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_body_that_does_not_come_is_a_timeout(monkeypatch):
    monkeypatch.setattr("runtime.server.bodies._BODY_SECONDS", 0.2)
    async with listening(answered("ok")) as served:
        raw = await exchange(served, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
                                     b"Connection: close\r\n\r\n{")  # fmt: skip
        assert error_in(raw, 504) == "timeout"


async def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error_of_ours(caplog):
    async with listening(answered("ok")) as served:
        half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{"
        assert await exchange(served, half, close=True) == b""
        async with asyncio.timeout(3):
            while await served.metric("counterpoint:http_requests_total", route=TEXT, status="499") != 1:
                await asyncio.sleep(0.01)  # the server has no event for this
        assert "failed" not in caplog.text


async def test_a_slash_at_the_end_changes_nothing():
    async with serving(answered("ok"), keys=["k"], headers={"Authorization": "Bearer k"}) as served:
        assert (await served.client.get("/v1/models/")).json() == (await served.client.get("/v1/models")).json()
        assert (await served.post(CHAT + "/", {"messages": USER})).status_code == 200
        assert (await served.client.get("/v1/models/demo/")).json()["id"] == "demo"
        assert (await served.client.get("/v1/models/", headers={"Authorization": ""})).status_code == 401


async def test_the_choices_of_all_prompts_count_in_the_queue():
    async with serving(answered("ok"), rows=2, max_waiting=30) as served:
        error = await served.refusal(TEXT, {"prompt": ["x"] * 64, "n": 16})
        assert "1024 answers" in error["message"]
        assert "32" in error["message"]
        assert len((await served.complete(prompt=["x"] * 4, n=8, max_tokens=1))["choices"]) == 32
        one, two = await asyncio.gather(*(served.post(TEXT, {"prompt": ["x"] * 20, "max_tokens": 2}) for _ in range(2)))
        assert sorted((one.status_code, two.status_code)) == [200, 429]


def test_limits_of_an_operator_stay_within_what_is_read():
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        Limits(logit_biases=10**6)
