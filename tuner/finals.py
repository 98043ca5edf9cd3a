"""The last rung: the best after all layers and the plans that always race, on a card.

Owns who is measured, that everybody is timed twice, and who wins. The first batch picks, the second, on fresh samples,
decides: the best of several noisy times flatters itself. Ratios are taken within rounds, so that what disturbs a round
disturbs both sides. A machine that is lost costs the measurement, never the search. Called by `search.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pydantic import TypeAdapter

from megakernel.config import digest
from megakernel.tiling import Choices
from tuner.journal import BucketJournal
from tuner.measure import Batch, Measurer, Stage
from tuner.outcome import MachineLost, Measured, Slower, Timed
from tuner.race import Standing
from tuner.search_config import Measuring

BATCH: TypeAdapter[Batch] = TypeAdapter(Batch)


@dataclass(frozen=True)
class Final:
    """A finalist: what became of it in the first batch, and in the second if it got there."""

    standing: Standing
    first: Measured
    confirmed: Measured | None = None

    @property
    def outcome(self) -> Measured:
        """The latest."""
        return self.first if self.confirmed is None else self.confirmed


@dataclass(frozen=True)
class Finals:
    """Finalists, the winner first; without a winner, `why` there is none, and predictions stand."""

    finals: tuple[Final, ...]
    device_s: float
    winner: Standing | None = None
    winner_ns: float | None = None
    why: str = ""
    card: str = ""

    @property
    def measured_ns(self) -> dict[Choices, float]:
        """Latest median of everybody that was timed."""
        found = {each.standing.choices: each.outcome for each in self.finals}
        return {
            choices: median(outcome.ms) * 1e6
            for choices, outcome in found.items()
            if isinstance(outcome, Timed | Slower)
        }


class Stadium:
    """Where finals are held: a measurer, its budget, and a journal that keeps what was measured."""

    def __init__(self, measurer: Measurer, how: Measuring, journal: BucketJournal) -> None:
        """Nothing is spent yet."""
        self._measurer, self._how, self._journal = measurer, how, journal
        self.device_s, self.card = 0.0, ""

    @property
    def left_s(self) -> float:
        """Device seconds left."""
        return self._how.seconds - self.device_s

    def measure(self, stage: Stage, standings: Sequence[Standing]) -> Mapping[str, Measured]:
        """Outcomes by name; those that the journal has are not measured again."""
        named = {each.name: each.choices for each in standings}
        how = self._how.model_dump(exclude={"seconds", "timeout_s", "records"})
        asked = digest([stage, self._measurer.source, how, *map(list, named.items())])
        known = self._journal.measured(asked)
        batch = BATCH.validate_python(known) if known else self._measurer.measure(stage, named, self.left_s)
        if not known and not any(isinstance(each, MachineLost) for each in batch.outcomes.values()):
            self._journal.note_measured(asked, BATCH.dump_python(batch, mode="json"))
        self.device_s += batch.device_s
        self.card = batch.card or self.card
        return batch.outcomes


def contenders(standings: Sequence[Standing], baselines: Sequence[Standing], how: Measuring) -> list[Standing]:
    """Who is measured: `baselines` and the best `how.top` of the others.

    Of those with equal predictions only the first is: what they differ in is nothing to the simulator, and a card's
    time is better spent on others.
    """
    known = [each.choices for each in baselines]
    others: dict[tuple[float, float], Standing] = {}
    for each in standings:
        if each.choices not in known:
            others.setdefault((each.score.expected_ns, each.score.p95_ns), each)
    return [*{each.choices: each for each in baselines}.values(), *list(others.values())[: how.top]]


def hold_finals(
    standings: Sequence[Standing], baselines: Sequence[Standing], how: Measuring, stadium: Stadium
) -> Finals:
    """Measure the contenders, then the best of them again."""
    racing = contenders(standings, baselines, how)
    first = stadium.measure("first", racing)
    finals = [Final(each, first[each.name]) for each in racing]
    timed = sorted((each for each in finals if isinstance(each.first, Timed)), key=_first_ns)
    failed = [each for each in finals if not isinstance(each.first, Timed)]
    spent_s = stadium.device_s
    if not timed:
        return Finals(tuple(finals), spent_s, why=f"nobody could be timed: {_say(finals[0].first)}")
    if stadium.left_s <= 0 or stadium.left_s < spent_s:
        why = f"{how.seconds:.0f} device seconds leave no time for a confirmation"
        return Finals((*timed, *failed), spent_s, why=why)
    own = {each.name for each in baselines}
    again = timed[: how.confirmed]
    again += [each for each in timed if each.standing.name in own and each not in again][:1]
    second = stadium.measure("confirmation", [each.standing for each in again])
    again = [replace(each, confirmed=second[each.standing.name]) for each in again]
    confirmed = {each.standing.name: each.confirmed for each in again if isinstance(each.confirmed, Timed)}
    rest = [each for each in timed if each.standing.name not in second]
    if not confirmed:
        why = f"nobody could be timed again: {_say(again[0].outcome)}"
        return Finals((*again, *rest, *failed), stadium.device_s, why=why)
    best = min(confirmed, key=lambda name: confirmed[name].median_ns)
    again = [_judged(each, confirmed[best]) if each.standing.name != best else each for each in again]
    again.sort(key=lambda each: (each.standing.name != best, _percent(each.outcome)))
    winner = again[0].standing
    winner_ns = confirmed[best].median_ns
    return Finals((*again, *rest, *failed), stadium.device_s, winner, winner_ns, card=stadium.card)


def paired_percent(ms: Sequence[float], winner_ms: Sequence[float]) -> float:
    """How much slower than the winner, in percent: the median over rounds of the ratio within each."""
    return 100.0 * (median(one / other for one, other in zip(ms, winner_ms, strict=False)) - 1.0)


def _judged(final: Final, winner: Timed) -> Final:
    if not isinstance(final.confirmed, Timed):
        return final
    ms = final.confirmed.ms
    return replace(final, confirmed=Slower(ms, paired_percent(ms, winner.ms)))


def _first_ns(final: Final) -> float:
    assert isinstance(final.first, Timed)
    return final.first.median_ns


def _percent(outcome: Measured) -> float:
    return outcome.percent if isinstance(outcome, Slower) else float("inf")


def _say(outcome: Measured) -> str:
    return outcome.reason if isinstance(outcome, MachineLost) else type(outcome).__name__
