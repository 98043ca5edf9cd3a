"""The rounding that all buckets of a model share, found over all of them before any is searched in full.

Choices that change sums must be one per model, so what is best for one bucket may not be chosen for it alone. Owns the
heats: every rounding that all buckets allow is searched for a few candidates in each bucket, the better half by the
mean over buckets goes on to twice as many, until one is left. Heats are the beginnings of the searches themselves: the
winner's candidates are in the journal when its buckets are searched. Called by `search.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log
from statistics import fmean

from megakernel.tiling import Rounding

Heat = Callable[[Rounding, int, int], float]
"""Best time as screened, over the bucket's floor, of a rounding in bucket number so, after so many candidates."""


def settle(roundings: Sequence[Rounding], num_buckets: int, trials: int, heat: Heat) -> Rounding:
    """The rounding with the least mean logarithm of time over floor; the first heat has `trials` candidates each."""
    left = list(roundings)
    while len(left) > 1:
        scores = {each: fmean(log(heat(each, bucket, trials)) for bucket in range(num_buckets)) for each in left}
        left = sorted(left, key=lambda each: scores[each])[: ceil(len(left) / 2)]
        trials *= 2
    return left[0]


def common(lists: Sequence[Sequence[Rounding]]) -> list[Rounding]:
    """Roundings that every bucket allows, in the order of the first."""
    return [each for each in lists[0] if all(each in other for other in lists)]
