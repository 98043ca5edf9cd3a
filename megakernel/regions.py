"""Boxes of buffers as arrays [n, dims, 2] of half-open ranges: which of them meet, and do they leave nothing out."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

Boxes = npt.NDArray[np.int64]


def overlap(first: Boxes, second: Boxes) -> npt.NDArray[np.bool_]:
    """[n, m] matrix: do boxes [n, dims, 2] and [m, dims, 2] share an element."""
    meets = np.ones((len(first), len(second)), dtype=np.bool_)
    for dim in range(first.shape[1]):
        _narrow(meets, first[:, dim, 0], second[:, dim, 1])
        _narrow(meets.T, second[:, dim, 0], first[:, dim, 1])
    return meets


def _narrow(meets: npt.NDArray[np.bool_], begins: Boxes, ends: Boxes) -> None:
    """Leave only pairs [n, m] in which the first begins before the second ends; most often all of them do."""
    if meets.size and begins.max() >= ends.min():
        meets &= begins[:, None] < ends[None, :]


def covers(boxes: Boxes, shape: tuple[int, ...]) -> bool:
    """Whether every element of a buffer of `shape` lies in one of `boxes`."""
    if not len(boxes):
        return False
    edges = [np.unique(boxes[:, dim]) for dim in range(len(shape))]
    if any(edge[0] > 0 or edge[-1] < extent for edge, extent in zip(edges, shape, strict=True)):
        return False
    # no box begins or ends inside a cell between neighbouring edges, so that a cell is covered whole or not at all;
    # how many boxes cover a cell is a sum over the corners before it: one more at a box's begin, one less at its end
    corners = np.zeros([len(edge) for edge in edges], dtype=np.int64)
    cells = [np.searchsorted(edge, boxes[:, dim]).T for dim, edge in enumerate(edges)]
    for ends in product((0, 1), repeat=len(edges)):
        at = tuple(cell[end] for cell, end in zip(cells, ends, strict=True))
        np.add.at(corners, at, -1 if sum(ends) % 2 else 1)
    for dim in range(len(edges)):
        corners.cumsum(axis=dim, out=corners)
    return bool((corners[(slice(-1),) * len(edges)] > 0).all())
