"""A SimPy environment for timers alone: events that call one action, and can be armed again after they have fired.

Owns the two liberties taken with SimPy. An actor has at most one pending wake-up of a kind, so it keeps one event
object for its whole life, whose action it may change, and no event is created per copy. And since nothing fails or is
waited for but these events, the environment fires them without SimPy's bookkeeping. Refuses a timer that is armed
twice. Used by every actor.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import ClassVar

import simpy

Action = Callable[[float], float | None]
"""What a timer does when it fires, told the time; it may return when the timer fires next, which is not past."""


class Clock(simpy.Environment):
    """Fires timers in the order of their times, and those of one time in the order in which they were armed."""

    def __init__(self) -> None:
        """Nothing is armed."""
        super().__init__()
        self.queue: list[tuple[float, int, Timer]] = []
        self.numbers = self._eid  # of the timers armed so far

    def run_timers(self) -> None:
        """Go on until no timer is armed."""
        queue, numbers, pending = self.queue, self.numbers, Timer.pending
        while queue:
            # The entry stays, ahead of all that its action adds, since one replacement is cheaper than two changes.
            now_ns, _, timer = queue[0]
            timer.callbacks = None  # pyright: ignore[reportAttributeAccessIssue] - as SimPy leaves an event that has fired
            again_ns = timer.action(now_ns)
            if again_ns is None:
                heappop(queue)
            else:
                timer.callbacks = pending
                heapreplace(queue, (again_ns, next(numbers), timer))


class Timer(simpy.Event):
    """Calls `action` at a given time; armed again at will once it has fired."""

    env: Clock
    pending: ClassVar[list[Callable[[simpy.Event], None]]] = []
    """Callbacks of every timer that is armed."""

    def __init__(self, env: Clock, action: Action) -> None:
        """Bind the action; nothing is scheduled yet."""
        # All that SimPy's own constructor would do, without the list.
        self.env = env
        self._ok = True
        self._value = None
        self.action = action
        # SimPy's annotation does not know of events that have fired.
        self.callbacks = None  # pyright: ignore[reportAttributeAccessIssue]

    def arm(self, at_ns: float, now_ns: float) -> None:
        """Fire at `at_ns`, seen from `now_ns`; at once if that is past by a rounding error."""
        assert self.callbacks is None, "a pending timer is armed again"  # pyright: ignore[reportUnknownMemberType]
        self.callbacks = self.pending
        env = self.env
        if at_ns < now_ns:  # noqa: PLR1730 - a comparison takes a third of the time of max()
            at_ns = now_ns
        heappush(env.queue, (at_ns, next(env.numbers), self))
