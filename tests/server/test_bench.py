"""`runtime bench` against servers whose every token and pause is known."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from support.serving import Script, answered, call_text, listening, thought

from megakernel.assets import asset
from megakernel.config import ConfigError
from runtime.bench.client import Answer, Client, connected
from runtime.bench.drive import Punctuality
from runtime.bench.load import Load, load_config
from runtime.bench.record import record_of, throughput, together
from runtime.bench.run import run
from runtime.bench.sessions import CHAT, TEXT, Ask, Said, sessions, shared_body

pytestmark = pytest.mark.anyio

STEP = 0.01


def script(context, _sampling):
    """A token that follows from the whole context."""
    return 20 + sum(context) % 60


async def bench(url, **load):
    async with connected() as http:
        return await run(http, url, Load.model_validate(load), detailed=True)


async def test_a_run_counts_and_times_what_a_metronome_gives():
    async with listening(script=script, seconds=STEP, prefill_tokens=(8, 512)) as served:
        sizes = {"random_input_len": 24, "random_output_len": 12, "num_prompts": 6, "max_concurrency": 3}
        record, answers = await bench(served.url, **sizes, num_warmups=2)
    assert (record["completed"], record["failed"], record["miscounted"]) == (6, 0, 0)
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (6 * 24, 6 * 12)
    assert (record["finish_reasons"], record["tokens_per_chunk"]) == ({"length": 6}, 1.0)
    assert record["server_counted"]["generation_tokens"] == 6 * 12, "warm-ups are counted, or answers are not"
    # a step sleeps that long: nobody can be faster, and two rounds of twelve tokens take at least their steps
    assert record["p90_itl_ms"] >= 1e3 * STEP
    assert record["median_ttft_ms"] >= 1e3 * STEP
    assert record["duration"] >= 2 * 12 * STEP
    assert record["output_throughput"] == pytest.approx(72 / record["duration"])
    for answer in answers:
        assert answer.token_ids == [20 + each % 60 for each in _sums(answer)]


def _sums(answer):
    """What the script sees: the sum of the prompt, unknown here but for its rest, and of the tokens before."""
    total, found = answer.token_ids[0] - 20, []
    for token in answer.token_ids:
        found.append(total)
        total += token
    return found


async def test_shared_beginnings_are_found_in_the_cache_and_random_prompts_are_not():
    async with listening(script=script) as served:
        lengths = {"prefix_repetition_prefix_len": 64, "prefix_repetition_suffix_len": 16, "max_concurrency": 1}
        shape = {"dataset_name": "prefix_repetition", "prefix_repetition_num_prefixes": 2, "num_prompts": 6}
        record, answers = await bench(served.url, **shape, **lengths, prefix_repetition_output_len=2)
        assert [each.cached_tokens for each in answers] == [0, 0, 64, 64, 64, 64]
        assert record["cached_tokens"] == record["server_counted"]["prefix_cache_hits"] == 4 * 64
        record, _ = await bench(served.url, num_prompts=4, random_input_len=80, random_output_len=2)
        assert record["cached_tokens"] == 0


async def test_agents_repeat_what_was_said_and_bring_results_of_tools():
    said = thought("hm") + answered("see") + call_text(("read_file", {"path": "a"}))
    async with listening(said) as served:
        load = {"dataset_name": "multi_turn", "multi_turn_system_len": 64, "multi_turn_tool_len": 16, "num_prompts": 3}
        options = {"multi_turn_output_len": 100, "ignore_eos": False, "max_concurrency": 1, "multi_turn_input_len": 8}
        record, answers = await bench(served.url, **load, **options, multi_turn_num_turns=3)
        assert (record["completed"], record["finish_reasons"]) == (9, {"tool_calls": 9})
    inputs = [each.usage["prompt_tokens"] for each in answers]
    for turns in (inputs[:3], inputs[3:6], inputs[6:]):
        assert turns == sorted(set(turns)), "a turn does not go on from the one before"
    assert all(each.cached_tokens for each in answers[1:]), "a turn found nothing of the one before"
    assert answers[0].said.reasoning == "hm"


def test_a_conversation_keeps_the_servers_own_calls_and_writes_one_where_there_is_none():
    load = Load(dataset_name="multi_turn", num_prompts=1, multi_turn_num_turns=3, multi_turn_tool_s=0.5)
    (session,) = sessions(load, vocab_size=100, tokens_per_word=2.0)
    first = next(session)
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    second = session.send(Said("see", "hm", [call]))
    third = session.send(Said("nothing"))
    assert [first.pause_s, second.pause_s, third.pause_s] == [0.0, 0.5, 0.5]
    assert [each["role"] for each in first.body["messages"]] == ["system", "user"]
    assistant, result = second.body["messages"][2:]
    assert assistant == {"role": "assistant", "content": "see", "tool_calls": [call], "reasoning": "hm"}
    assert (result["role"], result["tool_call_id"]) == ("tool", "x")
    written = third.body["messages"][4]["tool_calls"][0]
    assert json.loads(written["function"]["arguments"]) == {"path": "notes/1.txt", "line": 1}
    with pytest.raises(StopIteration):
        session.send(Said())


def bodies(**load):
    made = sessions(Load.model_validate(load), vocab_size=50, tokens_per_word=1.0)
    return [next(each).body for each in made]


def test_prompts_follow_from_the_seed_and_the_runs_name():
    load = {"num_prompts": 20, "random_input_len": 100, "random_output_len": 10, "random_prefix_len": 5}
    one = bodies(**load, random_range_ratio=0.5)
    assert one == bodies(**load, random_range_ratio=0.5)
    assert one != bodies(**load, random_range_ratio=0.5, seed=1)
    assert one != bodies(**load, random_range_ratio=0.5, label="other")
    lengths = {len(each["prompt"]) - 5 for each in one}
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(lengths) > 10
    assert len({tuple(each["prompt"][:5]) for each in one}) == 1
    assert len({tuple(each["prompt"][5:15]) for each in one}) == 20
    assert {len(each["prompt"]) for each in bodies(**load)} == {105}
    assert all(0 <= token < 50 for each in one for token in each["prompt"])


async def test_an_open_loop_is_a_poisson_process_that_does_not_wait_for_answers():
    async with listening(script=script, seconds=0.02, rows=4) as served:
        load = {"num_prompts": 30, "request_rate": 60.0, "random_input_len": 4, "random_output_len": 4}
        record, answers = await bench(served.url, **load)
        again, others = await bench(served.url, **load)
    due, due_again = (sorted(each.due for each in found) for found in (answers, others))
    since = [each - due[0] for each in due]
    assert since == pytest.approx([each - due_again[0] for each in due_again]), "the seed does not fix arrivals"
    gaps = [after - before for before, after in pairwise(since)]
    # 29 gaps of mean 1/60 s: the mean is within four of its deviations, and gaps are no metronome's
    assert sum(gaps) / 29 == pytest.approx(1 / 60, rel=4 / 29**0.5)
    assert max(gaps) > 2 / 60 > min(gaps) * 4
    assert max(each.began - each.due for each in answers) < 0.3, "sending waited for something"
    assert record["duration"] > since[-1]
    assert "p99_client_queue_time_ms" not in record | again


async def test_a_closed_loop_keeps_its_concurrency():
    async with listening(script=script, seconds=0.005) as served:
        _, answers = await bench(served.url, num_prompts=12, max_concurrency=3, random_input_len=4, random_output_len=6)
    edges = sorted([(each.began, 1) for each in answers] + [(each.ended, -1) for each in answers])
    running, most = 0, 0
    for _, step in edges:
        running += step
        most = max(most, running)
    assert most == 3


def test_figures_of_known_times_are_as_by_hand():
    one = Answer(due=9.5, began=10.0, ended=10.5, finish="length", is_done=True, token_ids=[1] * 5)
    one.arrivals = [(10.1, 1), (10.2, 2), (10.4, 2)]
    one.usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    two = Answer(due=10.0, began=10.0, ended=12.0, finish="stop", is_done=True)  # a server that tells no ids, no usage
    two.arrivals = [(10.3, 1), (10.4, 1), (11.8, 1)]
    lost = Answer(due=10.0, began=10.0, ended=10.2, error="gone")
    load = Load(request_rate=2.0, max_concurrency=2)
    record = record_of(load, [lost, one, two], Punctuality([0.001, 0.003], 0.25), detailed=True)
    assert (record["completed"], record["failed"], record["errors"]) == (2, 1, {"gone": 1})
    assert record["duration"] == pytest.approx(2.0)
    assert (record["total_input_tokens"], record["total_output_tokens"], record["cached_tokens"]) == (7, 8, 4)
    assert (record["reported_output_tokens"], record["miscounted"]) == (5, 0)
    assert record["output_throughput"] == pytest.approx(4.0)
    assert record["tokens_per_chunk"] == pytest.approx(8 / 6)
    assert record["mean_ttft_ms"] == pytest.approx(200.0)
    assert record["mean_itl_ms"] == pytest.approx(450.0)  # 100, 200, 100, 1400
    assert record["median_itl_ms"] == pytest.approx(150.0)
    assert record["p99_itl_ms"] == pytest.approx(200 + 0.97 * 1200)
    assert record["mean_tpot_ms"] == pytest.approx((300 / 4 + 1500 / 2) / 2)
    assert record["median_stream_throughput"] == pytest.approx((4 / 0.3 + 2 / 1.5) / 2)
    assert record["mean_e2el_ms"] == pytest.approx(1250.0)
    assert record["mean_client_queue_time_ms"] == pytest.approx(250.0)
    assert (record["client"]["cpu_share"], record["client"]["mean_late_ms"]) == (0.25, pytest.approx(2.0))
    assert record["ttfts"] == [None, pytest.approx(0.1), pytest.approx(0.3)]
    assert together([one, two]) == (10.3, 10.4)
    assert throughput([one, two], 10.1, 10.4) == pytest.approx((4 + 2) / 0.3)


def test_a_run_without_a_whole_answer_has_a_record_too():
    record = record_of(Load(), [Answer(due=1.0, began=1.0, ended=1.5, error="x")], Punctuality())
    assert (record["output_throughput"], record["median_ttft_ms"], record["completed"]) == (0.0, None, 0)
    json.dumps(record, allow_nan=False)


@asynccontextmanager
async def saying(*pieces, status=b"200 OK", holds=False):
    """A server that answers whatever it is asked with these bytes, each by itself, and closes, or holds on."""
    writers = []

    async def answer(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"
        for piece in (head, *pieces):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if not holds:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)  # closing takes a turn of the loop


def event(**data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


TOKEN = event(choices=[{"index": 0, "text": "a", "token_ids": [7], "finish_reason": None}])
END = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


async def asked(url, *, timeout_s=5.0, leave_after_s=None):
    async with connected() as http:
        client = Client(http, url, timeout_s=timeout_s)
        return await client.ask(Ask(TEXT, {"prompt": [1]}), 0.0, leave_after_s)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((TOKEN, END), "the stream ended without [DONE]"),
        ((TOKEN, DONE), "the stream ended without a finish reason"),
        ((TOKEN, event(error={"message": "the engine has failed"})), "the engine has failed"),
        ((TOKEN, event(error="flat")), "flat"),
        ((TOKEN, b"data: {\n\n", END, DONE), "JSONDecodeError"),
    ],
)
async def test_a_stream_that_does_not_end_well_is_an_error(pieces, error):
    async with saying(*pieces) as url:
        answer = await asked(url)
    assert error in answer.error
    assert answer.token_ids == [7]


async def test_a_refusal_is_told_in_the_servers_words():
    async with saying(b'{"error": {"message": "no room"}}', status=b"429 Too Many Requests") as url:
        assert (await asked(url)).error == "HTTP 429: no room"
    async with saying(b"<html>", status=b"502 Bad Gateway") as url:
        assert (await asked(url)).error == "HTTP 502: <html>"


async def test_a_stream_that_hangs_ends_with_the_deadline_and_one_that_is_left_is_no_error():
    async with saying(TOKEN, holds=True) as url:
        stuck = await asked(url, timeout_s=0.3)
        left = await asked(url, leave_after_s=0.3)
    assert (stuck.error, stuck.is_cancelled, stuck.token_ids) == ("no end after 0.3 s", False, [7])
    assert (left.error, left.is_cancelled, left.token_ids) == ("", True, [7])


async def test_events_are_put_together_from_any_pieces():
    whole = b": waiting\n\n" + TOKEN + TOKEN + END + DONE
    async with saying(*(whole[at : at + 7] for at in range(0, len(whole), 7))) as url:
        answer = await asked(url)
    assert (answer.error, answer.token_ids, answer.finish, len(answer.arrivals)) == ("", [7, 7], "length", 2)
    assert answer.arrivals[0][0] < answer.arrivals[1][0] <= answer.ended


def chat(**delta):
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


async def test_a_chat_of_a_server_that_tells_no_ids_is_counted_by_chunks():
    pieces = chat(role="assistant", content=""), chat(reasoning_content="hm"), chat(content="a"), chat(content="b")
    calls = [
        chat(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]),
        chat(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
    ]
    async with saying(*pieces, *calls, END, DONE) as url:
        answer = await asked(url)
    assert (answer.error, answer.tokens, answer.said.content, answer.said.reasoning) == ("", 5, "ab", "hm")
    assert answer.said.calls == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_extra_fields_win_over_those_that_every_request_has():
    body = shared_body(Load(temperature=0.5, extra_body={"return_token_ids": False, "top_k": 3}), "m")
    assert (body["return_token_ids"], body["top_k"], body["temperature"], body["model"]) == (False, 3, 0.5, "m")


def test_a_files_runs_share_what_stands_at_the_top_and_flags_win(tmp_path):
    path = tmp_path / "runs.toml"
    path.write_text(
        'base_url = "http://x:1"\nresult_dir = "out"\nnum_prompts = 7\nrequest_rate = inf\n'
        '[[runs]]\nlabel = "a"\nnum_prompts = 8\n[[runs]]\ndataset_name = "multi_turn"\n',
        encoding="utf-8",
    )
    config = load_config(str(path), {"seed": 3, "num_warmups": None})
    assert [(run.name, run.num_prompts, run.seed) for run in config.runs] == [("a", 8, 3), ("multi_turn", 7, 3)]
    assert config.result_dir == str(tmp_path / "out")
    assert [run.request_rate for run in config.runs] == [None, None]
    config = load_config("http://x:1/v", {"result_dir": "r", "request_rate": 2.5})
    assert (config.result_dir, config.runs[0].request_rate) == ("r", 2.5)


def test_the_shipped_file_has_every_workload_closed_and_open():
    config = load_config(str(asset("configs/bench/workloads.toml")), {"num_prompts": 2})
    assert {run.dataset_name for run in config.runs} == {"random", "prefix_repetition", "multi_turn"}
    assert {run.num_prompts for run in config.runs} == {2}
    assert [run.name for run in config.runs if run.request_rate] == ["open"]
    assert any(run.random_range_ratio for run in config.runs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "base_url"),
        ('base_url = "ftp://x"', "base_url"),
        ('base_url = "http://x"\nnum_promts = 3', "num_prompts"),
        ('base_url = "http://x"\nruns = 3', r"needed: \[\[runs\]\]"),
        ('base_url = "http://x"\nruns = []', "there is no run"),
        ('base_url = "http://x"\n[[runs]]\n[[runs]]', "two runs are called random"),
        ('base_url = "http://x"\nrequest_rate = 0', "request_rate"),
        ('base_url = "http://x"\nrandom_range_ratio = 1.0', "random_range_ratio"),
        ('base_url = "http://x"\nlabel = "../up"', "label"),
    ],
)
def test_a_wrong_file_is_told_by_its_field(tmp_path, text, message):
    path = tmp_path / "runs.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(str(path), {})


async def command(*arguments, **environment):
    """`runtime bench` as a process: exit code, what it prints, what it complains."""
    code = "from runtime.cli import main; main()"
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "150"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "bench", *map(str, arguments), env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_writes_a_record_and_says_it_in_a_table(tmp_path):
    async with listening(script=script, keys=["sk-x"]) as served:
        flags = ["--num-prompts", 4, "--random-input-len", 8, "--random-output-len", 4, "--label", "mine"]
        flags += ["--result-dir", tmp_path / "out", "--request-rate", 100, "--extra-body", '{"top_k": 1}']
        code, out, err = await command(served.url, *flags, OPENAI_API_KEY="sk-x")
        assert (code, err) == (0, "")
        assert "TTFT p50, p99" in out
        record = json.loads((tmp_path / "out" / "mine.json").read_text(encoding="utf-8"))
        assert (record["completed"], record["total_output_tokens"], record["load"]["request_rate"]) == (4, 16, 100.0)
        assert "ttfts" not in record
        code, _, err = await command(served.url, *flags)
        assert (code, "OPENAI_API_KEY" in err, err.count("\n")) == (2, True, 1)
        code, out, _ = await command(served.url, "--num-prompts", 1, "--random-input-len", 5000, OPENAI_API_KEY="sk-x")
        assert code == 1
        assert "1 x HTTP 400: this model's maximum context length is" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: not ready after 0 s: ClientConnector"),
        (["nothing.toml"], "nothing.toml: no such file"),
        (["http://x", "--extra-body", "["], "--extra-body is '['"),
        (["http://x", "--extra-body", "[1]"], "--extra-body is '[1]'; needed: a JSON object"),
        (["http://x", "--dataset-name", "sharegpt"], "the command line"),
    ],
)
async def test_bad_input_of_the_command_is_told_and_is_exit_code_2(arguments, message):
    code, out, err = await command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


async def test_a_server_without_our_routes_will_do(tmp_path):
    """/v1/models and completions are all that a server needs."""
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    stream = TOKEN + END + DONE

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        body = {"/v1/models": models, TEXT: stream, "/health": b""}.get(path)
        status = "404 Not Found" if body is None else "200 OK"
        body = body or b""
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    code, _, err = await command(url, "--num-prompts", 2, "--result-dir", tmp_path)
    server.close()
    record = json.loads((tmp_path / "random.json").read_text(encoding="utf-8"))
    assert (code, err, record["completed"], record["server"], record["server_counted"]) == (0, "", 2, {}, {})


async def test_a_server_that_is_still_loading_is_waited_for():
    async with listening(Script(thought("") + answered("x")), script=script) as served:
        engine, served.service.engine = served.service.engine, None
        async with connected() as http:
            client = Client(http, served.url)
            with pytest.raises(ConfigError, match=r"not ready after 0\.2 s: /ready answers 503"):
                await client.ready(0.2)
            waiting = asyncio.ensure_future(client.ready(10.0))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            served.service.engine = engine
            await waiting
            assert (await client.get(CHAT))[0] == 405
