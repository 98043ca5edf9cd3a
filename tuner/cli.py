"""The `tuner` command.

Owns its arguments, the live progress and the order of checks: outputs first, so that no minute is spent on a result
that can't be written. Refuses to compute: each command calls one function and shows what it returns.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from megakernel.assets import locate
from megakernel.config import ConfigError, check_writable, load_json, pretty_json, write_text_atomic
from megakernel.plan import Plan
from tuner import report
from tuner.problem import load_problem
from tuner.refresh import refresh as run_refresh
from tuner.search import plan_of
from tuner.search import search as run_search

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Search plans, and keep them up to date.")

INTERRUPTED = 130
"""Exit code of a search that was interrupted before it had a result."""

PlanPath = Annotated[str, typer.Argument(help="A plan file.")]


@app.callback()
def tuner() -> None:
    """Search the choices of a plan; show and refresh plans."""


@app.command()
def search(
    config: Annotated[str, typer.Argument(help="A search file, such as configs/search/north-mini-code-h200.toml.")],
    *,
    out: Annotated[str, typer.Option(help="The plan to write.")],
    seconds: Annotated[float | None, typer.Option(help="Budget per bucket, in place of the file's.")] = None,
    trials: Annotated[int | None, typer.Option(help="Candidates per bucket, in place of the file's budget.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of proposals and routings.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes that score candidates.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the search file: --set ladder.draws=5.")
    ] = None,
    picture: Annotated[str | None, typer.Option(help="Also write the report as a picture: .svg or .html.")] = None,
) -> None:
    """Search a plan for every bucket of CONFIG and write it to OUT; Ctrl-C ends the search and keeps the best so far.

    The result is never worse than the hand plan, the reference plan or the reference's order under the hand plan's
    cap, which always race. Exit code 0 also after Ctrl-C, once there is a plan to write; 130 before that.
    """
    _check_outputs(out, picture)
    problem = load_problem(config, [*_flags(seconds, trials, seed, jobs), *(assignments or [])])
    buckets = problem.config.buckets
    shown = report.LiveSearch(buckets, problem.config.budget)
    progress_console = Console(stderr=True)
    try:
        with Live(shown, console=progress_console, transient=True):
            results = run_search(problem, shown.update)
    except KeyboardInterrupt:
        progress_console.print("interrupted before there was a result; nothing is written", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    command = shlex.join(["tuner", *sys.argv[1:]]).encode(errors="backslashreplace").decode()
    with _undisturbed():
        write_text_atomic(out, pretty_json(plan_of(problem, results, command)))
    console = Console(record=picture is not None)
    for each in results:
        console.print(report.result(each))
    if any(each.raced.is_interrupted for each in results) or len(results) < len(buckets):
        console.print(f"interrupted: the best so far, for {len(results)} of {len(buckets)} buckets", style="yellow")
    console.print(f"wrote {out}", soft_wrap=True, markup=False)
    if picture is not None:
        is_svg = Path(picture).suffix == ".svg"
        write_text_atomic(picture, console.export_svg(title="tuner search") if is_svg else console.export_html())


@app.command()
def refresh(
    plan: PlanPath,
    *,
    out: Annotated[str | None, typer.Option(help="The plan to write; the plan itself by default.")] = None,
) -> None:
    """Lower, verify and score the same choices again, with the code as it is now, and write the new digests."""
    target = plan if out is None else out
    check_writable(target)
    with Console(stderr=True).status("reading the plan") as status:
        found = run_refresh(load_json(locate(plan), Plan), status.update)
    write_text_atomic(target, pretty_json(found.plan))
    console = Console()
    console.print(report.refreshed(found))
    console.print(f"wrote {target}", soft_wrap=True, markup=False)


@app.command()
def show(plan: PlanPath) -> None:
    """Show what a plan chooses, for which buckets, and whom it beat."""
    Console().print(report.plan(load_json(locate(plan), Plan)))


@contextmanager
def _undisturbed() -> Generator[None]:
    """Ignore Ctrl-C for a moment: a second one must not cost the result that the first one kept."""
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)


def _check_outputs(out: str, picture: str | None) -> None:
    check_writable(out)
    if picture is not None:
        if Path(picture).suffix not in (".svg", ".html"):
            raise ConfigError(f"--picture {picture}: needed a name that ends in .svg or .html")
        if Path(picture).resolve() == Path(out).resolve():
            raise ConfigError(f"--picture and --out are both {out}; needed two files")
        check_writable(picture)


def _flags(seconds: float | None, trials: int | None, seed: int | None, jobs: int | None) -> list[str]:
    """Flags as assignments; a budget given here replaces the file's as a whole."""
    flags: list[str] = []
    if seconds is not None or trials is not None:
        flags += [
            f"budget.{key}={'null' if value is None else value}"
            for key, value in (("seconds", seconds), ("trials", trials))
        ]
    for key, value in (("seed", seed), ("jobs", jobs)):
        if value is not None:
            flags.append(f"proposals.{key}={value}")
    return flags


def main() -> None:
    """Run the command; bad input becomes one message and exit code 2."""
    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
