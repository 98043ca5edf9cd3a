"""The producer of an SM: one thread that walks the records and issues their copies, ahead of the consumers.

Owns load waits, the producer's work, the order and pace of copies: a copy needs a free stage, room under the in-flight
cap, and its turn at the issue rate. Refuses to know what a copy is for. In exact mode every copy is one event; in
fast mode a batch of a few copies is, booked when its first copy is issued. Built by `sm.py`; hands what it fetched to
`consumers.py`.
"""
# ruff: noqa: PLR1730, FURB136 - a comparison takes a third of the time of max(), a million times a step

from dataclasses import dataclass
from typing import Protocol

import simpy

from megakernel.hardware import HardwareSpec
from simulator.counters import Counters
from simulator.memory import Memory
from simulator.program import Record, Ring
from simulator.result import SmTimes
from simulator.ring import RingState
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
    drains: bool


class Sink(Protocol):
    """Who takes what the producer fetches."""

    run: int
    is_running: bool

    def open_record(self, record_idx: int) -> None:
        """The record's load waits are met, so that its run may begin."""
        ...

    def take(self, record_idx: int, first: int, num: int, landed_ns: float, now_ns: float) -> None:
        """Copies `first` to `first + num - 1` are the record's and will have landed at `landed_ns`."""
        ...


class Producer:
    """The loading half of an SM."""

    def __init__(self, shared: Shared, sm: int, records: tuple[Record, ...], ring: RingState, times: SmTimes) -> None:
        """Wire it to the ring it fills; `start` sets it going."""
        env, costs = shared.env, shared.chip.costs
        self._env = env
        self._memory = shared.memory
        self._counters = shared.counters
        self._records = records
        self._ring = ring
        self._times = times
        self._copy_bytes = shared.ring.copy_bytes
        self._stages = shared.ring.stages
        self._cap = shared.ring.cap_copies or 0  # 0: none
        self._batch_copies = ring.batch_copies
        self._mask = ring.mask
        self._issue_ns = costs.issue_capped_ns if self._cap else costs.issue_ns
        self._port_ns_per_byte = 1.0 / shared.chip.sm_bytes_per_ns
        self._copy_latency_ns = costs.copy_latency_ns + self._copy_bytes * self._port_ns_per_byte
        self._idle_latency_ns = self._copy_latency_ns + costs.queue_ramp_ns
        self._straggle_ns = costs.straggle_ns
        self._straggle_queue_share = costs.straggle_queue_share
        self._straggler = sm * SM_STRIDE
        self._delays = delays()
        self.load: int = 0  # record being loaded
        self._load_wait: int = 0  # its load waits already met
        self._load_since_ns = 0.0
        self._left_bytes: int = 0  # of the record being loaded
        self._held_bytes: int = 0  # those that wait for its run
        self._drains = shared.drains
        self.awaits_end = False  # of the run before, so that the ring is empty
        self.awaits_run = False  # of the record being loaded
        self._issued: int = 0  # copies
        self._batch: int = 0  # copies that the issue timer waits for
        self._batch_last_ns: float = 0.0  # when the last of them is issued
        self._port_free_ns: float = 0.0
        self._landed_ns: float = 0.0  # when everything before the newest batch has landed
        self._newest_ns: float = 0.0  # when the newest batch has
        self._newest_issue_ns: float = 0.0  # when its last copy is issued
        self._ring_full = False
        self._issue_timer = Timer(env, self._issue)
        self._open_timer = Timer(env, self._open_after_work)

    def start(self, sink: Sink) -> None:
        """Begin with the first record."""
        self._sink = sink
        self._begin_load()

    def stages_freed(self, now_ns: float) -> None:
        """Go on if the ring was full."""
        if self._ring_full:
            self._ring_full = False
            self._plan_issue(now_ns)

    def run_ended(self) -> None:
        """Go on if the record ahead had to end first."""
        self.awaits_end = False
        self._begin_load()

    def run_started(self, now_ns: float) -> None:
        """Go on if the rest of the record's bytes waited for its run."""
        self.awaits_run = False
        self._left_bytes, self._held_bytes = self._held_bytes, 0
        self._plan_issue(now_ns)

    def in_flight_until(self, now_ns: float) -> float:
        """When the copies issued by now have landed; of the newest batch some may be issued later."""
        newest_ns = self._newest_ns
        if self._newest_issue_ns > now_ns:
            newest_ns -= self._newest_issue_ns - now_ns
        return max(self._landed_ns, newest_ns)

    def _begin_load(self) -> None:
        while self.load < len(self._records):
            if self._drains and self._sink.run < self.load:
                self.awaits_end = True
                return
            record = self._records[self.load]
            if self._load_wait < len(record.load_waits):
                wait = record.load_waits[self._load_wait]
                if not self._counters.is_met(wait.counter, wait.need):
                    self._load_since_ns = self._env.now
                    self._counters.when_met(wait.counter, wait.need, self._load_wait_over)
                    return
                self._load_wait += 1
                self._counters.poll(max(self._env.now, self._batch_last_ns), self._begin_load)
                return
            if record.load_work_ns > 0.0:
                now_ns = self._env.now
                self._open_timer.arm(max(now_ns, self._batch_last_ns) + record.load_work_ns, now_ns)
                return
            if self._open_record():
                return

    def _load_wait_over(self) -> None:
        self._times.load_wait_ns += self._env.now - self._load_since_ns
        self._load_wait += 1
        self._begin_load()

    def _open_after_work(self, _: simpy.Event) -> None:
        if not self._open_record():
            self._begin_load()

    def _open_record(self) -> bool:
        """Let the record's copies be issued and its run begin; whether there are copies to issue."""
        now_ns = self._env.now
        load = self.load
        record = self._records[load]
        self._left_bytes = record.load_bytes
        self._times.load_start_ns[load] = now_ns
        self._times.landed_ns[load] = now_ns
        has_copies = self._left_bytes > 0
        if has_copies:
            ahead = record.ahead_bytes
            if ahead is not None and ahead < record.load_bytes:
                self._left_bytes, self._held_bytes = ahead, record.load_bytes - ahead
            if self._left_bytes:
                self._plan_issue(now_ns)
            else:
                self.awaits_run = True
        else:
            self.load = load + 1
            self._load_wait = 0
        self._sink.open_record(load)
        return has_copies

    def _plan_issue(self, now_ns: float) -> None:  # noqa: C901 - one call less per batch
        """Find when the next batch can be issued and arm the timer, unless the ring is full."""
        first, stages, mask = self._issued, self._stages, self._mask
        num = self._batch_copies
        if num > 1:
            left = -(-self._left_bytes // self._copy_bytes)
            if left < num:
                num = left
        room = self._ring.consumed + stages - first
        if room < num:
            if room <= 0:
                self._ring_full = True
                return
            num = room
        # The first copy goes once its stage is free and the cap allows it; the others follow at the issue rate,
        # unless the last one has to wait longer for the same two things.
        first_ns = self._batch_last_ns
        if first_ns < now_ns:
            first_ns = now_ns
        last_ns = 0.0
        last = first + num - 1
        if last >= stages:
            last_ns = self._ring.consumed_ns[(last - stages) & mask]
            at_ns = self._ring.consumed_ns[(first - stages) & mask]
            if at_ns > first_ns:
                first_ns = at_ns
        cap = self._cap
        if cap and last >= cap:
            at_ns = self._ring.landed_ns[(last - cap) & mask]
            if at_ns > last_ns:
                last_ns = at_ns
            at_ns = self._ring.landed_ns[(first - cap) & mask]
            if at_ns > first_ns:
                first_ns = at_ns
        issue_ns = self._issue_ns
        first_ns += issue_ns
        last_ns += issue_ns
        at_ns = first_ns + (num - 1) * issue_ns
        self._batch = num
        self._batch_last_ns = at_ns if at_ns > last_ns else last_ns
        self._issue_timer.arm(first_ns, now_ns)

    def _issue(self, _: simpy.Event) -> None:
        """Book the batch whose first copy is issued now."""
        now_ns = self._issue_timer.at_ns
        num, first, load, mask = self._batch, self._issued, self.load, self._mask
        num_bytes = num * self._copy_bytes
        if num_bytes > self._left_bytes:
            num_bytes = self._left_bytes
        last_ns = self._batch_last_ns
        served_ns, backlog_ns = self._memory.read(now_ns, last_ns, num_bytes)
        straggle_ns = self._straggle_ns + self._straggle_queue_share * backlog_ns
        at_ns = served_ns + self._copy_latency_ns
        port_ns = self._port_free_ns + num_bytes * self._port_ns_per_byte
        if port_ns > at_ns:
            at_ns = port_ns
        entry = (self._straggler + first * COPY_STRIDE) & (SIZE - 1)
        if num == 1:
            used_ns = at_ns + straggle_ns * self._delays[entry]
            self._ring.landed_ns[first & mask] = used_ns
        else:
            idle_ns = last_ns + self._idle_latency_ns
            if idle_ns > at_ns:
                at_ns = idle_ns
            # The last copy's own delay: those before it land earlier by as much as they are issued earlier.
            used_ns = at_ns + straggle_ns * self._delays[(entry + (num - 1) * COPY_STRIDE) & (SIZE - 1)]
            if self._cap:
                self._land(first, num, now_ns, at_ns, straggle_ns)
        self._port_free_ns = at_ns
        if self._newest_ns > self._landed_ns:
            self._landed_ns = self._newest_ns
        self._newest_ns = used_ns
        self._newest_issue_ns = last_ns
        self._issued = first + num
        self._left_bytes -= num_bytes
        self._times.landed_ns[load] = used_ns
        self._sink.take(load, first, num, used_ns, now_ns)
        if self._left_bytes:
            self._plan_issue(now_ns)
        elif self._held_bytes:
            if self._sink.is_running and self._sink.run == load:
                self.run_started(now_ns)
            else:
                self.awaits_run = True
        else:
            self.load = load + 1
            self._load_wait = 0
            self._begin_load()

    def _land(self, first: int, num: int, now_ns: float, at_ns: float, straggle_ns: float) -> None:
        """Spread the landing of a batch: its copies land apart as they were issued, or as the SM is served."""
        since_ns = max(self._port_free_ns, now_ns + self._copy_latency_ns)
        step_ns = (self._batch_last_ns - now_ns) / (num - 1)
        served_step_ns = (at_ns - since_ns) / num
        if served_step_ns < step_ns:
            step_ns = served_step_ns if served_step_ns > 0.0 else 0.0
        mask, landed_ns = self._mask, self._ring.landed_ns
        at_ns += straggle_ns
        for copy in range(first + num - 1, first - 1, -1):
            landed_ns[copy & mask] = at_ns
            at_ns -= step_ns
