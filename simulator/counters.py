"""Counters: who has arrived, who waits for how many, and how long the news takes.

Owns the price of a hand-off. Between a record's end and the waiting threads' next instruction lie a few trips
through the memory system, one after another: the release waits for the SM's earlier requests, the arrival travels
to the counter behind the copies on their way, the poll's answer travels back, from L2 and past them. That is
why a hand-off under load costs several times an idle one, and why an uncapped ring hides nothing: its hand-off
waits until the prefetch has landed. The arriving threads are held by their release, and a wait that was met long ago
still costs a poll's way there and back. Arrivals on one word are served one after another. Refuses to know what is
waited for. Called by `sm.py`.
"""

# ruff: noqa: PLR1730 - a comparison takes a third of the time of max(), for every record

from collections.abc import Callable

from megakernel.hardware import HardwareSpec
from simulator.memory import Memory
from simulator.program import Program
from simulator.timer import Action, Clock, Timer


class Counters:
    """The device words that arrivals raise; values only grow."""

    def __init__(self, env: Clock, chip: HardwareSpec, memory: Memory, program: Program) -> None:
        """Start with every counter at zero; only values that `program` waits for are followed."""
        costs = chip.costs
        self._env = env
        self._memory = memory
        self._queue_share = costs.handoff_queue_share
        self._serial_ns = costs.arrive_serial_ns
        self._idle_ns = costs.handoff_ns - costs.fence_ns
        self._poll_ns = costs.poll_ns
        self._arrival = program.arrival
        self._fence_ns = costs.fence_ns
        self._fence_queue_share = costs.fence_queue_share
        self._read_back_ns = costs.read_back_ns
        self._read_back_queue_share = costs.read_back_queue_share
        self._poll_queue_share = costs.poll_queue_share
        self._raised_ns = [0.0] * program.num_counters  # when the latest arrival has been counted
        self._value = [0] * program.num_counters  # arrivals sent
        self._awaited = [set[int]() for _ in range(program.num_counters)]
        for wait in sorted(program.waits, key=lambda wait: (wait.counter, wait.need)):
            self._awaited[wait.counter].add(wait.need)
        self._seen: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], list[Action]] = {}

    def leaves_ns(self, now_ns: float, in_flight_until: Callable[[float], float]) -> float:
        """When an arrival that is begun now leaves its SM, and lets go of the threads that send it.

        A release, or a fence, waits until the SM's copies in flight have landed, as `in_flight_until` tells. A result
        that is read back waits for its trip to L2 alone, a relaxed arrival for nothing.
        """
        if self._arrival in {"release", "fence"}:
            landed_ns = max(now_ns, in_flight_until(now_ns))
            return landed_ns + self._fence_ns + self._fence_queue_share * self._memory.backlog_ns(now_ns)
        if self._arrival == "read_back":
            return now_ns + self._read_back_ns + self._read_back_queue_share * self._memory.backlog_ns(now_ns)
        return now_ns

    def arrive(self, counter: int, now_ns: float) -> None:
        """Let an arrival leave its SM now: it travels to the counter, where arrivals are served one after another."""
        at_ns = now_ns + self._queue_share * self._memory.backlog_ns(now_ns)
        need = self._value[counter] + 1
        if need > 1:
            after_ns = self._raised_ns[counter] + self._serial_ns
            if after_ns > at_ns:
                at_ns = after_ns
        self._raised_ns[counter] = at_ns
        self._value[counter] = need
        if need in self._awaited[counter]:
            Timer(self._env, lambda now_ns: self._answer((counter, need), now_ns)).arm(at_ns, now_ns)

    def is_met(self, counter: int, need: int) -> bool:
        """Whether a poll now finds the counter at `need`."""
        return need <= 0 or (counter, need) in self._seen

    def poll_ns(self, now_ns: float) -> float:
        """How long a thread takes to find that its wait is already met."""
        return self._poll_ns + 2.0 * self._poll_queue_share * self._memory.backlog_ns(now_ns)

    def when_met(self, counter: int, need: int, action: Action) -> None:
        """Call `action` once the SM has seen the counter at `need`; the counter must not be there yet."""
        self._waiting.setdefault((counter, need), []).append(action)

    def _answer(self, key: tuple[int, int], now_ns: float) -> None:
        """Let the counter's value travel to the SMs that poll it."""
        Timer(self._env, lambda now_ns: self._see(key, now_ns)).arm(now_ns + self._idle_ns, now_ns)

    def _see(self, key: tuple[int, int], now_ns: float) -> None:
        self._seen.add(key)
        for action in self._waiting.pop(key, ()):
            action(now_ns)
