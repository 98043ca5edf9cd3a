"""The one protocol of all measurements on a card: warmed, interleaved, repeated; medians and spreads.

Owns how variants are timed against each other and the record that a number is quoted from. Variants take turns inside
every round, so that clocks and neighbours disturb all of them alike; the order is rotated from round to round. A step
streams several gigabytes, so every launch finds L2 full of something else.
"""

from __future__ import annotations

import datetime as dt
import subprocess
from collections.abc import Callable, Mapping
from math import isnan, nan
from pathlib import Path

from megakernel.measurement import Card, Fault, Record, Sample
from runtime.gpu.compile import csrc_fingerprint
from runtime.gpu.launch import KernelStoppedError

Timed = Callable[[], float]
"""One timed run: milliseconds of a step."""

Watch = Callable[[str], object]
"""Told the name of the variant at work."""


def take(variants: Mapping[str, Timed], *, rounds: int = 7, warm_ups: int = 2) -> tuple[Sample, ...]:
    """Time all variants, interleaved; those that answered nan once are left out."""
    names = list(variants)
    for name in names:
        for _ in range(warm_ups):
            variants[name]()
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn * len(names) // max(rounds, 1)
        for name in names[shift:] + names[:shift]:
            taken[name].append(variants[name]())
    return tuple(Sample(name=name, ms=tuple(ms)) for name, ms in taken.items() if not any(map(isnan, ms)))


def tolerant(name: str, timed: Timed, faults: dict[str, Fault], watch: Watch | None = None) -> Timed:
    """`timed`, which answers nan from the first launch on that stopped, and leaves a fault."""

    def run() -> float:
        if name in faults:
            return nan
        if watch is not None:
            watch(name)
        try:
            return timed()
        except KernelStoppedError as stopped:
            faults[name] = Fault(kind="hung", text=str(stopped))
            return nan

    return run


def record(what: str, card: Card, samples: tuple[Sample, ...], **facts: str | float) -> Record:
    """A record of `samples`, dated."""
    return Record(
        what=what,
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        code=csrc_fingerprint(),
        card=card,
        facts=facts,
        samples=samples,
    )


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
