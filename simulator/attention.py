"""How long the warps of an SM attend: teams of them take a chunk each, round after round.

Owns the time of a round and how it is spread over the copies that bring the chunks. A last round takes as long as the
others, however few chunks are left for it. Read by the front ends that lower attention into the simulator's records.
"""

from megakernel.build import BuiltStep
from megakernel.hardware import HardwareSpec
from megakernel.model import BF16_BYTES
from megakernel.workspace import chunk_pieces, chunk_teams


class Attention:
    """Rounds of one step on one chip."""

    def __init__(self, step: BuiltStep, chip: HardwareSpec) -> None:
        """Derive them from chunks, copies and the chip's work."""
        rounding, self._copy_bytes = step.choices.rounding, step.choices.ring.copy_bytes
        chunk = rounding.chunk_tokens
        teams = chunk_teams(step.model, rounding, self._copy_bytes)
        keys = chunk / chunk_pieces(step.model, rounding, self._copy_bytes)
        self._round_bytes = teams * chunk * 2 * step.model.head_dim * BF16_BYTES
        self._round_ns = chip.cycles_ns(chip.work.attend * keys)

    def copy_ns(self, load_bytes: int) -> float:
        """Share of one copy in the rounds of a task that loads `load_bytes`."""
        copies = -(-load_bytes // self._copy_bytes)
        return -(-load_bytes // self._round_bytes) * self._round_ns / copies if copies else 0.0
