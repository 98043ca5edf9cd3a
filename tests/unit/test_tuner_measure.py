"""The rung on a card: who is measured, what becomes of whom, and that nothing a card does ends a search."""

import io
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest
from rich.console import Console
from support.measuring import COMMAND, FakeCard, record_of
from support.searching import BUCKET, FakeEvaluator, priced, problem, write_search

from megakernel.config import ConfigError, digest, load_json, load_toml, override, pretty_json
from megakernel.measurement import Fault
from megakernel.plan import Plan
from megakernel.tiling import Choices
from tuner import report
from tuner.finals import contenders, paired_percent
from tuner.journal import open_journal
from tuner.measure import Command, Replay, check_command, measurers
from tuner.outcome import FailedBuild, Hung, Illegal, MachineLost, Rung, Scored, Slower, Timed, Unrecorded, Wrong
from tuner.problem import HAND, RECORDED, REFERENCE, REFERENCE_ORDER, load_problem
from tuner.race import Standing
from tuner.search import plan_of, search
from tuner.study import Ended

NAMES = ("hand plan", "one", "two", "three")


@pytest.fixture
def card(tmp_path, monkeypatch):
    """Run a batch of four through a command that does as it is told; outcomes by name, and who was asked when."""
    folder = tmp_path / "search"
    folder.mkdir()
    (tmp_path / "command.py").write_text(COMMAND, encoding="utf-8")
    told = tmp_path / "told.json"
    monkeypatch.setenv("TOLD", str(told))

    def measure(does, seconds=60.0, **settings):
        told.write_text(json.dumps(does), encoding="utf-8")
        command = json.dumps([sys.executable, str(tmp_path / "command.py")])
        overrides = [f"ladder.measured.command={command}", "ladder.measured.rounds=3"]
        overrides += [f"ladder.measured.{key}={value}" for key, value in settings.items()]
        asked = load_problem(str(write_search(folder)), overrides)
        named = dict.fromkeys(NAMES, asked.baselines[0].choices)
        batch = Command(asked, asked.config.buckets[0], tmp_path).measure("first", named, seconds)
        log = tmp_path / "told.json.log"
        return dict(batch.outcomes), log.read_text(encoding="utf-8").split() if log.exists() else []

    return measure


def test_every_way_to_fail_has_its_type_and_ends_alone(card):
    faults = {
        "one": ["illegal", "too large"],
        "two": ["failed build", "spills"],
        "three": ["hung", "L3.up[17] never arrived"],
    }
    outcomes, _ = card(faults)
    assert outcomes == {
        "hand plan": Timed((5.0, 5.0, 5.0)),
        "one": Illegal(("too large",)),
        "two": FailedBuild("spills"),
        "three": Hung("L3.up[17] never arrived"),
    }
    assert card({"one": ["wrong", "logits differ"]})[0]["one"] == Wrong("logits differ")


def test_whoever_hangs_or_takes_the_process_along_is_blamed_and_the_others_are_measured(card):
    outcomes, asked = card({"one": "hang", "two": "crash"}, timeout_s=3)
    assert outcomes["one"] == Hung("no answer for 3 s; left no post-mortem")
    assert isinstance(outcomes["two"], Wrong)
    assert "illegal address" in outcomes["two"].reason
    assert outcomes["hand plan"] == outcomes["three"] == Timed((5.0, 5.0, 5.0))
    assert len("".join(asked).split(",")) < 4 * 3
    assert asked[-1].endswith("plan,three")


def test_a_machine_that_does_not_answer_is_tried_again_and_then_lost(card):
    outcomes, asked = card({"gone": True}, retries=2)
    assert all(isinstance(each, MachineLost) and "no card here" in each.reason for each in outcomes.values())
    assert sum(line.endswith("three") for line in asked) == 3


def test_device_time_that_is_spent_blames_nobody(card):
    outcomes, _ = card({"one": "hang"}, seconds=2.0)
    assert set(outcomes.values()) == {MachineLost("no device time left")}


def test_a_command_that_can_not_be_run_loses_the_machine_and_says_why(card, tmp_path):
    (tmp_path / "text").write_text("no program", encoding="utf-8")
    outcomes, _ = card({}, command=json.dumps([str(tmp_path / "text")]))
    assert {type(each) for each in outcomes.values()} == {MachineLost}
    assert "ended with 126" in outcomes["one"].reason
    assert "Permission denied" in outcomes["one"].reason


def test_a_command_does_not_outlive_a_search_that_is_killed(tmp_path):
    """What it started neither: it would hold the card, and disturb the times of the search that goes on."""
    write_search(tmp_path)
    alive = tmp_path / "alive"
    child = f"import os, time; open({str(alive)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}\\n'); time.sleep(300)"
    starter = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {child!r}])"
    command = json.dumps([sys.executable, "-c", starter])
    arguments = ["search", "search.toml", "--out", "plan.json", "--measure"]
    arguments += ["--set", f"ladder.measured.command={command}"]
    searching = subprocess.Popen(
        [sys.executable, "-c", "from tuner.cli import main; main()", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    while not alive.exists() or not alive.read_text(encoding="utf-8").endswith("\n"):
        assert searching.poll() is None, "it ended before it measured"
        sleep(0.02)
    searching.kill()
    searching.wait()
    processes = [Path("/proc") / pid for pid in alive.read_text(encoding="utf-8").split()]
    until = monotonic() + 10.0
    while any(each.exists() for each in processes) and monotonic() < until:
        sleep(0.02)
    assert not any(each.exists() for each in processes)


def test_a_command_that_is_not_there_is_refused_before_the_search():
    how = problem().config.ladder.measured.model_copy(update={"command": ("no-such-command",)})
    with pytest.raises(ConfigError, match="no-such-command is no command here"):
        check_command(how)


def found_with(card, **settings):
    asked = problem(ladder={"measured": {"top": 3, "confirmed": 2, "rounds": 3, "seconds": 100.0}}, **settings)
    (found,) = search(asked, lambda *_: None, lambda *_: FakeEvaluator(), measurer_for=lambda _: card)
    return asked, found


def best_three():
    card = FakeCard()
    found_with(card)
    return card.asked[0][1][3:]


def test_the_second_time_decides_and_the_best_race_beside_the_plans_that_always_do():
    first, second, third = best_three()
    card = FakeCard(
        first={first: Timed((4.0, 4.1, 4.2)), second: Timed((3.0, 3.1, 3.2)), third: Timed((6.0, 6.0, 6.0))},
        again={first: Timed((4.0, 4.0, 4.2)), second: Timed((5.0, 5.0, 5.0))},
    )
    asked, found = found_with(card)
    assert card.asked[0][0] == "first"
    assert {HAND, REFERENCE, first, second, third} <= set(card.asked[0][1])
    assert card.asked[1][0] == "confirmation"
    assert card.asked[1][1][:2] == (second, first)
    assert card.asked[1][1][2] in {each.name for each in asked.baselines}
    assert found.best.name == first
    outcomes = {each.standing.name: each.outcome for each in found.finals.finals}
    assert outcomes[second] == Slower((5.0, 5.0, 5.0), pytest.approx(25.0))
    entry = plan_of(asked, (found,), "tests").entries[0]
    assert entry.measured_ns == 4.0e6
    assert {each.name: each.measured_ns for each in entry.losers}[second] == 5.0e6


def test_of_candidates_that_the_simulator_can_not_tell_apart_one_is_measured():
    asked = problem()
    hand = asked.baselines[0].choices
    plans = [hand.model_copy(update={"cut": hand.cut.model_copy(update={"up": 100 + idx})}) for idx in range(4)]
    scores = [Scored(Rung.ALL_LAYERS, ns, ns, 1.0, 1.0) for ns in (1.0, 1.0, 2.0, 3.0)]
    standings = [Standing(f"c{idx}", *both) for idx, both in enumerate(zip(plans, scores, strict=True))]
    baseline = Standing(HAND, hand, Scored(Rung.ALL_LAYERS, 2.0, 2.0, 1.0, 1.0))
    how = asked.config.ladder.measured.model_copy(update={"top": 2})
    racing = contenders([*standings[:2], baseline, *standings[2:]], [baseline], how)
    assert [each.name for each in racing] == [HAND, "c0", "c2"], "a baseline races whatever it equals"


def test_a_wrong_candidate_can_not_win_however_fast_and_a_baseline_can():
    names = best_three()
    card = FakeCard(first={name: Wrong("logits differ") for name in names} | {REFERENCE: Timed((8.0, 8.0, 8.0))})
    _, found = found_with(card)
    assert found.best.name == REFERENCE


@pytest.mark.parametrize("stage", ["first", "again"])
def test_a_lost_machine_leaves_the_predictions_to_decide(stage):
    lost = {name: MachineLost("gone") for name in (*best_three(), *(each.name for each in problem().baselines))}
    card = FakeCard(**{stage: lost})
    asked, found = found_with(card)
    assert found.finals.winner is None
    assert "gone" in found.finals.why
    assert found.best == found.raced.standings[0]
    plan_of(asked, (found,), "tests")


def test_an_interrupt_while_a_card_measures_keeps_what_was_predicted():
    class Interrupted(FakeCard):
        def measure(self, *_):
            raise KeyboardInterrupt

    asked, found = found_with(Interrupted())
    assert found.raced.ended is Ended.INTERRUPTED
    assert found.best == found.raced.standings[0]
    plan_of(asked, (found,), "tests")


def test_without_time_for_a_confirmation_no_time_counts():
    _, found = found_with(FakeCard(took_s=60.0))
    assert found.finals.winner is None
    assert "leave no time for a confirmation" in found.finals.why


def test_what_was_measured_is_not_measured_again(tmp_path):
    asked = problem(ladder={"measured": {"top": 3}})
    plans = []
    for idx in range(2):
        card = FakeCard()
        with open_journal(str(tmp_path / "p.journal"), asked, fresh=False) as journal:
            results = search(asked, lambda *_: None, lambda *_: FakeEvaluator(), journal, lambda _, c=card: c)
        plans.append(plan_of(asked, results, "tests"))
        assert len(card.asked) == (2 if idx == 0 else 0)
    assert plans[0] == plans[1]


def test_ratios_are_taken_within_rounds():
    assert paired_percent((2.0, 4.0, 8.0), (1.0, 2.0, 4.0)) == pytest.approx(100.0)
    assert paired_percent((1.01, 2.02, 40.0), (1.0, 2.0, 4.0)) == pytest.approx(1.0)


def test_a_record_is_replayed_earlier_rounds_first():
    asked = problem()
    hand, reference, mixed = (each.choices for each in asked.baselines)
    record = record_of(
        asked,
        {"a": (1.0, 2.0, 3.0, 4.0), "b": (5.0, 6.0, 7.0, 8.0)},
        {"a": hand, "b": reference, "c": mixed},
        faults={"c": Fault(kind="hung", text="why")},
    )
    other = hand.model_copy(update={"cut": hand.cut.model_copy(update={"up": 7})})
    named = {"x": hand, "y": reference, "z": mixed, "new": other}
    first = Replay(record).measure("first", named, 1.0)
    assert first.outcomes == {"x": Timed((1.0, 2.0)), "y": Timed((5.0, 6.0)), "z": Hung("why"), "new": Unrecorded()}
    assert Replay(record).measure("confirmation", named, 1.0).outcomes["x"] == Timed((3.0, 4.0))


def test_a_record_of_another_model_chip_or_bucket_is_refused(tmp_path):
    asked = problem()
    record = record_of(asked, {}, {})
    path = tmp_path / "record.json"
    path.write_text(pretty_json(record.model_copy(update={"model_digest": digest("other")})), encoding="utf-8")
    with pytest.raises(ConfigError, match="measured another model"):
        measurers(asked, "", str(path), measure=False)
    for other in ({"num_sms": 7}, {"memory_bytes": record.card.memory_bytes * 4 // 7}):  # an H100's of an H200's
        card = record.card.model_copy(update=other)
        path.write_text(pretty_json(record.model_copy(update={"card": card})), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"measured on made up .* needed a record of that chip"):
            measurers(asked, "", str(path), measure=False)
    bucket = BUCKET.model_copy(update={"rows": 2})
    path.write_text(pretty_json(record.model_copy(update={"bucket": bucket})), encoding="utf-8")
    with pytest.raises(ConfigError, match="measured the bucket"):
        measurers(asked, "", str(path), measure=False)


def test_a_search_ends_early_once_it_is_near_the_bound():
    asked = problem(trials=200, within_percent=1e6)
    (found,) = search(asked, lambda *_: None, lambda *_: FakeEvaluator())
    assert len(found.raced.attempts) == 0
    near = min(priced(each.choices) for each in asked.baselines) / found.floor_ns
    asked = problem(trials=200, within_percent=100.0 * (near - 1.0) - 2.0)
    (found,) = search(asked, lambda *_: None, lambda *_: FakeEvaluator())
    assert 0 < len(found.raced.attempts) < 200
    assert found.best.score.expected_ns <= found.floor_ns * (1.0 + asked.config.budget.within_percent / 100.0)


def test_the_ladder_is_the_search_files():
    for ladder, rungs in (
        ({"bound": False}, {Rung.BOUND, Rung.FEW_LAYERS, Rung.ALL_LAYERS}),
        ({"screen": "all_layers"}, {Rung.BOUND, Rung.ALL_LAYERS}),
    ):
        evaluator = FakeEvaluator()
        (found,) = search(problem(ladder=ladder), lambda *_: None, lambda *_, e=evaluator: e)
        assert {rung for _, rung in evaluator.calls} == rungs
        assert found.best.score.expected_ns == min(priced(each) for each in evaluator.at(Rung.ALL_LAYERS))
    evaluator = FakeEvaluator()
    search(problem(ladder={"proofs": 0, "finalists": 2}), lambda *_: None, lambda *_: evaluator)
    assert len(evaluator.at(Rung.ALL_LAYERS)) <= 3 + 2


def test_p95_ranks_where_it_is_asked_to():
    class Spread(FakeEvaluator):
        def evaluate(self, choices, rung):
            outcome = super().evaluate(choices, rung)
            late = 2.0 if choices.ring.copy_bytes == 8192 else 1.0
            return replace(outcome, p95_ns=outcome.expected_ns * late)

    best = {}
    for rank_by in ("expected", "p95"):
        asked = problem(ladder={"rank_by": rank_by, "screen": "all_layers"}, trials=80)
        (found,) = search(asked, lambda *_: None, lambda *_: Spread())
        best[rank_by] = found.best.score
    assert best["p95"].p95_ns <= best["expected"].p95_ns
    assert best["p95"].p95_ns == best["p95"].expected_ns


def test_the_command_measures_through_files_that_stay(tmp_path, monkeypatch, capsys):
    from tuner.cli import main

    write_search(tmp_path)
    (tmp_path / "command.py").write_text(COMMAND, encoding="utf-8")
    (tmp_path / "told.json").write_text('{"hand plan": 1.0}', encoding="utf-8")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    monkeypatch.chdir(tmp_path)
    command = json.dumps([sys.executable, str(tmp_path / "command.py")])
    arguments = ["tuner", "search", "search.toml", "--out", "plan.json", "--measure"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--set", f"ladder.measured.command={command}"])
    with pytest.raises(SystemExit) as left:
        main()
    out = capsys.readouterr().out
    assert not left.value.code, out
    assert "on the card" in out
    assert "wins" in out
    plan = load_json(tmp_path / "plan.json", Plan)
    assert plan.entries[0].measured_ns == 1.0e6
    assert plan.provenance.measured_on.startswith("made up")
    assert (tmp_path / "plan.json.measured" / "1x1024" / "first.toml").is_file()


def recorded(times):
    """A problem that has a record: the hand plan and another, by how long they took."""
    asked = problem(ladder={"measured": {"top": 3}})
    hand = asked.baselines[0].choices
    other = hand.model_copy(update={"counters": hand.counters.model_copy(update={"words": 2})})
    choices = {"hand plan": hand, "odd one": other}
    return replace(asked, records=(record_of(asked, times, choices),)), other


def searched_with(asked, **more):
    found = search(asked, lambda *_: None, lambda *_: FakeEvaluator(), measurer_for=measurers(asked, "", None, **more))
    return found[0]


def test_a_prediction_does_not_win_over_what_a_record_has_timed_and_the_fastest_on_record_races():
    asked, other = recorded({"hand plan": (5.0,) * 4, "odd one": (4.0, 4.0, 4.1, 4.1)})
    found = searched_with(asked, measure=False)
    assert found.raced.standings[0].score.expected_ns < min(each.score.expected_ns for each in found.baselines)
    assert (found.best.name, found.best.choices) == (RECORDED, other)
    printed = Console(width=120, record=True, file=io.StringIO())
    printed.print(report.result(found))
    assert "3 predicted faster, which no card has timed: --request FILE, or --measure" in printed.export_text()
    entry = plan_of(asked, (found,), "tests").entries[0]
    assert entry.measured_ns == pytest.approx(4.1e6)
    assert entry.predicted_ns > min(each.predicted_ns for each in entry.losers), (
        "the faster predictions stay in the plan"
    )


def test_a_record_is_of_its_own_bucket_and_rounding_and_what_can_not_run_any_more_is_left_out():
    asked, other = recorded({"hand plan": (5.0,), "odd one": (4.0,)})
    older, _ = recorded({"hand plan": (1.0,), "odd one": (4.0,)})
    asked = replace(asked, records=(*asked.records, *older.records))
    assert asked.fastest_on_record(BUCKET) == other, "the latest is first"
    wider = BUCKET.model_copy(update={"rows": 2})
    rounding = other.rounding.model_copy(update={"chunk_tokens": 256})
    assert RECORDED in {each.name for each in asked.racing(BUCKET)}
    assert RECORDED not in {each.name for each in asked.racing(wider)}
    assert RECORDED not in {each.name for each in asked.racing(BUCKET, rounding)}
    assert RECORDED in {each.name for each in asked.racing(BUCKET, other.rounding)}
    too_long = other.ring.model_copy(update={"stages": 999})
    record = asked.records[0]
    broken = record.choices | {"odd one": other.model_copy(update={"ring": too_long})}
    asked = replace(asked, records=(record.model_copy(update={"choices": broken}),))
    assert RECORDED not in {each.name for each in asked.racing(BUCKET)}, "the hand plan is next and races anyway"


def test_several_buckets_share_the_rounding_of_the_fastest_on_record_so_that_it_stays_their_plan():
    wider = BUCKET.model_copy(update={"rows": 2})
    asked = problem(buckets=(BUCKET, wider), trials=8)
    hand = asked.baselines[0].choices
    other = hand.model_copy(update={"rounding": hand.rounding.model_copy(update={"chunk_tokens": 256})})
    for fastest in (hand, other):
        times = {"hand": (4.0 + (fastest == other),) * 2, "other": (5.0 - (fastest == other),) * 2}
        told = replace(asked, records=(record_of(asked, times, {"hand": hand, "other": other}),))
        decide = measurers(told, "", None, measure=False)
        results = search(told, lambda *_: None, lambda *_: FakeEvaluator(), measurer_for=decide)
        assert {each.best.choices.rounding for each in results} == {fastest.rounding}
        assert results[0].best.choices == fastest
        assert results[1].finals is None


def test_a_replay_of_another_record_asks_anew(tmp_path):
    path = str(tmp_path / "p.journal")
    for ms in (4.0, 3.0):
        asked, _ = recorded({"hand plan": (ms,) * 2, "odd one": (8.0,) * 2})
        with open_journal(path, asked, fresh=False) as journal:
            decide = measurers(asked, "", None, measure=False)
            (found,) = search(asked, lambda *_: None, lambda *_: FakeEvaluator(), journal, decide)
        assert found.finals.winner_ns == ms * 1e6


def test_a_search_writes_whom_a_card_should_be_asked_about(tmp_path, monkeypatch, capsys):
    from tuner.cli import main

    write_search(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["tuner", "search", "search.toml", "--out", "plan.json", "--request"]
    for target, code in (("plan.json", 2), ("contest.toml", 0)):
        monkeypatch.setattr(sys, "argv", [*arguments, target])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == code, capsys.readouterr()
    asked = tomllib.loads((tmp_path / "contest.toml").read_text(encoding="utf-8"))
    names = [each["name"] for each in asked["variants"]]
    assert names[:3] == [HAND, REFERENCE, REFERENCE_ORDER]
    assert len(names) > 3
    hand = load_toml(tmp_path / "hand.toml", Choices)
    plan = load_json(tmp_path / "plan.json", Plan)
    winner = next(each for each in asked["variants"] if override(hand, each["set"]) == plan.entries[0].choices)
    assert winner["name"] not in names[:3]
