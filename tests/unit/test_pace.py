"""The pace of an issuer: cycles from copy to copy by a closed form, and which kernels have one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from support import small
from support.card import chip

from runtime.gpu.specialize import LEAST_PACE, PACE, KernelOptions, pace_cycles, resolved, specialize


def test_a_pace_is_a_multiple_of_an_sms_share_of_the_streaming_rate():
    # 4,588 GB/s over 132 SMs are 34.76 GB/s; 8 KB at 4/3 of that are 176.8 ns, of 1,980 MHz
    assert pace_cycles(8192, chip(), 4 / 3) == pytest.approx(350, abs=1)
    assert pace_cycles(16384, chip(), 4 / 3) == pytest.approx(700, abs=2)
    assert pace_cycles(8192, chip(), 1.0) == pytest.approx(467, abs=1)
    assert pace_cycles(8192, chip(), 0.0) == 0


@pytest.mark.parametrize(
    ("rows", "options", "pace"),
    [
        (1, {}, 0.0),
        (2, {}, PACE),
        (8, {"arrival": "release"}, PACE),
        (8, {"streaming": True}, 0.0),
        (8, {"pace": 0.0}, 0.0),
        (1, {"pace": 2.0}, 2.0),
    ],
)
def test_several_rows_have_a_pace_unless_told_otherwise(rows, options, pace):
    step = small.build(rows=rows)
    assert resolved(step, KernelOptions(**options)).pace == pace
    cycles = specialize(step, small.chip(), KernelOptions(**options))["kPaceCycles"]
    assert cycles == pace_cycles(step.choices.ring.copy_bytes, small.chip(), pace)


@pytest.mark.parametrize("pace", [-0.1, 1e-9, 101, float("nan")])
def test_a_pace_beyond_its_bounds_is_refused_by_name(pace):
    with pytest.raises(ValidationError, match="pace"):
        KernelOptions(pace=pace)


def test_the_slowest_pace_of_the_largest_copy_fits_its_word():
    assert pace_cycles(2**17, chip(), LEAST_PACE) < 2**31
