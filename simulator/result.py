"""What a simulated run leaves behind: total time, times of every record, stalls by cause, memory use.

Owns the arrays that timelines and reports are built from, and the digest that makes determinism testable.
Refuses to interpret them. Filled by `sm.py` and `simulate.py`.
"""

import hashlib
from array import array
from dataclasses import dataclass


class SmTimes:
    """Times of one SM's records, by position in its list, and what it waited for; all in nanoseconds."""

    __slots__ = (
        "data_wait_ns",
        "end_ns",
        "landed_ns",
        "load_start_ns",
        "load_wait_ns",
        "run_start_ns",
        "run_wait_ns",
        "run_wait_start_ns",
    )

    def __init__(self, num_records: int) -> None:
        """Nothing has happened: all times are zero."""
        zeros = bytes(8 * num_records)
        self.load_start_ns = array("d", zeros)  # load waits and load work are over
        self.landed_ns = array("d", zeros)  # the last copy has landed
        self.run_wait_start_ns = array("d", zeros)  # the consumers turned to this record
        self.run_start_ns = array("d", zeros)  # its run waits were met
        self.end_ns = array("d", zeros)  # consumed, computed, arrived
        self.load_wait_ns = 0.0  # the producer in load waits
        self.run_wait_ns = 0.0  # the consumers in run waits
        self.data_wait_ns = 0.0  # the consumers without a landed copy


@dataclass(frozen=True, slots=True)
class Result:
    """One simulated run."""

    total_ns: float
    bytes_read: int
    memory_busy_ns: float  # bytes over the streaming rate
    num_records: int  # that ended
    sms: tuple[SmTimes, ...]

    def digest(self) -> str:
        """Fingerprint of all times; equal input gives an equal digest."""
        found = hashlib.sha256(repr((self.total_ns, self.num_records)).encode())
        for sm in self.sms:
            for times in (sm.load_start_ns, sm.landed_ns, sm.run_start_ns, sm.end_ns):
                found.update(times.tobytes())
        return found.hexdigest()
