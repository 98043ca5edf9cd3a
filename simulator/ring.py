"""The ring of one SM: when each copy had landed in its stage, and when its stage was free again.

Owns the two arrays that producer and consumers meet in, by copy number. Refuses to decide anything. Written and read
by `producer.py` and `consumers.py`.
"""

from simulator.program import Ring


class RingState:
    """Times of the most recent copies; older ones are overwritten."""

    __slots__ = ("batch_copies", "consumed", "consumed_ns", "landed_ns", "mask")

    def __init__(self, ring: Ring, batch_copies: int) -> None:
        """Size the arrays for everything that can be asked about a copy of `ring`."""
        cap = ring.cap_copies
        batch = min(batch_copies, ring.stages)
        if cap is not None:
            # The cap is kept by looking at batches before the one being issued, so a batch has to keep it itself.
            batch = min(batch, max(1, cap * 4 // 5))
        self.batch_copies = batch
        self.mask = (1 << (max(ring.stages, cap or 0) + batch).bit_length()) - 1
        self.landed_ns = [0.0] * (self.mask + 1)
        self.consumed_ns = [0.0] * (self.mask + 1)
        self.consumed = 0  # copies whose time of use is known
