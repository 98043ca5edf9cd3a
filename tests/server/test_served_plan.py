"""A plan beside a checkpoint: taken, bounding rows and context, shown; refused in one line when it can't be meant."""

import asyncio
import json
import signal
from pathlib import Path

import httpx2 as httpx
import pytest
from support.plans import north_plan, plan_of
from support.process import Process
from support.small import chip
from typer.testing import CliRunner

from megakernel.build import build_step
from megakernel.config import ConfigError, digest, load_json, pretty_json
from megakernel.families import read_model
from megakernel.plan import Plan, PlanEntry
from megakernel.tiling import Choices, Cut, Interleave, Ring, Rounding
from megakernel.workload import Bucket
from runtime.cli import app
from runtime.demo import write_checkpoint
from runtime.server.config import ServeConfig, load_config
from runtime.server.offline import generate
from runtime.server.plan import prove, under_plan

CHOICES = Choices(
    rounding=Rounding(chunk_tokens=16, page_tokens=16, slice_columns=32),
    cut=Cut(project=5, attend=4, merge=3, output=3, up=4, down=4, head=5, route=2),
    ring=Ring(copy_bytes=4096, stages=12, in_flight_cap_bytes=8192),
    interleave=Interleave(order=("project", "up", "attend", "merge", "down", "output")),
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def plan(demo):
    """The demo model's, with two buckets, 1 x 8192 and 3 x 512; the second measured."""
    model = read_model(demo)
    long, wide = (
        build_step(model, Bucket(rows=rows, max_context_tokens=most, nominal_context_tokens=256), CHOICES, chip())
        for rows, most in ((1, 8192), (3, 512))
    )
    second = PlanEntry(
        bucket=wide.bucket,
        choices=CHOICES,
        table_digest=wide.table.digest,
        predicted_ns=9000.0,
        measured_ns=8000.0,
    )
    made = plan_of(long, chip())
    return made.model_copy(update={"entries": (made.entries[0], second)})


@pytest.fixture
def path(plan, tmp_path):
    (tmp_path / "plan.json").write_text(pretty_json(plan), encoding="utf-8")
    return str(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("given", "rows", "tokens"),
    [
        ({}, 3, 512),
        ({"max_num_seqs": 2}, 2, 512),
        ({"max_model_len": 100}, 3, 100),
        ({"max_num_seqs": 1}, 1, 8192),
        ({"max_model_len": 600}, 1, 600),
        ({"max_num_seqs": 1, "max_model_len": 300}, 1, 300),
    ],
)
def test_buckets_bound_rows_and_context_and_what_is_set_smaller_wins(given, rows, tokens, demo, path, plan):
    config, found = under_plan(ServeConfig(plan=path, **given), demo)
    assert (config.max_num_seqs, config.max_model_len, found) == (rows, tokens, plan)


@pytest.mark.parametrize(
    "given", [{"max_num_seqs": 4}, {"max_model_len": 20000}, {"max_num_seqs": 2, "max_model_len": 513}]
)
def test_sizes_that_no_bucket_has_are_refused(given, demo, path):
    with pytest.raises(ConfigError, match=r"no bucket for \d rows of \d+ tokens; it has rows x tokens 1 x 8192, 3 x"):
        under_plan(ServeConfig(plan=path, **given), demo)


def test_without_a_plan_nothing_changes(demo):
    config = ServeConfig(max_model_len=100)
    assert under_plan(config, demo) == (config, None)


def test_a_plan_in_a_file_lies_beside_it(tmp_path):
    (tmp_path / "serve.toml").write_text('plan = "plan.json"\n')
    assert load_config(tmp_path / "serve.toml", {}).plan == str(tmp_path / "plan.json")
    assert load_config(tmp_path / "serve.toml", {"plan": "other.json"}).plan == "other.json"


def edited(path, **changes):
    made = load_json(path, Plan).model_copy(update=changes)
    Path(path).write_text(pretty_json(made), encoding="utf-8")


def stale(path):
    edited(path, code_digest="sha256:0")


def foreign(path):
    other = north_plan()
    edited(path, model=other.model, model_digest=other.model_digest)


def of_another_window(path):
    model = load_json(path, Plan).model.model_copy(update={"max_context_tokens": 4096})
    edited(path, model=model, model_digest=digest(model))


def of_another_table(path):
    entries = load_json(path, Plan).entries
    edited(path, entries=(entries[0], entries[1].model_copy(update={"table_digest": "sha256:0"})))


def illegal(path):
    entries = load_json(path, Plan).entries
    ring = entries[0].choices.ring.model_copy(update={"stages": 128})  # more than shared memory holds
    choices = entries[0].choices.model_copy(update={"ring": ring})
    edited(path, entries=(entries[0].model_copy(update={"choices": choices}), entries[1]))


def by_hand(path):
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    data["model"]["num_heads"] = 2
    Path(path).write_text(json.dumps(data), encoding="utf-8")


def no_json(path):
    Path(path).write_text("{", encoding="utf-8")


def absent(path):
    Path(path).unlink()


def no_plan(path):
    Path(path).write_text('{"entries": []}', encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (stale, r"run `tuner refresh .*plan\.json`"),
        (foreign, r"for another model than .*config\.json, which differs in hidden_size, .*needed: .*`tuner search`"),
        (of_another_window, r"which differs in max_context_tokens; needed"),
        (of_another_table, r"the plan says sha256:0; run `tuner refresh"),
        (illegal, r"plan\.json: .*can't run on"),
        (by_hand, "the file was edited"),
        (no_json, "not valid JSON"),
        (no_plan, "plan.json"),
        (absent, "no such file"),
    ],
)
def test_a_plan_that_cannot_be_meant_stops_the_start_with_exit_code_2(spoil, message, path, monkeypatch):
    spoil(path)
    monkeypatch.setattr("runtime.server.run.start_logging", lambda: None)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--plan", path])
    assert isinstance(result.exception, ConfigError), result.output
    assert path in str(result.exception)
    assert "Traceback" not in str(result.exception)
    with pytest.raises(ConfigError, match=message):
        raise result.exception


def test_a_table_that_is_not_safe_is_refused(plan, path, monkeypatch):
    asked = []

    def judge(_graph, table, **_most):
        asked.append(table.digest)
        return [] if len(asked) == 1 else ["race: two tasks"]

    monkeypatch.setattr("runtime.server.plan.verify", judge)
    with pytest.raises(ConfigError, match="bucket 3 x 512 is not safe to run: race"):
        prove(plan, path)
    assert asked == [entry.table_digest for entry in plan.entries]


def test_tokens_are_the_same_with_a_plan_and_without(path):
    asked = {"max_tokens": 24, "temperature": None, "seed": 3}
    with_plan, without = ("".join(generate(ServeConfig(plan=each), "hello", asked, raw=False)) for each in (path, None))
    assert with_plan == without != ""


@pytest.mark.anyio
async def test_the_process_serves_a_folder_under_its_plan_and_shows_it(demo, path, plan):
    running = Process(str(demo), "--plan", path, "--host", "0.0.0.0")
    try:
        async with httpx.AsyncClient(base_url=running.url(), timeout=30) as client:
            await running.ready(client)
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 512
            info = (await client.get("/server_info")).json()
            assert (info["rows"], info["max_model_len"]) == (3, 512)
            found = info["plan"]
            assert (found["path"], found["digest"], found["chip"]) == (path, digest(plan), plan.hardware.name)
            times = [(each["rows"], each["max_context_tokens"], each["predicted_ns"]) for each in found["buckets"]]
            assert times == [(1, 8192, None), (3, 512, 9000.0)]
            assert [each.get("measured_ns") for each in found["buckets"]] == [None, 8000.0]
            refused = await client.post("/v1/completions", json={"prompt": [5] * 512, "max_tokens": 1})
            assert refused.status_code == 400
            assert "maximum context length is 512" in refused.json()["error"]["message"]
            await what_no_row_is_free_for_waits(client)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert running.process.stderr is not None
        assert "clients beyond this machine need no key" in running.process.stderr.read()
    finally:
        running.end()


async def what_no_row_is_free_for_waits(client):
    """Five endless requests on three rows: three run, and the metrics tell of two that wait."""
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
    posts = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(5)]
    async with asyncio.timeout(20):
        counts = set()
        while ("3.0", "2.0") not in counts:
            lines = (await client.get("/metrics")).text.splitlines()
            found = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines}
            counts.add((found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]))
    assert all(float(running) <= 3 for running, _ in counts)
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)


def test_the_process_exits_2_for_a_stale_plan(path):
    stale(path)
    running = Process("--plan", path)
    try:
        assert running.process.wait(60) == 2
        assert running.process.stderr is not None
        assert running.process.stderr.read().splitlines()[-1].startswith("error: ")
    finally:
        running.end()
