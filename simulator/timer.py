"""A SimPy event that can be armed again after it has fired.

Owns the one liberty taken with SimPy: an actor has at most one pending wake-up, so it keeps one event object
for its whole life and no event is created per copy. Refuses to be armed twice. Used by `sm.py` and `counters.py`.
"""

from collections.abc import Callable

import simpy
from simpy.events import NORMAL


class Timer(simpy.Event):
    """Calls `action` at a given time; armed again at will once it has fired."""

    def __init__(self, env: simpy.Environment, action: Callable[[], None]) -> None:
        """Bind the action; nothing is scheduled yet."""
        super().__init__(env)
        self._ok = True
        self._value = None
        self._callbacks = [lambda _event: action()]
        self.callbacks = None
        self.armed_ns = -1.0

    def arm(self, at_ns: float) -> None:
        """Fire at `at_ns`, which must not lie in the past."""
        assert self.callbacks is None, "a pending timer is armed again"
        self.callbacks = self._callbacks
        self.armed_ns = at_ns
        self.env.schedule(self, NORMAL, max(0.0, at_ns - self.env.now))
