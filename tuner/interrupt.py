"""What Ctrl-C and SIGTERM mean to a search: it ends, and keeps the best so far.

Owns the signals' handlers while a search runs and while its result is written. What was interrupted answers with
KeyboardInterrupt, as Python has it. Called by the `tuner` command.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import inf
from time import monotonic
from types import FrameType

BOTH = (signal.SIGINT, signal.SIGTERM)

SAME_S = 1.0
"""Signals this close to each other are one interrupt: `timeout` sends two, and so do impatient hands."""


@contextmanager
def interruptible() -> Generator[Callable[[], None]]:
    """Answer SIGTERM as Ctrl-C: workers are ended and the best so far is kept.

    What it yields raises once more what was raised and swallowed: NumPy drops whatever comes of looking up an attribute
    of an enumeration, which it does for every comparison with one. A signal that whoever started us ignores, as shells
    do for commands in the background, stays ignored.
    """
    raised_s = -inf

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal raised_s
        if monotonic() - raised_s > SAME_S:
            raised_s = monotonic()
            raise KeyboardInterrupt

    def check() -> None:
        if raised_s > -inf:
            raise KeyboardInterrupt

    asked = [each for each in BOTH if signal.getsignal(each) is not signal.SIG_IGN]
    answers = {each: signal.signal(each, interrupt) for each in asked}
    try:
        yield check
    finally:
        for each, answer in answers.items():
            signal.signal(each, answer)


@contextmanager
def undisturbed() -> Generator[None]:
    """Ignore both for a moment: a second one must not cost the result that the first one kept."""
    answers = {each: signal.signal(each, signal.SIG_IGN) for each in BOTH}
    try:
        yield
    finally:
        for each, answer in answers.items():
            signal.signal(each, answer)
