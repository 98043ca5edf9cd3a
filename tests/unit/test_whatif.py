"""What-if studies: each scheme is what it says, what can't run says why, and other families are refused by name."""

import json
import sys
from pathlib import Path

import pytest
from support import north
from support.browser import needs_chromium, show
from support.plans import plan_of
from support.predicting import short_step

from megakernel.assets import asset
from megakernel.build import build_step
from megakernel.config import ConfigError, pretty_json
from megakernel.families import SUPPORTED_FAMILIES, read_model
from megakernel.workload import Bucket, Workload
from simulator.baseline import kernel_step
from simulator.cli import main
from simulator.few_layers import truncated
from simulator.page import study_page
from simulator.predict import predict, predict_few_layers
from simulator.routing import mean_state
from simulator.study import load_study
from simulator.whatif import answers, fitted, to_json

NORTH = "configs/models/CohereLabs--North-Mini-Code-1.0.json"
H200, H100 = "configs/hardware/h200.toml", "configs/hardware/h100-sxm.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of five layers, a plan for it, and a study of both."""
    made = tmp_path_factory.mktemp("study")
    config = json.loads(asset(NORTH).read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 5, "layer_types": config["layer_types"][:5]}
    (made / "short.json").write_text(json.dumps(config), encoding="utf-8")
    (made / "plan.json").write_text(pretty_json(plan_of(short_step(layers=5), north.chip())), encoding="utf-8")
    (made / "study.toml").write_text(
        f'models = ["short.json"]\nchips = ["{asset(H200)}"]\nbatches = [1, 4]\ncontexts = [8192]\n'
        'schemes = ["plan", "hand", "kernels"]\nplans = ["plan.json"]\n'
        '[[routings]]\nkind = "uniform"\n[[routings]]\nkind = "zipf"\nexponent = 2.0\n',
        encoding="utf-8",
    )
    return made


@pytest.fixture(scope="module")
def found(folder):
    return answers(load_study(str(folder / "study.toml")))


def one(found, scheme, batch=1, routing="uniform"):
    (answer,) = (each for each in found if (each.scheme, each.batch, each.routing) == (scheme, batch, routing))
    return answer


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `simulator whatif` with arguments; returns exit code, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["simulator", "whatif", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return call


def test_the_schemes_are_the_predictions_of_their_choices(folder, found):
    model = read_model(folder / "short.json")
    bucket, workload = Bucket(rows=1, max_context_tokens=8192, nominal_context_tokens=8192), Workload(contexts=(8192,))
    hand = predict_few_layers(model, bucket, north.choices("hand"), north.chip(), workload)
    assert one(found, "hand").ms == hand.total_ns / 1e6
    plan = predict(short_step(layers=5), north.chip(), workload)
    assert one(found, "plan").ms == plan.total_ns / 1e6
    assert one(found, "plan").of == "plan.json"
    step = build_step(model, bucket, north.choices("hand"), north.chip())
    kernels = kernel_step(step, north.chip(), mean_state(model, workload))
    assert one(found, "kernels").ms == kernels.total_ns / 1e6
    assert one(found, "kernels").percent_of_roofline == pytest.approx(100 * hand.roofline_ns / kernels.total_ns)


def test_a_plan_has_no_answer_outside_its_buckets_and_the_hand_choices_are_fitted(found):
    assert one(found, "plan", batch=4).ms is None
    assert one(found, "plan", batch=4).reason == "no plan of the study has a bucket for this point"
    bucket = Bucket(rows=64, max_context_tokens=8192, nominal_context_tokens=8192)
    hand = north.choices("hand")
    less = fitted(hand, north.model(), bucket, north.chip())
    assert less.ring.stages < hand.ring.stages
    assert less.ring.in_flight_cap_bytes <= less.ring.bytes
    build_step(truncated(north.model(), 2), bucket, less, north.chip())  # legal, or refused


def test_routing_matters_for_several_rows_alone(found):
    for scheme in ("hand", "kernels"):
        assert one(found, scheme, routing="zipf 2").ms == one(found, scheme).ms
        assert one(found, scheme, batch=4, routing="zipf 2").ms < one(found, scheme, batch=4).ms


def test_kernels_pay_a_gap_each_and_their_bytes_at_least():
    step = short_step(layers=3)
    state = mean_state(step.model, Workload(contexts=(8192,)))
    chip = north.chip()
    none, one_us = (kernel_step(step, chip, state, gap_ns=gap) for gap in (0.0, 1000.0))
    assert none.kernels == len(step.graph.ops)
    assert one_us.total_ns - none.total_ns == pytest.approx(1000.0 * (none.kernels - 1))
    assert none.total_ns > none.stream_ns
    # Each kernel that streams fills an empty ring: it pays at least a copy's latency and its own start.
    streaming = sum(op.name in {"project", "attend", "output", "up", "down", "head"} for op in step.graph.ops)
    least_ns = chip.costs.copy_latency_ns + chip.cycles_ns(chip.work.finish)
    assert none.total_ns - none.stream_ns > streaming * least_ns
    more = kernel_step(short_step(layers=4), chip, mean_state(short_step(layers=4).model, Workload(contexts=(8192,))))
    fewer = kernel_step(step, chip, state)
    assert more.total_ns > fewer.total_ns


def test_draws_give_a_mean_and_a_p95_over_all_layers(folder):
    text = (folder / "study.toml").read_text(encoding="utf-8")
    assert "draws" not in text
    few = ["draws=3", "batches=[4]", "schemes=['hand','kernels']", "plans=[]", "routings=[{kind='uniform'}]"]
    sweep = load_study(str(folder / "study.toml"), few)
    hand, kernels = answers(sweep)
    for answer in (hand, kernels):
        assert answer.routings == 3
        assert answer.bound_ms < answer.ms <= answer.p95_ms
    assert kernels.percent_of_roofline * kernels.ms == pytest.approx(hand.percent_of_roofline * hand.ms)


def test_what_does_not_fit_is_an_answer_with_its_reason(folder):
    big = asset("configs/models/Qwen--Qwen3-235B-A22B.json")
    sweep = load_study(str(folder / "study.toml"), [f"models=['{big}']", "batches=[1]", "schemes=['hand']", "plans=[]"])
    for answer in answers(sweep):
        assert answer.ms is None
        assert "GB of weights" in answer.reason


def test_the_shipped_study_is_read_and_its_answers_are_printed_and_drawn(command, tmp_path):
    page = tmp_path / "study.html"
    study = "configs/studies/north-mini-code.toml"
    few = ["--set", "batches=[2]", "--set", "contexts=[1024]", "--set", "schemes=['kernels']", "--set", "plans=[]"]
    assert load_study(study).num_points == 40
    few += ["--set", "routings=[{kind='uniform'}]"]
    code, out, err = command(study, *few, "--report", page, "--json")
    assert (code, err) == (0, "")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "this chip's costs are not calibrated" in text
    rows = json.loads(out)["answers"]
    assert [row["chip"] for row in rows] == ["NVIDIA H200", "NVIDIA H100 SXM"]
    assert [row["is_calibrated"] for row in rows] == [True, False]
    assert rows[0]["ms"] < rows[1]["ms"]


def test_flags_price_one_point(command, folder):
    point = ("--model", folder / "short.json", "--batch", 2, "--context", 1024)
    code, out, _ = command(*point)
    assert code == 0
    for part in ("short on NVIDIA H200, routing uniform", "rows", "kernels", "% of roofline", "bound ms"):
        assert part in out
    code, out, _ = command(*point, "--json")
    rows = json.loads(out)["answers"]
    assert [(row["scheme"], row["batch"], row["context"]) for row in rows] == [("hand", 2, 1024), ("kernels", 2, 1024)]


UNREAD = {
    "openai--gpt-oss-20b": "gpt_oss",
    "google--gemma-4-26B-A4B": "gemma4",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_h",
    "deepseek-ai--DeepSeek-V2-Lite": "deepseek_v2",
    "mistralai--Mixtral-8x7B-v0.1": "mixtral",
    "zai-org--GLM-4.5-Air": "glm4_moe",
    "somebody--something": "never_heard_of",
}


@pytest.mark.parametrize("model", UNREAD)
def test_a_family_that_is_not_read_is_refused_by_name_before_anything_is_priced(command, tmp_path, model):
    family = UNREAD[model]
    if family in SUPPORTED_FAMILIES:
        pytest.skip(f"{family} is read now")
    path = tmp_path / f"{model}.json"
    path.write_text(json.dumps({"model_type": family}), encoding="utf-8")
    code, out, err = command("--model", path)
    assert (code, out) == (2, "")
    assert f"{model}.json: `model_type` is" in err
    assert family in err
    assert "supported" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a study file, or --model for a single point"),
        (("configs/studies/north-mini-code.toml", "--model", NORTH), "give a study file, or --model"),
        (("none.toml",), "none.toml: no such file"),
        (("configs/studies/north-mini-code.toml", "--set", "batches=[65]"), "batches"),
        (("configs/studies/north-mini-code.toml", "--set", "batches=[]"), "batches"),
        (("configs/studies/north-mini-code.toml", "--set", "batches=[1,1]"), "`batches` names a value twice"),
        (("configs/studies/north-mini-code.toml", "--set", "plans=[]"), "`plans` and the scheme"),
        (("configs/studies/north-mini-code.toml", "--set", "routings=[{kind='picks'}]"), "go together"),
        (("configs/studies/north-mini-code.toml", "--set", "modles=[]"), "modles"),
        (("--model", "configs/models/Qwen--Qwen3-235B-A22B.json"), "GB of weights"),
        (("--model", NORTH, "--context", 10**7), "the model ends at"),
        (("--model", NORTH, "--report", "none/page.html"), "none/page.html: cannot be written"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_absurd_gaps_and_constants_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="gap_ns"):
        load_study(str(folder / "study.toml"), ["gap_ns=1e300"])
    chip = Path(asset(H200)).read_text(encoding="utf-8").replace("handoff_ns = 580.0", "handoff_ns = 1e306")
    (tmp_path / "absurd.toml").write_text(chip, encoding="utf-8")
    sweep = load_study(str(folder / "study.toml"), [f"chips=['{tmp_path / 'absurd.toml'}']"])
    with pytest.raises(ConfigError, match="NVIDIA H200: no step can be priced with these constants"):
        answers(sweep)


@needs_chromium
def test_the_study_page_shows_every_answer(found, tmp_path):
    page = tmp_path / "study.html"
    page.write_text(study_page(to_json(found), "study <b>", None), encoding="utf-8")
    shown = show(page, tmp_path)
    assert shown.console == []
    assert (shown.root["data-ready"], shown.root["data-requests"]) == ("yes", "0")
    assert "study <b>" in shown.text
    rows = [row for row in shown.tables["answers"] if row[0] != "rows"]
    assert len(rows) == len(found)
    assert [row[3] for row in rows] == ["" if each.ms is None else f"{each.ms:.4f}" for each in found]
    assert [row[-1] for row in rows] == [each.stopped_by or each.reason for each in found]
