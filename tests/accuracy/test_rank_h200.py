"""The simulator as a judge of plans: orders of North's phases, as a computing kernel on a card ranked them.

Four works of `configs/hardware/h200.toml` are fitted to every other variant of this record, the others were kept for
checking; the model's structure was chosen while looking at all of them. Within one bucket a judge that counts bytes, or
bytes and hand-offs, says the same of every order: that is what skill is measured against.
"""

import pytest
from support.contest import contest, mean_error, measured_ms, regret, simulated_ms, spearman

from megakernel.tiling import Choices

RECORD = contest("configs/measurements/north-h200-orders.json")


@pytest.fixture(scope="module")
def measured():
    return measured_ms(RECORD)


@pytest.fixture(scope="module")
def simulated(measured):
    found = simulated_ms(RECORD)
    for name, ms in found.items():
        print(f"{name}: measured {measured[name]:.3f} ms, simulated {ms:.3f}, {ms / measured[name] - 1:+.1%}")  # noqa: T201
    return found


@pytest.fixture(scope="module")
def orders(simulated):
    return {name: ms for name, ms in simulated.items() if RECORD.choices[name].counters.words == 1}


def test_the_record_holds_every_order_under_both_policies(orders):
    assert len(orders) == 21
    assert len({RECORD.choices[name].interleave for name in orders}) == 21


@pytest.mark.timeout(600)
def test_orders_are_ranked_as_the_card_ranks_them(measured, orders):
    assert spearman(measured, orders) >= 0.9
    assert spearman(measured, dict(list(orders.items())[1::2])) >= 0.85


def test_the_best_of_the_top_eight_is_within_a_percent_of_the_best(measured, orders):
    assert regret(measured, orders, top=8) <= 0.01


def test_bytes_and_hand_offs_alone_can_not_tell_orders_apart(measured, orders):
    """Skill: orders with equal cuts move equal bytes in equally many tasks, and yet lie 37% apart on the card."""
    alike = [name for name in orders if RECORD.choices[name].cut == RECORD.choices["hand plan"].cut]
    assert len(alike) == 20
    without_order = {_without_order(RECORD.choices[name]) for name in alike}
    assert len(without_order) == 2, "only order and policy differ, so that bytes and hand-offs are equal"
    assert max(measured[name] for name in alike) > 1.3 * min(measured[name] for name in alike)
    assert spearman(measured, {name: orders[name] for name in alike}) >= 0.9


def test_times_are_met(measured, simulated):
    assert mean_error(measured, simulated) <= 0.03
    assert mean_error(measured, dict(list(simulated.items())[1::2])) <= 0.03


def test_two_words_a_counter_change_as_little_as_on_the_card(measured, simulated):
    """By 1.4% at most, and with either sign: four later pairs on a card had attention first 0.8% slower with two."""
    for one, two in (("candidate 14", "attention first, two words"), ("hand plan", "hand plan, two words")):
        assert simulated[two] / simulated[one] == pytest.approx(measured[two] / measured[one], abs=0.02)


def _without_order(choices: Choices) -> Choices:
    interleave = choices.interleave.model_copy(update={"order": ()})
    return choices.model_copy(update={"interleave": interleave})
