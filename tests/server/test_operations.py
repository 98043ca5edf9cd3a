"""Cancelling, queueing, draining, failing, measuring: the server on a real socket."""

import asyncio
import json
import signal
import socket
from contextlib import asynccontextmanager, suppress

import httpx2 as httpx
import pytest
from support.process import Process
from support.serving import USER, Script, Stream, answered, error_of, ids, listening, serving, thought

from runtime.server.config import ServeConfig, Waits

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = thought("") + "<|START_TEXT|>" + "word " * 400


@asynccontextmanager
async def open_stream(served, **body):
    """An open stream whose first event has arrived."""
    body = {"messages": USER, "stream": True, **body}
    async with served.client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        yield lines


async def rest(lines):
    text = [line async for line in lines]
    return Stream.read("\n".join(text).lstrip("\n") + "\n" if text[-1] == "" else "\n".join(text) + "\n\n")


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)  # what is waited for happens on the engine's thread


async def test_a_token_does_not_wait_for_the_one_before_to_be_acknowledged():
    """Else a connection that is used again brings its tokens in heaps, of 40 ms where Linux is the client."""
    async with listening(ENDLESS, seconds=0.002) as served, open_stream(served):
        (connection,) = served.host.server_state.connections
        bound = connection.transport.get_extra_info("socket")
        assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(stream, path):
    async with listening(ENDLESS, seconds=0.005) as served:
        body = {"messages": USER} if path == CHAT else {"prompt": "x", "max_tokens": 400}
        async with httpx.AsyncClient(base_url=served.url) as other:
            posting = asyncio.ensure_future(other.post(path, json={**body, "stream": stream}))
            await until(lambda: served.engine.stats().running == 1 and served.engine.stats().generated_tokens >= 2)
            calls = served.script.calls
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        await served.idle(3.0)
        assert served.script.calls < calls + 60, "the row went on for long after its client had gone"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_while_queued_leaves_the_queue(stream):
    async with listening(ENDLESS, seconds=0.005, rows=1) as served, open_stream(served):
        async with httpx.AsyncClient(base_url=served.url) as other:
            posting = asyncio.ensure_future(other.post(CHAT, json={"messages": USER, "stream": stream}))
            await until(lambda: served.engine.stats().waiting == 1)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        await until(lambda: served.engine.stats().waiting == 0, 3.0)
        assert served.engine.stats().running == 1


async def test_b46_gauges_fall_after_every_socket_was_dropped():
    async with listening(ENDLESS, seconds=0.002, rows=16) as served:
        clients = [httpx.AsyncClient(base_url=served.url) for _ in range(32)]
        posts = [asyncio.ensure_future(each.post(CHAT, json={"messages": USER, "stream": True})) for each in clients]
        await until(lambda: (stats := served.engine.stats()).running == 16 and stats.waiting == 16)
        assert await served.metric("vllm:num_requests_running") == 16
        assert await served.metric("vllm:kv_cache_usage_perc") > 0
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        async with asyncio.timeout(2):
            while await served.metric("vllm:num_requests_running") or await served.metric("vllm:num_requests_waiting"):
                await asyncio.sleep(0.02)
        assert await served.metric("vllm:kv_cache_usage_perc") == 0
        assert await served.metric("vllm:request_success_total", finished_reason="abort") == 32
        await asyncio.gather(*(each.aclose() for each in clients))


async def test_a_full_queue_is_429_with_retry_after():
    async with listening(ENDLESS, seconds=0.005, rows=1, max_waiting=1) as served:
        async with open_stream(served):
            waiting = asyncio.ensure_future(served.client.post(CHAT, json={"messages": USER, "max_tokens": 1}))
            await until(lambda: served.engine.stats().waiting == 1)
            for stream in (False, True):
                response = await served.client.post(CHAT, json={"messages": USER, "stream": stream})
                assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
                assert int(response.headers["retry-after"]) >= 1
        assert (await waiting).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_waiting_too_long_is_504_and_running_too_long_ends_with_an_error(stream):
    waits = Waits(first_token_s=1.0, total_s=60)
    config = ServeConfig(waits=waits)
    async with listening(ENDLESS, seconds=0.01, rows=1, config=config) as served, open_stream(served):
        response = await served.client.post(CHAT, json={"messages": USER, "stream": stream})
        assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
    waits = Waits(first_token_s=60, total_s=0.3)
    async with listening(ENDLESS, seconds=0.005, config=ServeConfig(waits=waits)) as served:
        response = await served.client.post(CHAT, json={"messages": USER, "stream": stream})
        if stream:
            found = Stream.read(response.text)
            assert (found.errors()[0]["code"], found.is_done, bool(found.content())) == ("timeout", False, True)
        else:
            assert (response.status_code, error_of(response)["code"]) == (504, "timeout")


async def test_keep_alive_comments_while_queued():
    config = ServeConfig(waits=Waits(keep_alive_s=0.05))
    async with (
        listening(ENDLESS, seconds=0.005, rows=1, config=config) as served,
        open_stream(served),
        served.client.stream("POST", CHAT, json={"messages": USER, "stream": True}) as queued,
    ):
        lines = queued.aiter_lines()
        assert [await anext(lines), await anext(lines), await anext(lines)] == [": waiting", "", ": waiting"]
        assert served.engine.stats().waiting == 1


async def test_b47_draining_lets_streams_end_and_refuses_new_work():
    waits = Waits(drain_s=20)
    async with listening(
        thought("") + answered("word " * 60), seconds=0.004, config=ServeConfig(waits=waits)
    ) as served:
        streams = [open_stream(served, seed=seed) for seed in range(4)]
        lines = [await each.__aenter__() for each in streams]
        served.host.handle_exit(signal.SIGTERM, None)
        for path, status in (("/ready", 503), ("/health", 200)):
            assert (await served.client.get(path)).status_code == status
        refused = await served.client.post(CHAT, json={"messages": USER})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        for each in lines:
            found = await rest(each)
            assert (found.is_done, found.content()) == (True, "word " * 60)
        for each in streams:
            await each.__aexit__(None, None, None)


async def test_b47_streams_beyond_the_drain_time_end_with_an_error_event_and_queued_work_can_be_retried():
    waits = Waits(drain_s=0.2)
    async with (
        listening(ENDLESS, seconds=0.004, rows=2, config=ServeConfig(waits=waits)) as served,
        open_stream(served) as one,
        open_stream(served) as two,
    ):
        queued = asyncio.ensure_future(served.client.post(CHAT, json={"messages": USER, "stream": True}))
        await until(lambda: served.engine.stats().waiting == 1)
        served.host.handle_exit(signal.SIGTERM, None)
        for each in (one, two):
            found = await rest(each)
            assert (found.errors()[0]["code"], found.is_done) == ("unavailable", False)
        response = await queued
        assert (response.status_code, "retry-after" in response.headers) == (503, True)


async def test_b47_a_request_that_waits_learns_of_the_drain_at_once():
    waits = Waits(drain_s=600, keep_alive_s=600)
    async with (
        listening(ENDLESS, seconds=0.004, rows=2, config=ServeConfig(waits=waits)) as served,
        open_stream(served) as one,
        open_stream(served) as two,
    ):
        queued = [
            asyncio.ensure_future(served.client.post(CHAT, json={"messages": USER, "stream": stream, "n": n}))
            for stream, n in ((False, 1), (True, 1), (True, 2))
        ]
        await until(lambda: served.engine.stats().waiting == 4)
        served.host.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(3):
            for response in await asyncio.gather(*queued):
                assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
                assert int(response.headers["retry-after"]) >= 1
        assert served.engine.stats().running == 2
        for each in (one, two):
            assert (await rest(each)).is_done


async def test_b47_a_response_of_which_a_part_runs_is_finished_whole():
    async with listening(thought("") + answered("word " * 20), seconds=0.004, rows=2) as served:
        posting = asyncio.ensure_future(served.client.post(CHAT, json={"messages": USER, "n": 5}))
        await until(lambda: served.engine.stats().running == 2)
        served.host.handle_exit(signal.SIGTERM, None)
        response = await posting
        assert response.status_code == 200
        assert [each["message"]["content"] for each in response.json()["choices"]] == ["word " * 20] * 5


async def test_b47_a_second_signal_ends_at_once():
    config = ServeConfig(waits=Waits(drain_s=600))
    async with listening(ENDLESS, seconds=0.004, config=config) as served, open_stream(served) as lines:
        served.host.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0)
        served.host.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(3):
            with suppress(httpx.HTTPError):  # the connection just ends
                assert not (await rest(lines)).is_done


async def test_a_dead_engine_is_503_and_the_server_stops():
    script = Script(thought(""), ids("ab"), RuntimeError("the device is gone"))
    async with listening(script=script, dies=True, seconds=0.002) as served:
        found = Stream.read((await served.client.post(CHAT, json={"messages": USER, "stream": True})).text)
        assert (found.errors()[0]["code"], found.is_done) == ("unavailable", False)
        assert "device" not in json.dumps(found.chunks)
        try:
            for path in ("/ready", "/health"):
                assert (await served.client.get(path)).status_code == 503
        except httpx.HTTPError:
            pass  # it may have stopped already
        await until(lambda: served.host.should_exit)


async def test_abort_by_request_id():
    async with (
        listening(ENDLESS, seconds=0.004) as served,
        served.client.stream(
            "POST", CHAT, json={"messages": USER, "stream": True}, headers={"X-Request-Id": "mine"}
        ) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        aborted = await served.client.post("/abort", json={"request_id": "mine"})
        assert aborted.json() == {"aborted": ["chatcmpl-mine"]}
        found = await rest(lines)
        assert (found.finishes(), found.is_done) == (["abort"], True)


async def test_a_server_that_loads_is_alive_and_not_ready():
    async with serving(answered("ok")) as served:
        engine, served.service.engine = served.service.engine, None
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.get("/v1/models")).status_code == 200
        for path in ("/ready",):
            assert (await served.client.get(path)).status_code == 503
        response = await served.client.post(CHAT, json={"messages": USER})
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        served.service.engine = engine


async def test_metrics_have_the_names_that_routers_read():
    async with serving(thought("a") + answered("b")) as served:
        await served.chat()
        await served.chat()
        text = (await served.client.get("/metrics")).text
        for prefix in ("vllm", "counterpoint"):
            for name in (
                "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
                "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "prefix_cache_queries_total",
                "prefix_cache_hits_total", "request_success_total", "time_to_first_token_seconds_bucket",
                "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
                "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
                "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket",
                "request_generation_tokens_bucket", "cache_config_info",
            ):  # fmt: skip
                assert f"\n{prefix}:{name}{{" in text, name
        tokens = len(ids(thought("a") + answered("b"))) + 1
        assert await served.metric("vllm:generation_tokens_total") == 2 * tokens
        assert await served.metric("vllm:request_success_total", finished_reason="stop") == 2
        assert await served.metric("vllm:e2e_request_latency_seconds_count") == 2
        assert await served.metric("vllm:inter_token_latency_seconds_count") == 2 * (tokens - 1)
        assert await served.metric("vllm:prefix_cache_hits_total") > 0
        assert await served.metric("counterpoint:http_requests_total", route=CHAT, status="200") == 2


async def test_the_server_says_what_it_is():
    async with serving(answered("ok")) as served:
        version = (await served.client.get("/version")).json()["version"]
        info = (await served.client.get("/server_info")).json()
        assert (info["version"], info["models"], info["rows"], info["is_ready"]) == (
            version,
            ["demo", "alias"],
            8,
            True,
        )
        assert info["limits"] == served.service.config.limits.model_dump()


async def test_cached_tokens_are_reported():
    async with serving(answered("b")) as served:
        first, second = [(await served.chat())["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert (first, second > 0) == (0, True)


async def test_the_process_serves_the_demo_model_and_exits_0_at_once_on_a_second_sigterm(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    config = tmp_path / "serve.toml"
    config.write_text('api_key_file = "keys"\nmax_num_seqs = 2\n[waits]\ndrain_s = 60.0\n')
    running = Process(str(config), "--max-model-len", "512", COUNTERPOINT_API_KEY="from-env")
    try:
        url = running.url()
        assert url.startswith("http://127.0.0.1:"), "without a host, nobody beyond this machine is let in"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            await running.ready(client)
            assert (await client.get("/v1/models")).status_code == 401
            for key in ("from-file", "from-env"):
                client.headers["Authorization"] = f"Bearer {key}"
                models = (await client.get("/v1/models")).json()["data"]
                assert [(each["id"], each["max_model_len"]) for each in models] == [("demo", 512)]
            body = {"messages": USER, "max_tokens": 60, "reasoning_effort": "none", "seed": 1}
            schema = {
                "type": "object",
                "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 1}},
                "required": ["n"],
            }
            form = {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}},
            }
            reply = await client.post(CHAT, json={**body, "response_format": form})
            assert 1 <= json.loads(reply.json()["choices"][0]["message"]["content"])["n"] <= 9
            same = [
                (await client.post(TEXT, json={"prompt": "a", "seed": 5})).json()["choices"][0]["text"]
                for _ in range(2)
            ]
            assert same[0] == same[1]
            async with client.stream(
                "POST", TEXT, json={"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 500}
            ) as response:
                lines = response.aiter_lines()
                await anext(lines)
                running.process.send_signal(signal.SIGTERM)
                while (await client.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.01)
                running.process.send_signal(signal.SIGTERM)
                assert running.process.wait(20) == 0
        for line in running.process.stderr.read().splitlines():
            assert "from-" not in line
            json.loads(line)
    finally:
        running.end()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-folder"], "no such folder"),
        (["no-such-file.toml"], "no such file"),
        (["--parser", "other"], "`parser` is 'other'"),
        (["--max-model-len", "100000"], "the model's window is 8192"),
        (["--api-key-file", "absent"], "cannot be read"),
        (["--api-key", ""], "an API key is empty"),
        (["--block-size", "7"], "multiple of 8"),
        (["--num-gpu-blocks", "1"], "lower `max_model_len` to 64"),
        (["--host", "no-such-host.invalid"], "choose another --host"),
        (["--host", "192.0.2.1"], "choose another --host"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from megakernel.config import ConfigError
    from runtime.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runtime.server.run.start_logging", lambda: None)
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_port_in_use_is_told(monkeypatch):
    import socket

    from typer.testing import CliRunner

    from runtime.cli import app

    monkeypatch.setattr("runtime.server.run.start_logging", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])])
        assert "choose another --port" in str(result.exception)


BUSY = """
import torch
from runtime.engine.cpu_backend import CpuBackend
from runtime.server import run
block, decode = torch.empty(10**7), CpuBackend.decode
def loads_for_ever(folder, service):
    while True:
        block.normal_()
def decodes_slowly(*arguments):
    for _ in range(100):
        block.normal_()
    return decode(*arguments)
"""


async def test_a_signal_while_the_model_loads_ends_the_process_with_0():
    """The thread that loads is inside torch; the interpreter's end would abort the process there."""
    running = Process(before=f"{BUSY}\nrun.load_engine = loads_for_ever")
    try:
        async with httpx.AsyncClient(base_url=running.url(), timeout=30) as client:
            assert (await client.get("/health")).status_code == 200
            running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert "terminate" not in running.process.stderr.read()
    finally:
        running.end()


async def test_a_second_signal_inside_a_step_ends_the_process_with_0_and_no_traceback():
    running = Process(before=f"{BUSY}\nCpuBackend.decode = decodes_slowly")
    try:
        async with httpx.AsyncClient(base_url=running.url(), timeout=30) as client:
            await running.ready(client)
            body = {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 500}
            async with client.stream("POST", TEXT, json=body) as response:
                await anext(response.aiter_lines())
                running.process.send_signal(signal.SIGTERM)
                while (await client.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.01)
                running.process.send_signal(signal.SIGTERM)
                assert running.process.wait(20) == 0
        said = running.process.stderr.read()
        assert "Traceback" not in said
        assert "terminate" not in said
    finally:
        running.end()


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", "a"), ("model_type", "llama"), ("layer_types", None), ("vocab_size", None)]
)
def test_a_model_that_can_t_be_served_is_refused_before_a_socket_is_opened(name, value, tmp_path):
    import json

    from runtime.demo import write_checkpoint

    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    running = Process(str(tmp_path))
    try:
        assert running.process.wait(60) == 2
        assert running.process.stdout.read() == ""
        (line,) = [each for each in running.process.stderr.read().splitlines() if not each.startswith("{")]
        assert line.startswith(f"error: {tmp_path}: ")
        assert f"`{name}`" in line
    finally:
        running.end()


@pytest.mark.parametrize("arguments", [["--max-tokens", "0"], ["--temperature", "-1", "--raw"], ["--seed", str(2**70)]])
def test_generate_refuses_what_a_server_would(arguments):
    from typer.testing import CliRunner

    from megakernel.config import ConfigError
    from runtime.cli import app

    result = CliRunner().invoke(app, ["generate", "hello", *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    assert arguments[0].strip("-").replace("-", "_") in str(result.exception)


def test_generate_gives_the_same_text_for_the_same_seed():
    from runtime.server.offline import generate

    config = ServeConfig(max_num_seqs=1, max_model_len=512)
    asked = {"max_tokens": 12, "temperature": None, "seed": 3}
    texts = ["".join(generate(config, "hello", asked, raw=raw)) for raw in (False, False, True)]
    assert texts[0] == texts[1] != texts[2]
