"""What the warps of an SM do with the copies of an operator: each takes one in its turn, or a team all of a chunk.

Owns the time of one warp's turn, which passes while other warps take the copies behind. A product's copy is a few
slices of a unit, each summed and left for whoever adds the unit up. Attention gives a team of warps a chunk, all of
whose copies are held until its sums are added up; a task's last chunks take it a whole turn too, however few they are.
Read by the front ends that lower operators into the simulator's records.
"""

from __future__ import annotations

from typing import NamedTuple

from megakernel.build import BuiltStep
from megakernel.hardware import HardwareSpec
from megakernel.kinds import TaskKind
from megakernel.model import BF16_BYTES
from megakernel.workspace import CONSUMER_WARPS, chunk_pieces, chunk_teams, products, slice_bytes

KIB = 1024

_PRODUCTS = {
    TaskKind.PROJECT: "project",
    TaskKind.OUTPUT: "output",
    TaskKind.UP: "up",
    TaskKind.DOWN: "down",
    TaskKind.HEAD: "up",  # over the same columns
}

FETCHING = frozenset({TaskKind.OUTPUT, TaskKind.DOWN})
"""Products over rows in device memory: every warp reads those of its slices, where others stage them once."""


class Turn(NamedTuple):
    """`fetch_ns` before a copy, landed or not, and `warp_ns` after it has landed; the next one is `copies` further."""

    fetch_ns: float
    warp_ns: float
    copies: int


_NONE = Turn(0.0, 0.0, CONSUMER_WARPS)


class Turns:
    """Turns of one step's operators on one chip."""

    def __init__(self, step: BuiltStep, chip: HardwareSpec) -> None:
        """Derive them from chunks, slices, copies and the chip's work."""
        model, rounding, work = step.model, step.choices.rounding, chip.work
        copy_bytes = step.choices.ring.copy_bytes
        columns = products(model, rounding)
        self._of = {TaskKind.ATTEND: _attention(step, chip)}
        for kind, name in _PRODUCTS.items():
            slices = max(copy_bytes // slice_bytes(columns[name], rounding), 1)
            fetch = work.fetch * slices if kind in FETCHING else 0.0
            use = work.slice * slices + work.multiply * copy_bytes / KIB
            self._of[kind] = Turn(chip.cycles_ns(fetch), chip.cycles_ns(use), CONSUMER_WARPS)

    def of(self, kind: TaskKind) -> Turn:
        """Turns of an operator of that kind; kinds without copies take none."""
        return self._of.get(kind, _NONE)


def _attention(step: BuiltStep, chip: HardwareSpec) -> Turn:
    rounding, copy_bytes = step.choices.rounding, step.choices.ring.copy_bytes
    chunk = rounding.chunk_tokens
    held = chunk_teams(step.model, rounding, copy_bytes) * chunk * 2 * step.model.head_dim * BF16_BYTES
    keys = chunk / chunk_pieces(step.model, rounding, copy_bytes)
    return Turn(0.0, chip.cycles_ns(chip.work.attend * keys), max(held // copy_bytes, 1))
