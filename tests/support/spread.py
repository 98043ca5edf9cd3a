"""A comparison's runs, spread over processes: each has one of its own, and so a processor clock of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from time import monotonic

Run = Callable[[], object]
"""What is computed; pickled, so that a partial of a module's function it is."""


def spread(
    runs: Iterable[tuple[str, Run]], processes: int, stop_after_s: float = float("inf")
) -> Iterator[tuple[str, object]]:
    """Names and results of `runs` as they come, an exception in place of a result; begun in the order given.

    Each takes one core; none is begun once `stop_after_s` seconds have passed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    began_s, left = monotonic(), iter(runs)
    running: dict[Future[object], str] = {}
    with ProcessPoolExecutor(processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        while True:
            while len(running) < processes and monotonic() - began_s < stop_after_s:
                name, run = next(left, ("", None))
                if run is None:
                    break
                running[pool.submit(run)] = name
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                yield running.pop(future), future.result() if error is None else error
