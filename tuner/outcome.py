"""What became of a candidate at one rung of the ladder, as a type per way it can end.

A candidate that can't run, one that is refused by the proof and one that is slow are different things; a search that
mixed them up would learn the wrong lesson. Returned by evaluators, told to the sampler by `study.py`.
"""

from dataclasses import dataclass
from enum import IntEnum


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


def few_layers_ns(outcome: Outcome) -> float | None:
    """Time of a candidate that was scored on few layers."""
    return outcome.expected_ns if isinstance(outcome, Scored) and outcome.rung is Rung.FEW_LAYERS else None
