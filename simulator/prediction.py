"""What a step is predicted to cost, and what stops it from costing less.

Owns the figures of a prediction and their JSON form. Refuses to compute times: `predict` fills it. Read by the reports
of the simulator and of the tuner.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from simulator.bounds import Bounds
from simulator.breakdown import Breakdown

AT_A_BOUND_PERCENT = 3.0
"""A step within this of its highest bound is stopped by that bound: less is inside the simulator's own error."""


@dataclass(frozen=True)
class Prediction:
    """One step of `rows` rows: times in nanoseconds, means over the routings drawn."""

    total_ns: float
    p95_ns: float
    draws_ns: tuple[float, ...]
    rows: int
    bounds: Bounds
    breakdown: Breakdown

    @property
    def tokens_per_s(self) -> float:
        """One token a row and step."""
        return self.rows * 1e9 / self.total_ns

    @property
    def roofline_ns(self) -> float:
        """Bytes that the step must read, over the datasheet's bandwidth."""
        return self.bounds.roofline_ns

    @property
    def percent_of_roofline(self) -> float:
        """Roofline over time."""
        return 100.0 * self.roofline_ns / self.total_ns

    @property
    def stopped_by(self) -> str:
        """What stops the step from being faster, in words: a bound that it is at, or what most of the idle time is."""
        above_ns = self.total_ns - self.bounds.lower_ns
        if above_ns <= self.bounds.lower_ns * AT_A_BOUND_PERCENT / 100.0:
            return f"the {self.bounds.binding} bound: the step is within {AT_A_BOUND_PERCENT:g}% of it"
        idle = self.breakdown.idle
        ways = {
            "hand-offs": idle.hand_offs_ns,
            "unequal SMs": idle.imbalance_ns,
            "the step's end": idle.end_ns,
            "latency and uneven service": idle.start_ns + idle.service_ns,
        }
        worst = max(ways, key=lambda name: ways[name])
        found = [f"{off.source} -> {off.waiter}" for off in self.breakdown.hand_offs if off.exposed_ns > 0.0]
        most = ", most of all in " + " and ".join(dict.fromkeys(found[:2])) if worst == "hand-offs" and found else ""
        above = f"the step is {100.0 * above_ns / self.bounds.lower_ns:.0f}% above the {self.bounds.binding} bound"
        return f"{worst}: {100.0 * ways[worst] / self.total_ns:.0f}% of the step{most}; {above}"

    def to_json(self) -> dict[str, object]:
        """Plain data; units are in the names."""
        return {
            "ms": self.total_ns / 1e6,
            "p95_ms": self.p95_ns / 1e6,
            "draws_ms": [each / 1e6 for each in self.draws_ns],
            "rows": self.rows,
            "tokens_per_s": self.tokens_per_s,
            "percent_of_roofline": self.percent_of_roofline,
            "memory_busy_ns": self.breakdown.memory_busy_ns,
            "memory_idle_ns": self.breakdown.memory_idle_ns,
            "idle": asdict(self.breakdown.idle),
            "critical_path": asdict(self.breakdown.critical),
            "bounds": asdict(self.bounds) | {"binding": self.bounds.binding},
            "stopped_by": self.stopped_by,
            "kinds": [asdict(kind) for kind in self.breakdown.kinds],
            "hand_offs": [asdict(off) for off in self.breakdown.hand_offs],
        }
