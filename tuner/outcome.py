"""What became of a candidate at one rung of the ladder, as a type per way it can end.

A candidate that can't run, one that is refused by the proof and one that is slow are different things; a search that
mixed them up would learn the wrong lesson. Returned by evaluators, told to the sampler by `study.py`.
"""

from dataclasses import dataclass
from enum import IntEnum
from statistics import median


class Rung(IntEnum):
    """Fidelities, cheapest first; each is some ten to a hundred times the price of the one before."""

    BOUND = 0
    FEW_LAYERS = 1
    ALL_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Illegal:
    """The chip can't run these choices."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """`verify` found the table wrong: a fault of lowering or placement, never of the choices."""

    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Predicted step time; at the first rung it is a lower bound.

    `p95_ns` is over routings; `bound_ns` what these choices can't beat, `roofline_ns` what nothing on the chip can.
    """

    rung: Rung
    expected_ns: float
    p95_ns: float
    bound_ns: float
    roofline_ns: float


Outcome = Illegal | Refused | Scored


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds on a card, one a round, beside all others of the batch."""

    ms: tuple[float, ...]

    @property
    def median_ns(self) -> float:
        """Median."""
        return median(self.ms) * 1e6


@dataclass(frozen=True, slots=True)
class Slower:
    """Timed again, and `percent` slower than the winner: the median of the rounds' ratios."""

    ms: tuple[float, ...]
    percent: float


@dataclass(frozen=True, slots=True)
class FailedBuild:
    """The compiler, or the card's memory, refused it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """It left other results than those before it, or took the process with it; its time does not count."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hung:
    """A launch stopped; the post-mortem names the first task that should have fired."""

    post_mortem: str


@dataclass(frozen=True, slots=True)
class MachineLost:
    """There was no answer from a card, which says nothing of the candidate."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """The record that is replayed does not have these choices."""


Measured = Timed | Slower | Illegal | FailedBuild | Wrong | Hung | MachineLost | Unrecorded
"""What became of a candidate on a card."""
