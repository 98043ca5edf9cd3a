"""What a variant must show on a card before its time counts, on made-up results."""

import numpy as np
import pytest

from megakernel.config import ConfigError
from megakernel.tiling import Rounding

torch = pytest.importorskip("torch", reason="needs the runtime extra")
pytest.importorskip("cuda.core", reason="needs the launcher of the runtime extra")

ONE, OTHER = Rounding(), Rounding(chunk_tokens=64)


def logits(seed=0):
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def gate():
    from runtime.gpu.gate import Gate

    gate = Gate()
    gate.check(ONE, [logits()] * 3)
    return gate


def nudged(by):
    changed = logits()
    changed[1, 7] += by
    return changed


def test_the_same_results_pass_and_near_ones_of_another_rounding(gate):
    gate.check(ONE, [logits()] * 3)
    gate.check(OTHER, [nudged(1e-3)] * 3)
    gate.check(OTHER, [nudged(1e-3)] * 3)


@pytest.mark.parametrize(
    ("rounding", "launches", "message"),
    [
        (ONE, [nudged(1e-6)] * 3, "differ from those of the same rounding, by .* at most, in 1 of 128"),
        (ONE, [logits(), logits(), nudged(0.5)], "launch 3 left other logits than the first, by 0.5 at most"),
        (OTHER, [logits(seed=1)] * 3, "point elsewhere than another rounding's: cosine"),
        (OTHER, [nudged(float("nan"))] * 3, "1 logits are not finite"),
    ],
    ids=["a bit", "a race", "elsewhere", "nan"],
)
def test_other_results_are_wrong(gate, rounding, launches, message):
    with pytest.raises(ConfigError, match=message):
        gate.check(rounding, launches)


def test_a_variant_that_is_refused_is_no_measure_for_the_next(gate):
    with pytest.raises(ConfigError):
        gate.check(OTHER, [logits(seed=1)] * 3)
    gate.check(OTHER, [logits()] * 3)


def test_counters_that_missed_an_arrival_are_named():
    from runtime.gpu.gate import check_counters

    class Loaded:
        class table:  # noqa: N801
            totals = np.array([132, 32], "<u4")

        class titles:  # noqa: N801
            counter = staticmethod("counter {}".format)

        def counters(self):
            return np.array([264, 63], "<u4")

    with pytest.raises(ConfigError, match="counter 1 counted 63 arrivals, needed 64"):
        check_counters(Loaded(), 2)
