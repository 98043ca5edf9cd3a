"""A search's history as lines of text: every candidate a dot, the best so far a line, the plans that it races as marks.

Owns the scaling and the characters; `report.py` colours and prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from tuner.study import Attempt

WIDTH = 64
HEIGHT = 12
CANDIDATE, BEST, LEVEL = "·", "━", "┈"


def history(attempts: Sequence[Attempt], levels: Mapping[str, float]) -> list[str]:
    """Lines of a plot of predicted ms over candidates; `levels` are named times in ns that are drawn across.

    Candidates far above the levels are drawn at the upper edge: the picture is about who leads.
    """
    times = [each.screened_ns for each in attempts]
    known = [ns for ns in times if ns is not None]
    if not known or not levels:
        return []
    low, high = min([*known, *levels.values()]), max(levels.values())
    high += (high - low) * 0.15 or 1.0

    def height(ns: float) -> int:
        return min(HEIGHT - 1, max(0, round((high - ns) / (high - low) * (HEIGHT - 1))))

    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for ns in levels.values():
        grid[height(ns)] = [LEVEL] * WIDTH
    best = list(accumulate((ns if ns is not None else float("inf") for ns in times), min))
    for idx, ns in enumerate(times):
        if ns is not None:
            grid[height(ns)][idx * WIDTH // len(times)] = CANDIDATE
    for column in range(WIDTH):
        first, after = column * len(best) // WIDTH, (column + 1) * len(best) // WIDTH
        leader = best[max(first, after - 1)]
        if leader <= high:
            grid[height(leader)][column] = BEST
    for level in {height(ns) for ns in levels.values()}:
        label = f" {', '.join(name for name, ns in levels.items() if height(ns) == level)} "[:WIDTH]
        grid[level][-len(label) :] = label
    lines = [f"{(high - (high - low) * idx / (HEIGHT - 1)) / 1e6:8.3f} {''.join(row)}" for idx, row in enumerate(grid)]
    return [f"{'ms':>8} predicted from few layers", *lines, f"{'':8} 1{f'{len(times)} candidates':>{WIDTH - 1}}"]
