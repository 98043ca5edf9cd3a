"""Small steps away from the best candidates so far, for a sampler that looks far and wide by itself.

A sampler learns which values tend to be good; it seldom takes the leader and turns one knob, which is how most of the
last percents are found. Owns what a small step is. Its draws are its own, seeded for each candidate, so that a search
stays reproducible wherever it is taken up again.
Used by `study.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from megakernel.tiling import Choices
from tuner.space import Point, Space
from tuner.values import Dimension

PARENTS = 4
"""Leaders that steps start from."""

MORE_STEPS = 0.4
"""Chance of a further dimension, and of going one value further in an ordered one."""

RETRIES = 20
"""Tries for choices that are not known yet."""


class Neighbours:
    """The leaders so far, and steps away from them."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        """Know nobody yet; draw from `seed` until `seed()` is told another."""
        self._dimensions = [each for each in space.dimensions if len(each.values) > 1]
        self._chance = Random(seed)
        self._space = space
        self._leaders: dict[Choices, tuple[float, Point]] = {}

    def seed(self, seed: int) -> None:
        """Let the draws that follow depend on `seed` alone."""
        self._chance = Random(seed)

    def learn(self, ns: float, point: Point) -> None:
        """Note how a point did; only the best few are kept."""
        self._leaders.setdefault(self._space.choices(point), (ns, point))
        best = sorted(self._leaders.items(), key=lambda each: each[1][0])
        self._leaders = dict(best[:PARENTS])

    def wants(self, percent: int) -> bool:
        """Whether the next candidate is to be a step, which `percent` of them are once there is a leader."""
        return bool(self._leaders) and self._chance.random() * 100 < percent

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
        point = dict(chance.choice(list(self._leaders.values()))[1])
        count = 1
        while count < len(self._dimensions) and chance.random() < MORE_STEPS:
            count += 1
        acting = [each for each in self._dimensions if each.name in point]
        for dimension in chance.sample(acting, min(count, len(acting))):
            point[dimension.name] = self._moved(dimension, point[dimension.name])
        return self._space.acting(point)

    def _moved(self, dimension: Dimension, idx: int) -> int:
        last = len(dimension.values) - 1
        if not dimension.is_ordered:
            return self._chance.choice([each for each in range(last + 1) if each != idx])
        by = 1
        while self._chance.random() < MORE_STEPS:
            by += 1
        up = idx < last and (idx == 0 or self._chance.random() < 0.5)
        return min(idx + by, last) if up else max(idx - by, 0)
