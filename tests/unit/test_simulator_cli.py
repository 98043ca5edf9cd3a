"""`simulator run` as a user meets it."""

import json
import re
import sys

import pytest
from support import north
from support.plans import plan_of
from support.predicting import short_step

from megakernel.assets import asset
from megakernel.config import pretty_json
from megakernel.plan import Plan
from megakernel.tiling import Ring
from megakernel.workload import Bucket, Workload
from simulator.cli import main
from simulator.predict import predict

QWEN = "configs/models/Qwen--Qwen3-30B-A3B.json"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(short_step(layers=2), north.chip())


@pytest.fixture
def here(tmp_path, monkeypatch, plan):
    """A directory with `plan.json`, made the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(pretty_json(plan), encoding="utf-8")
    return tmp_path


@pytest.fixture
def command(here, monkeypatch, capsys):
    """Run `simulator run` with arguments beside `plan.json`; returns exit code, stdout and stderr."""
    assert (here / "plan.json").is_file()

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["simulator", "run", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call


def test_the_report_has_every_part(command):
    code, out, err = command("plan.json")
    assert (code, err) == (0, "")
    for part in (
        "plan.json on NVIDIA H200: 1 row of 8192 tokens", "roofline", "a second", "critical path", "busiest SM",
        "task kind", "attend", "hand-off", "up -> down", "exposed us", "critical path: ", "SMs that finished early",
        "mean slack us", "means over the SMs", "stopped by",
    ):  # fmt: skip
        assert part in out


def test_json_is_one_object_on_the_last_line_with_the_predictions_figures(command):
    code, out, _ = command("plan.json", "--context", 4096, "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    expected = predict(short_step(layers=2), north.chip(), Workload(contexts=(4096,)))
    assert found["ms"] == expected.total_ns / 1e6
    assert found["percent_of_roofline"] == expected.percent_of_roofline
    assert found["bounds"]["binding"] == expected.bounds.binding
    assert found["contexts"] == [4096]
    assert len(found["kinds"]) == len(expected.breakdown.kinds)
    assert found["hand_offs"][0]["exposed_ns"] == expected.breakdown.hand_offs[0].exposed_ns


def test_the_same_command_prints_the_same_bytes(command):
    assert command("plan.json", "--json") == command("plan.json", "--json")


def test_the_trace_opens_as_json_with_a_span_for_every_task_load_and_wait(here, command, plan):
    code, _, _ = command("plan.json", "--trace", "trace.json")
    assert code == 0
    trace = json.loads((here / "trace.json").read_text(encoding="utf-8"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    by_track = {category: sum(each["cat"] == category for each in slices) for category in ("load", "wait")}
    step = plan.build(plan.entries[0])
    assert len(slices) - by_track["load"] - by_track["wait"] == step.graph.num_tasks
    with_loads = sum(len(op.tasks) for op in step.graph.ops if op.name not in {"embed", "merge", "sample", "attend"})
    assert with_loads <= by_track["load"] <= step.graph.num_tasks
    assert {event["pid"] for event in slices} == set(range(132))
    assert trace["otherData"]["source"] == "simulated on NVIDIA H200"


def test_another_chip_of_the_same_limits_is_taken(command):
    code, out, _ = command("plan.json", "--chip", "configs/hardware/h100-sxm.toml", "--json")
    slower = json.loads(out)
    assert code == 0
    assert slower["chip"] != "NVIDIA H200"
    assert slower["ms"] > json.loads(command("plan.json", "--json")[1])["ms"]


def test_rows_alone_take_the_smallest_bucket_at_its_nominal_context(here, command):
    bucket = Bucket(rows=4, max_context_tokens=4096, nominal_context_tokens=1024)
    wide = plan_of(short_step(layers=2, bucket=bucket, ring=Ring(copy_bytes=8192, stages=12)), north.chip())
    one = plan_of(short_step(layers=2), north.chip())
    both = one.model_copy(update={"entries": (*one.entries, *wide.entries)})
    (here / "both.json").write_text(pretty_json(both), encoding="utf-8")
    code, out, _ = command("both.json", "--rows", 2)
    assert code == 0
    assert "2 rows of 1024 tokens" in out
    assert "of n = 5 routings" in out
    found = json.loads(command("both.json", "--rows", 4, "--draws", 3, "--json")[1])
    assert found["contexts"] == [1024] * 4
    assert len(found["draws_ms"]) == 3
    assert min(found["draws_ms"]) < found["ms"] < found["p95_ms"] == max(found["draws_ms"])
    assert (
        command("both.json", "--rows", 9)[2]
        == "error: no bucket for 9 rows; the plan has rows x tokens 1 x 16384, 4 x 4096\n"
    )
    (here / "picks.json").write_text(json.dumps({"counts": [[1] * 8 + [0] * 120]}), encoding="utf-8")
    alike = json.loads(command("both.json", "--rows", 4, "--picks", "picks.json", "--json")[1])
    assert len(set(alike["draws_ms"])) == 1  # all rows always hit the same eight experts
    assert alike["ms"] < found["ms"]
    assert alike["routing"] == "picks of picks.json"


def test_names_that_look_like_markup_are_printed_as_they_are(here, command):
    chip = asset("configs/hardware/h100-sxm.toml").read_text(encoding="utf-8")
    (here / "[bold]x.toml").write_text(chip.replace('NVIDIA H100 SXM"', '[red]H100[/red]"'), encoding="utf-8")
    (here / "[blink]p.json").write_text((here / "plan.json").read_text(encoding="utf-8"), encoding="utf-8")
    code, out, _ = command("[blink]p.json", "--chip", "[bold]x.toml")
    assert code == 0
    assert "[blink]p.json on [red]H100[/red]: 1 row" in out
    assert "[red]H100[/red]: this chip's costs are not calibrated: 19 of 19" in " ".join(out.split())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("handoff_ns", "1e300"), ("consume_bytes_per_ns", "1e-300"), ("queue_ramp_ns", "1e300"),
        ("work_stretch", "1.7e308"), ("datasheet_bytes_per_ns", "1e-300"), ("l2_bytes_per_ns", "1e-300"),
    ],
)  # fmt: skip
def test_absurd_constants_end_as_one_message(here, command, key, value):
    text = asset("configs/hardware/h200.toml").read_text(encoding="utf-8")
    changed = re.sub(rf"^{key} = [0-9.]+$", f"{key} = {value}", text, flags=re.MULTILINE)
    (here / "absurd.toml").write_text(changed, encoding="utf-8")
    code, out, err = command("plan.json", "--chip", "absurd.toml", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: NVIDIA H200: no step can be priced with these constants")
    assert len(err.splitlines()) == 1


def test_draws_of_one_row_are_all_alike_and_exact_mode_is_near(command):
    draws = json.loads(command("plan.json", "--draws", 3, "--zipf", 1.0, "--json")[1])["draws_ms"]
    assert len(draws) == 3
    assert len(set(draws)) == 1
    exact = json.loads(command("plan.json", "--exact", "--json")[1])["ms"]
    assert exact == pytest.approx(draws[0], rel=0.03)


def test_the_plans_own_model_is_accepted(here, command):
    (here / "whole.json").write_text(pretty_json(plan_of(north.step(), north.chip())), encoding="utf-8")
    code, _, err = command("whole.json", "--model", "configs/models/CohereLabs--North-Mini-Code-1.0.json", "--rows", 2)
    assert code == 2  # the model is right, the rows are not
    assert err == "error: no bucket for 2 rows; the plan has rows x tokens 1 x 16384\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.json",), "none.json: no such file"),
        (("plan.json", "--chip", "none.toml"), "none.toml: no such file"),
        (("plan.json", "--context", 20000), "no bucket for 1 rows of 20000 tokens; the plan has rows x tokens 1 x"),
        (("plan.json", "--rows", 3, "--context", 5, "--context", 6), "--rows is 3, but --context is given for 2 rows"),
        (("plan.json", "--report", "none/page.html"), "none/page.html: cannot be written"),
        (("plan.json", "--zipf", 1, "--picks", "picks.json"), "--zipf and --picks are two routing laws; give one"),
        (("plan.json", "--picks", "none.json"), "none.json: no such file"),
        (("plan.json", "--trace", "none/trace.json"), "none/trace.json: cannot be written"),
        (("none.json", "--trace", "none/trace.json"), "none/trace.json: cannot be written"),
        (("broken.json",), "broken.json: not valid JSON"),
        (("keys.json",), "keys.json: "),
        (("stale.json",), "the plan was lowered by other code than this program's; run `tuner refresh PLAN`"),
        (("plan.json", "--chip", "small.toml"), "the plan is for 132 SMs, NVIDIA H200 has 112"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_exit_code_2(here, command, plan, arguments, message):
    (here / "broken.json").write_text("{", encoding="utf-8")
    (here / "keys.json").write_text(pretty_json(plan).replace('"entries"', '"entrys"', 1), encoding="utf-8")
    (here / "stale.json").write_text(pretty_json(plan.model_copy(update={"code_digest": "sha256:0"})), encoding="utf-8")
    chip = asset("configs/hardware/h200.toml").read_text(encoding="utf-8")
    last = next(line for line in chip.splitlines() if line.strip().startswith("{ num_sms = 132"))
    chip = chip.replace(last, "").replace("\nnum_sms = 132", "\nnum_sms = 112")
    (here / "small.toml").write_text(chip, encoding="utf-8")
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert "Traceback" not in err


def test_a_plan_for_another_model_is_refused_with_both_digests(command, plan):
    code, _, err = command("plan.json", "--model", QWEN)
    assert code == 2
    assert plan.model_digest in err
    assert err.count("sha256:") == 2
