"""The measured data sets, recomputed: all cells in fast mode, twenty of them in exact mode, against the bars.

The bars are the project's own: 5% mean over capped cells, 90% of the cells within 8%, none beyond 15%, and 95% of the
pairs of caps or of orders that differ by more than 2% ordered right. The constants were fitted without
the held-out half, which contains one whole copy size and one whole order of phases.
"""

import pytest
from support.h200 import CHIP, figures, load_cells, simulate_cells

from megakernel.hardware import Costs, load_hardware

FITTED = 12  # constants at most
EXACT_STRIDE = 23


@pytest.fixture(scope="module")
def chip():
    return load_hardware(CHIP)


@pytest.fixture(scope="module")
def cells():
    return load_cells()


@pytest.fixture(scope="module")
def fast_ms(cells, chip):
    return simulate_cells(cells, chip)


def part(cells, times, keep):
    chosen = [(cell, ms) for cell, ms in zip(cells, times, strict=True) if keep(cell)]
    return figures([cell for cell, _ in chosen], [ms for _, ms in chosen])


def test_the_data_sets_are_whole_and_the_held_out_half_is_the_stated_one(cells):
    assert len(cells) == 459
    held_out = [cell for cell in cells if cell.is_held_out]
    assert 0.45 < len(held_out) / len(cells) < 0.55
    assert all(cell.is_held_out for cell in cells if cell.copy_bytes == 4096)
    assert all(cell.is_held_out for cell in cells if cell.order == "QKV ATT UP DOWN O")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", ["all", "fitted", "held out"])
def test_all_cells_meet_the_bars_in_fast_mode(cells, fast_ms, half):
    found = part(cells, fast_ms, lambda cell: half == "all" or cell.is_held_out == (half == "held out"))
    print(f"{half}\n{found}")  # noqa: T201 - the figures belong into the log
    assert found.capped_mape <= 0.05
    assert found.share_within_8_percent >= 0.9
    assert found.worst <= 0.15
    (caps, all_caps), (orders, all_orders) = found.cap_pairs, found.order_pairs
    assert caps >= 0.95 * all_caps
    assert orders >= 0.95 * all_orders


@pytest.mark.timeout(600)
def test_exact_mode_agrees_on_twenty_cells(cells, fast_ms, chip):
    chosen = cells[EXACT_STRIDE // 2 :: EXACT_STRIDE]
    assert len(chosen) == 20
    exact_ms = simulate_cells(chosen, chip, exact=True)
    found = figures(chosen, exact_ms)
    assert found.worst <= 0.15
    apart = [abs(fast_ms[cell.number] / exact - 1) for cell, exact in zip(chosen, exact_ms, strict=True)]
    assert max(apart) <= 0.02
    assert sum(apart) / len(apart) <= 0.01


def test_no_more_constants_are_fitted_than_allowed(chip):
    fitted = [key for key in Costs.model_fields if chip.sources[f"costs.{key}"].startswith("fitted")]
    assert len(fitted) <= FITTED
