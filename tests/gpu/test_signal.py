"""On a card: signals come, copies in flight hold releases up, and one that can't come is given up."""

import pytest
from support import small

pytestmark = pytest.mark.gpu

TURNS = 200


@pytest.fixture(scope="module")
def bench():
    from runtime.gpu.buffers import random_bytes
    from runtime.gpu.signal import SignalBench

    return SignalBench(small.chip(), random_bytes(1 << 28))


@pytest.mark.parametrize("of_all", [False, True])
def test_a_release_waits_for_copies_and_a_read_back_hardly(bench, of_all):
    from runtime.gpu.signal import STAGES, Signal

    def ns(*, reads_back, in_flight):
        return 1e6 * bench.timed(Signal(of_all, reads_back, in_flight), turns=TURNS)()

    idle = ns(reads_back=False, in_flight=0)
    assert 200 < idle < 5000  # a trip to L2 and back is 150 ns; a turn is two at least
    assert ns(reads_back=False, in_flight=STAGES) > 3 * idle
    assert ns(reads_back=True, in_flight=STAGES) < ns(reads_back=False, in_flight=STAGES)


@pytest.mark.parametrize("in_flight", [0, 24])
@pytest.mark.parametrize("of_all", [False, True])
def test_a_signal_that_cannot_come_is_given_up(bench, of_all, in_flight):
    from runtime.gpu.launch import KernelStoppedError
    from runtime.gpu.signal import Signal

    signal = Signal(of_all, False, in_flight)
    with pytest.raises(KernelStoppedError, match=r"turn 0 of .* did not come within 20 ms"):
        bench.timed(signal, turns=TURNS, begun=-1000, deadline_ms=20.0)()
    assert bench.timed(signal, turns=TURNS)() > 0  # the card is as it was
