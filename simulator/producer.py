"""The producer of an SM: one thread that walks the records and issues their copies, ahead of the consumers.

Owns load waits, the producer's work, the order and pace of copies: a copy needs a free stage, room under the in-flight
cap, and its turn at the issue rate. Refuses to know what a copy is for. In exact mode every copy is one event; in
fast mode a batch of a few copies is, booked when its first copy is issued and landing when its last one is. A copy that
is served late holds its task's end and, by the cap, copies to come; those behind it are used meanwhile. Built by
`sm.py`; hands what it fetched to `consumers.py`.
"""
# ruff: noqa: PLR1730, FURB136 - a comparison takes a third of the time of max(), a million times a step

from dataclasses import dataclass
from typing import Protocol

from megakernel.hardware import HardwareSpec
from simulator.counters import Counters
from simulator.memory import Memory
from simulator.program import Record, Ring
from simulator.result import SmTimes
from simulator.ring import RingState, spread
from simulator.straggle import COPY_STRIDE, SIZE, SM_STRIDE, delays
from simulator.timer import Clock, Timer


@dataclass(frozen=True, slots=True)
class Shared:
    """What the SMs of one run have in common."""

    env: Clock
    chip: HardwareSpec
    memory: Memory
    counters: Counters
    ring: Ring
    batch_copies: int
    slots: int
    follow_ns: float
    longest_turn: int


class Sink(Protocol):
    """Who takes what the producer fetches."""

    run: int
    running: int

    def open_record(self, record_idx: int, now_ns: float) -> None:
        """The record's load waits are met, so that its run may begin."""
        ...

    def keep(self, record_idx: int, num: int, landed_ns: float) -> None:
        """The next copies are a later record's and will have landed at `landed_ns`."""
        ...

    def consume(self, num: int, landed_ns: float, now_ns: float) -> None:
        """They are the running record's."""
        ...


class Producer:
    """The loading half of an SM."""

    __slots__ = (
        "_batch",
        "_batch_bytes",
        "_batch_copies",
        "_batch_first_ns",
        "_batch_gap_ns",
        "_batch_last_ns",
        "_batch_slope",
        "_batch_until_ns",
        "_beyond_one",
        "_cap",
        "_cap_free_ns",
        "_copy_bytes",
        "_copy_latency_ns",
        "_counters",
        "_delays",
        "_follow_ns",
        "_has_polled",
        "_held_bytes",
        "_idle_latency_ns",
        "_is_booked",
        "_issue_ns",
        "_issue_timer",
        "_issued",
        "_landed_ns",
        "_left_bytes",
        "_load_since_ns",
        "_memory",
        "_open_timer",
        "_poll_timer",
        "_port_free_ns",
        "_port_ns_per_byte",
        "_records",
        "_ring",
        "_ring_full",
        "_seen_timer",
        "_sink",
        "_slots",
        "_sm",
        "_stage_free_ns",
        "_straggle_ns",
        "_straggle_queue_share",
        "_straggler",
        "_times",
        "_whole_bytes",
        "awaits_end",
        "awaits_run",
        "load",
    )

    def __init__(self, shared: Shared, sm: int, records: tuple[Record, ...], ring: RingState, times: SmTimes) -> None:
        """Wire it to the ring it fills; `start` sets it going."""
        env, costs = shared.env, shared.chip.costs
        self._memory = shared.memory
        self._counters = shared.counters
        self._records = records
        self._ring = ring
        self._stage_free_ns = ring.stage_free_ns
        self._cap_free_ns = ring.cap_free_ns
        self._times = times
        self._copy_bytes = shared.ring.copy_bytes
        self._cap = shared.ring.cap_copies or 0  # 0: none
        self._batch_copies = ring.batch_copies
        self._whole_bytes = ring.batch_copies * self._copy_bytes
        self._issue_ns = costs.issue_capped_ns if self._cap else costs.issue_ns
        self._port_ns_per_byte = 1.0 / shared.chip.sm_bytes_per_ns
        self._copy_latency_ns = costs.copy_latency_ns + self._copy_bytes * self._port_ns_per_byte
        self._idle_latency_ns = self._copy_latency_ns + costs.queue_ramp_ns
        self._straggle_ns = costs.straggle_ns
        self._straggle_queue_share = costs.straggle_queue_share
        self._sm = sm
        self._straggler = sm * SM_STRIDE
        self._delays = delays()
        # Of so many exponential delays the latest has this beyond one, on average.
        self._beyond_one = [sum(1.0 / each for each in range(2, num + 1)) for num in range(ring.batch_copies + 1)]
        self.load: int = 0  # record being loaded
        self._has_polled = False  # its counters
        self._load_since_ns = 0.0
        self._left_bytes: int = 0  # of the record being loaded
        self._held_bytes: int = 0  # those that wait for its run
        self._slots = shared.slots
        self._follow_ns = shared.follow_ns
        self.awaits_end = False  # of a run, so that a slot is free
        self.awaits_run = False  # of the record being loaded
        self._issued: int = 0  # copies, beside those that the ring has forgotten
        self._batch: int = 0  # copies that the issue timer waits for
        self._batch_bytes: int = 0  # of them
        self._batch_first_ns: float = 0.0  # when the first of them is issued
        self._batch_last_ns: float = 0.0  # when the last one is
        self._batch_gap_ns: float = 0.0  # from one to the next
        self._batch_until_ns: float = 0.0  # they count as issued evenly until then, as this is booked
        self._batch_slope: float = 0.0
        self._is_booked = False  # they are
        self._port_free_ns: float = 0.0
        self._landed_ns: float = 0.0  # when everything before that has landed
        self._ring_full = False
        self._issue_timer = Timer(env, self._issue)
        self._open_timer = Timer(env, self._open_after_work)
        self._poll_timer = Timer(env, self._begin_load)
        self._seen_timer = Timer(env, self._load_wait_over)

    def start(self, sink: Sink) -> None:
        """Begin with the first record."""
        self._sink = sink
        self._begin_load(0.0)

    def stages_freed(self, now_ns: float) -> None:
        """Go on if the ring was full."""
        if self._ring_full:
            self._ring_full = False
            self._plan_issue(now_ns)

    def run_ended(self, now_ns: float) -> None:
        """Go on if a record had to end first."""
        self.awaits_end = False
        self._begin_load(now_ns)

    def run_started(self, now_ns: float) -> None:
        """Go on if the rest of the record's bytes waited for its run."""
        self.awaits_run = False
        self._left_bytes, self._held_bytes = self._held_bytes, 0
        self._plan_issue(now_ns)

    def in_flight_until(self, now_ns: float) -> float:
        """When the copies issued by now have landed; of the batch that is being issued some may be issued later."""
        landed_ns = self._landed_ns
        since_ns = now_ns - self._batch_first_ns
        if self._is_booked and since_ns >= 0.0:
            newest_ns = now_ns - since_ns % self._batch_gap_ns
            at_ns = newest_ns + self._memory.backlog_ns(now_ns) + self._copy_latency_ns
            if at_ns > landed_ns:
                return at_ns
        return landed_ns

    def _begin_load(self, now_ns: float) -> None:
        records = self._records
        while (load := self.load) < len(records):
            if load - self._sink.run >= self._slots:
                self.awaits_end = True
                return
            record = records[load]
            waits = record.load_waits
            # As for the consumers: all counters of a record are polled at once.
            for wait in waits:
                if not self._counters.is_met(wait.counter, wait.need):
                    self._has_polled = True
                    self._load_since_ns = now_ns
                    self._counters.when_met(wait.counter, wait.need, self._sm, self._seen_timer)
                    return
            if waits and not self._has_polled:
                self._has_polled = True
                trip_ns = self._counters.poll_ns(now_ns)
                self._poll_timer.arm(max(now_ns, self._batch_last_ns) + trip_ns, now_ns)
                return
            if record.load_work_ns > 0.0:
                self._open_timer.arm(max(now_ns, self._batch_last_ns) + record.load_work_ns, now_ns)
                return
            if self._open_record(now_ns):
                return

    def _load_wait_over(self, now_ns: float) -> None:
        self._times.load_wait_ns += now_ns - self._load_since_ns
        self._begin_load(now_ns)

    def _open_after_work(self, now_ns: float) -> None:
        if not self._open_record(now_ns):
            self._begin_load(now_ns)

    def _open_record(self, now_ns: float) -> bool:
        """Let the record's copies be issued and its run begin; whether there are copies to issue."""
        load = self.load
        record = self._records[load]
        times = self._times
        times.load_start_ns[load] = times.landed_ns[load] = now_ns
        load_bytes = record.load_bytes
        forgotten = self._ring.forget(self._issued)
        self._issued -= forgotten
        self._straggler += forgotten * COPY_STRIDE
        if load_bytes:
            self._batch_last_ns += self._follow_ns
            ahead = record.ahead_bytes
            if ahead is None or ahead >= load_bytes:
                self._left_bytes = load_bytes
            else:
                self._left_bytes, self._held_bytes = ahead, load_bytes - ahead
            if self._left_bytes:
                self._plan_issue(now_ns)
            else:
                self.awaits_run = True
        else:
            self.load = load + 1
            self._has_polled = False
        self._sink.open_record(load, now_ns)
        return load_bytes > 0

    def _plan_issue(self, now_ns: float) -> None:
        """Arm the timer for the next batch, unless the ring is full."""
        at_ns = self._next_issue_ns(now_ns)
        if at_ns is not None:
            self._issue_timer.arm(at_ns, now_ns)

    def _next_issue_ns(self, now_ns: float) -> float | None:  # noqa: C901 - no calls to spare per batch
        """Plan the next batch: when its first copy can be issued, or None if the ring is full.

        One that follows close on another is booked at once: then it is when its last copy is issued.
        """
        first, num, num_bytes = self._issued, self._batch_copies, self._whole_bytes
        if self._left_bytes < num_bytes:
            num_bytes = self._left_bytes
            num = -(-num_bytes // self._copy_bytes)
        free_ns = self._stage_free_ns
        room = len(free_ns) - first  # stages whose time of use is known
        if room < num:
            if room <= 0:
                self._ring_full = True
                return None
            num, num_bytes = room, room * self._copy_bytes
        # The first copy goes once its stage is free and the cap allows it; the others follow at the issue rate,
        # unless the last one has to wait longer for the same two things.
        first_ns = before_ns = self._batch_last_ns
        if first_ns < now_ns:
            first_ns = now_ns
        last = first + num - 1
        last_ns = free_ns[last]
        at_ns = free_ns[first]
        if at_ns > first_ns:
            first_ns = at_ns
        if self._cap:
            free_ns = self._cap_free_ns
            at_ns = free_ns[last]
            if at_ns > last_ns:
                last_ns = at_ns
            at_ns = free_ns[first]
            if at_ns > first_ns:
                first_ns = at_ns
        issue_ns = self._issue_ns
        first_ns += issue_ns
        self._batch, self._batch_bytes = num, num_bytes
        if num == 1:
            self._batch_first_ns = self._batch_last_ns = first_ns
            return first_ns
        last_ns += issue_ns
        at_ns = first_ns + (num - 1) * issue_ns
        if at_ns > last_ns:
            last_ns = at_ns
        self._batch_first_ns, self._batch_last_ns = first_ns, last_ns
        self._batch_gap_ns = (last_ns - first_ns) / (num - 1)
        if before_ns < now_ns or first_ns - now_ns > last_ns - first_ns + self._follow_ns:
            return first_ns
        self._book(now_ns)
        return last_ns

    def _book(self, now_ns: float) -> None:
        """Book the batch, of which each copy stands for the time until the next one's."""
        self._is_booked = True
        self._batch_until_ns = self._batch_last_ns + 0.5 * self._batch_gap_ns
        self._batch_slope = self._memory.book(now_ns, self._batch_until_ns, self._batch_bytes)

    def _issue(self, now_ns: float) -> float | None:  # noqa: C901, PLR0912, PLR0915 - no calls to spare per batch
        """Book the batch whose first copy is issued now, or let it land if its last one is.

        Returns when the next copy is issued of which that is to be known.
        """
        num, num_bytes, last_ns, load = self._batch, self._batch_bytes, self._batch_last_ns, self.load
        if self._is_booked:
            self._is_booked = False
            served_ns = self._memory.issued(now_ns, self._batch_until_ns, self._batch_slope)
            backlog_ns = served_ns - now_ns
        elif last_ns > now_ns:
            self._book(now_ns)
            return last_ns
        else:
            served_ns, backlog_ns = self._memory.read(now_ns, num_bytes)
        straggle_ns = self._straggle_ns + self._straggle_queue_share * backlog_ns
        latency_ns, port_free_ns = self._copy_latency_ns, self._port_free_ns
        at_ns = served_ns + latency_ns
        port_ns = port_free_ns + num_bytes * self._port_ns_per_byte
        if port_ns > at_ns:
            at_ns = port_ns
        issued = self._issued = self._issued + num
        # The last copy's own delay, and what the latest of the batch has beyond it: copies are issued in order.
        delay_ns = straggle_ns * (
            self._delays[(self._straggler + (issued - 1) * COPY_STRIDE) & (SIZE - 1)] + self._beyond_one[num]
        )
        if num == 1:
            if self._cap:
                self._cap_free_ns.append(at_ns + delay_ns)
        else:
            idle_ns = last_ns + self._idle_latency_ns
            if idle_ns > at_ns:
                at_ns = idle_ns
            if self._cap:
                # The landing of a batch is spread: its copies land apart as they were issued, or as the SM is served.
                since_ns = self._batch_first_ns + latency_ns
                if port_free_ns > since_ns:
                    since_ns = port_free_ns
                step_ns = self._batch_gap_ns
                served_step_ns = (at_ns - since_ns) / num
                if served_step_ns < step_ns:
                    step_ns = served_step_ns if served_step_ns > 0.0 else 0.0
                landed_ns = at_ns + delay_ns
                free_ns = self._cap_free_ns
                if num == 4:  # nearly always
                    third_ns = landed_ns - step_ns
                    second_ns = third_ns - step_ns
                    free_ns += (second_ns - step_ns, second_ns, third_ns, landed_ns)
                else:
                    free_ns += spread(landed_ns, step_ns, num)
        self._port_free_ns = self._landed_ns = at_ns
        late_ns = at_ns + delay_ns
        landed = self._times.landed_ns
        if late_ns > landed[load]:
            landed[load] = late_ns
        left_bytes = self._left_bytes = self._left_bytes - num_bytes
        sink = self._sink
        if sink.running == load:
            sink.consume(num, at_ns, now_ns)
        else:
            sink.keep(load, num, at_ns)
        if left_bytes:
            return self._next_issue_ns(now_ns)
        if self._held_bytes:
            if sink.running == load:
                self.run_started(now_ns)
            else:
                self.awaits_run = True
        else:
            self.load = load + 1
            self._has_polled = False
            self._begin_load(now_ns)
        return None
