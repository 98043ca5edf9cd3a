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
from simulator.timer import Clock, Timer

SM_STRIDE = 0.6180339887498949
COUNTER_STRIDE = 0.7548776662466927
"""Shares of a poll's trip by which SMs, and one SM at other counters, poll later: spread evenly, and ever the same."""


class Counters:
    """The device words that arrivals raise; values only grow."""

    def __init__(self, env: Clock, chip: HardwareSpec, memory: Memory, program: Program) -> None:
        """Start with every counter at zero; only values that `program` waits for are followed."""
        costs = chip.costs
        self._env = env
        self._memory = memory
        self._queue_share = costs.handoff_queue_share
        self._serial_ns = costs.arrive_serial_ns
        self._poll_ns = costs.poll_ns
        # Measured from one SM to another, which on average polled half a trip before the news was there.
        self._idle_ns = max(costs.handoff_ns - costs.fence_ns - 0.5 * costs.poll_ns, 0.0)
        self._arrival = program.arrival
        self.waits_for_copies = program.arrival in {"release", "fence"}
        self._fence_ns = costs.fence_ns
        self._fence_later_share = costs.fence_later_share
        self._read_back_ns = costs.read_back_ns
        self._read_back_queue_share = costs.read_back_queue_share
        self._poll_queue_share = costs.poll_queue_share
        self._raised_ns = [0.0] * program.num_counters  # when the latest arrival has been counted
        self._value = [0] * program.num_counters  # arrivals sent
        self._awaited = [set[int]() for _ in range(program.num_counters)]
        for wait in sorted(program.waits, key=lambda wait: (wait.counter, wait.need)):
            self._awaited[wait.counter].add(wait.need)
        self._seen: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], list[tuple[int, Timer]]] = {}

    def ordered_ns(self, now_ns: float, in_flight_until: Callable[[float], float]) -> float:
        """When what an arrival that is begun now has to follow is over; until then its threads are held.

        A release, or a fence, waits first until the SM's copies in flight have landed, as `in_flight_until` tells. A
        result that is read back waits for its trip to L2 alone, a relaxed arrival for nothing: both leave then.
        """
        if self.waits_for_copies:
            return max(now_ns, in_flight_until(now_ns))
        if self._arrival == "read_back":
            return now_ns + self._read_back_ns + self._read_back_queue_share * self._memory.backlog_ns(now_ns)
        return now_ns

    def leaves_ns(self, now_ns: float, in_flight_until: Callable[[float], float]) -> float:
        """When a release leaves that its SM's earlier copies held until now; those issued meanwhile hold it too."""
        later_ns = in_flight_until(now_ns) - now_ns
        return now_ns + self._fence_ns + (self._fence_later_share * later_ns if later_ns > 0.0 else 0.0)

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
            key = counter, need
            Timer(self._env, lambda now_ns: self._see(key, now_ns)).arm(at_ns + self._idle_ns, now_ns)

    def is_met(self, counter: int, need: int) -> bool:
        """Whether a poll now finds the counter at `need`."""
        return need <= 0 or (counter, need) in self._seen

    def poll_ns(self, now_ns: float) -> float:
        """How long a thread takes to find that its wait is already met."""
        return self._poll_ns + 2.0 * self._poll_queue_share * self._memory.backlog_ns(now_ns)

    def when_met(self, counter: int, need: int, sm: int, timer: Timer) -> None:
        """Let `timer` fire once that SM has seen the counter at `need`; the counter must not be there yet."""
        self._waiting.setdefault((counter, need), []).append((sm, timer))

    def _see(self, key: tuple[int, int], now_ns: float) -> None:
        """Let the SMs that poll a counter see its value, each with the next poll of its own, a trip later at most."""
        self._seen.add(key)
        first = key[0] * COUNTER_STRIDE
        for sm, timer in self._waiting.pop(key, ()):
            timer.arm(now_ns + self._poll_ns * ((first + sm * SM_STRIDE) % 1.0), now_ns)
