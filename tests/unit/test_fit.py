"""Least squares against constants that are known because the times were made from them."""

import numpy as np
import pytest

from simulator.fit import fit

AT = np.linspace(0.5, 8.0, 24)


def times(values):
    return values["start"] + values["slope"] * AT + values["ramp"] * (1.0 - np.exp(-AT / values["scale"]))


TRUE = {"start": 3.0, "slope": 0.7, "ramp": 5.0, "scale": 2.0}


def test_constants_are_found_again_from_their_own_times():
    found = fit({name: 1.5 * value for name, value in TRUE.items()}, times(TRUE), times, rounds=40)
    assert found.values == pytest.approx(TRUE, rel=0.1)
    assert found.mape < 1e-3


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    draw, held, told = np.random.default_rng(7), 0, 0
    for _ in range(40):
        noisy = times(TRUE) * np.exp(0.01 * draw.standard_normal(len(AT)))
        for each in fit(TRUE, noisy, times, rounds=6).constants:
            held += each.low <= TRUE[each.name] <= each.high
            told += 1
    assert 0.88 <= held / told <= 1.0


def test_a_constant_that_times_do_not_depend_on_stays_and_is_said_to_be_unknown():
    found = fit({**TRUE, "idle": 4.0}, 1.1 * times(TRUE), times, rounds=3)
    (idle,) = [each for each in found.constants if each.name == "idle"]
    assert idle.value == pytest.approx(4.0)
    assert not idle.is_known
    assert all(each.is_known for each in found.constants if each.name in {"start", "slope"})


def test_a_round_that_would_not_help_ends_the_fit():
    calls = []

    def counted(values):
        calls.append(values)
        return times(values)

    assert fit(TRUE, times(TRUE), counted, rounds=50).mape == pytest.approx(0.0, abs=1e-9)
    assert len(calls) < 20
