"""The HTML pages of the `simulator` command: one file each, which opens without a network.

Owns the data that a page of a step shows and the putting together of page, style, script and data; the drawing is the
scripts' business (`web/`). Refuses links: whatever a page needs is in it. Called by simulator/cli.py.
"""

from __future__ import annotations

import html
from importlib import resources
from typing import cast

import numpy as np

from megakernel.config import canonical_json
from megakernel.graph import TaskGraph
from simulator.compare import Comparison
from simulator.critical import Critical
from simulator.curves import curves
from simulator.exposure import Exposure
from simulator.step_run import StepRun
from simulator.trust import calibration_note
from simulator.walk import Walk, walk_of_run

SCRIPTS = ("charts.js", "timeline.js", "step.js", "study.js", "comparison.js", "main.js")


def render(page: str, title: str, data: dict[str, object]) -> str:
    """One self-contained page; `page` is the name under which web/main.js knows it."""
    text = canonical_json({"page": page, "title": title} | data).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": _asset("style.css"),
        "script": "\n".join(_asset(name) for name in SCRIPTS),
        "data": text,
    }
    before, *rest = _asset("page.html").split("@")
    # Template text and names of parts take turns: nothing inside a part is looked at again.
    return before + "".join(parts[each] if idx % 2 == 0 else each for idx, each in enumerate(rest))


def _asset(name: str) -> str:
    return (resources.files("simulator") / "web" / name).read_text(encoding="utf-8")


def step_page(run: StepRun, figures: dict[str, object], title: str) -> str:
    """The page of one simulated step beside the figures of its prediction."""
    step, chip = run.step, run.chip
    walk = walk_of_run(run)
    exposure = Exposure(walk, step.choices.ring, chip)
    found = curves(run, walk, exposure)
    bucket, ring = step.bucket, step.choices.ring
    return render(
        "step",
        title,
        {
            "about": f"Simulated: {step.model.family}, {step.model.num_layers} layers; bucket of {bucket.rows} x "
            f"{bucket.max_context_tokens} tokens; ring of {ring.stages} x {ring.copy_bytes} bytes an SM. "
            "Timeline, curves and roofline are of the first routing.",
            "note": calibration_note(chip),
            "figures": figures,
            "total_ns": walk.total_ns,
            "chip": {
                "name": chip.name,
                "datasheet_bytes_per_ns": chip.datasheet_bytes_per_ns,
                "streaming_bytes_per_ns": chip.ceiling_bytes_per_ns(step.table.num_sms),
            },
            "ring": {"bytes": ring.bytes, "in_flight_cap_bytes": ring.in_flight_cap_bytes},
            **_operators(step.graph),
            "spans": _spans(walk, step.graph),
            "chain": _chain(Critical(walk, exposure)),
            "curves": {
                "bin_ns": found.bin_ns,
                "bytes_per_ns": _rounded(found.bytes_per_ns),
                "ring_mean": _rounded(found.ring_mean),
                "ring_least": _rounded(found.ring_least),
                "ring_most": _rounded(found.ring_most),
            },
            "roofline": _roofline(run, figures),
        },
    )


def study_page(found: dict[str, object], title: str, note: str | None) -> str:
    """The page of a what-if study's answers."""
    about = (
        "Simulated. Hand choices are placed by reasoning and fitted to each bucket; a kernel per operator has their "
        "tiles, is launched from a graph and loads nothing before it starts."
    )
    return render("study", title, {"about": about, "note": note} | found)


def comparison_page(found: Comparison, graph: TaskGraph, title: str, note: str | None) -> str:
    """The page of a measured step beside the simulated one."""
    sides = {
        name: {"spans": _spans(walk, graph), "chain": _chain(critical)}
        for name, walk, critical in zip(("measured", "simulated"), found.walks, found.criticals, strict=True)
    }
    total = max(walk.total_ns for walk in found.walks)
    return render(
        "comparison", title, {"figures": found.to_json(), "note": note, "total_ns": total, **_operators(graph), **sides}
    )


def _operators(graph: TaskGraph) -> dict[str, object]:
    """The operators that spans name, and their kinds."""
    ops = [{"name": op.name, "path": op.path.value, "layer": op.layer} for op in graph.ops]
    kinds = {op.name: {"name": op.name, "path": op.path.value} for op in graph.ops}
    return {"ops": ops, "kinds": list(kinds.values())}


def _spans(walk: Walk, graph: TaskGraph) -> dict[str, object]:
    """Columns over records, whole nanoseconds; `task` counts within its operator."""
    first_task = np.array(graph.first_task)
    num_sms = int(walk.sm[-1]) + 1
    offsets = np.searchsorted(walk.sm, np.arange(num_sms + 1))
    columns = {
        "load_start": walk.load_start,
        "landed": walk.landed,
        "wait": walk.turned,
        "start": walk.run_start,
        "end": walk.end,
    }
    return {
        "offsets": offsets.tolist(),
        "op": walk.op.tolist(),
        "task": (walk.task - first_task[walk.op]).tolist(),
        **{name: np.rint(values).astype(np.int64).tolist() for name, values in columns.items()},
    }


def _chain(critical: Critical) -> list[dict[str, object]]:
    """The critical path from its last link to the first: on which record, from when to when."""
    links: list[dict[str, object]] = []
    for link in critical.chain():
        to, lengths = critical.moment(link.record, link.at), critical.lengths(link)
        links.append({"record": link.record, "from": round(to - lengths.run - lengths.copies), "to": round(to)})
    return links


def _roofline(run: StepRun, figures: dict[str, object]) -> dict[str, object]:
    """Operators with bytes of their own: arithmetic per byte, and how fast it goes while their tasks run."""
    step, cost, chip = run.step, run.lowered.cost, run.chip
    flop: dict[str, float] = {}
    for first, op in zip(step.graph.first_task, step.graph.ops, strict=True):
        flop[op.name] = flop.get(op.name, 0.0) + 2.0 * float(cost.macs[first : first + len(op.tasks)].sum())
    kinds = cast("list[dict[str, float]]", figures["kinds"])
    rows = [(str(kind["name"]), flop[str(kind["name"])], kind["load_bytes"], kind["run_ns"]) for kind in kinds]
    rows.append(("whole step", sum(flop.values()), float(cost.streamed_bytes), run.result.total_ns))
    roofs = (
        ("datasheet", chip.datasheet_bytes_per_ns),
        ("streaming rate", chip.ceiling_bytes_per_ns(step.table.num_sms)),
    )
    return {
        "kinds": [
            {"name": name, "flop_per_byte": flops / num_bytes, "gflops": flops / time_ns}
            for name, flops, num_bytes, time_ns in rows
            if num_bytes > 0.0 and flops > 0.0 and time_ns > 0.0
        ],
        "roofs": [{"name": name, "bytes_per_ns": rate} for name, rate in roofs],
    }


def _rounded(values: np.ndarray) -> list[float]:
    return np.round(values, 1).tolist()
