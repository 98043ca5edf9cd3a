"""What a simulated persistent kernel is asked to do: a list of records for every SM, and the ring they share.

Owns the abstract input of the simulator and its checks. Refuses to know models, task kinds or files: the two
front ends (streaming programs, plan tables) translate into it. Built by `stream.py` and by the plan front end,
read by `simulate.py` and `sm.py`.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.workspace import CONSUMER_WARPS


class ProgramError(Exception):
    """A program that cannot run on the simulated chip, or that stops for ever."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Met once `counter` has been arrived on `need` times in this run."""

    counter: int
    need: int


@dataclass(frozen=True, slots=True)
class Signal:
    """An arrival before the record's end: `work_ns` after its run waits, by the consumers.

    Where the record's first `copies` lead to it, they are used before, all consumers on one and `copy_ns` on each.
    """

    counter: int
    work_ns: float
    copies: int = 0
    copy_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Label:
    """What a report calls a record; the simulation never reads it."""

    kind: str
    task: int = -1
    path: str = ""
    layer: int = -1

    @property
    def name(self) -> str:
        """How messages name the record."""
        parts = [self.kind]
        if self.layer >= 0:
            parts.append(f"of layer {self.layer}")
        if self.task >= 0:
            parts.append(f"(task {self.task})")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Record:
    """One task of one SM: load wait, load, run wait, early signal, work, consume, compute, arrive.

    `load_bytes` come in copies of the ring's copy size, the last one possibly shorter. `load_work_ns` is the
    producer's, spent after its load waits. `signal.work_ns` and `work_ns` are the consumers', spent after the run
    waits and before the first copy is used; `copy_ns` is what they spend on a copy beyond reading it, one after
    another. `warp_ns` is what one warp spends on a copy that has landed while the others, which take copies in turn, go
    on: its next copy is `turn` further. `fetch_ns` is what it spends before, whether the copy has landed or not.
    `compute_ns` follows the last copy. `other_bytes` are read by the run itself through L2. `arrive` counts up when all
    of that is done. `ahead_bytes` may be fetched before the run waits are met, in whole copies; None: all.
    """

    label: Label
    load_bytes: int = 0
    load_waits: tuple[Wait, ...] = ()
    load_work_ns: float = 0.0
    run_waits: tuple[Wait, ...] = ()
    signal: Signal | None = None
    work_ns: float = 0.0
    copy_ns: float = 0.0
    warp_ns: float = 0.0
    fetch_ns: float = 0.0
    turn: int = CONSUMER_WARPS
    compute_ns: float = 0.0
    other_bytes: int = 0
    arrive: int | None = None
    ahead_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ring:
    """The landing zone of an SM's copies: how many stages, and how much may be on its way at once."""

    copy_bytes: int
    stages: int
    in_flight_cap_bytes: int | None = None

    @property
    def cap_copies(self) -> int | None:
        """Copies in flight at most: copy i is issued once copy i - cap_copies has landed."""
        return None if self.in_flight_cap_bytes is None else self.in_flight_cap_bytes // self.copy_bytes


@dataclass(frozen=True, slots=True)
class Program:
    """Records per SM in the order in which each SM walks them.

    Of each list at most `slots` records are begun and not ended: nothing is fetched for one more. With one slot rings
    are drained at every record. None: any number. `follow_ns` pass from the issue of a record's last copy to where the
    next one's first may be issued.
    """

    ring: Ring
    sms: tuple[tuple[Record, ...], ...]
    num_counters: int
    arrival: Arrival = DEFAULT_ARRIVAL
    slots: int | None = None
    follow_ns: float = 0.0
    arrivals: tuple[int, ...] = field(init=False)  # per counter, over the whole run
    waits: frozenset[Wait] = field(init=False)  # all that anybody waits for
    longest_turn: int = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what no SM could walk, and count every counter's arrivals."""
        ring = self.ring
        if ring.copy_bytes < 1 or ring.stages < 1:
            raise ProgramError(f"a ring of {ring.stages} stages of {ring.copy_bytes} bytes holds no copy")
        if ring.cap_copies is not None and ring.cap_copies < 1:
            raise ProgramError(
                f"the in-flight cap of {ring.in_flight_cap_bytes} bytes is below one copy of {ring.copy_bytes}"
            )
        if not self.sms:
            raise ProgramError("a program needs at least one SM")
        arrivals = [0] * self.num_counters
        waits: set[Wait] = set()
        # SMs share records, and a streaming program gives every SM the same list: look at each record once.
        records = {id(record): record for sm in self.sms for record in sm}
        for record_id, times in Counter(map(id, chain.from_iterable(self.sms))).items():
            record = records[record_id]
            self._check(record)
            waits.update(record.load_waits, record.run_waits)
            if record.signal is not None:
                arrivals[record.signal.counter] += times
            if record.arrive is not None:
                arrivals[record.arrive] += times
        object.__setattr__(self, "arrivals", tuple(arrivals))
        object.__setattr__(self, "waits", frozenset(waits))
        object.__setattr__(self, "longest_turn", max((record.turn for record in records.values()), default=1))

    def _check(self, record: Record) -> None:
        used = [wait.counter for wait in record.load_waits + record.run_waits]
        if record.signal is not None:
            used.append(record.signal.counter)
        if record.arrive is not None:
            used.append(record.arrive)
        for counter in used:
            if not 0 <= counter < self.num_counters:
                raise ProgramError(f"{record.label.name} uses counter {counter} of {self.num_counters}")
        if record.load_bytes < 0:
            raise ProgramError(f"{record.label.name} loads {record.load_bytes} bytes")
        if record.ahead_bytes is not None and (record.ahead_bytes < 0 or record.ahead_bytes % self.ring.copy_bytes):
            raise ProgramError(
                f"{record.label.name} loads {record.ahead_bytes} bytes ahead, which is no number of copies"
            )
        if record.turn < 1:
            raise ProgramError(f"{record.label.name} takes turns of {record.turn} copies; a turn is one at least")
        spent = record.load_work_ns, record.work_ns, record.copy_ns, record.warp_ns, record.fetch_ns, record.compute_ns
        if min(*spent, record.other_bytes) < 0:
            raise ProgramError(f"{record.label.name} spends a negative time or number of bytes")
