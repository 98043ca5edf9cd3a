"""How the `simulator` command shows a prediction.

Owns tables for people only; the machine's form is `Prediction.to_json`. Called by simulator/cli.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.bounds import Bounds
from simulator.breakdown import Breakdown
from simulator.prediction import Prediction

_MOST_HAND_OFFS = 10


def prediction_report(prediction: Prediction, title: str) -> RenderableType:
    """Everything about one prediction; `title` says of what."""
    breakdown = prediction.breakdown
    return Group(
        Text(title, style="bold"),
        _figures(prediction),
        Text(),
        _bounds(prediction.bounds, prediction.total_ns),
        Text(),
        _kinds(breakdown),
        Text(),
        _hand_offs(breakdown),
        Text(),
        Text.assemble(("stopped by ", "bold"), prediction.stopped_by),
    )


def _figures(prediction: Prediction) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    step = f"{_ms(prediction.total_ns)} ms"
    if len(prediction.draws_ns) > 1:
        step += f", p95 {_ms(prediction.p95_ns)} ms over {len(prediction.draws_ns)} routings"
    table.add_row("step", step)
    table.add_row("tokens", f"{prediction.tokens_per_s:,.0f} a second")
    table.add_row("roofline", f"{prediction.percent_of_roofline:.1f}% of the datasheet's")
    idle = prediction.breakdown.memory_idle_ns
    table.add_row("memory", f"idle {_us(idle)} us, {_percent(idle, prediction.total_ns)} of the step")
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
            table.add_row(name, _ms(bound_ns), _percent(total_ns - bound_ns, bound_ns))
    return table


def _kinds(breakdown: Breakdown) -> Table:
    table = _table("task kind", "tasks", "MB", "running us", "of step", "waiting us")
    for kind in breakdown.kinds:
        share = _percent(kind.run_ns, breakdown.total_ns)
        table.add_row(
            kind.name, f"{kind.tasks:.0f}", f"{kind.load_bytes / 1e6:.0f}", _us(kind.run_ns), share, _us(kind.wait_ns)
        )
    return table


def _hand_offs(breakdown: Breakdown) -> Table:
    table = _table("hand-off", "phase", "waited us", "exposed us", "of step")
    for off in breakdown.hand_offs[:_MOST_HAND_OFFS]:
        share = _percent(off.exposed_ns, breakdown.total_ns)
        table.add_row(f"{off.source} -> {off.waiter}", off.phase, _us(off.waited_ns), _us(off.exposed_ns), share)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for idx, column in enumerate(columns):
        table.add_column(column, justify="left" if idx == 0 else "right")
    return table


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.4f}"


def _us(time_ns: float) -> str:
    return f"{time_ns / 1e3:.1f}"


def _percent(part: float, whole: float) -> str:
    return f"{100.0 * part / whole:.1f}%"


def workload_title(contexts: Iterable[int]) -> str:
    """`8 rows of 8192 tokens` or `2 rows of 100 to 8192 tokens`."""
    lengths = sorted(contexts)
    tokens = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
    return f"{len(lengths)} row{'s' if len(lengths) > 1 else ''} of {tokens} tokens"
