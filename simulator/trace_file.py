"""Reads a timeline back from the Perfetto file that `Timeline.to_perfetto` writes.

Owns the reading of traces and every way in which a file is no trace of a plan's step: events that are malformed, tasks
that the plan does not have, tasks that are missing or there twice. Refuses to align tasks by anything but their number.
Called by `compare`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from megakernel.config import ConfigError, read_json
from megakernel.kinds import Path as TaskPath
from megakernel.timeline import TaskSpan, Timeline

Event = Mapping[str, object]


def load_timeline(path: str | Path, num_tasks: int) -> Timeline:
    """The timeline in a trace of a step of `num_tasks` tasks; ConfigError says what is wrong with the file."""
    data = read_json(path)
    events: object = data.get("traceEvents")
    if not isinstance(events, list):
        raise ConfigError(f"{path}: `traceEvents` is missing; needed: a trace that `runtime trace` or `--trace` wrote")
    runs: dict[int, Event] = {}
    others: dict[tuple[str, int], Event] = {}
    for idx, event in enumerate(cast("list[object]", events)):
        where = f"{path}: traceEvents.{idx}"
        slice_ = _slice(event, where)
        if slice_ is None:
            continue
        task = _task(slice_, num_tasks, where)
        phase = slice_.get("cat")
        if phase in {"load", "wait"}:
            others[str(phase), task] = slice_
        elif task in runs:
            raise ConfigError(f"{where}: task {task} runs twice; needed: a trace of one step")
        else:
            runs[task] = slice_
    if len(runs) != num_tasks:
        missing = next(task for task in range(num_tasks) if task not in runs)
        raise ConfigError(
            f"{path}: {len(runs)} tasks, the plan's step has {num_tasks} (task {missing} is not there); "
            "needed: a trace of this plan and bucket"
        )
    spans = [_span(task, runs[task], others, str(path)) for task in sorted(runs)]
    spans.sort(key=lambda span: (span.sm, span.run_start_ns))
    other = data.get("otherData")
    source = cast("dict[str, object]", other).get("source") if isinstance(other, dict) else None
    return Timeline(str(source or path), tuple(spans))


def begin_at_zero(timeline: Timeline) -> Timeline:
    """The same timeline, counted from its first event."""
    zero = min(min(span.load_start_ns, span.run_wait_ns) for span in timeline.spans)
    moved = (
        replace(
            span,
            load_start_ns=span.load_start_ns - zero,
            landed_ns=span.landed_ns - zero,
            run_wait_ns=span.run_wait_ns - zero,
            run_start_ns=span.run_start_ns - zero,
            end_ns=span.end_ns - zero,
        )
        for span in timeline.spans
    )
    return Timeline(timeline.source, tuple(moved))


def _slice(event: object, where: str) -> Event | None:
    """The event if it is a slice; names of tracks and other notes are passed over."""
    if not isinstance(event, dict):
        raise ConfigError(f"{where} is no object")
    slice_ = cast("dict[str, object]", event)
    return slice_ if slice_.get("ph") == "X" else None


def _task(slice_: Event, num_tasks: int, where: str) -> int:
    args = slice_.get("args")
    task = cast("dict[str, object]", args).get("task") if isinstance(args, dict) else None
    if not isinstance(task, int) or isinstance(task, bool):
        raise ConfigError(f"{where}: `args.task` is missing; needed: the task's number in every slice")
    if not 0 <= task < num_tasks:
        raise ConfigError(
            f"{where}: task {task}, the plan's step has {num_tasks}; needed: a trace of this plan and bucket"
        )
    return task


def _span(task: int, run: Event, others: Mapping[tuple[str, int], Event], path: str) -> TaskSpan:
    run_start, end = _times(run, path, task)
    wait = others.get(("wait", task))
    load = others.get(("load", task))
    run_wait = run_start if wait is None else _times(wait, path, task)[0]
    # A task without copies has no slice for them: it could load when its run turned to it.
    load_start, landed = (run_wait, run_wait) if load is None else _times(load, path, task)
    args = cast("dict[str, object]", run["args"])
    sm, layer = run.get("pid"), args.get("layer", -1)
    if not isinstance(sm, int) or not isinstance(layer, int) or sm < 0:
        raise ConfigError(f"{path}: task {task} has no SM or layer; needed: `pid` and `args.layer`, whole numbers")
    try:
        of_path = TaskPath(str(args.get("path")))
    except ValueError:
        raise ConfigError(
            f"{path}: task {task} is on the path {args.get('path')!r}; known: {', '.join(TaskPath)}"
        ) from None
    title, kind = str(run.get("name")), str(args.get("kind"))
    return TaskSpan(sm, task, title, kind, of_path, layer, load_start, landed, run_wait, run_start, end)


def _times(slice_: Event, path: str, task: int) -> tuple[float, float]:
    start, length = slice_.get("ts"), slice_.get("dur")
    numbers = [each for each in (start, length) if isinstance(each, (int, float)) and not isinstance(each, bool)]
    if len(numbers) != 2 or not all(math.isfinite(each) for each in numbers) or numbers[1] < 0:
        raise ConfigError(f"{path}: task {task} has `ts` {start!r} and `dur` {length!r}; needed: microseconds")
    return numbers[0] * 1e3, (numbers[0] + numbers[1]) * 1e3
