"""The race of one bucket: every candidate's outcome so far, who leads, and who climbs the ladder.

Owns the ladder, as the search file sets it up. A candidate first meets the limits and the closed-form bound; one whose
bound is already above the leader can't win and goes no further. The others are screened, on few layers as a rule; who
leads there clearly is scored on all layers, verified, so that at any moment there is a proven result to keep. Nothing
is scored twice at a rung. Refuses to propose: `study.py` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from time import monotonic

from megakernel.config import ConfigError
from megakernel.tiling import Choices
from tuner.outcome import Illegal, Outcome, Refused, Rung, Scored
from tuner.problem import Baseline
from tuner.search_config import Ladder
from tuner.workers import NotedWorkers

SEEN, ILLEGAL, REFUSED = "seen before", "illegal", "refused by verify"
BOUNDED, SCREENED, ALL = "bound above the leader", "screened", "scored on all layers"
COUNTED = (SEEN, ILLEGAL, BOUNDED, SCREENED, ALL, REFUSED)
"""What a race counts, in the order in which a candidate climbs."""


@dataclass(frozen=True)
class Standing:
    """A candidate scored on all layers."""

    name: str
    choices: Choices
    score: Scored


class Race:
    """Outcomes of all candidates; `counts` says what became of them."""

    def __init__(
        self, workers: NotedWorkers, ladder: Ladder | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        """Nobody has started; `clock` is the search's, in seconds."""
        self._workers = workers
        self._ladder = ladder or Ladder()
        self._clock = clock
        self._screen = Rung[self._ladder.screen.upper()]
        self._names: dict[Choices, str] = {}
        self._early: dict[Choices, Outcome] = {}  # at the bound or, for those that pass it, on few layers
        self._standings: dict[Choices, Standing] = {}
        self._leader_ns = self._proven_ns = inf  # both as screened
        self._busy_s = 0.0  # of all processes, on all layers
        self._proves, self._proofs = True, 0
        self.counts: Counter[str] = Counter()

    @property
    def standings(self) -> tuple[Standing, ...]:
        """Candidates scored on all layers, best first; of equals the one that came first."""
        return tuple(sorted(self._standings.values(), key=lambda each: self.rank_ns(each.score)))

    def rank_ns(self, score: Scored) -> float:
        """The time that ranks: expected or p95 over routings."""
        return score.expected_ns if self._ladder.rank_by == "expected" else score.p95_ns

    def screened_ns(self, outcome: Outcome) -> float | None:
        """The time that ranks a candidate which got further than its bound."""
        if not isinstance(outcome, Scored) or outcome.rung is Rung.BOUND:
            return None
        return self.rank_ns(outcome)

    @property
    def leader_ns(self) -> float:
        """The best time as screened, whether it was proven or not."""
        return min((ns for each in self._early.values() if (ns := self.screened_ns(each)) is not None), default=inf)

    def knows(self, choices: Choices) -> bool:
        """Whether a candidate with these choices was here before."""
        return choices in self._early

    def enter_baselines(self, baselines: Sequence[Baseline], *, prove: bool = True) -> None:
        """Screen the plans that always race and, unless only a heat is run, prove them; ConfigError if one can't run.

        A heat is a race that nobody wins.
        """
        for each in baselines:
            self._names.setdefault(each.choices, each.name)
        choices = list(self._names)
        self._early |= zip(choices, self._workers.evaluate(choices, self._screen), strict=True)
        self._proves = prove
        if prove:
            self._finish(choices)
        for each in choices:
            outcome = self._early[each]
            if not isinstance(outcome, Scored):
                listed = "".join(f"\n  {fault}" for fault in _faults(outcome))
                raise ConfigError(f"the {self._names[each]} can't race:{listed}")
            self._leader_ns = self._proven_ns = min(self._leader_ns, self.rank_ns(outcome))

    def enter(self, named: Mapping[str, Choices]) -> list[Outcome]:
        """Let candidates climb as far as they deserve; what became of each before the last rung."""
        new: dict[Choices, str] = {}
        for name, choices in named.items():
            if choices not in self._early:
                new.setdefault(choices, name)
        self.counts[SEEN] += len(named) - len(new)
        self._names |= new
        hopeful = [each for each in new if self._has_hope(each)]
        for choices, outcome in zip(hopeful, self._workers.evaluate(hopeful, self._screen), strict=True):
            self._early[choices] = outcome
            self.counts[SCREENED] += 1
        self._promote(hopeful)
        return [self._early[choices] for choices in named.values()]

    def enter_finals(self, finalists: int) -> None:
        """Score the best `finalists` after few layers on all layers, those that aren't yet."""
        best = self._best_first(list(self._early))[:finalists]
        self._finish([choices for choices in best if choices not in self._standings])

    def finals_s(self, finalists: int) -> float:
        """How long `enter_finals` would take, judging by those that were scored on all layers so far."""
        each_s = self._busy_s / max(len(self._standings), 1)
        return each_s * ceil(finalists / self._workers.jobs)

    def _has_hope(self, choices: Choices) -> bool:
        """Whether limits and bound let a new candidate pass."""
        outcome = self._workers.evaluate_here(choices, Rung.BOUND)
        self._early[choices] = outcome
        if not isinstance(outcome, Scored):
            self.counts[ILLEGAL] += 1
        elif self._ladder.bound and outcome.expected_ns >= self._leader_ns:
            self.counts[BOUNDED] += 1
        else:
            return True
        return False

    def _promote(self, candidates: Sequence[Choices]) -> None:
        """Let the best of a batch lead, and prove it on all layers if it leads by enough."""
        for best in self._best_first(candidates)[:1]:
            best_ns = self.screened_ns(self._early[best])
            if best_ns is None or best_ns >= self._leader_ns:
                return
            may_prove = self._proves and self._proofs < self._ladder.proofs
            if may_prove and best_ns <= self._proven_ns * (1.0 - self._ladder.lead_percent / 100.0):
                self._proofs += 1
                if self._finish([best]):
                    return
                self._proven_ns = best_ns
            self._leader_ns = best_ns

    def _best_first(self, candidates: Sequence[Choices]) -> list[Choices]:
        """Those of `candidates` that were screened, best first."""
        found = {choices: self.screened_ns(self._early[choices]) for choices in candidates}
        scored = [(ns, choices) for choices, ns in found.items() if ns is not None]
        return [choices for _, choices in sorted(scored, key=lambda pair: pair[0])]

    def _finish(self, candidates: Sequence[Choices]) -> list[Choices]:
        """Score candidates on all layers; those that were refused there."""
        started_s = self._clock()
        refused: list[Choices] = []
        for choices, outcome in zip(candidates, self._workers.evaluate(candidates, Rung.ALL_LAYERS), strict=True):
            if isinstance(outcome, Scored):
                self._standings[choices] = Standing(self._names[choices], choices, outcome)
                self.counts[ALL] += 1
            else:
                self._early[choices] = outcome
                self.counts[REFUSED] += 1
                refused.append(choices)
        self._busy_s += (self._clock() - started_s) * min(self._workers.jobs, len(candidates))
        return refused


def _faults(outcome: Outcome) -> tuple[str, ...]:
    match outcome:
        case Illegal(reasons):
            return reasons
        case Refused(findings):
            return findings
        case Scored():
            return ()
