"""One SM: a producer that issues copies into the ring and consumers that use them, both walking one list.

Owns the six phases of a record and everything that can hold one up: load waits, ring space, the in-flight cap,
the issue rate, run waits, data. Refuses to look at another SM; they meet in `memory.py` and `counters.py`.
Between two waits everything the consumers do is arithmetic, so events are spent only on issuing copies, on ends
of records and on waits. The producer issues copies in batches: of one in exact mode, of several in fast mode.
"""

from collections import deque
from dataclasses import dataclass

import simpy

from megakernel.hardware import HardwareSpec
from simulator.counters import Counters
from simulator.memory import Memory
from simulator.program import Record, Ring
from simulator.result import SmTimes
from simulator.straggle import COPY_STRIDE, SIZE, SM_STRIDE, longest_delays
from simulator.timer import Timer


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies issued together; `last` is the last one's number in the SM's stream."""

    last: int
    num_copies: int
    at_ns: float  # when its last copy had landed, or had been consumed
    step_ns: float  # time between its copies, looking back from `at_ns`


class Marks:
    """When copies passed a point (landed, consumed), kept as long as somebody may ask; asked in rising order."""

    __slots__ = ("_batches", "known")

    def __init__(self) -> None:
        """Nothing has passed."""
        self._batches: deque[Batch] = deque()
        self.known = 0  # copies whose time is known

    def add(self, batch: Batch) -> None:
        """Append the next batch."""
        self._batches.append(batch)
        self.known = batch.last + 1

    def forget_before(self, copy: int) -> None:
        """Drop batches that end before `copy`."""
        batches = self._batches
        while batches and batches[0].last < copy:
            batches.popleft()

    def at_ns(self, copy: int) -> float:
        """When `copy` passed; at the earliest for copies that were there from the start."""
        if copy < 0:
            return 0.0
        for batch in self._batches:
            if batch.last >= copy:
                return batch.at_ns - (batch.last - copy) * batch.step_ns
        raise AssertionError(f"copy {copy} has not passed")


class StreamingMultiprocessor:
    """Producer and consumers of one SM."""

    def __init__(
        self,
        env: simpy.Environment,
        chip: HardwareSpec,
        memory: Memory,
        counters: Counters,
        ring: Ring,
        records: tuple[Record, ...],
        *,
        sm: int,
        batch_copies: int,
    ) -> None:
        """Wire the SM to what it shares with the others; `start` sets it going."""
        costs = chip.costs
        self._env = env
        self._memory = memory
        self._counters = counters
        self._records = records
        self._copy_bytes = ring.copy_bytes
        self._stages = ring.stages
        cap = ring.cap_copies
        # A cap that the ring cannot reach never acts, and then its extra wait returns at once.
        self._cap = cap if cap is not None else 0
        self._issue_ns = costs.issue_capped_ns if cap is not None else costs.issue_ns
        self._batch_copies = max(1, min(batch_copies, ring.stages, cap or batch_copies))
        self._idle_latency_ns = costs.copy_latency_ns + costs.queue_ramp_ns
        self._port_ns_per_byte = 1.0 / chip.sm_bytes_per_ns
        self._consume_ns = costs.consume_copy_ns + ring.copy_bytes / costs.consume_bytes_per_ns
        self._l2_ns_per_byte = 1.0 / costs.l2_bytes_per_ns
        self._straggle_ns = costs.straggle_ns
        self._straggle_queue_share = costs.straggle_queue_share
        self._straggler = sm * SM_STRIDE
        self.times = SmTimes(len(records))
        # Producer.
        self._load = 0  # record being loaded
        self._load_wait = 0  # its load waits already met
        self._load_since_ns = -1.0
        self._opened = 0  # records whose load waits and load work are done
        self._left_bytes = 0  # of the record being loaded
        self._issued = 0
        self._batch = 0  # copies in the batch that the issue timer waits for
        self._batch_last_ns = 0.0  # when its last copy is issued
        self._port_free_ns = 0.0
        self._ring_full = False
        self._landed = Marks()
        self._issue_timer = Timer(env, self._issue)
        self._load_work_timer = Timer(env, self._open_load)
        self._load_poll_timer = Timer(env, self._begin_load)
        # Consumers.
        self._run = 0  # record being run, or waited for
        self._run_wait = 0  # its run waits already met
        self._run_since_ns = -1.0
        self._running = False
        self._awaits_load = False
        self._unused = 0  # copies of the running record still to be consumed
        self._done_ns = 0.0  # when the consumers are free again
        self._fetched: deque[tuple[int, Batch]] = deque()  # issued for records that don't run yet
        self._consumed = Marks()
        self._end_timer = Timer(env, self._finish)
        self._run_poll_timer = Timer(env, self._begin_run)

    @property
    def is_done(self) -> bool:
        """Whether all records have ended."""
        return self._run == len(self._records)

    @property
    def blocked_at(self) -> str:
        """What the SM was doing when nothing could happen any more."""
        load, run = min(self._load, len(self._records) - 1), min(self._run, len(self._records) - 1)
        return f"loading {self._records[load].label} and running {self._records[run].label}"

    def start(self) -> None:
        """Begin with the first record."""
        self._begin_load()
        self._begin_run()

    # Producer: load waits, load work, copies.

    def _begin_load(self) -> None:
        while self._load < len(self._records):
            record = self._records[self._load]
            while self._load_wait < len(record.load_waits):
                wait = record.load_waits[self._load_wait]
                if not self._counters.is_met(wait.counter, wait.need):
                    self._load_since_ns = self._env.now
                    self._counters.when_met(wait.counter, wait.need, self._load_wait_over)
                    return
                self._load_wait += 1
                self._load_poll_timer.arm(max(self._env.now, self._batch_last_ns) + self._counters.poll_ns())
                return
            if record.load_work_ns > 0.0:
                self._load_work_timer.arm(max(self._env.now, self._batch_last_ns) + record.load_work_ns)
                return
            if self._open_record():
                return

    def _load_wait_over(self) -> None:
        self.times.load_wait_ns += self._env.now - self._load_since_ns
        self._load_wait += 1
        self._begin_load()

    def _open_load(self) -> None:
        if not self._open_record():
            self._begin_load()

    def _open_record(self) -> bool:
        """Let the record's copies be issued and its run begin; whether there are copies to issue."""
        record = self._records[self._load]
        self._opened = self._load + 1
        self._left_bytes = record.load_bytes
        self.times.load_start_ns[self._load] = self._env.now
        self.times.landed_ns[self._load] = self._env.now
        if not record.load_bytes:
            self._load += 1
            self._load_wait = 0
        else:
            self._plan_issue()
        if self._awaits_load:
            self._awaits_load = False
            self._start_run()
        return record.load_bytes > 0

    def _plan_issue(self) -> None:
        """Find when the next batch can be issued and arm the timer, unless the ring is full."""
        first = self._issued
        num = min(self._batch_copies, -(-self._left_bytes // self._copy_bytes))
        room = self._consumed.known + self._stages - first
        if room < num:
            if room <= 0:
                self._ring_full = True
                return
            num = room
        last = first + num - 1
        issue_ns = self._issue_ns
        self._consumed.forget_before(first - self._stages)
        first_ns = max(self._env.now, self._batch_last_ns, self._consumed.at_ns(first - self._stages))
        last_ns = self._consumed.at_ns(last - self._stages)
        if self._cap:
            self._landed.forget_before(first - self._cap)
            first_ns = max(first_ns, self._landed.at_ns(first - self._cap))
            last_ns = max(last_ns, self._landed.at_ns(last - self._cap))
        first_ns += issue_ns
        self._batch = num
        self._batch_last_ns = max(first_ns + (num - 1) * issue_ns, last_ns + issue_ns)
        self._issue_timer.arm(first_ns)

    def _issue(self) -> None:
        """Book the batch whose first copy is issued now."""
        now_ns = self._env.now
        num = self._batch
        num_bytes = min(num * self._copy_bytes, self._left_bytes)
        port_ns = self._port_ns_per_byte
        one_ns = self._copy_bytes * port_ns
        straggle_ns = self._straggle_ns + self._straggle_queue_share * self._memory.backlog_ns(now_ns)
        at_ns = max(
            self._memory.read(now_ns, num_bytes) + one_ns,
            self._batch_last_ns + self._idle_latency_ns + one_ns,
            self._port_free_ns + num_bytes * port_ns,
        )
        self._port_free_ns = at_ns
        at_ns += straggle_ns * longest_delays(num)[(self._straggler + self._issued * COPY_STRIDE) & (SIZE - 1)]
        self._issued += num
        self._left_bytes -= num_bytes
        batch = Batch(self._issued - 1, num, at_ns, 0.0)
        self._landed.add(batch)
        load = self._load
        self.times.landed_ns[load] = at_ns
        if self._running and load == self._run:
            self._consume(batch)
        else:
            self._fetched.append((load, batch))
        if self._left_bytes:
            self._plan_issue()
        else:
            self._load = load + 1
            self._load_wait = 0
            self._begin_load()

    # Consumers: run waits, early signal, work, copies, arrival.

    def _begin_run(self) -> None:
        if self._run == len(self._records):
            return
        now_ns = self._env.now
        record = self._records[self._run]
        if self._run_since_ns < 0.0:
            self._run_since_ns = now_ns
        while self._run_wait < len(record.run_waits):
            wait = record.run_waits[self._run_wait]
            if not self._counters.is_met(wait.counter, wait.need):
                self._counters.when_met(wait.counter, wait.need, self._run_wait_over)
                return
            self._run_wait += 1
            self._run_poll_timer.arm(now_ns + self._counters.poll_ns())
            return
        if self._opened > self._run:
            self._start_run()
        else:
            self._awaits_load = True

    def _run_wait_over(self) -> None:
        self._run_wait += 1
        self._begin_run()

    def _start_run(self) -> None:
        now_ns = self._env.now
        run = self._run
        record = self._records[run]
        since_ns = self._run_since_ns
        times = self.times
        times.run_wait_start_ns[run] = since_ns
        times.run_start_ns[run] = now_ns
        times.run_wait_ns += now_ns - since_ns
        ready_ns = now_ns
        if record.signal is not None:
            ready_ns += record.signal.work_ns
            counter = record.signal.counter
            Timer(self._env, lambda: self._counters.arrive(counter)).arm(ready_ns)
        ready_ns += record.work_ns + record.other_bytes * self._l2_ns_per_byte
        self._done_ns = ready_ns
        self._running = True
        self._unused = -(-record.load_bytes // self._copy_bytes)
        if not self._unused:
            self._end_timer.arm(ready_ns + record.compute_ns)
            return
        fetched = self._fetched
        while fetched and fetched[0][0] == run:
            self._consume(fetched.popleft()[1])
        if self._ring_full:
            self._ring_full = False
            self._plan_issue()

    def _consume(self, batch: Batch) -> None:
        """Use a batch of the running record as soon as it is there and the consumers are free."""
        step_ns = self._consume_ns
        free_ns = self._done_ns + batch.num_copies * step_ns
        fed_ns = batch.at_ns + step_ns
        if fed_ns > free_ns:
            self.times.data_wait_ns += fed_ns - free_ns
            free_ns = fed_ns
        self._done_ns = free_ns
        self._consumed.add(Batch(batch.last, batch.num_copies, free_ns, step_ns))
        self._unused -= batch.num_copies
        if not self._unused:
            self._end_timer.arm(free_ns + self._records[self._run].compute_ns)

    def _finish(self) -> None:
        run = self._run
        self.times.end_ns[run] = self._env.now
        arrive = self._records[run].arrive
        self._running = False
        self._run = run + 1
        self._run_wait = 0
        self._run_since_ns = -1.0
        if arrive is not None:
            self._counters.arrive(arrive)
        self._begin_run()
