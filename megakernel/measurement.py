"""What a card did with some choices: the file in which runtime and tuner meet.

The runtime writes it, a search reads it: times of every variant, interleaved, or why there is none. Records of one
campaign are complete enough to be judged, and replayed, later.
"""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import Field

from megakernel.config import Frozen
from megakernel.tiling import Choices
from megakernel.workload import Bucket


class Card(Frozen):
    """A card as its driver describes it."""

    name: str
    compute_capability: str
    num_sms: int = Field(gt=0)
    shared_memory_per_block_bytes: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    cuda: str

    @property
    def architecture(self) -> str:
        """Name of the architecture that kernels for this card are compiled for."""
        return f"sm_{self.compute_capability.replace('.', '')}a"


class Sample(Frozen):
    """Milliseconds of one variant, in the order in which they were taken."""

    name: str
    ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median."""
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """Largest minus smallest, as a share of the median."""
        return (max(self.ms) - min(self.ms)) / self.median_ms


FaultKind = Literal["illegal", "failed build", "wrong", "hung"]


class Fault(Frozen):
    """Why a variant has no time.

    `illegal`: limits or `verify` refuse it. `failed build`: the compiler or the card's memory does. `wrong`: it leaves
    other results than the variants before it. `hung`: a launch stopped, and `text` is its post-mortem.
    """

    kind: FaultKind
    text: str


class Record(Frozen):
    """One measurement, complete enough to be judged later; `choices` and `faults` are by name of the variant."""

    what: str
    date: str
    commit: str
    code: str  # fingerprint of csrc
    card: Card
    facts: dict[str, str | int | float]  # of the table: digest, bytes
    samples: tuple[Sample, ...]
    model_digest: str | None = None
    bucket: Bucket | None = None
    choices: dict[str, Choices] = Field(default_factory=dict)
    faults: dict[str, Fault] = Field(default_factory=dict)

    def median_ms(self, name: str) -> float:
        """Median of one variant."""
        return next(sample.median_ms for sample in self.samples if sample.name == name)
