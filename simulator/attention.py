"""How the warps of an SM attend: teams of them take a chunk each, round after round.

Owns what a round is made of. All copies of a chunk are held until its sums are added up, so a team frees them at the end
of its turn; and it needs a whole turn for the last chunks of a task too, however few they are. Read by the front ends that
lower attention into the simulator's records.
"""

from megakernel.build import BuiltStep
from megakernel.hardware import HardwareSpec
from megakernel.model import BF16_BYTES
from megakernel.workspace import chunk_pieces, chunk_teams


class Attention:
    """Turns of one step on one chip: copies that all teams hold together, and how long a team works on those it has."""

    def __init__(self, step: BuiltStep, chip: HardwareSpec) -> None:
        """Derive them from chunks, copies and the chip's work."""
        rounding, copy_bytes = step.choices.rounding, step.choices.ring.copy_bytes
        chunk = rounding.chunk_tokens
        teams = chunk_teams(step.model, rounding, copy_bytes)
        keys = chunk / chunk_pieces(step.model, rounding, copy_bytes)
        self.turn = max(teams * chunk * 2 * step.model.head_dim * BF16_BYTES // copy_bytes, 1)
        self.warp_ns = chip.cycles_ns(chip.work.attend * keys)
