"""A whole search against an evaluator with known answers: what it promises, and what it keeps when things go wrong."""

import json
import re
from dataclasses import replace

import pytest
from support import small
from support.searching import BUCKET, FakeEvaluator, priced, problem

from megakernel import limits
from megakernel.assets import asset
from megakernel.config import ConfigError, canonical_json
from megakernel.plan import lowering_digest
from megakernel.workload import Bucket
from tuner.outcome import Rung
from tuner.problem import HAND, REFERENCE, REFERENCE_ORDER, load_problem
from tuner.refresh import refresh
from tuner.search import plan_of, search
from tuner.study import Ended

LONGER = Bucket(rows=2, max_context_tokens=4096, nominal_context_tokens=4096)


def run(evaluator, **settings):
    asked = problem(**settings)
    return asked, search(asked, lambda *_: None, lambda *_: evaluator)


def test_the_result_is_better_than_the_baselines_where_better_choices_exist():
    _, (found,) = run(FakeEvaluator(), trials=120)
    assert [each.name for each in found.baselines] == [HAND, REFERENCE, REFERENCE_ORDER]
    assert found.best.name not in {HAND, REFERENCE, REFERENCE_ORDER}
    assert found.best.score.expected_ns == priced(found.best.choices)
    assert found.best.score.expected_ns < 0.98 * min(each.score.expected_ns for each in found.baselines)


@pytest.mark.parametrize("favourite", [HAND, REFERENCE, REFERENCE_ORDER])
def test_the_result_is_never_worse_than_a_baseline(favourite):
    """Every candidate is far slower than one baseline, and looks faster after few layers."""
    choices = {each.name: each.choices for each in problem().baselines}

    def price(each):
        return 1e6 if each == choices[favourite] else 1.5e6 + priced(each)

    _, (found,) = run(FakeEvaluator(price=price, few_layers_error=0.1))
    assert found.best.name == favourite
    assert found.best.choices == choices[favourite]


@pytest.mark.parametrize(("rows", "stages"), [(1, 24), (4, 22), (8, 18)])
def test_baselines_race_in_every_bucket_with_rings_that_fit(rows, stages):
    asked = load_problem("configs/search/north-mini-code-h200.toml", [f"buckets.0.rows={rows}"])
    (bucket,) = asked.config.buckets
    for given, racing in zip(asked.baselines, asked.racing(bucket), strict=True):
        assert racing.choices.ring.stages == stages
        assert limits.reasons(asked.model, bucket, racing.choices, asked.chip) == []
        ring = given.choices.ring.model_copy(update={"stages": stages})
        assert racing.choices == given.choices.model_copy(update={"ring": ring}), "nothing else changes"


def test_plans_that_a_search_names_beside_hand_and_reference_race_too(tmp_path):
    (tmp_path / "a-good-one.toml").write_text(asset("configs/choices/attention-first.toml").read_text(encoding="utf-8"))
    also = json.dumps([str(tmp_path / "a-good-one.toml")])
    asked = load_problem("configs/search/north-mini-code-h200.toml", [f"baselines.also={also}"])
    assert [each.name for each in asked.baselines] == [HAND, REFERENCE, REFERENCE_ORDER, "a good one"]
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_problem("configs/search/north-mini-code-h200.toml", ['baselines.also=["nowhere.toml"]'])


def test_a_candidate_that_only_looks_good_after_few_layers_does_not_win():
    def price(choices):
        return 3e6 if choices.rounding.chunk_tokens == 256 else 2e6

    class Flattering(FakeEvaluator):
        def evaluate(self, choices, rung):
            outcome = super().evaluate(choices, rung)
            if rung is Rung.FEW_LAYERS and choices.rounding.chunk_tokens == 256:
                return type(outcome)(rung, 1e6, 1e6, 1e6, 1e6)
            return outcome

    _, (found,) = run(Flattering(price=price))
    assert found.best.choices.rounding.chunk_tokens != 256
    assert 3e6 in {each.score.expected_ns for each in found.raced.standings}


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_seed_and_trials_give_the_same_plan(sampler):
    plans = []
    for seed in (3, 3, 4):
        asked, results = run(FakeEvaluator(), seed=seed, sampler=sampler)
        plans.append(canonical_json(plan_of(asked, results, "tests").model_copy(update={"provenance": None})))
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_the_number_of_processes_does_not_change_the_plan():
    plans = []
    for jobs in (1, 2):
        _, (found,) = run(FakeEvaluator(), jobs=jobs, trials=24)
        plans.append([(each.name, each.choices) for each in found.raced.standings])
    assert plans[0] == plans[1]


def test_nothing_is_scored_twice_at_a_rung():
    evaluator = FakeEvaluator()
    run(evaluator, trials=80)
    for rung in Rung:
        scored = evaluator.at(rung)
        assert len(scored) == len(set(scored))


def test_outcomes_that_are_no_score_are_counted_apart_and_never_win():
    evaluator = FakeEvaluator(
        illegal=lambda each: each.rounding.chunk_tokens == 256,
        refused=lambda each: each.ring.copy_bytes == 16384,
    )
    _, (found,) = run(evaluator, trials=120)
    counts = found.raced.counts
    assert counts["illegal"] > 0
    assert counts["refused by verify"] > 0
    assert sum(counts[each] for each in ("seen before", "illegal", "bound above the leader", "screened")) == 120
    assert found.best.choices.ring.copy_bytes != 16384
    assert all(each.rounding.chunk_tokens != 256 for each in evaluator.at(Rung.ALL_LAYERS))


def test_a_candidate_whose_bound_is_above_the_leader_goes_no_further():
    class Bounded(FakeEvaluator):
        def evaluate(self, choices, rung):
            outcome = super().evaluate(choices, rung)
            return type(outcome)(rung, 9e9, 9e9, 9e9, 1.0) if rung is Rung.BOUND else outcome

    evaluator = Bounded()
    _, (found,) = run(evaluator)
    assert len(evaluator.at(Rung.FEW_LAYERS)) == 3
    assert found.raced.counts["bound above the leader"] + found.raced.counts["seen before"] == 40
    assert len(found.raced.standings) == 3


def test_a_baseline_that_is_refused_ends_the_search():
    with pytest.raises(ConfigError, match=re.compile("hand plan can't race.*made wrong", re.DOTALL)):
        run(FakeEvaluator(refused=lambda each: each == problem().baselines[0].choices))


@pytest.mark.parametrize("calls", [8, 20, 60])
def test_an_interrupt_keeps_the_best_so_far(calls):
    evaluator = FakeEvaluator(interrupt_after=calls)
    asked, (found,) = run(evaluator, trials=100_000)
    assert found.raced.ended is Ended.INTERRUPTED
    known = {each: priced(each) for each in evaluator.at(Rung.ALL_LAYERS)[: len(found.raced.standings)]}
    assert found.best.score.expected_ns == min(known.values())
    plan = plan_of(asked, (found,), "tests")
    assert plan.build(plan.entries[0]).choices == found.best.choices


def test_an_interrupt_before_the_baselines_are_scored_leaves_nothing():
    with pytest.raises(KeyboardInterrupt):
        run(FakeEvaluator(interrupt_after=5))


def test_an_interrupt_in_a_later_bucket_keeps_the_earlier_ones():
    class Interrupted(FakeEvaluator):
        def evaluate(self, choices, rung):
            if rung is Rung.ALL_LAYERS:
                raise KeyboardInterrupt
            return super().evaluate(choices, rung)

    asked = problem(buckets=(BUCKET, LONGER))
    by_bucket = {BUCKET: FakeEvaluator(), LONGER: Interrupted()}
    results = search(asked, lambda *_: None, lambda _, bucket: by_bucket[bucket])
    assert [each.bucket for each in results] == [BUCKET]


def test_the_time_budget_ends_a_search():
    _, (found,) = run(FakeEvaluator(), trials=None, seconds=0.5)
    assert found.raced.elapsed_s < 5.0
    assert found.raced.ended is Ended.COMPLETE


def test_buckets_share_what_changes_rounding():
    def price(choices):
        return priced(choices) + 1e5 * (choices.rounding.chunk_tokens != 256)

    asked = problem(buckets=(BUCKET, LONGER), trials=60)
    results = search(asked, lambda *_: None, lambda *_: FakeEvaluator(price=price))
    plan = plan_of(asked, results, "tests")
    assert {entry.choices.rounding.chunk_tokens for entry in plan.entries} == {256}
    assert [entry.bucket for entry in plan.entries] == [BUCKET, LONGER]


def test_a_plan_says_where_it_comes_from_and_whom_it_beat():
    asked, results = run(FakeEvaluator(), trials=120)
    plan = plan_of(asked, results, "tuner search x")
    (entry,) = plan.entries
    assert {HAND, REFERENCE, REFERENCE_ORDER} <= {each.name for each in entry.losers}
    assert len(entry.losers) <= 7
    assert [each.predicted_ns for each in entry.losers] == sorted(each.predicted_ns for each in entry.losers)
    assert entry.predicted_ns <= entry.losers[0].predicted_ns
    assert (plan.provenance.command, plan.provenance.candidates) == ("tuner search x", 120)
    assert '"trials":120' in plan.provenance.search
    assert plan.build(entry).table.digest == entry.table_digest


@pytest.fixture
def stale():
    """A plan that other lowering code wrote: its digests are another table's."""
    asked, results = run(FakeEvaluator())
    plan = plan_of(asked, results, "tests")
    other = "sha256:" + "0" * 64
    entry = plan.entries[0].model_copy(update={"table_digest": other, "predicted_ns": 1.0})
    return plan.model_copy(update={"code_digest": other, "entries": (entry,)})


def test_refresh_makes_a_stale_plan_run_again_without_changing_a_choice(stale):
    with pytest.raises(ConfigError, match="tuner refresh"):
        stale.build(stale.entries[0])
    found = refresh(stale, lambda _: None, lambda *_: FakeEvaluator())
    (before,), (after,) = stale.entries, found.plan.entries
    assert found.plan.code_digest == lowering_digest()
    assert found.plan.build(after).choices == before.choices
    assert after.predicted_ns == priced(before.choices)
    assert [each.choices for each in after.losers] == [each.choices for each in before.losers]
    assert found.changes[0].faster_losers == ()


def test_refresh_says_which_losers_lead_now_and_which_are_gone(stale):
    hand = next(each for each in stale.entries[0].losers if each.name == HAND).choices
    reference = next(each for each in stale.entries[0].losers if each.name == REFERENCE).choices
    evaluator = FakeEvaluator(
        price=lambda each: 1e5 if each == hand else priced(each), illegal=lambda each: each == reference
    )
    (change,) = refresh(stale, lambda _: None, lambda *_: evaluator).changes
    assert [each.name for each in change.faster_losers] == [HAND]
    timed = replace(change, after=change.after.model_copy(update={"measured_ns": 1.0}))
    assert timed.faster_losers == (), "a card's word is no prediction's to doubt"
    assert change.dropped == (REFERENCE,)


def test_refresh_keeps_what_a_card_said_of_losers_that_are_what_they_were(stale):
    (entry,) = stale.entries
    timed = tuple(each.model_copy(update={"measured_ns": 7.0}) for each in entry.losers)
    plan = stale.model_copy(update={"entries": (entry.model_copy(update={"losers": timed}),)})
    hand = next(each for each in timed if each.name == HAND).choices
    evaluator = FakeEvaluator(price=lambda each: 2 * priced(each) if each == hand else priced(each))
    (after,) = refresh(plan, lambda _: None, lambda *_: evaluator).plan.entries
    assert len(after.losers) == len(timed)
    assert {each.name for each in after.losers if each.measured_ns is None} == {HAND}
    assert all(each.measured_ns in {None, 7.0} for each in after.losers)


@pytest.mark.parametrize("fault", ["illegal", "refused"])
def test_refresh_refuses_choices_that_can_not_run_any_more(stale, fault):
    with pytest.raises(ConfigError, match="search again:\n  made"):
        refresh(stale, lambda _: None, lambda *_: FakeEvaluator(**{fault: lambda _: True}))


def test_the_simulator_scores_a_refreshed_plan_as_the_search_did():
    asked = problem(trials=1)
    results = search(asked, lambda *_: None)
    plan = plan_of(asked, results, "tests")
    found = refresh(plan, lambda _: None).plan
    assert found == plan
    assert plan.hardware == small.chip()
