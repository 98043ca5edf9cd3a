"""The picture of a search: everything in it stands where it belongs."""

from tuner.plot import BEST, CANDIDATE, HEIGHT, WIDTH, history
from tuner.study import Attempt


def attempts(*times):
    return [Attempt(idx, ns) for idx, ns in enumerate(times)]


def test_the_leader_is_drawn_from_the_first_candidate_to_the_last():
    lines = history(attempts(4e6, 2e6, 3e6, 1e6), {"hand": 3e6, "reference": 4e6})
    assert len(lines) == HEIGHT + 2
    cells = [line[9:].ljust(WIDTH) for line in lines[1:-1]]

    def height(column):
        return next(idx for idx, row in enumerate(cells) if row[column] == BEST)

    quarter = WIDTH // 4
    assert height(0) == height(quarter - 1) < height(quarter) == height(3 * quarter - 1) < height(3 * quarter)
    assert height(WIDTH - 1) == HEIGHT - 1
    assert any(" hand" in row for row in cells)
    assert any(" reference" in row for row in cells)
    assert "4 candidates" in lines[-1]


def test_candidates_without_a_time_leave_a_gap_and_slow_ones_the_upper_edge():
    lines = history(attempts(None, 9e9, 2e6), {"hand": 3e6})
    assert CANDIDATE in lines[1]
    assert lines[1][9] == " "


def test_without_candidates_there_is_no_picture():
    assert history([], {"hand": 1.0}) == []
    assert history(attempts(None), {"hand": 1.0}) == []
