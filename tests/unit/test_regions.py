"""Boxes meet and cover as sets of elements do."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from megakernel.regions import covers, overlap


def elements(box):
    return set(product(*(range(low, high) for low, high in box)))


def random_boxes(rng, shape):
    return [[sorted(rng.sample(range(extent + 1), 2)) for extent in shape] for _ in range(rng.randint(1, 5))]


@pytest.mark.parametrize("shape", [(4,), (3, 2), (2, 3, 2)])
def test_overlap_and_covers_are_those_of_sets(shape):
    rng = random.Random(len(shape))
    covered = 0
    for _ in range(300):
        first, second = random_boxes(rng, shape), random_boxes(rng, shape)
        meets = overlap(np.array(first), np.array(second))
        assert meets.tolist() == [[bool(elements(a) & elements(b)) for b in second] for a in first]
        whole = set().union(*map(elements, first)) == elements([(0, extent) for extent in shape])
        assert covers(np.array(first), shape) == whole
        covered += whole
    assert covered > 5


def test_volumes_that_add_up_by_chance_cover_nothing():
    assert not covers(np.array([[[0, 2]], [[0, 2]]]), (4,))
    assert not covers(np.array([[[0, 2]], [[1, 3]]]), (4,))
    assert covers(np.array([[[0, 2]], [[1, 4]]]), (4,))
    assert not covers(np.empty((0, 1, 2), dtype=np.int64), (4,))
