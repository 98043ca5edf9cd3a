"""Small steps away from the best candidates so far, for a sampler that looks far and wide by itself.

A sampler learns which values tend to be good; it seldom takes the leader and turns one knob, which is how most of the
time is won. Owns what a small step is, and whose turn it is: every dimension has one before any has a second, those
that say what runs when first, since they decide most. Steps depend on the candidate's number and seed alone, so that a
search stays reproducible wherever it is taken up again. Used by `study.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from megakernel.tiling import Choices
from tuner.space import Point, Space
from tuner.values import Dimension

PARENTS = 4
"""Leaders that steps start from."""

BEST_PARENT = 0.5
"""Chance that a step starts from the best of them, whoever else leads."""

MORE_STEPS = 0.3
"""Chance of a further dimension, and of going one value further in an ordered one."""

TOGETHER = 0.6
"""Chance that all parts of an operator move to the same slot of the order."""

RETRIES = 20
"""Tries for choices that are not known yet."""

FIRST = ("interleave.", "order.", "ring.", "counters.", "rounding.", "cut.")
"""Groups of choices in the order in which they have their first turns."""


class Neighbours:
    """The leaders so far, and steps away from them."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        """Know nobody yet; draw from `seed` until `turn()` is told another."""
        free = [each for each in space.dimensions if len(each.values) > 1]
        self._dimensions = sorted(free, key=_rank)
        self._chance, self._turn = Random(seed), 0
        self._space = space
        self._leaders: dict[Choices, tuple[float, Point]] = {}

    def turn(self, number: int, seed: int) -> None:
        """Let what follows depend on the candidate's `number` and `seed` alone."""
        self._chance, self._turn = Random(seed), number

    def learn(self, ns: float, point: Point) -> None:
        """Note how a point did; only the best few are kept."""
        self._leaders.setdefault(self._space.choices(point), (ns, point))
        best = sorted(self._leaders.items(), key=lambda each: each[1][0])
        self._leaders = dict(best[:PARENTS])

    def wants(self, percent: int) -> bool:
        """Whether the next candidate is to be a step: all are once there is a leader, until every dimension had a turn.

        Later `percent` of them are, and none at all if that is 0.
        """
        if not self._leaders or not percent:
            return False
        return self._turn < len(self._dimensions) or self._chance.random() * 100 < percent

    def step(self, is_known: Callable[[Choices], bool]) -> Point:
        """A leader, changed in one dimension or a few; not to choices that are known, if others are found soon."""
        point = self._any_step()
        for _ in range(RETRIES):
            if not is_known(self._space.choices(point)):
                break
            point = self._any_step()
        return point

    def _any_step(self) -> Point:
        chance = self._chance
        leaders = [point for _, point in self._leaders.values()]
        point = dict(leaders[0] if chance.random() < BEST_PARENT else chance.choice(leaders))
        moved = [each for each in self._order_of_turns() if each.name in point][:1]
        acting = [each for each in self._dimensions if each.name in point and each not in moved]
        while acting and chance.random() < MORE_STEPS:
            moved.append(acting.pop(chance.randrange(len(acting))))
        for dimension in moved:
            point[dimension.name] = self._moved(dimension, point[dimension.name])
            if dimension.name.startswith("order.") and chance.random() < TOGETHER:
                operator = dimension.name.rpartition(".")[0]
                parts = [name for name in point if name.rpartition(".")[0] == operator]
                point |= dict.fromkeys(parts, point[dimension.name])
        return self._space.acting(point)

    def _order_of_turns(self) -> list[Dimension]:
        """Dimensions, the one whose turn it is first; in every round but the first in another order."""
        turn, size = self._turn, len(self._dimensions)
        order = list(self._dimensions)
        if turn >= size:
            Random(turn // size).shuffle(order)
        at = turn % size
        return order[at:] + order[:at]

    def _moved(self, dimension: Dimension, idx: int) -> int:
        last = len(dimension.values) - 1
        if not dimension.is_ordered:
            return self._chance.choice([each for each in range(last + 1) if each != idx])
        by = 1
        while self._chance.random() < MORE_STEPS:
            by += 1
        up = idx < last and (idx == 0 or self._chance.random() < 0.5)
        return min(idx + by, last) if up else max(idx - by, 0)


def _rank(dimension: Dimension) -> int:
    return next(idx for idx, group in enumerate(FIRST) if dimension.name.startswith(group))
