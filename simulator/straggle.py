"""How unevenly copies are served: a fixed table of exponential delays, looked up by SM and copy number.

Owns the only randomness of the simulator, drawn once from a fixed seed, so that equal input gives equal output
and exact and fast mode draw from the same table. Refuses to change a mean: callers scale it. Used by `sm.py`.
"""

from functools import cache
from random import Random

SIZE = 4096  # a power of two, so that a mask picks the entry
SM_STRIDE = 1013
COPY_STRIDE = 17


@cache
def delays() -> tuple[float, ...]:
    """Exponential delays of mean one."""
    draw = Random(2026)
    return tuple(draw.expovariate(1.0) for _ in range(SIZE))
