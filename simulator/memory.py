"""The memory that all SMs share: one queue, served in the order in which copies were issued.

Owns the two facts that decide whether prefetch pays. A copy lands after everything issued before it (Little's
law), so latency grows with bytes in flight; and the queue is served below the streaming rate while it is short,
because few requests cannot keep every channel busy. Refuses to know who reads or why. A copy is booked when it is
issued, never ahead of simulated time. Called by `sm.py` (copies) and `counters.py` (signals share the way).
"""

from math import exp

from megakernel.hardware import HardwareSpec


class Memory:
    """Virtual clock of the shared queue: one float says when it will be empty."""

    def __init__(self, chip: HardwareSpec, num_sms: int) -> None:
        """Take the streaming ceiling for the number of SMs that read."""
        self._ns_per_byte = 1.0 / chip.ceiling_bytes_per_ns(num_sms)
        self._ramp_ns = chip.costs.queue_ramp_ns
        self._latency_ns = chip.costs.copy_latency_ns
        self._free_ns = 0.0
        self.busy_ns = 0.0
        self.bytes_read = 0

    def read(self, now_ns: float, num_bytes: int) -> float:
        """Book a copy issued now; return when it arrives at the SM's port."""
        backlog_ns = self._free_ns - now_ns
        if backlog_ns < 0.0:
            backlog_ns = 0.0
        own_ns = num_bytes * self._ns_per_byte
        spent_ns = own_ns / (1.0 - exp(-(backlog_ns + own_ns) / self._ramp_ns))
        self.busy_ns += own_ns
        self.bytes_read += num_bytes
        self._free_ns = now_ns + backlog_ns + spent_ns
        return self._free_ns + self._latency_ns

    def backlog_ns(self, now_ns: float) -> float:
        """How long a request issued now waits behind the copies in the queue."""
        return max(0.0, self._free_ns - now_ns)
