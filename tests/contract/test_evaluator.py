"""What a search relies on, for every evaluator: the same promises, whoever scores."""

import pickle

import pytest
from support import small
from support.searching import BUCKET, FakeEvaluator

from megakernel.tiling import Ring
from megakernel.workload import Workload
from tuner.evaluate import SimulatorEvaluator
from tuner.outcome import Illegal, Rung, Scored

CHOICES = small.build(rows=1).choices
OTHER = CHOICES.model_copy(update={"ring": Ring(copy_bytes=4096, stages=8)})
TOO_BIG = CHOICES.model_copy(update={"ring": Ring(copy_bytes=32768, stages=64)})


def too_big(choices):
    return choices.ring.bytes > small.chip().shared_memory_per_block_bytes


EVALUATORS = {
    "simulator": SimulatorEvaluator(small.model(), BUCKET, small.chip(), Workload.nominal(BUCKET), seed=0, draws=2),
    "fake": FakeEvaluator(illegal=too_big),
}

pytestmark = [
    pytest.mark.parametrize("evaluator", EVALUATORS.values(), ids=EVALUATORS.keys()),
    pytest.mark.parametrize("rung", Rung),
]


def test_equal_choices_have_equal_outcomes_whatever_was_asked_before(evaluator, rung):
    first = evaluator.evaluate(CHOICES, rung)
    evaluator.evaluate(OTHER, rung)
    assert evaluator.evaluate(CHOICES.model_copy(), rung) == first


def test_a_score_names_its_rung_and_keeps_its_bounds(evaluator, rung):
    score = evaluator.evaluate(CHOICES, rung)
    assert isinstance(score, Scored)
    assert score.rung is rung
    assert 0 < score.roofline_ns <= score.bound_ns <= score.expected_ns <= score.p95_ns


def test_what_can_not_run_is_illegal_with_a_reason(evaluator, rung):
    outcome = evaluator.evaluate(TOO_BIG, rung)
    assert isinstance(outcome, Illegal)
    assert all(outcome.reasons)


def test_another_process_gets_the_same_outcome(evaluator, rung):
    assert pickle.loads(pickle.dumps(evaluator)).evaluate(CHOICES, rung) == evaluator.evaluate(CHOICES, rung)
