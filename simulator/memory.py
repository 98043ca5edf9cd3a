"""The memory that all SMs share: one queue, served in the order in which copies were issued.

Owns the two facts that decide whether prefetch pays. A copy lands after everything issued before it (Little's
law), so latency grows with bytes in flight; and the queue is served below the streaming rate while it is short,
because few requests cannot keep every channel busy. Refuses to know who reads or why. Called by `sm.py` (copies)
and `counters.py` (signals share the way).

A batch of copies is booked when its first copy is issued. What of it is issued later than now is kept apart
(`_batches`), so that nobody queues behind copies that don't exist yet; a batch of one leaves nothing ahead.
"""
# ruff: noqa: PLR1730, FURB136 - a comparison takes a third of the time of max(), a million times a step

from collections import deque
from math import exp

from megakernel.hardware import HardwareSpec

# Which moment of a batch's issue stands for all of it when its service rate is chosen: a share of the time
# between its first and last copy. A property of the fast mode, set where it agrees best with the exact one.
BATCH_MOMENT = 0.34


class Memory:
    """Virtual clock of the shared queue: one float says when it will be empty."""

    __slots__ = (
        "_ahead_at_zero",
        "_ahead_slope",
        "_batches",
        "_channels_share",
        "_free_ns",
        "_ns_per_byte",
        "_per_ramp_ns",
        "bytes_read",
    )

    def __init__(self, chip: HardwareSpec, num_sms: int) -> None:
        """Take the streaming ceiling for the number of SMs that read.

        Below the whole card's rate it is the way to the SMs that is full, not the channels: what is queued then
        keeps fewer channels busy than the same time of the memory's full rate would.
        """
        self._ns_per_byte = 1.0 / chip.ceiling_bytes_per_ns(num_sms)
        self._channels_share = chip.ceiling_bytes_per_ns(num_sms) / chip.streaming_bytes_per_ns
        self._per_ramp_ns = self._channels_share / chip.costs.queue_ramp_ns
        self._free_ns = 0.0
        self._batches: deque[tuple[float, float, float]] = deque()  # end of issue, and its share in the two sums
        self._ahead_at_zero = 0.0
        self._ahead_slope = 0.0
        self.bytes_read = 0

    @property
    def busy_ns(self) -> float:
        """Time that all bytes read so far take at the streaming rate."""
        return self.bytes_read * self._ns_per_byte

    def read(self, now_ns: float, last_ns: float, num_bytes: int) -> tuple[float, float]:
        """Book a batch of copies issued from now to `last_ns`.

        Returns when the last of them has been served and how long a queue the batch found.
        """
        free_ns = self._free_ns
        if free_ns < now_ns:
            free_ns = now_ns
        own_ns = num_bytes * self._ns_per_byte
        self.bytes_read += num_bytes
        backlog_ns = free_ns - now_ns
        issue_ns = last_ns - now_ns
        queue_ns = backlog_ns + own_ns - BATCH_MOMENT * issue_ns
        if queue_ns < own_ns:
            queue_ns = own_ns
        channels_ns = own_ns * self._channels_share / (1.0 - exp(-queue_ns * self._per_ramp_ns))
        free_ns += channels_ns if channels_ns > own_ns else own_ns
        self._free_ns = free_ns
        batches = self._batches
        if batches:
            if batches[0][0] <= now_ns:
                self._forget(now_ns)
            ahead_ns = self._ahead_at_zero - self._ahead_slope * now_ns
            if ahead_ns > 0.0:
                backlog_ns -= ahead_ns
                if backlog_ns < 0.0:
                    backlog_ns = 0.0
        if issue_ns > 0.0:
            slope = own_ns / issue_ns
            at_zero = slope * last_ns
            batches.append((last_ns, at_zero, slope))
            self._ahead_at_zero += at_zero
            self._ahead_slope += slope
            if last_ns + backlog_ns > free_ns:
                return last_ns + backlog_ns, backlog_ns
        return free_ns, backlog_ns

    def backlog_ns(self, now_ns: float) -> float:
        """How long a request issued now waits behind the copies in the queue."""
        backlog_ns = self._free_ns - now_ns
        if self._batches:
            if self._batches[0][0] <= now_ns:
                self._forget(now_ns)
            ahead_ns = self._ahead_at_zero - self._ahead_slope * now_ns
            if ahead_ns > 0.0:
                backlog_ns -= ahead_ns
        return backlog_ns if backlog_ns > 0.0 else 0.0

    def _forget(self, now_ns: float) -> None:
        """Leave only batches that are not wholly issued.

        They are issued evenly until their end, so the service time of what is booked but not issued is a line in time.
        """
        batches = self._batches
        while batches and batches[0][0] <= now_ns:
            _, at_zero, slope = batches.popleft()
            self._ahead_at_zero -= at_zero
            self._ahead_slope -= slope
        if not batches:
            self._ahead_at_zero = self._ahead_slope = 0.0  # drop rounding errors
