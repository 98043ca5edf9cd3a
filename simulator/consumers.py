"""The consumers of an SM: the warps that walk the records behind the producer and use what has landed.

Owns run waits, the early signal, work, the use of copies in their order, and the arrival. Refuses to know where
copies come from. Between two waits everything here is arithmetic: an event is spent only on a wait, an early signal
and the end of a record. Built by `sm.py`; frees stages for `producer.py`.
"""

# ruff: noqa: PLR1730, FURB136 - a comparison takes a third of the time of max(), for every batch

from collections import deque

from simulator.producer import Producer, Shared
from simulator.program import Record
from simulator.result import SmTimes
from simulator.ring import RingState, spread
from simulator.timer import Timer


class Consumers:
    """The running half of an SM."""

    __slots__ = (
        "_before",
        "_copy_bytes",
        "_counters",
        "_done_ns",
        "_early",
        "_end_timer",
        "_fetch_ns",
        "_fetched",
        "_has_polled",
        "_is_released",
        "_l2_ns_per_byte",
        "_opened",
        "_poll_timer",
        "_producer",
        "_read_ns",
        "_ready_ns",
        "_records",
        "_run_since_ns",
        "_signal_timer",
        "_sm",
        "_stage_free_ns",
        "_step_ns",
        "_taken",
        "_times",
        "_turn",
        "_unused",
        "_warp_ns",
        "awaits_load",
        "run",
        "running",
    )

    def __init__(
        self, shared: Shared, sm: int, records: tuple[Record, ...], ring: RingState, times: SmTimes, producer: Producer
    ) -> None:
        """Wire them to the ring they empty; `start` sets them going."""
        env, costs = shared.env, shared.chip.costs
        self._counters = shared.counters
        self._is_released = shared.counters.waits_for_copies
        self._sm = sm
        self._records = records
        self._stage_free_ns = ring.stage_free_ns
        self._times = times
        self._producer = producer
        self._copy_bytes = shared.ring.copy_bytes
        self._read_ns = costs.consume_ns(self._copy_bytes)
        self._step_ns = 0.0  # per copy of the running record
        self._warp_ns = 0.0  # of which one warp's, and what it fetches before
        self._fetch_ns = 0.0
        self._ready_ns = 0.0  # when its warps could begin
        self._turn = 0  # copies further is the next one of the same warp
        self._taken = 0  # copies that may be used at once
        self._early = 0  # copies still to be used before the early signal
        self._l2_ns_per_byte = 1.0 / costs.l2_bytes_per_ns
        self.run = 0  # record being run, or waited for
        self._has_polled = False  # its counters
        self._run_since_ns = -1.0
        self.running = -1  # the record whose copies are being used
        self._opened = 0  # records whose load waits are met
        self.awaits_load = False
        self._unused = 0  # copies of the running record still to be fetched or used
        self._done_ns = 0.0  # when the consumers are free again
        self._fetched: deque[tuple[int, int, float]] = deque()  # batches of records that don't run yet
        self._end_timer = Timer(env, self._finish)
        self._signal_timer = Timer(env, self._signal)
        self._poll_timer = Timer(env, self._begin_run)

    def start(self) -> None:
        """Begin with the first record."""
        self._begin_run(0.0)

    def open_record(self, record_idx: int, now_ns: float) -> None:
        """Run the record if only its load waits were missing."""
        self._opened = record_idx + 1
        if self.awaits_load:
            self.awaits_load = False
            self._start_run(now_ns)

    def keep(self, record_idx: int, num: int, landed_ns: float) -> None:
        """Keep copies of a record that doesn't run yet."""
        self._fetched.append((record_idx, num, landed_ns))

    def _begin_run(self, now_ns: float) -> None:
        run = self.run
        if run == len(self._records):
            return
        if self._run_since_ns < 0.0:
            self._run_since_ns = now_ns
        counters = self._counters
        waits = self._records[run].run_waits
        # All counters of a record are polled at once, a lane each: waiting for the last, one has seen the others.
        for wait in waits:
            if not counters.is_met(wait.counter, wait.need):
                self._has_polled = True
                counters.when_met(wait.counter, wait.need, self._sm, self._poll_timer)
                return
        if waits and not self._has_polled:
            self._has_polled = True
            self._poll_timer.arm(now_ns + counters.poll_ns(now_ns), now_ns)
        elif self._opened > run:
            self._start_run(now_ns)
        else:
            self.awaits_load = True

    def _start_run(self, now_ns: float) -> None:
        run, since_ns, times = self.run, self._run_since_ns, self._times
        times.run_wait_start_ns[run] = since_ns
        times.run_start_ns[run] = now_ns
        times.run_wait_ns += now_ns - since_ns
        signal = self._records[run].signal
        if signal is None:
            self._use(now_ns)
        elif signal.copies:
            self._early = signal.copies
            self._taken = 0
            self._done_ns = now_ns + signal.work_ns
            self._unused = self._early
            self._drain(now_ns)
        else:
            self._signal_timer.arm(now_ns + signal.work_ns, now_ns)

    def _signal(self, now_ns: float) -> float:
        self._signal_timer.action = self._signal_ordered if self._is_released else self._signal_left
        return self._counters.ordered_ns(now_ns, self._producer.in_flight_until)

    def _signal_ordered(self, now_ns: float) -> float:
        self._signal_timer.action = self._signal_left
        return self._counters.leaves_ns(now_ns, self._producer.in_flight_until)

    def _signal_left(self, now_ns: float) -> None:
        self._signal_timer.action = self._signal
        signal = self._records[self.run].signal
        assert signal is not None
        self._counters.arrive(signal.counter, now_ns)
        self._use(now_ns)

    def _use(self, now_ns: float) -> None:
        """Work, then use what has been fetched of the record."""
        record = self._records[self.run]
        signal = record.signal
        self._done_ns = self._ready_ns = now_ns + record.work_ns + record.other_bytes * self._l2_ns_per_byte
        step_ns = self._step_ns = self._read_ns + record.copy_ns
        self._fetch_ns = record.fetch_ns
        self._warp_ns = record.warp_ns if record.warp_ns > step_ns else step_ns
        self._turn = self._taken = record.turn
        self._unused = -(-record.load_bytes // self._copy_bytes) - (signal.copies if signal is not None else 0)
        if self._unused:
            self._drain(now_ns)
        else:
            self.running = self.run
            self._end_timer.arm(self._ready_ns + record.compute_ns, now_ns)

    def _drain(self, now_ns: float) -> None:
        """Use what has been fetched of the record, and let what comes be used as it comes."""
        run = self.running = self.run
        fetched = self._fetched
        while self._unused and fetched and fetched[0][0] == run:
            _, num, used_ns = fetched.popleft()
            self.consume(num, used_ns, now_ns)
        producer = self._producer
        producer.stages_freed(now_ns)
        if producer.awaits_run:
            producer.run_started(now_ns)

    def _lead(self, num: int, landed_ns: float, now_ns: float) -> None:
        """Use copies of a batch that lead to the early signal, all warps on each."""
        signal = self._records[self.run].signal
        assert signal is not None
        used = min(num, self._early)
        step_ns = signal.copy_ns
        done_ns = self._done_ns = max(self._done_ns + used * step_ns, landed_ns + step_ns)
        self._stage_free_ns += spread(done_ns, step_ns, used)
        self._unused -= used
        self._early -= used
        if not self._early:
            self.running = -1  # until the signal has left
            self._signal_timer.arm(done_ns, now_ns)
            if used < num:
                self._fetched.appendleft((self.run, num - used, landed_ns))

    def _consume_apart(self, num: int, landed_ns: float, now_ns: float) -> None:
        """Use a batch that is not used at once: it leads to a signal, or one warp has several of its copies."""
        if self._early:
            self._lead(num, landed_ns, now_ns)
            return
        while num:
            taken = min(num, self._turn)
            self.consume(taken, landed_ns, now_ns)
            num -= taken

    def consume(self, num: int, landed_ns: float, now_ns: float) -> None:
        """Use a batch of the running record as soon as it is there and the consumers are free."""
        if num > self._taken:
            self._consume_apart(num, landed_ns, now_ns)
            return
        step_ns, free_ns = self._step_ns, self._stage_free_ns
        done_ns = self._done_ns + num * step_ns
        # The warp of the last copy had another one a turn before, and fetches what it needs while this one comes.
        before = len(free_ns) + num - 1 - self._turn
        turned_ns = self._ready_ns
        if before >= 0:
            at_ns = free_ns[before]
            if at_ns > turned_ns:
                turned_ns = at_ns
        turned_ns += self._fetch_ns
        fed_ns = (landed_ns if landed_ns > turned_ns else turned_ns) + self._warp_ns
        if fed_ns > done_ns:
            if landed_ns > turned_ns:
                self._times.data_wait_ns += fed_ns - done_ns
            done_ns = fed_ns
        self._done_ns = done_ns
        if num == 4:  # what fast mode nearly always has
            third_ns = done_ns - step_ns
            second_ns = third_ns - step_ns
            free_ns += (second_ns - step_ns, second_ns, third_ns, done_ns)
        elif num == 1:
            free_ns.append(done_ns)
        else:
            free_ns += spread(done_ns, step_ns, num)
        self._unused -= num
        if not self._unused:
            run = self.run
            late_ns = self._times.landed_ns[run] + self._warp_ns
            if late_ns > done_ns:
                self._times.data_wait_ns += late_ns - done_ns
                self._done_ns = done_ns = late_ns
            self._end_timer.arm(done_ns + self._records[run].compute_ns, now_ns)

    def _finish(self, now_ns: float) -> float | None:
        run = self.run
        self._times.end_ns[run] = now_ns
        self.running = -1
        if self._records[run].arrive is None:
            self._next(now_ns)
            return None
        self._end_timer.action = self._ordered if self._is_released else self._left
        return self._counters.ordered_ns(now_ns, self._producer.in_flight_until)

    def _ordered(self, now_ns: float) -> float:
        self._end_timer.action = self._left
        return self._counters.leaves_ns(now_ns, self._producer.in_flight_until)

    def _left(self, now_ns: float) -> None:
        self._end_timer.action = self._finish
        arrive = self._records[self.run].arrive
        assert arrive is not None
        self._counters.arrive(arrive, now_ns)
        self._next(now_ns)

    def _next(self, now_ns: float) -> None:
        self.run += 1
        self._has_polled = False
        self._run_since_ns = -1.0
        self._begin_run(now_ns)
        if self._producer.awaits_end:
            self._producer.run_ended(now_ns)
