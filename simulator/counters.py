"""Counters: who has arrived, who waits for how many, and how long the news takes.

Owns the price of a hand-off. Between a record's end and the waiting threads' next instruction lie a few trips
through the memory system, one after another (the release waits for the SM's earlier requests, the arrival travels
to the counter, the poll's answer travels back), and each of them queues behind the copies on their way. That is
why a hand-off under load costs several times an idle one, and why an uncapped ring hides nothing: its hand-off
waits until the prefetch has landed. Arrivals on one word are served one after another. Refuses to know what is
waited for. Called by `sm.py`.
"""

from collections.abc import Callable

import simpy

from megakernel.hardware import HardwareSpec
from simulator.memory import Memory
from simulator.timer import Timer

TRIPS = 3  # release, arrival, answer to the poll


class Counters:
    """The device words that arrivals raise; values only grow."""

    def __init__(self, env: simpy.Environment, chip: HardwareSpec, memory: Memory, num_counters: int) -> None:
        """Start with every counter at zero."""
        costs = chip.costs
        self._env = env
        self._memory = memory
        self._queue_share = costs.handoff_queue_share
        self._serial_ns = costs.arrive_serial_ns
        self._idle_ns = costs.handoff_ns
        self._poll_ns = costs.poll_ns
        self._poll_queue_share = costs.poll_queue_share
        self._raised_ns: list[list[float]] = [[] for _ in range(num_counters)]
        self._seen: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def arrive(self, counter: int) -> None:
        """Send one arrival now."""
        raised = self._raised_ns[counter]
        at_ns = self._trip_ns()
        if raised:
            at_ns = max(at_ns, raised[-1] + self._serial_ns)
        raised.append(at_ns)
        key = (counter, len(raised))
        if key in self._waiting:
            self._travel(key, at_ns, TRIPS - 1)

    def is_met(self, counter: int, need: int) -> bool:
        """Whether a poll now finds the counter at `need`: the news of it has reached the SMs."""
        key = (counter, need)
        if need <= 0 or key in self._seen:
            return True
        raised = self._raised_ns[counter]
        if len(raised) < need or key in self._waiting:
            return False
        # Nobody waited for exactly this value, so its trips were not followed; an idle hand-off is near enough.
        return raised[need - 1] + self._idle_ns <= self._env.now

    def poll_ns(self) -> float:
        """How long it takes now to find that a wait is already met."""
        return self._poll_ns + self._poll_queue_share * self._memory.backlog_ns(self._env.now)

    def when_met(self, counter: int, need: int, action: Callable[[], None]) -> None:
        """Call `action` once the SM has seen the counter at `need`; the counter must not be there yet."""
        key = (counter, need)
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(action)
            return
        self._waiting[key] = [action]
        raised = self._raised_ns[counter]
        if len(raised) >= need:
            self._travel(key, max(raised[need - 1], self._env.now), TRIPS - 1)

    def _trip_ns(self) -> float:
        """When a trip that starts now ends."""
        now_ns = self._env.now
        return now_ns + self._queue_share * self._memory.backlog_ns(now_ns)

    def _travel(self, key: tuple[int, int], at_ns: float, trips: int) -> None:
        """Make the trips that are left at `at_ns`, then wake whoever waits."""
        if trips:
            Timer(self._env, lambda: self._travel(key, self._trip_ns(), trips - 1)).arm(at_ns)
        else:
            Timer(self._env, lambda: self._see(key)).arm(at_ns + self._idle_ns)

    def _see(self, key: tuple[int, int]) -> None:
        self._seen.add(key)
        for action in self._waiting.pop(key):
            action()
