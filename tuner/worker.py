"""Scores what a search on some machine puts into a queue, until that search ends.

Owns one item at a time, and the thread that says it is alive. Refuses to propose. Called by `tuner worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from time import sleep

from megakernel.workload import Bucket
from tuner.evaluate import Evaluator
from tuner.outcome import Outcome
from tuner.queue import BEAT_S, POLL_S, Item, WorkQueue, no_answers

EvaluatorFor = Callable[[Bucket], Evaluator]


def work(queue: WorkQueue, evaluator_for: EvaluatorFor, watch: Callable[[int, Item], None]) -> int:
    """Score items until the search ends; how many. `watch` is told of each, with the number before it."""
    done = 0
    while True:
        taken = queue.take()
        if taken is not None:
            trial_id, item = taken
            watch(done, item)
            done += queue.finish(trial_id, _score(queue, trial_id, item, evaluator_for(item.bucket)))
        elif queue.has_ended:
            return done
        else:
            sleep(POLL_S)


def _score(queue: WorkQueue, trial_id: int, item: Item, evaluator: Evaluator) -> Outcome:
    """The outcome of an item, while a thread counts."""
    is_done = Event()

    def count() -> None:
        beats = 0
        while not is_done.wait(BEAT_S):
            beats += 1
            with suppress(*no_answers()):  # the answer itself will say so, or find the storage back
                queue.beat(trial_id, beats)

    thread = Thread(target=count, daemon=True)
    thread.start()
    try:
        return evaluator.evaluate(item.choices, item.rung)
    finally:
        is_done.set()
        thread.join()
