"""Runs an evaluator over many choices, in this process or in several; what a journal knows is not run again.

Owns the processes, which never outlive their parent. Outcomes come back in the order of the choices, so that a search
does not depend on how many processes share its work. Used by `race.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from types import TracebackType
from typing import Protocol, Self

from megakernel.tiling import Choices
from tuner.evaluate import Evaluator
from tuner.journal import BucketJournal
from tuner.outcome import Outcome, Rung


class Workers:
    """A context in which choices are evaluated by `jobs` processes; one job is this process itself."""

    def __init__(self, jobs: int) -> None:
        """Start the processes, if there are to be several."""
        self.jobs = jobs
        self._pool = _start(jobs) if jobs > 1 else None

    def evaluate(self, evaluator: Evaluator, choices: Sequence[Choices], rung: Rung) -> Iterator[Outcome]:
        """Outcomes of all `choices` at `rung`, one by one, so that an interrupt loses only those not yet there."""
        if self._pool is None:
            for each in choices:
                yield evaluator.evaluate(each, rung)
            return
        for future in [self._pool.submit(evaluator.evaluate, each, rung) for each in choices]:
            yield future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            # Not waited for: after an interrupt the plan is written first, and what still runs is dropped. Nothing may
            # keep the command from ending once it has been.
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()


class AnyWorkers(Protocol):
    """Whoever scores for a search."""

    @property
    def jobs(self) -> int:
        """How many candidates are scored at a time."""
        ...

    def evaluate(self, evaluator: Evaluator, choices: Sequence[Choices], rung: Rung) -> Iterator[Outcome]:
        """Outcomes of all `choices` at `rung`, in their order."""
        ...


class NotedWorkers:
    """Workers of one evaluator whose outcomes a journal keeps."""

    def __init__(self, workers: AnyWorkers, evaluator: Evaluator, journal: BucketJournal) -> None:
        """Ask `journal` first, `workers` for what it does not know."""
        self._workers, self._evaluator, self._journal = workers, evaluator, journal
        self.jobs = workers.jobs

    def evaluate(self, choices: Sequence[Choices], rung: Rung) -> Iterator[Outcome]:
        """Outcomes of all `choices`, none of which is named twice, at `rung`."""
        missing = [each for each in choices if self._journal.outcome(each, rung) is None]
        new = self._workers.evaluate(self._evaluator, missing, rung)
        for each in choices:
            outcome = self._journal.outcome(each, rung)
            if outcome is None:
                outcome = next(new)
                self._journal.note(each, rung, outcome)
            yield outcome

    def evaluate_here(self, choices: Choices, rung: Rung) -> Outcome:
        """Outcome of one candidate, scored in this process: sending it to another would cost more."""
        outcome = self._journal.outcome(choices, rung)
        if outcome is None:
            outcome = self._evaluator.evaluate(choices, rung)
            self._journal.note(choices, rung, outcome)
        return outcome


def _leave_with_parent() -> None:
    """End this process as soon as its parent has, however that ended: nobody waits for its task any more."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _start(jobs: int) -> ProcessPoolExecutor:
    """Processes that never see Ctrl-C, which a terminal sends to all: it is the search's to answer."""
    # Forking a process that draws live progress in a thread of its own would not be safe.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_leave_with_parent)
    # Blocked, which they inherit from their first moment on, and not ignored: one that comes now is answered below.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(jobs):  # each starts one, as long as none is idle yet
            pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool
