"""How the `simulator` command shows a prediction.

Owns tables for people only; the machine's form is `Prediction.to_json`. Names come from files, so every cell is plain
text, never markup. Called by simulator/cli.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.bounds import Bounds
from simulator.breakdown import Breakdown
from simulator.calibrate import Calibrated
from simulator.compare import Comparison
from simulator.prediction import Prediction
from simulator.whatif import Answer

_WORST_CELLS = 5


def prediction_report(prediction: Prediction, title: str, note: str | None = None) -> RenderableType:
    """Everything about one prediction; `title` says of what, `note` what to beware of."""
    breakdown = prediction.breakdown
    return Group(
        Text(title, style="bold"),
        *([] if note is None else [Text(note, style="yellow")]),
        _figures(prediction),
        Text(),
        _bounds(prediction.bounds, prediction.total_ns),
        Text(),
        _kinds(breakdown),
        Text(),
        _hand_offs(breakdown),
        Text(),
        _critical_path(breakdown),
        Text(),
        _idle(breakdown),
        Text(
            "times of kinds, hand-offs and idle memory are means over the SMs; the critical path is one chain",
            style="dim",
        ),
        Text(),
        Text.assemble(("stopped by ", "bold"), prediction.stopped_by),
    )


def calibration_report(found: Calibrated, title: str) -> RenderableType:
    """Fitted constants with their intervals, and how well times are met that were fitted and that were not."""
    table = _table("constant", "value", "95% from", "to", "")
    for name, value in found.measured.items():
        table.add_row(name, f"{value:.4g}", "", "", "measured")
    for each in found.fitted.constants:
        note = "" if each.is_known else "not told: left as it was"
        table.add_row(each.name, f"{each.value:.4g}", f"{each.low:.3g}", f"{each.high:.3g}", note)
    unseen = [abs(each) for each in found.unseen]
    lines = [
        f"streams {found.rate_bytes_per_ns:.0f} GB/s; {len(found.fitted.errors)} fitted: {found.fitted.mape:.1%} mean"
    ]
    if unseen:
        lines.append(f"{len(unseen)} not seen: {sum(unseen) / len(unseen):.1%} mean, {max(unseen):.1%} at worst")
    return Group(Text(title, style="bold"), table, *map(Text, lines))


def study_report(found: Sequence[Answer], title: str, notes: Iterable[str]) -> RenderableType:
    """All answers of a study, one table for each model, chip and routing."""
    parts: list[RenderableType] = [Text(title, style="bold"), *(Text(note, style="yellow") for note in notes)]
    for (model, chip, routing), answers in groupby(found, lambda each: (each.model, each.chip, each.routing)):
        table = _table("rows", "context", "scheme", "ms", "p95 ms", "tok/s", "% of roofline", "bound ms")
        reasons: dict[str, None] = {}
        for each in answers:
            figures = [f"{each.batch}", f"{each.context}", each.scheme]
            if each.ms is None or each.p95_ms is None or each.bound_ms is None:
                reasons[f"{each.scheme}, {each.batch} x {each.context}: {each.reason}"] = None
                figures += ["-"] * 5
            else:
                times = [f"{each.ms:.4f}", f"{each.p95_ms:.4f}" if each.routings > 1 else ""]
                share = f"{each.percent_of_roofline:.1f}"
                figures += [*times, f"{each.tokens_per_s:,.0f}", share, f"{each.bound_ms:.4f}"]
            _add(table, *figures)
        head = Text(f"{model} on {chip}, routing {routing}", style="bold")
        parts += [Text(), head, table, *(Text(reason, style="dim") for reason in reasons)]
    return Group(*parts)


def comparison_report(found: Comparison, title: str, note: str | None) -> RenderableType:
    """A measured step beside the simulated one."""
    gap, simulated_ns = found.gap, found.simulated.total_ns
    head = f"measured {_ms(found.measured.total_ns)} ms, simulated {_ms(simulated_ns)} ms"
    parts = {
        "duration: runs": gap.duration_ns,
        "wait: after the last arrival": gap.wait_ns,
        "order: other tasks came last": gap.order_ns,
        "contention: copies": gap.contention_ns,
        "together": gap.total_ns,
    }
    table = _table("task kind", "tasks", "run us", "copies us", "wait us", "moved")
    for kind in found.kinds:
        pairs = (
            (kind.measured_run_ns, kind.simulated_run_ns),
            (kind.measured_copies_ns, kind.simulated_copies_ns),
            (kind.measured_wait_ns, kind.simulated_wait_ns),
        )
        cells = (f"{measured / 1e3:.2f} / {simulated / 1e3:.2f}" for measured, simulated in pairs)
        _add(table, kind.name, f"{kind.tasks}", *cells, f"{kind.moved}")
    return Group(
        Text(title, style="bold"),
        *([] if note is None else [Text(note, style="yellow")]),
        Text(head),
        Text(),
        _shares("measured less simulated", parts, simulated_ns),
        Text(),
        table,
        Text("means of a task, measured / simulated; moved: tasks on another SM than simulated", style="dim"),
    )


def _figures(prediction: Prediction) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    num_draws = len(prediction.draws_ns)
    step = f"{_ms(prediction.total_ns)} ms"
    if num_draws > 1:
        step += f", p95 {_ms(prediction.p95_ns)} ms, of n = {num_draws} routings"
    elif prediction.rows == 1:
        step += ", whatever the routing: one row always hits as many experts"
    else:
        step += ", of one routing"
    _add(table, "step", step)
    _add(table, "tokens", f"{prediction.tokens_per_s:,.0f} a second")
    _add(table, "roofline", f"{prediction.percent_of_roofline:.1f}% of the datasheet's")
    return table


def _bounds(bounds: Bounds, total_ns: float) -> Table:
    table = _table("bound", "ms", "step above")
    rows = (
        ("datasheet roofline", bounds.roofline_ns),
        ("bytes at the streaming rate", bounds.bytes_ns),
        ("critical path", bounds.critical_path_ns),
        ("busiest SM", bounds.sm_load_ns),
    )
    for name, bound_ns in rows:
        if bound_ns:
            _add(table, name, _ms(bound_ns), _percent(total_ns - bound_ns, bound_ns))
    return table


def _kinds(breakdown: Breakdown) -> Table:
    table = _table("task kind", "tasks", "MB", "running us", "of step", "waiting us", "mean slack us")
    for kind in breakdown.kinds:
        _add(
            table,
            kind.name,
            f"{kind.tasks:.0f}",
            f"{kind.load_bytes / 1e6:.0f}",
            _us(kind.run_ns),
            _percent(kind.run_ns, breakdown.total_ns),
            _us(kind.wait_ns),
            _us(kind.slack_ns / kind.tasks if kind.tasks else 0.0),
        )
    return table


def _hand_offs(breakdown: Breakdown) -> Table:
    table = _table("hand-off", "phase", "waited us", "exposed us", "of step", "critical us", "on path")
    for off in breakdown.hand_offs:
        _add(
            table,
            f"{off.source} -> {off.waiter}",
            off.phase,
            _us(off.waited_ns),
            _us(off.exposed_ns),
            _percent(off.exposed_ns, breakdown.total_ns),
            _us(off.critical_ns),
            f"{off.on_path:.0f}" if off.on_path else "",
        )
    return table


def _critical_path(breakdown: Breakdown) -> Table:
    path = breakdown.critical
    title = f"critical path: {path.tasks:.0f} tasks, {path.hand_offs:.0f} hand-offs"
    parts = {
        "running, all copies there": path.run_ns,
        "waiting for copies": path.copies_ns,
        "hand-offs between tasks": path.hand_off_ns,
        "from an SM's task to its next": path.turn_ns,
    }
    return _shares(title, parts, breakdown.total_ns)


def _idle(breakdown: Breakdown) -> Table:
    idle = breakdown.idle
    parts = {
        "exposed by hand-offs": idle.hand_offs_ns,
        "first copies' latency": idle.start_ns,
        "SMs that finished early": idle.imbalance_ns,
        "after the last copy": idle.end_ns,
        "latency and uneven service (less than 0: caught up)": idle.service_ns,
        "together": breakdown.memory_idle_ns,
    }
    return _shares("idle memory", parts, breakdown.total_ns)


def _shares(title: str, parts: dict[str, float], whole_ns: float) -> Table:
    table = _table(title, "us", "of step")
    for name, part_ns in parts.items():
        _add(table, name, _us(part_ns), _percent(part_ns, whole_ns))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for idx, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if idx == 0 else "right", no_wrap=idx == 0)
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:z.4f}"


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:z.1f}"


def _percent(part: float, whole: float) -> str:
    return f"{100.0 * part / whole:z.1f}%"


def workload_title(contexts: Iterable[int]) -> str:
    """`8 rows of 8192 tokens` or `2 rows of 100 to 8192 tokens`."""
    lengths = sorted(contexts)
    tokens = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
    return f"{len(lengths)} row{'s' if len(lengths) > 1 else ''} of {tokens} tokens"
