"""The rounding that buckets share: the best over all of them, and never one that loses to a plan that always races."""

import pytest
from support.searching import BUCKET, FakeEvaluator, priced, problem, write_search

from megakernel.config import ConfigError
from megakernel.tiling import Rounding
from megakernel.workload import Bucket
from tuner.outcome import Rung
from tuner.problem import load_problem
from tuner.rounding import common, settle
from tuner.search import search
from tuner.search_config import RoundingValues, SpaceValues
from tuner.study import Ended

LONGER = Bucket(rows=2, max_context_tokens=4096, nominal_context_tokens=4096)
ROUNDINGS = [Rounding(chunk_tokens=tokens) for tokens in (64, 128, 192, 256, 320)]


def test_the_best_mean_over_buckets_is_settled_not_the_best_of_one():
    times = {64: (1.0, 4.0), 128: (1.5, 2.0), 192: (1.9, 1.9), 256: (4.0, 1.0), 320: (9.0, 9.0)}
    heats = []

    def heat(rounding, bucket, trials):
        heats.append((rounding.chunk_tokens, bucket, trials))
        return times[rounding.chunk_tokens][bucket]

    assert settle(ROUNDINGS, 2, 8, heat).chunk_tokens == 128
    by_trials = {trials: {tokens for tokens, _, each in heats if each == trials} for _, _, trials in heats}
    assert [len(each) for each in by_trials.values()] == [5, 3, 2]
    assert list(by_trials) == [8, 16, 32]


def test_one_rounding_needs_no_heat():
    assert settle(ROUNDINGS[:1], 2, 8, lambda *_: pytest.fail("a heat of one")) == ROUNDINGS[0]


def test_only_what_every_bucket_allows_is_tried():
    assert common([ROUNDINGS, ROUNDINGS[3:0:-1]]) == ROUNDINGS[1:4]


def found_with(price_of, **settings):
    """A search of two buckets, each with its own price, and their evaluators."""
    asked = problem(buckets=(BUCKET, LONGER), trials=24, **settings)
    evaluators = {bucket: FakeEvaluator(price=price_of(bucket)) for bucket in (BUCKET, LONGER)}
    results = search(asked, lambda *_: None, lambda _, bucket: evaluators[bucket])
    return results, evaluators


def test_a_search_settles_what_suits_all_buckets_and_proves_nobody_in_heats():
    def price_of(bucket):
        worse = {BUCKET: {128: 0.0, 256: 1e5}, LONGER: {128: 9e5, 256: 0.0}}[bucket]
        return lambda choices: priced(choices) + worse[choices.rounding.chunk_tokens]

    results, evaluators = found_with(price_of)
    # 128 tokens are the baselines' own, and better in the first bucket alone: there a baseline would win.
    assert {each.best.choices.rounding.chunk_tokens for each in results} == {128}
    proven = {each.rounding.chunk_tokens for each in evaluators[LONGER].at(Rung.ALL_LAYERS)}
    assert proven == {128, 256}


def test_a_settled_rounding_stays_where_no_baseline_beats_it():
    results, evaluators = found_with(
        lambda _: lambda choices: priced(choices) + 5e5 * (choices.rounding.chunk_tokens == 128)
    )
    assert {each.best.choices.rounding.chunk_tokens for each in results} == {256}
    own = [each for each in evaluators[BUCKET].at(Rung.ALL_LAYERS) if each.rounding.chunk_tokens == 128]
    assert len(own) == 3, "the plans that always race are scored as they are, too"


@pytest.mark.parametrize(
    ("where", "tokens", "calls"),
    [(LONGER, 256, 5), (BUCKET, 128, 1), (LONGER, 128, 1)],
    ids=["in a later bucket", "while the plans that always race are compared", "when all is searched again for theirs"],
)
def test_an_interrupt_keeps_all_buckets_and_begins_no_other_search(where, tokens, calls):
    """The settled rounding, of 256 tokens, loses to the plans that always race, in theirs of 128."""
    worse = {BUCKET: {128: 0.0, 256: 1e5}, LONGER: {128: 9e5, 256: 0.0}}

    class Interrupted(FakeEvaluator):
        def evaluate(self, choices, rung):
            proven = [each for each in self.at(Rung.ALL_LAYERS) if each.rounding.chunk_tokens == tokens]
            outcome = super().evaluate(choices, rung)
            if rung is Rung.ALL_LAYERS and choices.rounding.chunk_tokens == tokens and len(proven) == calls - 1:
                raise KeyboardInterrupt
            return outcome

    evaluators = {
        bucket: (Interrupted if bucket is where else FakeEvaluator)(
            price=lambda choices, added=added: priced(choices) + added[choices.rounding.chunk_tokens]
        )
        for bucket, added in worse.items()
    }
    asked = problem(buckets=(BUCKET, LONGER), trials=24)
    results = search(asked, lambda *_: None, lambda _, bucket: evaluators[bucket])
    assert [each.bucket for each in results] == [BUCKET, LONGER]
    assert {each.best.choices.rounding.chunk_tokens for each in results} == {256}
    assert results[-1].raced.ended is Ended.INTERRUPTED
    if tokens == 256:
        assert not [each for each in evaluators[BUCKET].at(Rung.ALL_LAYERS) if each.rounding.chunk_tokens == 128]


def test_a_space_of_one_rounding_is_searched_without_heats():
    space = SpaceValues(rounding=RoundingValues(chunk_tokens=(128,), project_k_splits=(1,), slice_columns=(256,)))
    results, _ = found_with(lambda _: priced, space=space)
    assert [each.bucket for each in results] == [BUCKET, LONGER]


def test_chunks_below_a_page_are_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match="needed whole pages of 64 tokens"):
        load_problem(str(write_search(tmp_path)), ["space.rounding.chunk_tokens=[16]"])
