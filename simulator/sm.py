"""One SM: a producer and its consumers, walking the same list of records.

Owns their wiring and what is said about an SM that stopped. Refuses to look at another SM: they meet in `memory.py`
and `counters.py`. The six phases of a record are split by who performs them: load wait and load in `producer.py`;
run wait, run, early signal and arrival in `consumers.py`. Called by `simulate.py`.
"""

from simulator.consumers import Consumers
from simulator.producer import Producer, Shared
from simulator.program import Record
from simulator.result import SmTimes
from simulator.ring import RingState


class StreamingMultiprocessor:
    """Producer and consumers of one SM."""

    def __init__(self, shared: Shared, sm: int, records: tuple[Record, ...]) -> None:
        """Wire the SM to what it shares with the others; `start` sets it going."""
        self._records = records
        self.times = SmTimes(len(records))
        ring = RingState(shared.ring, shared.batch_copies, shared.longest_turn)
        self._producer = Producer(shared, sm, records, ring, self.times)
        self._consumers = Consumers(shared, sm, records, ring, self.times, self._producer)

    def start(self) -> None:
        """Begin with the first record."""
        self._producer.start(self._consumers)
        self._consumers.start()

    @property
    def is_done(self) -> bool:
        """Whether all records have ended."""
        return self._consumers.run == len(self._records)

    @property
    def blocked_at(self) -> str:
        """What the SM was doing when nothing could happen any more."""
        run, load = self._consumers.run, self._producer.load
        if load <= run:
            return f"waiting to load {self._records[load].label.name}"
        return f"waiting to run {self._records[run].label.name}"
