"""The command `simulator`: what the model says about a program or a plan, on a chip.

Owns arguments, printing and exit codes only: bad input is one message on stderr and exit 2. Refuses to compute.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.assets import locate
from megakernel.config import ConfigError, canonical_json, check_writable, load_json, write_text_atomic
from megakernel.families import read_model
from megakernel.hardware import load_hardware
from megakernel.plan import Plan
from simulator.calibrate import EVERY, ROUNDS, chip_toml
from simulator.calibrate import calibrate as run_calibrate
from simulator.compare import both_in_perfetto
from simulator.compare import compare as run_compare
from simulator.microbench import check_card, read_measurement
from simulator.page import comparison_page, step_page, study_page
from simulator.predict import predict
from simulator.program import ProgramError
from simulator.report import calibration_report, comparison_report, prediction_report, study_report, workload_title
from simulator.request import DRAWS, check_model, choose, figures, routing_of
from simulator.routing import draw_states
from simulator.simulate import simulate
from simulator.step_run import run_step
from simulator.stream import StreamProgram, stream_records
from simulator.study import MOST_ROWS, load_study, single_point
from simulator.trace_file import load_timeline
from simulator.trust import calibration_note, check_finite, priced_with
from simulator.whatif import answers
from simulator.whatif import to_json as answers_json

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def simulator() -> None:
    """Simulate decode steps of a persistent kernel."""


@app.command()
def stream(
    program: Annotated[Path, typer.Argument(help="streaming program, JSON")],
    chip: Annotated[str, typer.Option(help="chip, TOML")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="one event per copy")] = False,
    arrival: Annotated[Arrival, typer.Option(help="what orders an arrival after its results")] = DEFAULT_ARRIVAL,
) -> None:
    """Simulate a pure streaming program with the model that prices plans."""
    spec = load_hardware(locate(chip))
    described = load_json(program, StreamProgram)
    records = stream_records(described, spec, str(program), arrival)
    try:
        result = simulate(records, spec, exact=exact)
    except ProgramError as error:
        raise ConfigError(f"{program}: {error}") from None
    ms = result.total_ns / 1e6
    if as_json:
        typer.echo(json.dumps({"ms": round(ms, 6)}))
        return
    rate = result.bytes_read / result.total_ns if result.total_ns else 0.0
    share = 100 * rate / spec.datasheet_bytes_per_ns
    typer.echo(f"{described.sms} SMs of {spec.name} read {result.bytes_read / 1e9:.3f} GB in {ms:.4f} ms")
    typer.echo(f"{rate:.0f} GB/s, {share:.1f}% of the datasheet's {spec.datasheet_bytes_per_ns:.0f} GB/s")


@app.command()
def run(
    plan: Annotated[str, typer.Argument(help="plan, JSON")],
    *,
    chip: Annotated[str | None, typer.Option(help="chip, TOML; left out: the plan's own")] = None,
    model: Annotated[str | None, typer.Option(help="config.json that the plan must be for")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="active rows; left out: all of the bucket")] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="tokens of every row, or one --context per row; left out: nominal")
    ] = None,
    zipf: Annotated[
        float | None, typer.Option(min=0.0, max=8.0, help="experts by 1/rank^ZIPF; left out: uniformly")
    ] = None,
    picks: Annotated[str | None, typer.Option(help="experts as often as this JSON file counts them")] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help=f"routings drawn; left out: {DRAWS}, or 1 for a single row")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the routings")] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="one event per copy")] = False,
    arrival: Annotated[Arrival, typer.Option(help="what orders an arrival after its results")] = DEFAULT_ARRIVAL,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="a kernel that reads its bytes and computes nothing")
    ] = False,
    trace: Annotated[str | None, typer.Option(help="write a timeline for ui.perfetto.dev (first routing)")] = None,
    report: Annotated[str | None, typer.Option(help="write an HTML page that needs no network (first routing)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
) -> None:
    """Predict a plan's step: time over routings, roofline, task kinds, hand-offs, critical path and what stops it."""
    for out in (trace, report):
        if out is not None:
            check_writable(out)
    read = load_json(locate(plan), Plan)
    if model is not None:
        check_model(read, read_model(locate(model)), model)
    spec = read.hardware if chip is None else load_hardware(locate(chip))
    spec = spec.streaming() if streaming else spec
    entry, workload = choose(read, rows, context or (), routing_of(zipf, picks, read.model))
    step = read.build(entry, spec)
    first = None
    try:
        with priced_with(spec):
            num_draws = draws or (1 if len(workload.contexts) == 1 else DRAWS)
            prediction = predict(step, spec, workload, draws=num_draws, seed=seed, exact=exact, arrival=arrival)
            check_finite(prediction, spec)
            if trace is not None or report is not None:
                state = draw_states(step.model, workload, draws=1, seed=seed)[0]
                first = run_step(step, spec, state, exact=exact, arrival=arrival)
    except ProgramError as error:
        raise ConfigError(f"{plan}: {error}") from None
    title = f"{plan} on {spec.name}: {workload_title(workload.contexts)}"
    found = figures(prediction, spec, workload)
    if first is not None and trace is not None:
        write_text_atomic(trace, first.timeline().to_perfetto())
    if first is not None and report is not None:
        write_text_atomic(report, step_page(first, found, title))
    if as_json:
        typer.echo(canonical_json(found))
    else:
        Console().print(prediction_report(prediction, title, calibration_note(spec)))


@app.command()
def whatif(
    study: Annotated[
        str | None, typer.Argument(help="study, TOML, such as configs/studies/north-mini-code.toml")
    ] = None,
    *,
    model: Annotated[str | None, typer.Option(help="in place of a study: config.json of one model")] = None,
    chip: Annotated[str, typer.Option(help="with --model: chip, TOML")] = "configs/hardware/h200.toml",
    batch: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="with --model: rows")] = 1,
    context: Annotated[int, typer.Option(min=1, help="with --model: tokens of every row")] = 8192,
    plan: Annotated[str | None, typer.Option(help="with --model: a plan to price beside the hand choices")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="any key of the study: --set draws=5, --set batches=[1,8]")
    ] = None,
    report: Annotated[str | None, typer.Option(help="write an HTML page that needs no network")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
) -> None:
    """Price models, chips, batches and contexts: a searched plan, the hand choices, a kernel per operator."""
    if report is not None:
        check_writable(report)
    if (study is None) == (model is None):
        raise ConfigError("give a study file, or --model for a single point")
    if study is not None:
        sweep = load_study(study, assignments or ())
    else:
        sweep = single_point(str(model), chip, batch, context, plan, assignments or ())
    with Console(stderr=True).status("pricing") as status:
        found = answers(sweep, lambda done: status.update(f"point {done + 1} of {sweep.num_points}"))
    if study is None and all(each.ms is None for each in found):
        raise ConfigError(f"{model}: {found[0].reason}")
    title = study or f"{model}, {chip}"
    notes = [note for each in sweep.chips if (note := calibration_note(each)) is not None]
    if report is not None:
        write_text_atomic(report, study_page(answers_json(found), title, notes[0] if notes else None))
    if as_json:
        typer.echo(canonical_json(answers_json(found)))
    else:
        Console().print(study_report(found, title, notes))


@app.command()
def compare(
    plan: Annotated[str, typer.Argument(help="plan, JSON")],
    trace: Annotated[str, typer.Argument(help="measured step, as `runtime trace` writes it")],
    *,
    chip: Annotated[str | None, typer.Option(help="chip, TOML; left out: the plan's own")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="rows that were active; left out: all of the bucket")] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="tokens of every row, or one --context per row; left out: nominal")
    ] = None,
    zipf: Annotated[float | None, typer.Option(min=0.0, max=8.0, help="experts by 1/rank^ZIPF")] = None,
    picks: Annotated[str | None, typer.Option(help="experts as often as this JSON file counts them")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the routing")] = 0,
    arrival: Annotated[Arrival, typer.Option(help="what orders an arrival after its results")] = DEFAULT_ARRIVAL,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="the kernel read its bytes and computed nothing")
    ] = False,
    perfetto: Annotated[str | None, typer.Option(help="write both timelines into one file for ui.perfetto.dev")] = None,
    report: Annotated[str | None, typer.Option(help="write an HTML page that needs no network")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
) -> None:
    """Align a measured step with the simulated one by task, and say what the gap between them is made of."""
    for out in (perfetto, report):
        if out is not None:
            check_writable(out)
    read = load_json(locate(plan), Plan)
    spec = read.hardware if chip is None else load_hardware(locate(chip))
    spec = spec.streaming() if streaming else spec
    entry, workload = choose(read, rows, context or (), routing_of(zipf, picks, read.model))
    step = read.build(entry, spec)
    measured = load_timeline(locate(trace), step.graph.num_tasks)
    try:
        with priced_with(spec):
            state = draw_states(step.model, workload, draws=1, seed=seed)[0]
            found = run_compare(run_step(step, spec, state, arrival=arrival), measured)
    except ProgramError as error:
        raise ConfigError(f"{plan}: {error}") from None
    title = f"{trace} and {plan} on {spec.name}: {workload_title(workload.contexts)}"
    if perfetto is not None:
        write_text_atomic(perfetto, both_in_perfetto(found))
    if report is not None:
        write_text_atomic(report, comparison_page(found, step.graph, title, calibration_note(spec)))
    if as_json:
        typer.echo(canonical_json(found.to_json()))
    else:
        Console().print(comparison_report(found, title, calibration_note(spec)))


@app.command()
def calibrate(
    measurement: Annotated[str, typer.Argument(help="record of `runtime microbench`, JSON")],
    *,
    chip: Annotated[str, typer.Option(help="chip to start from, TOML")] = "configs/hardware/h200.toml",
    out: Annotated[str | None, typer.Option(help="write the calibrated chip, TOML")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="of the fit")] = ROUNDS,
    every: Annotated[int, typer.Option(min=1, help="fit to every so many steps; the others are the check")] = EVERY,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
) -> None:
    """Fit a chip's costs to a card's measurements: values, 95% intervals, and where each comes from."""
    if out is not None:
        check_writable(out)
    base = load_hardware(locate(chip))
    read, points = read_measurement(locate(measurement))
    check_card(read.card, base, measurement)
    with Progress(console=Console(stderr=True), transient=True) as progress, priced_with(base):
        bar = progress.add_task("fitting", total=1.0)
        found = run_calibrate(
            base,
            read,
            points,
            Path(measurement).name,
            rounds=rounds,
            every=every,
            watch=lambda share: progress.update(bar, completed=share),
        )
    if out is not None:
        head = [
            f"{base.name}, calibrated from {Path(measurement).name} by `simulator calibrate`, starting from {chip}."
        ]
        write_text_atomic(out, chip_toml(found.chip, head))
    if as_json:
        typer.echo(canonical_json(found.to_json()))
    else:
        Console().print(calibration_report(found, measurement))


def main() -> None:
    """Run the command line; bad input is one message and exit 2."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
