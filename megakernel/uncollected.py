"""Work without the garbage collector: building, proving and simulating a table make many objects and few cycles.

Owns the pause. What is made is freed by its reference counts all the same; looking for cycles in it, again and again as
it grows, is up to a tenth of a candidate's time. Used by `build.py`, `verify` and the simulator.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Generator[None]:
    """Pause the collector of the process for a block or, as a decorator, for a function; leave it as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
