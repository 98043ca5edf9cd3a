"""How the `tuner` command shows a search, its result and a plan.

Owns tables and pictures for people only; the machine's form of a result is the plan. Called by tuner/cli.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from time import monotonic

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megakernel.plan import Plan, PlanEntry
from megakernel.tiling import Choices
from megakernel.workload import Bucket
from tuner import plot
from tuner.finals import Finals
from tuner.insight import Insight, shown
from tuner.outcome import FailedBuild, Hung, Illegal, MachineLost, Measured, Slower, Timed, Unrecorded, Wrong
from tuner.problem import HAND
from tuner.race import COUNTED, Standing
from tuner.refresh import Refreshed
from tuner.search import BucketResult
from tuner.search_config import Budget
from tuner.study import Progress

PHASES = {
    "heats": "trying roundings that suit all buckets",
    "baselines": "scoring the plans that always race",
    "search": "searching",
    "finals": "scoring the finalists on all layers",
}

SHOWN_VALUES = 5
"""Values of a choice that are shown, best first."""

SHOWN_SPREAD = 1.0005
"""A p95 over routings this much above the mean has a column of its own."""


class LiveSearch:
    """The search while it runs; its clock goes on between the search's own reports."""

    def __init__(self, buckets: Sequence[Bucket], budget: Budget) -> None:
        """Show nothing until the search reports."""
        self._buckets = buckets
        self._budget = budget
        self._latest: tuple[int, Progress, float] | None = None

    def update(self, idx: int, progress: Progress) -> None:
        """Take a report on bucket number `idx`."""
        self._latest = idx, progress, monotonic()

    def __rich__(self) -> RenderableType:
        """Render the latest report."""
        if self._latest is None:
            return Text("reading the problem")
        idx, progress, at_s = self._latest
        bucket, budget = self._buckets[idx], self._budget
        elapsed_s = progress.elapsed_s + monotonic() - at_s
        done = [0.0]
        of: list[str] = []
        if budget.seconds is not None:
            done.append(elapsed_s / budget.seconds)
            of.append(f"{elapsed_s:.0f} of {budget.seconds:.0f} s")
        if budget.trials is not None:
            done.append(progress.num_trials / budget.trials)
            of.append(f"{progress.num_trials} of {budget.trials} candidates")
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=1.0, completed=min(max(done), 1.0), width=40), ", ".join(of))
        which = f"bucket {idx + 1} of {len(self._buckets)}, " if len(self._buckets) > 1 else ""
        title = Text(f"{which}{bucket_title(bucket)}: {PHASES[progress.phase]}", style="bold")
        lines: list[RenderableType] = [title, bar]
        if progress.standings:
            lines.append(Text(_leader(progress.standings, bucket)))
        lines.append(Text(counts_line(progress.num_trials, progress.counts), style="dim"))
        return Group(*lines)


def _leader(standings: tuple[Standing, ...], bucket: Bucket) -> str:
    best = standings[0]
    hand = next((each for each in standings if each.name == HAND), best)
    ms, gain = best.score.expected_ns / 1e6, 100.0 * (hand.score.expected_ns / best.score.expected_ns - 1.0)
    share = 100.0 * best.score.roofline_ns / best.score.expected_ns
    speed = bucket.rows * 1e3 / ms
    found = f"{ms:.3f} ms, {speed:.0f} tok/s, {share:.1f}% of roofline"
    return f"{best.name} leads: {found}, {gain:.1f}% faster than the hand plan"


def counts_line(num_trials: int, counts: Counter[str]) -> str:
    """What became of the candidates, in one line."""
    parts = [f"{counts[what]} {what}" for what in COUNTED if counts[what]]
    return f"{num_trials} candidates" + (": " + ", ".join(parts) if parts else "")


def bucket_title(bucket: Bucket) -> str:
    """A bucket, for people."""
    rows = "1 row" if bucket.rows == 1 else f"{bucket.rows} rows"
    return f"{rows} of {bucket.nominal_context_tokens} tokens (up to {bucket.max_context_tokens})"


def result(found: BucketResult) -> RenderableType:
    """A bucket's result: who came where, what the winner chose, and the way there."""
    raced = found.raced
    best = found.best
    summary = f"{counts_line(len(raced.attempts), raced.counts)}; {raced.elapsed_s:.0f} s"
    lines = plot.history(raced.attempts, {each.name: each.score.expected_ns for each in found.baselines})
    hand = next(each for each in found.baselines if each.name == HAND)
    parts: list[RenderableType] = [_standings(found), Text(summary, style="dim")]
    if found.finals is not None:
        parts += [Text(), _finals(found.finals)]
    if best.choices != hand.choices:
        parts.append(differences(hand.choices, best.choices, ("hand plan", "best")))
    parts.append(Text("\n".join(lines)))
    return Panel(Group(*parts), title=bucket_title(found.bucket), title_align="left")


def _standings(found: BucketResult) -> Table:
    best = found.best
    others = [each for each in found.baselines if each.choices != best.choices]
    varies = any(each.score.p95_ns > SHOWN_SPREAD * each.score.expected_ns for each in (best, *others))
    table = Table(box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    for name in ("ms", *(["p95 ms"] if varies else []), "tok/s", "% of roofline", "above the bound"):
        table.add_column(name, justify="right")
    for name, ns, p95_ns, style in (
        (f"best: {best.name}", best.score.expected_ns, best.score.p95_ns, "bold green"),
        *((each.name, each.score.expected_ns, each.score.p95_ns, "") for each in others),
        ("bound of any plan", found.floor_ns, found.floor_ns, "dim"),
    ):
        speed, share = found.bucket.rows * 1e9 / ns, 100.0 * best.score.roofline_ns / ns
        above = 100.0 * (ns / found.floor_ns - 1.0)
        times = [f"{each / 1e6:.3f}" for each in (ns, *([p95_ns] if varies else []))]
        table.add_row(*_plain(name, *times, f"{speed:.1f}", f"{share:.1f}", f"{above:.1f}%"), style=style)
    return table


def _finals(finals: Finals) -> RenderableType:
    """What the card said of everybody, the winner first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("on the card", "predicted ms", "first ms", "again ms", ""):
        table.add_column(name, justify="right" if "ms" in name else "left", no_wrap=name == "on the card")
    for each in finals.finals:
        first, again = each.first, each.confirmed
        times = [
            "" if not isinstance(outcome, Timed | Slower) else f"{median(outcome.ms):.3f}" for outcome in (first, again)
        ]
        is_winner = each.standing == finals.winner
        said = "wins" if is_winner else _said(each.outcome)
        row = _plain(each.standing.name, f"{each.standing.score.expected_ns / 1e6:.3f}", *times, said)
        table.add_row(*row, style="bold green" if is_winner else "")
    spent = f"{finals.card or 'no card'}; {finals.device_s:.0f} device seconds"
    note = [Text(f"predictions stand: {finals.why}", style="yellow")] if finals.why else []
    if finals.winner is not None:
        won_ns = finals.winner.score.expected_ns
        unknown = [each for each in finals.finals if isinstance(each.outcome, Unrecorded)]
        hopeful = sum(each.standing.score.expected_ns < won_ns for each in unknown)
        if hopeful:
            note.append(Text(f"{hopeful} predicted faster, which no card has timed: --request FILE, or --measure"))
    return Group(table, Text(spent, style="dim"), *note)


def _said(outcome: Measured) -> str:
    """Why somebody did not win, in a line."""
    match outcome:
        case Timed():
            return "not among the best"
        case Slower(percent=percent):
            return f"{percent:+.1f}%"
        case Illegal(reasons):
            text = f"illegal: {reasons[0]}"
        case FailedBuild(reason):
            text = f"failed build: {reason}"
        case Wrong(reason):
            text = f"wrong: {reason}"
        case Hung(post_mortem):
            text = f"hung: {post_mortem}"
        case MachineLost(reason):
            text = f"machine lost: {reason}"
        case Unrecorded():
            text = "not timed"
    return text.splitlines()[0]


def differences(one: Choices, other: Choices, names: tuple[str, str]) -> Table:
    """Choices in which two plans differ, side by side."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("choice", no_wrap=True)
    for name in names:
        table.add_column(name)
    first, second = dict(_flat(one)), dict(_flat(other))
    for key, value in first.items():
        if second[key] != value:
            table.add_row(*_plain(key, value, second[key]))
    return table


def _flat(choices: Choices) -> Iterable[tuple[str, str]]:
    for group, part in choices:
        for key, value in part:
            yield f"{group}.{key}", shown(value)


def plan(one: Plan, insights: Sequence[Insight]) -> RenderableType:
    """A plan: what it is for, its choices, whom they beat and what each was worth, by the insight of each entry."""
    state = "stale: run `tuner refresh`" if one.stale else "up to date"
    how = one.provenance
    head = f"{one.model.family}, {one.model.num_layers} layers, on {one.hardware.name}; {state}"
    lines: list[RenderableType] = [
        Text(head, style="bold"),
        Text(f"{how.command}\n{how.candidates} candidates, seed {how.seed}", style="dim"),
    ]
    return Group(*lines, *(_entry(*each) for each in zip(one.entries, insights, strict=True)))


def _entry(entry: PlanEntry, insight: Insight) -> RenderableType:
    choices = Table(box=None, pad_edge=False, header_style="bold")
    choices.add_column("choice", no_wrap=True)
    choices.add_column("value")
    for key, value in _flat(entry.choices):
        choices.add_row(*_plain(key, value))
    parts: list[RenderableType] = [choices, Text(), _leaderboard(entry)]
    if insight.worths:
        parts += [Text(), _worths(insight)]
    return Panel(Group(*parts), title=bucket_title(entry.bucket), title_align="left")


def _leaderboard(entry: PlanEntry) -> Table:
    """Who came where, and how far above the bound of any plan; of this plan's choices alone, if that is all it has."""
    measures = any(each.measured_ns is not None for each in (entry, *entry.losers))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "ms", "tok/s", "slower", "above the bound", *(["measured ms", "slower"] if measures else [])):
        table.add_column(name, justify="left" if not name else "right", no_wrap=not name)
    best_ns, floor_ns = entry.predicted_ns, entry.floor_ns or entry.bound_ns
    scored = [
        ("this plan", best_ns, entry.measured_ns),
        *((each.name, each.predicted_ns, each.measured_ns) for each in entry.losers),
    ]
    bounds = [("bound of these choices", entry.bound_ns, None), ("bound of any plan", entry.floor_ns, None)]
    for name, ns, measured_ns in [*scored, *bounds]:
        if ns is not None:
            slower = "" if name.startswith("bound") else _above(ns, best_ns)
            cells = [name, f"{ns / 1e6:.3f}", f"{entry.bucket.rows * 1e9 / ns:.1f}", slower, _above(ns, floor_ns)]
            if measures:
                cells += ["" if measured_ns is None else f"{measured_ns / 1e6:.3f}"]
                cells += [_above(measured_ns, entry.measured_ns)]
            table.add_row(*_plain(*cells))
    return table


def _above(ns: float | None, of_ns: float | None) -> str:
    return "" if ns is None or of_ns is None else f"{100.0 * (ns / of_ns - 1.0):.1f}%"


def _worths(insight: Insight) -> Table:
    """The best time with each value of a choice, those choices first that matter most."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("choice", no_wrap=True)
    if insight.importances:
        table.add_column("matters", justify="right")
    table.add_column(f"best with each value, above the best of {insight.num_candidates} ({insight.source})")
    best_ns = min(worths[0].best_ns for worths in insight.worths.values())

    def matters(name: str) -> tuple[float, float]:
        """What Optuna says and, where it says nothing, what the second best value costs."""
        return insight.importances.get(name, 0.0), insight.worths[name][1].best_ns

    for name in sorted(insight.worths, key=matters, reverse=True):
        worths = insight.worths[name]
        each = [f"{worth.value} +{100.0 * (worth.best_ns / best_ns - 1.0):.1f}%" for worth in worths[:SHOWN_VALUES]]
        more = [f"{len(worths) - SHOWN_VALUES} more"] if len(worths) > SHOWN_VALUES else []
        share = [f"{100.0 * insight.importances.get(name, 0.0):.0f}%"] if insight.importances else []
        table.add_row(*_plain(name, *share, ", ".join([*each, *more])))
    return table


def _plain(*cells: str) -> list[Text]:
    """Cells as they are: a name in a file is no markup."""
    return [Text(each) for each in cells]


def refreshed(found: Refreshed) -> RenderableType:
    """What a refresh changed."""
    table = Table(box=None, pad_edge=False)
    for name in ("bucket", "ms before", "ms now", "table"):
        table.add_column(name)
    notes: list[RenderableType] = []
    for change in found.changes:
        before, after = change.before.predicted_ns, change.after.predicted_ns
        same = change.before.table_digest == change.after.table_digest
        times = [f"{ns / 1e6:.3f}" if ns is not None else "unknown" for ns in (before, after)]
        table.add_row(*_plain(bucket_title(change.after.bucket), *times, "as before" if same else "new"))
        notes += [Text(f"{name} can't run any more and is dropped from the losers") for name in change.dropped]
        notes += [
            Text(f"{each.name} is now predicted faster, {each.predicted_ns / 1e6:.3f} ms: search again", style="yellow")
            for each in change.faster_losers
        ]
    return Group(table, *notes)
