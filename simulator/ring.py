"""The ring of one SM: when each copy had landed in its stage, and when its stage was free again.

Owns the two lists that producer and consumers meet in. Refuses to decide anything. Written and read by `producer.py`
and `consumers.py`.
"""

from simulator.program import Ring

FORGET_COPIES = 64
"""So many times are dropped at once, at least: few enough that the lists of all SMs stay in a core's cache."""


class RingState:
    """Times by the number of the copy that had to wait for them.

    `stage_free_ns[i]` is when copy i - stages had been consumed, `cap_free_ns[i]` when copy i - cap had landed: what
    copy i waits for. Both are zero for the first copies. Numbers count on from the last copy that was forgotten.
    """

    __slots__ = ("_kept", "batch_copies", "cap_free_ns", "stage_free_ns")

    def __init__(self, ring: Ring, batch_copies: int, kept: int) -> None:
        """Nothing has been copied: as many copies as there are stages, or as the cap allows, need not wait.

        Times of the last `kept` copies that were issued are not forgotten.
        """
        cap = ring.cap_copies
        batch = min(batch_copies, ring.stages)
        if cap is not None:
            # The cap is kept by looking at batches before the one being issued, so a batch has to keep it itself: most
            # of a cap that holds few copies is no grain to tell when the next may be issued.
            batch = min(batch, cap * 4 // 5 if cap > 3 else 1)
        self.batch_copies = batch
        self.stage_free_ns = [0.0] * ring.stages
        self.cap_free_ns = [0.0] * (cap or 0)
        self._kept = kept

    def forget(self, issued: int) -> int:
        """Drop the times of copies before the last `issued` that nobody asks for any more; how many there were."""
        num = issued - self._kept
        if num < FORGET_COPIES:
            return 0
        del self.stage_free_ns[:num]
        del self.cap_free_ns[:num]
        return num


def spread(last_ns: float, step_ns: float, num: int) -> tuple[float, ...]:
    """`num` times, `step_ns` apart, up to `last_ns`."""
    times = [last_ns]
    for _ in range(num - 1):
        last_ns -= step_ns
        times.append(last_ns)
    return tuple(reversed(times))
