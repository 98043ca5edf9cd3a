"""Recorded routing: rows hit experts as often as the file counts them, and files of other models are refused."""

import json

import numpy as np
import pytest
from support import north

from megakernel.config import ConfigError
from megakernel.workload import Workload
from simulator.recorded import Recorded, load_picks
from simulator.routing import draw_states, mean_distinct_experts, mean_state

SKEWED = tuple(40 if expert < 4 else 10 if expert < 64 else 0 for expert in range(128))


def recorded(*counts):
    return Recorded(source="picks.json", counts=counts)


def test_a_row_always_hits_top_k_different_experts():
    chance = np.random.Generator(np.random.PCG64(1))
    law = recorded(SKEWED)
    assert {law.draw_distinct(8, 1, 0, chance) for _ in range(200)} == {8}


def test_experts_are_hit_as_often_as_they_were_picked():
    # With two experts always picked together with one of six others, a pair of rows meets in known ways.
    law = recorded((6, 6, 1, 1, 1, 1, 1, 1))
    assert law.chances(3, 0).tolist() == [1.0, 1.0, *[1 / 6] * 6]
    chance = np.random.Generator(np.random.PCG64(2))
    drawn = [law.draw_distinct(3, 2, 0, chance) for _ in range(4000)]
    assert set(drawn) == {3, 4}
    assert np.mean(np.array(drawn) == 3) == pytest.approx(1 / 6, abs=0.02)
    assert law.mean_distinct(3, 2, 0) == pytest.approx(3 + 5 / 6)


def test_the_closed_form_is_the_mean_of_the_draws():
    chance = np.random.Generator(np.random.PCG64(3))
    law = recorded(SKEWED)
    drawn = np.mean([law.draw_distinct(8, 8, 0, chance) for _ in range(600)])
    assert drawn == pytest.approx(law.mean_distinct(8, 8, 0), rel=0.01)


def test_states_use_each_layers_own_counts():
    model = north.model()
    even, few = (1,) * 128, (1,) * 8 + (0,) * 120
    law = recorded(*(few if layer % 2 else even for layer in range(48)))
    workload = Workload(contexts=(100,) * 8, routing=law)
    (state,) = draw_states(model, workload, draws=1, seed=0)
    assert state.distinct_experts[0] == 0
    assert set(state.distinct_experts[2::2]) == {8}
    assert min(state.distinct_experts[1::2]) > 30
    assert mean_state(model, workload).distinct_experts[2] == 8
    mlp = model.layers[1].mlp
    between = (law.mean_distinct(8, 8, 0) + 8) / 2
    assert mean_distinct_experts(mlp, 8, law) == pytest.approx(between)
    assert mean_distinct_experts(mlp, 1, law) == 8


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1] * 128] * 2, "counts of 2 layers; the model has 48 routed ones"),
        ([[1] * 64], "counts of routed layer 0 are of 64 experts; the model has 128"),
        ([[0] * 128], "are all 0"),
        ([[128] + [1] * 127], "expert 0 has 50.2% of the picks; a row picks 8 different experts, so at most 12.5%"),
        ([[-1] * 128], "counts"),
        ([], "counts"),
    ],
)
def test_a_file_that_no_such_model_leaves_is_refused(tmp_path, counts, message):
    (tmp_path / "picks.json").write_text(json.dumps({"counts": counts}), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as refused:
        load_picks(tmp_path / "picks.json", north.model())
    assert "picks.json" in str(refused.value)


def test_one_list_stands_for_all_layers(tmp_path):
    (tmp_path / "picks.json").write_text(json.dumps({"counts": [SKEWED]}), encoding="utf-8")
    law = load_picks(tmp_path / "picks.json", north.model())
    assert law.mean_distinct(8, 4, 47) == law.mean_distinct(8, 4, 0)
