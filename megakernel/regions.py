"""Boxes of buffers as arrays [n, dims, 2] of half-open ranges: which of them meet, and do they leave nothing out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Boxes = npt.NDArray[np.int64]


def overlap(first: Boxes, second: Boxes) -> npt.NDArray[np.bool_]:
    """[n, m] matrix: do boxes [n, dims, 2] and [m, dims, 2] share an element."""
    meets = np.ones((len(first), len(second)), dtype=np.bool_)
    for dim in range(first.shape[1]):
        meets &= first[:, None, dim, 0] < second[None, :, dim, 1]
        meets &= second[None, :, dim, 0] < first[:, None, dim, 1]
    return meets


def covers(boxes: Boxes, shape: tuple[int, ...]) -> bool:
    """Whether every element of a buffer of `shape` lies in one of `boxes`."""
    if not len(boxes):
        return False
    edges = [np.unique(boxes[:, dim]) for dim in range(len(shape))]
    if any(edge[0] > 0 or edge[-1] < extent for edge, extent in zip(edges, shape, strict=True)):
        return False
    # no box begins or ends inside a cell between neighbouring edges, so that a cell is covered whole or not at all
    painted = np.zeros([len(edge) - 1 for edge in edges], dtype=np.bool_)
    cells = np.stack([np.searchsorted(edge, boxes[:, dim]) for dim, edge in enumerate(edges)], axis=1)
    for cell in np.unique(cells, axis=0):
        painted[tuple(slice(begin, end) for begin, end in cell)] = True
    return bool(painted.all())
