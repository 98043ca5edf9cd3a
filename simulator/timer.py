"""A SimPy event that can be armed again after it has fired.

Owns the one liberty taken with SimPy: an actor has at most one pending wake-up of a kind, so it keeps one event
object for its whole life and no event is created per copy. Refuses to be armed twice. Used by `sm.py` and
`counters.py`.
"""

from collections.abc import Callable

import simpy
from simpy.events import NORMAL


class Timer(simpy.Event):
    """Calls `action` at a given time; armed again at will once it has fired."""

    def __init__(self, env: simpy.Environment, action: Callable[[simpy.Event], None]) -> None:
        """Bind the action; nothing is scheduled yet."""
        super().__init__(env)
        self._ok = True
        self._value = None
        self._actions = [action]
        # As SimPy leaves an event that has fired; its annotation does not know of that either.
        self.callbacks = None  # pyright: ignore[reportAttributeAccessIssue]
        self.at_ns = 0.0

    def arm(self, at_ns: float, now_ns: float) -> None:
        """Fire at `at_ns`, seen from `now_ns`; at once if that is past by a rounding error."""
        assert self.callbacks is None, "a pending timer is armed again"  # pyright: ignore[reportUnknownMemberType]
        self.callbacks = self._actions
        self.at_ns = at_ns
        self.env.schedule(self, NORMAL, at_ns - now_ns if at_ns > now_ns else 0.0)
