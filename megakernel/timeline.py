"""What ran where and when: one type, whether simulated or traced on a device, and its Perfetto form.

Times are nanoseconds since the step began. Phases have the names of the record's phases in kernel and simulator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from megakernel.kinds import Path


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """One task on one SM: when its copies were issued and landed, when its run waited, started and ended."""

    sm: int
    task: int
    title: str
    kind: str
    path: Path
    layer: int
    load_start_ns: float
    landed_ns: float
    run_wait_ns: float
    run_start_ns: float
    end_ns: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one step, in order of SM and start; `source` says whether it was simulated or measured."""

    source: str
    spans: tuple[TaskSpan, ...]

    @property
    def total_ns(self) -> float:
        """End of the last task."""
        return max((span.end_ns for span in self.spans), default=0.0)

    def to_perfetto(self) -> str:
        """Chrome trace JSON, for ui.perfetto.dev: one process per SM, a track for its copies and one for its runs."""
        events: list[dict[str, object]] = []
        for sm in sorted({span.sm for span in self.spans}):
            events.append(_name("process_name", sm, 0, f"SM {sm}"))
            events.append(_name("thread_name", sm, 0, "load"))
            events.append(_name("thread_name", sm, 1, "run"))
        for span in self.spans:
            if span.landed_ns > span.load_start_ns:
                events.append(_slice(span, "load", span.load_start_ns, span.landed_ns))
            if span.run_start_ns > span.run_wait_ns:
                events.append(_slice(span, "wait", span.run_wait_ns, span.run_start_ns))
            events.append(_slice(span, "run", span.run_start_ns, span.end_ns))
        other = {"source": self.source, "total_ns": self.total_ns}
        return json.dumps({"displayTimeUnit": "ns", "otherData": other, "traceEvents": events})


def _name(what: str, sm: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": sm, "tid": thread, "args": {"name": name}}


def _slice(span: TaskSpan, phase: str, start_ns: float, end_ns: float) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.title if phase == "run" else f"{phase} {span.title}",
        "cat": span.path.value if phase == "run" else phase,
        "pid": span.sm,
        "tid": 0 if phase == "load" else 1,
        "ts": start_ns / 1e3,  # Chrome traces count in microseconds
        "dur": (end_ns - start_ns) / 1e3,
        "args": {"task": span.task, "kind": span.kind, "path": span.path.value, "layer": span.layer},
    }
