"""The command `simulator`: what the model says about a program or a plan, on a chip.

Owns arguments, printing and exit codes only: bad input is one message on stderr and exit 2. Refuses to compute.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megakernel.assets import locate
from megakernel.config import ConfigError, canonical_json, check_writable, load_json, write_text_atomic
from megakernel.families import read_model
from megakernel.hardware import load_hardware
from megakernel.plan import Plan
from megakernel.workload import Routing
from simulator.predict import predict
from simulator.program import ProgramError
from simulator.report import prediction_report, workload_title
from simulator.request import check_model, choose
from simulator.routing import draw_states
from simulator.simulate import simulate
from simulator.step_run import run_step
from simulator.stream import StreamProgram, stream_records

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
) -> None:
    """Simulate a pure streaming program with the model that prices plans."""
    spec = load_hardware(locate(chip))
    described = load_json(program, StreamProgram)
    records = stream_records(described, spec, str(program))
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
    draws: Annotated[int, typer.Option(min=1, help="routings drawn")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="of the routings")] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="one event per copy")] = False,
    trace: Annotated[str | None, typer.Option(help="write a timeline for ui.perfetto.dev (first routing)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON line")] = False,
) -> None:
    """Predict a plan's step: time, roofline, task kinds, hand-offs, bounds and what stops it."""
    if trace is not None:
        check_writable(trace)
    read = load_json(locate(plan), Plan)
    if model is not None:
        check_model(read, read_model(locate(model)), model)
    spec = read.hardware if chip is None else load_hardware(locate(chip))
    routing = Routing() if zipf is None else Routing(kind="zipf", exponent=zipf)
    entry, workload = choose(read, rows, context or (), routing)
    step = read.build(entry, spec)
    try:
        prediction = predict(step, spec, workload, draws=draws, seed=seed, exact=exact)
        if trace is not None:
            state = draw_states(step.model, workload, draws=1, seed=seed)[0]
            write_text_atomic(trace, run_step(step, spec, state, exact=exact).timeline().to_perfetto())
    except ProgramError as error:
        raise ConfigError(f"{plan}: {error}") from None
    if as_json:
        typer.echo(canonical_json({"chip": spec.name, "contexts": workload.contexts} | prediction.to_json()))
    else:
        title = f"{plan} on {spec.name}: {workload_title(workload.contexts)}"
        Console().print(prediction_report(prediction, title))


def main() -> None:
    """Run the command line; bad input is one message and exit 2."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
