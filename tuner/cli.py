"""The `tuner` command.

Owns its arguments, the live progress and the order of checks: outputs first, so that no minute is spent on a result
that can't be written. Refuses to compute: each command calls one function and shows what it returns.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Generator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from optuna.exceptions import ExperimentalWarning
from rich.console import Console
from rich.live import Live

from megakernel.assets import locate
from megakernel.config import ConfigError, check_writable, load_json, pretty_json, write_text_atomic
from megakernel.plan import Plan
from megakernel.workload import Bucket
from tuner import insight, report
from tuner.export import choices_toml, entry_of
from tuner.interrupt import interruptible, undisturbed
from tuner.journal import identity_of, open_journal
from tuner.measure import measurers
from tuner.problem import Problem, load_problem
from tuner.queue import LEAST_LOST_AFTER_S, RemoteWorkers, WorkQueue, answering, open_storage, serve
from tuner.refresh import refresh as run_refresh
from tuner.request import all_candidates, request_toml
from tuner.search import BucketResult, contest_toml, plan_of, simulator_evaluator
from tuner.search import search as run_search
from tuner.study import Ended, Progress
from tuner.worker import work

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Search plans, and keep them up to date.")

INTERRUPTED = 130
"""Exit code of a search that was interrupted before it had a result."""

WORKER_LOST = 1
"""Exit code of a search that lost one of its processes, with or without a result."""

PlanPath = Annotated[str, typer.Argument(help="A plan file.")]


@app.callback()
def tuner() -> None:
    """Search the choices of a plan; show, export and refresh plans."""


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
    journal: Annotated[str | None, typer.Option(help="Optuna journal of the search; OUT.journal by default.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what the journal knows.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Let a card decide among the best: see ladder.measured.")
    ] = False,
    replay: Annotated[
        str | None, typer.Option(help="Let a record decide, as `runtime measure --tolerant` left it.")
    ] = None,
    contest: Annotated[
        str | None, typer.Option("--request", help="Also write who would be timed, for `runtime measure --tolerant`.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Leave the scoring to workers that meet here: grpc://HOST:PORT or a database.")
    ] = None,
    lost_after: Annotated[
        float, typer.Option(min=LEAST_LOST_AFTER_S, help="Seconds of silence after which a worker is given up.")
    ] = 60.0,
) -> None:
    """Search a plan for every bucket of CONFIG and write it to OUT; Ctrl-C ends the search and keeps the best so far.

    The result is never worse than the hand plan, the reference plan or the reference's order under the hand plan's
    cap, which always race. With --measure the best are timed on a card, beside those plans; files of what was asked
    and answered stay in OUT.measured. A card that is lost leaves the predictions to decide. Without --measure a
    record decides, if the search file names one (ladder.measured.records) or --replay does; --request writes whom a
    card should be asked about next. However a search ended, the same command goes on from its journal; a larger
    budget is no other search. Exit code 0 also after Ctrl-C or SIGTERM, once there is a plan to write; 130 before
    that; 1 when a worker was lost.
    """
    kept = _journal_path(out, journal)
    _check_outputs(picture, out=out, journal=kept, request=contest)
    problem = load_problem(config, [*_flags(seconds, trials, seed, jobs), *(assignments or [])])
    if contest is not None:
        _only_bucket(problem)
    measurer_for = measurers(problem, f"{out}.measured", replay, measure=measure)
    jobs_here = problem.config.proposals.jobs
    remote = None if storage is None else RemoteWorkers(_queue(problem, storage), jobs_here, lost_after)
    buckets = problem.config.buckets
    shown = report.LiveSearch(buckets, problem.config.budget)
    progress_console = Console(stderr=True)
    opened = nullcontext() if kept is None else open_journal(kept, problem, fresh=fresh)
    try:
        with _disk_told(kept), answering(storage), opened as record, interruptible() as check:
            if record is not None and record.num_trials:
                progress_console.print(
                    f"going on from {record.num_trials} candidates in {kept}", soft_wrap=True, markup=False
                )

            def watch(idx: int, progress: Progress) -> None:
                check()
                shown.update(idx, progress)

            with Live(shown, console=progress_console, transient=True):
                results = run_search(problem, watch, journal=record, measurer_for=measurer_for, remote=remote)
    except KeyboardInterrupt:
        progress_console.print("interrupted before there was a result; nothing is written", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenExecutor:
        progress_console.print("a worker was lost before there was a result; nothing is written", soft_wrap=True)
        raise typer.Exit(WORKER_LOST) from None
    command = shlex.join(["tuner", *sys.argv[1:]]).encode(errors="backslashreplace").decode()
    with undisturbed():
        write_text_atomic(out, pretty_json(plan_of(problem, results, command)))
        if contest is not None:
            write_text_atomic(contest, contest_toml(problem, results[0], Path(contest).parent))
    _show(results, f"of {len(buckets)} buckets" + ("" if kept is None else "; the same command goes on"), picture)
    for path in (out, contest, picture):
        if path is not None:
            Console().print(f"wrote {path}", soft_wrap=True, markup=False)
    if results[-1].raced.ended is Ended.WORKER_LOST:
        raise typer.Exit(WORKER_LOST)


@contextmanager
def _disk_told(journal: str | None) -> Generator[None]:
    """One message for a disk that is full by now, or a folder that is gone."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the search had to stop: {error.filename or journal}: {error.strerror}; make room there, and the same "
            "command goes on from its journal"
        ) from None


def _show(results: Sequence[BucketResult], of_all: str, picture: str | None) -> None:
    """Print results, and draw them; `of_all` ends the sentence that says how many there are, if not all."""
    console = Console(record=picture is not None)
    for each in results:
        console.print(report.result(each))
    ended = results[-1].raced.ended
    if ended is not Ended.COMPLETE:
        so_far = f"{ended.value}: the best so far, for {len(results)} {of_all}"
        console.print(so_far, style="yellow", soft_wrap=True)
    if picture is not None:
        is_svg = Path(picture).suffix == ".svg"
        write_text_atomic(picture, console.export_svg(title="tuner search") if is_svg else console.export_html())


@app.command()
def worker(
    config: Annotated[str, typer.Argument(help="The search file of the search to work for.")],
    *,
    storage: Annotated[
        str, typer.Option(help="Where the search and its workers meet: grpc://HOST:PORT or a database.")
    ],
    seed: Annotated[int | None, typer.Option(help="The search's --seed.")] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", help="The search's own --set.")] = None,
) -> None:
    """Score candidates of `tuner search CONFIG --storage URL`, on this machine or any other, until it ends.

    Model, chip, code and everything else that scores depend on must be the search's: another queue is another search's.
    """
    problem = load_problem(config, [*_flags(None, None, seed, None), *(assignments or [])])
    queue = _queue(problem, storage)
    console = Console(stderr=True)
    with answering(storage), console.status("waiting for candidates") as status:
        done = work(
            queue,
            lambda bucket: simulator_evaluator(problem, bucket),
            lambda number, item: status.update(f"candidate {number + 1}, {item.rung.name.lower().replace('_', ' ')}"),
        )
    console.print(f"scored {done} candidates; the search has ended", soft_wrap=True)


@app.command()
def storage(
    url: Annotated[str, typer.Argument(help="The database behind it, such as sqlite:///search.db.")],
    *,
    host: Annotated[str, typer.Option(help="Address to listen at; others than this machine's can write there.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 13000,
) -> None:
    """Serve a storage through Optuna's gRPC proxy, for a search and its workers; Ctrl-C ends it."""
    serve(url, host, port, lambda: Console().print(f"grpc://{host}:{port}", soft_wrap=True, markup=False))


@app.command()
def request(
    config: Annotated[str, typer.Argument(help="A search file with a small space.")],
    *,
    out: Annotated[str, typer.Option(help="The measurement file to write, TOML, for `runtime measure --tolerant`.")],
) -> None:
    """Write all candidates of a small space, and the plans that always race, as one measurement file."""
    check_writable(out)
    problem = load_problem(config)
    bucket = _only_bucket(problem)
    named = all_candidates(problem, bucket)
    write_text_atomic(out, request_toml(problem, bucket, named, Path(out).parent))
    Console().print(f"wrote {len(named)} variants to {out}", soft_wrap=True, markup=False)


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
def show(
    plan: PlanPath,
    *,
    journal: Annotated[str | None, typer.Option(help="The journal of its search: what all candidates teach.")] = None,
    plots: Annotated[str | None, typer.Option(help="Folder for pages of the journal's history and slices.")] = None,
) -> None:
    """Show what a plan chooses, for which buckets, whom it beat, and what each choice is worth."""
    if plots is not None:
        if journal is None:
            raise ConfigError("--plots draws a journal; needed --journal FILE as well")
        insight.check_plots()
    found = load_json(locate(plan), Plan)
    studies = None if journal is None else insight.studies_of(journal, found)
    insights = map(insight.of_plan, found.entries) if studies is None else map(insight.of_study, studies)
    console = Console()
    console.print(report.plan(found, list(insights)))
    if plots is not None and studies is not None:
        _make_folder(plots)
        for idx, study in enumerate(studies):
            for path in insight.plot(study, Path(plots), idx + 1):
                console.print(f"wrote {path}", soft_wrap=True, markup=False)


@app.command()
def export(
    plan: PlanPath,
    *,
    out: Annotated[str, typer.Option(help="The choices to write, TOML.")],
    bucket: Annotated[str | None, typer.Option(help="Which bucket's, such as 1x16384, if there are several.")] = None,
) -> None:
    """Write the winning choices of a plan as a file of choices, to edit or to race against."""
    check_writable(out)
    write_text_atomic(out, choices_toml(entry_of(load_json(locate(plan), Plan), bucket)))
    Console().print(f"wrote {out}", soft_wrap=True, markup=False)


def _only_bucket(problem: Problem) -> Bucket:
    bucket, *others = problem.config.buckets
    if others:
        raise ConfigError(f"{problem.source}: has {1 + len(others)} buckets, a measurement file has one")
    return bucket


def _queue(problem: Problem, storage: str) -> WorkQueue:
    return WorkQueue(open_storage(storage), identity_of(problem))


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots {path}: not a folder that can be made: {error.strerror}") from None


def _journal_path(out: str, journal: str | None) -> str | None:
    """Where the journal is kept: beside the plan, unless that goes to a stream."""
    if journal is not None:
        return journal
    return None if Path(out).exists() and not Path(out).is_file() else f"{out}.journal"


def _check_outputs(picture: str | None, **paths: str | None) -> None:
    """Refuse what can't be written, and one file for two of them, by their options' names."""
    taken: dict[Path, str] = {}
    for option, path in {**paths, "picture": picture}.items():
        if path is None:
            continue
        other = taken.setdefault(Path(path).resolve(), option)
        if other != option:
            raise ConfigError(f"--{other} and --{option} are both {path}; needed two files")
        check_writable(path)
    if picture is not None and Path(picture).suffix not in (".svg", ".html"):
        raise ConfigError(f"--picture {picture}: needed a name that ends in .svg or .html")


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
    warnings.simplefilter("ignore", ExperimentalWarning)  # Optuna's to us, not ours to who runs the command
    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
