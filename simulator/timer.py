"""A SimPy environment for timers alone: events that call one action, and can be armed again after they have fired.

Owns the two liberties taken with SimPy. An actor has at most one pending wake-up of a kind, so it keeps one event
object for its whole life and no event is created per copy. And since nothing fails or is waited for but these events,
the environment fires them without SimPy's bookkeeping. Refuses a timer that is armed twice. Used by every actor.
"""

from collections.abc import Callable
from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL


class Clock(simpy.Environment):
    """Fires timers in the order of their times, and those of one time in the order in which they were armed."""

    def schedule_at(self, timer: "Timer", at_ns: float) -> None:
        """Fire `timer` at `at_ns`, which is not past."""
        heappush(self._queue, (at_ns, NORMAL, next(self._eid), timer))

    def run_timers(self) -> None:
        """Go on until no timer is armed."""
        queue = self._queue
        while queue:
            self._now, _, _, timer = heappop(queue)
            timer.callbacks = None  # pyright: ignore[reportAttributeAccessIssue] - as SimPy leaves an event that has fired
            timer.action(timer)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


class Timer(simpy.Event):
    """Calls `action` at a given time; armed again at will once it has fired."""

    env: Clock

    def __init__(self, env: Clock, action: Callable[[simpy.Event], None]) -> None:
        """Bind the action; nothing is scheduled yet."""
        super().__init__(env)
        self._ok = True
        self._value = None
        self.action = action
        self._actions = [action]
        # SimPy's annotation does not know of events that have fired.
        self.callbacks = None  # pyright: ignore[reportAttributeAccessIssue]
        self.at_ns = 0.0

    def arm(self, at_ns: float, now_ns: float) -> None:
        """Fire at `at_ns`, seen from `now_ns`; at once if that is past by a rounding error."""
        assert self.callbacks is None, "a pending timer is armed again"  # pyright: ignore[reportUnknownMemberType]
        self.callbacks = self._actions
        if at_ns < now_ns:  # noqa: PLR1730 - a comparison takes a third of the time of max()
            at_ns = now_ns
        self.at_ns = at_ns
        self.env.schedule_at(self, at_ns)
