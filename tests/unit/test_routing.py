"""Draws of experts: seeded, distinct, and as even as the law says."""

import pytest
from support import north

from megakernel.model import RoutedMlp
from megakernel.workload import Routing, Workload
from simulator.routing import draw_states, mean_distinct_experts, mean_state, upper_quantile

EIGHT_ROWS = Workload(contexts=(100,) * 8)
MLP = RoutedMlp(kind="routed", num_experts=128, top_k=8, width=768, score="softmax", renormalise=True)


def mean_drawn(routing):
    workload = Workload(contexts=(100,) * 8, routing=routing)
    found = [
        count for state in draw_states(north.model(), workload, draws=8, seed=3) for count in state.distinct_experts[1:]
    ]
    return sum(found) / len(found)


def test_one_row_hits_top_k_experts_in_every_routed_layer_and_none_in_a_dense_one():
    (state,) = draw_states(north.model(), Workload(contexts=(8192,)), draws=1, seed=0)
    assert state.distinct_experts == (0,) + (8,) * 48
    assert state.positions == (8191,)


def test_a_draw_depends_on_its_number_and_the_seed_alone():
    many = draw_states(north.model(), EIGHT_ROWS, draws=5, seed=1)
    assert draw_states(north.model(), EIGHT_ROWS, draws=2, seed=1) == many[:2]
    assert draw_states(north.model(), EIGHT_ROWS, draws=2, seed=2) != many[:2]
    assert len(set(many)) == 5


def test_uniform_draws_have_the_mean_of_the_closed_form():
    assert mean_drawn(Routing()) == pytest.approx(mean_distinct_experts(MLP, 8, Routing()), rel=0.01)


def test_a_steeper_law_hits_fewer_experts_and_a_flat_one_is_uniform():
    means = [mean_drawn(Routing(kind="zipf", exponent=exponent)) for exponent in (0.0, 0.5, 1.0, 2.0)]
    assert means == sorted(means, reverse=True)
    assert means[0] == mean_drawn(Routing())


def test_the_mean_of_a_law_without_a_closed_form_is_that_of_its_draws():
    law = Routing(kind="zipf", exponent=1.0)
    assert mean_distinct_experts(MLP, 8, law) == pytest.approx(mean_drawn(law), rel=0.02)


def test_the_mean_state_has_whole_experts_that_add_up_to_the_mean():
    distinct = mean_state(north.model(), EIGHT_ROWS).distinct_experts
    mean = mean_distinct_experts(MLP, 8, Routing())
    assert sum(distinct) == round(48 * mean)
    assert distinct[0] == 0
    assert max(distinct[1:]) - min(distinct[1:]) == 1


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 10.0), (0.95, 19.0), (1.0, 20.0)])
def test_a_quantile_is_a_value_that_was_seen(share, expected):
    assert upper_quantile(tuple(float(value) for value in range(20, 0, -1)), share) == expected
