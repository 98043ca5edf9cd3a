"""The memory that all SMs share: one queue, served in the order in which copies were issued.

Owns the two facts that decide whether prefetch pays. A copy lands after everything issued before it (Little's
law), so latency grows with bytes in flight; and the queue is served below the streaming rate while it is short,
because few requests cannot keep every channel busy. Refuses to know who reads or why. Called by `producer.py` (copies)
and `counters.py` (signals share the way).

A batch of copies is booked when its first copy is issued, or as soon as that is known. What of it is issued later than
now is kept apart (`_ahead_...`), so that nobody queues behind copies that don't exist yet. When it lands is asked for
when its last copy is issued: by then the others have booked what they issued meanwhile.
"""
# ruff: noqa: PLR1730, FURB136 - a comparison takes a third of the time of max(), a million times a step

from math import exp

from megakernel.hardware import HardwareSpec

# Which moment of a batch's issue stands for all of it when its service rate is chosen: a share of the time
# between its first and last copy. A property of the fast mode, set where it agrees best with the exact one.
BATCH_MOMENT = 0.4


class Memory:
    """Virtual clock of the shared queue: one float says when it will be empty."""

    __slots__ = (
        "_ahead_at_zero",
        "_ahead_slope",
        "_channels_share",
        "_free_ns",
        "_ns_per_byte",
        "_num_ahead",
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
        # Batches are issued evenly until their end: the service time of what is booked, not issued, is a line in time.
        self._num_ahead = 0
        self._ahead_at_zero = 0.0
        self._ahead_slope = 0.0
        self.bytes_read = 0

    @property
    def busy_ns(self) -> float:
        """Time that all bytes read so far take at the streaming rate."""
        return self.bytes_read * self._ns_per_byte

    def read(self, now_ns: float, num_bytes: int) -> tuple[float, float]:
        """Queue a copy that is issued now: when it has been served, and how long a queue it found."""
        backlog_ns = self.backlog_ns(now_ns)
        # As a batch that is over at once, of which nothing is ahead.
        own_ns, free_ns = num_bytes * self._ns_per_byte, max(self._free_ns, now_ns)
        channels_ns = own_ns * self._channels_share / (1.0 - exp(-(free_ns - now_ns + own_ns) * self._per_ramp_ns))
        self._free_ns = free_ns + max(channels_ns, own_ns)
        self.bytes_read += num_bytes
        return now_ns + self.backlog_ns(now_ns), backlog_ns

    def book(self, now_ns: float, until_ns: float, num_bytes: int) -> float:
        """Queue copies that are issued evenly from now on until then; what to say of them when the last one is."""
        issue_ns = until_ns - now_ns
        own_ns = num_bytes * self._ns_per_byte
        free_ns = self._free_ns
        if free_ns < now_ns:
            free_ns = now_ns
        queue_ns = free_ns - now_ns + own_ns - BATCH_MOMENT * issue_ns
        if queue_ns < own_ns:
            queue_ns = own_ns
        channels_ns = own_ns * self._channels_share / (1.0 - exp(-queue_ns * self._per_ramp_ns))
        self._free_ns = free_ns + (channels_ns if channels_ns > own_ns else own_ns)
        self.bytes_read += num_bytes
        slope = own_ns / issue_ns
        self._num_ahead += 1
        self._ahead_at_zero += slope * until_ns
        self._ahead_slope += slope
        return slope

    def issued(self, now_ns: float, until_ns: float, slope: float) -> float:
        """The last copy of a booked batch is issued now: when everything that has been issued will have been served."""
        self._num_ahead -= 1
        if self._num_ahead:
            at_zero = self._ahead_at_zero = self._ahead_at_zero - slope * until_ns
            slope = self._ahead_slope = self._ahead_slope - slope
            served_ns = self._free_ns - (at_zero - slope * now_ns)  # with `backlog_ns`, but for a call a batch
        else:
            self._ahead_at_zero = self._ahead_slope = 0.0  # drop rounding errors
            served_ns = self._free_ns
        return served_ns if served_ns > now_ns else now_ns

    def backlog_ns(self, now_ns: float) -> float:
        """How long a request issued now waits behind the copies in the queue."""
        backlog_ns = self._free_ns - now_ns - (self._ahead_at_zero - self._ahead_slope * now_ns)
        return backlog_ns if backlog_ns > 0.0 else 0.0
