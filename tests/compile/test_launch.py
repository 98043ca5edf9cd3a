"""What the host makes of the words that a launch leaves, without a card."""

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="needs the launcher of the runtime extra")

from runtime.gpu.launch import LoadedTable


@pytest.mark.parametrize(
    ("boundary", "armed", "made"),
    [
        pytest.param((3, 0), 64, 64, id="to its end"),
        pytest.param((12, 1), 64, 12, id="halted on its way"),
        pytest.param((64, 1), 64, 64, id="halted before its last step"),
        pytest.param((65, 1), 64, 64, id="halted in its last step, which none follows"),
        pytest.param((2, 1), 1, 1, id="halted in its only step"),
    ],
)
def test_a_halt_adds_no_step_to_a_launch(boundary, armed, made):
    table = LoadedTable.__new__(LoadedTable)
    table._at = {"boundary": 0}
    table._record = np.array([(armed,)], [("num_steps", "<u4")])
    table._words = lambda _at, _count: boundary
    assert table.steps_made() == made
