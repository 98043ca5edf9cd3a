"""The script that holds serving to its bars: figures are what a server of known speed gives, bars are judged."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from bench import serve_figures as script
from support.serving import listening, text_side

from megakernel.config import ConfigError
from runtime.bench.client import connected

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/bench/records/2026-11-30-decode-later.json"
STEP = 0.01
SIZES = script.Sizes(
    short=16, long=48, context=24, streams=(1, 3), stream_tokens=24, ttft_prompts=(2, 2), beside=3, beside_tokens=60,
    arrivals=(3, 2), arrival_rates=(20.0, 20.0), settle_s=0.1, closed_streams=2, closed_prompts=4, closed_tokens=8,
    shapes=(6, 2), shape_tokens=8, shape_rate=20.0,
)  # fmt: skip


def token(context, _sampling):
    return 20 + sum(context) % 60


async def figures(part, step_ms=None):
    async with (
        listening(script=token, seconds=STEP, prefill_tokens=(8, 512)) as served,
        connected() as http,
    ):
        bench = script.Bench(http, served.url, SIZES, step_ms or {})
        return await script.PARTS[part](bench), bench.records


async def test_streams_are_counted_while_all_of_them_run():
    found, records = await figures("streams", {1: 1e3 * STEP, 3: 1e3 * STEP})
    assert [each.name for each in found] == ["1 streams", "3 streams"]
    for count, each in zip((1, 3), found, strict=True):
        # every step sleeps: no more tokens can come, and a machine that does something else gives far fewer
        assert 0.1 * count / STEP < each.value <= 1.02 * count / STEP
        assert each.at_least == pytest.approx(0.92 * count / STEP)
        assert each.beside["kept"] == pytest.approx(each.value * STEP / count)
        assert 0 < each.beside["seconds"] < 24 * STEP * 10
    assert [each["total_input_tokens"] for each in records] == [12, 36]


async def test_first_tokens_are_of_prompts_nobody_has_seen():
    found, records = await figures("ttft")
    assert [each.name for each in found] == ["first token of 16, median", "first token of 48, median"]
    assert all(each.value >= 1e3 * STEP and each.holds is None for each in found)
    assert [each["cached_tokens"] for each in records] == [0, 0]


async def test_gaps_are_those_of_running_streams_while_prompts_arrive():
    found, records = await figures("itl", {8: 12.0})
    for each, length in zip(found, (16, 48), strict=True):
        assert each.name == f"gap while prompts of {length} arrive, p99"
        assert each.at_most == pytest.approx(1.1 * (12.0 + 25.0))
        assert each.beside["measured_step_ms"] == 12.0, "the smallest bucket that holds three rows has eight"
        assert each.beside["arrivals"] >= 1
        # a prefill sleeps between two steps
        assert each.value >= each.beside["median_ms"] >= 1e3 * STEP
        assert each.beside["max_ms"] >= 2e3 * STEP * 0.99
        assert 0 < each.beside["gaps"] < 3 * 60
    assert {each["label"] for each in records} == {f"beside-{n}{end}" for n in (16, 48) for end in ("", "-arrivals")}


async def test_the_closed_loop_counts_everything():
    (found,), (record,) = await figures("closed")
    assert found.value == record["output_throughput"] == pytest.approx(32 / record["duration"])
    assert found.value <= 2 / STEP
    assert found.holds is None


async def test_other_shapes_share_beginnings_and_differ_in_lengths():
    found, records = await figures("shapes")
    assert [each.name for each in found] == ["shared-prefix, output", "agents, output", "ragged, output"]
    assert all(each.value == record["output_throughput"] > 0 for each, record in zip(found, records, strict=True))
    shared, agents, ragged = records
    assert shared["total_output_tokens"] == 6 * 8
    assert shared["cached_tokens"] > 0
    assert agents["completed"] == 2 * 2
    assert ragged["total_output_tokens"] not in {0, 6 * 8}


@pytest.mark.parametrize(
    ("window", "message"), [(8, r"streams-1: .*HTTP 400"), (16, "streams-1: answers were cut short")]
)
async def test_a_server_that_does_not_do_what_was_asked_fails_the_part(window, message):
    async with listening(script=token, text=text_side(window=window)) as served, connected() as http:
        with pytest.raises(AssertionError, match=message):
            await script.streams(script.Bench(http, served.url, SIZES, {}))


def test_bars_hold_from_the_bar_on():
    def holds(value, **bar):
        return script.Figure("x", value, "ms", **bar).holds

    assert (holds(1.0), holds(1.0, at_least=1.0), holds(0.99, at_least=1.0)) == (None, True, False)
    assert (holds(1.0, at_most=1.0), holds(1.01, at_most=1.0)) == (True, False)


def test_measured_steps_are_those_of_the_record_by_rows(tmp_path):
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    times = {sample["name"]: statistics.median(sample["ms"]) for sample in record["samples"]}
    assert script.measured_steps([f"1={RECORD}"]) == {1: min(times.values())}
    name, ms = list(times.items())[-1]
    assert script.measured_steps([f"4={RECORD}:{name}"]) == {4: ms}
    bucket = {"rows": 8, "max_context_tokens": 8256, "nominal_context_tokens": 8192}
    (tmp_path / "own.json").write_text(json.dumps(record | {"bucket": bucket}), encoding="utf-8")
    assert script.measured_steps([f"1={RECORD}", f"{tmp_path}/own.json"]) == dict.fromkeys((1, 8), min(times.values()))
    with pytest.raises(ConfigError, match="does not say its bucket; needed: ROWS="):
        script.measured_steps([str(RECORD)])
    with pytest.raises(ConfigError, match="no variant is called 'x'; there are "):
        script.measured_steps([f"1={RECORD}:x"])


def command(*arguments, timeout=240):
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/bench/serve_figures.py"), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


def test_the_script_serves_measures_and_writes(tmp_path):
    done = command("--demo", "--parts", "closed", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "serve-closed.json").read_text(encoding="utf-8"))
    assert (record["failure"], [each["name"] for each in record["figures"]]) == (None, ["2 closed-loop streams"])
    assert record["runs"][0]["total_output_tokens"] == 4 * 12
    assert record["start_s"] > 0
    assert "2 closed-loop streams" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--parts", "streams,all"], 2, "no part is called all; there are streams, ttft, itl, closed"),
        (["--measured", "none.json"], 2, "none.json: no such file"),
        (["--demo", "--", "--no-such-flag"], 1, "No such option: --no-such-flag"),
    ],
)
def test_what_cannot_start_is_told(tmp_path, arguments, code, message):
    done = command("--out", tmp_path, *arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
