"""What a search is worth: North Mini Code at 8K, batches 1 to 8, on H100 and H200, against what it has to beat.

    python tests/bench/search_evidence.py RECORD.json [cells|ablation|draws ...] [--rows 1 2 4 8] [--seconds 60]
                                          [--seeds 5] [--processes N] [--stop-after SECONDS] [--cache FOLDER]

`cells`: the search and a random one at equal seconds of one core, proofs included, beside the hand plan, the reference
plan, the reference's order under the hand plan's cap, and the bound of any plan; what a card has timed is not told to
them. `ablation`: the same on one cell with one group of choices held at the hand plan's values. `draws`: the best of
500 random legal plans, whatever they cost. Each search is a process on one core, whose processor seconds it counts.
RECORD.json is written after every search and gone on from; a second run adds what is missing.
"""

# ruff: noqa: T201, E402 - a script reports on stdout; the clone is not installed

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import optuna
from support.metered import Cache, Metered, from_scratch, metered, study_of
from support.spread import Run, spread

from megakernel import limits
from megakernel.workload import Workload
from simulator.bounds import bounds
from tuner.outcome import Rung, Scored
from tuner.problem import Problem
from tuner.space import Space

SEARCH = "north-mini-code-h200"
CELLS = [(chip, rows) for rows in (1, 2, 4, 8) for chip in ("h200", "h100-sxm")]
GROUPS = {
    "order": ("order.",),
    "placement": ("interleave.",),
    "ring": ("ring.",),
    "cuts": ("cut.",),
    "rounding": ("rounding.",),
    "counters": ("counters.",),
}
DRAWS = 500


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("record", type=Path)
    options.add_argument("what", nargs="*", default=["cells", "ablation", "draws"])
    options.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8])
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--stop-after", type=float, default=float("inf"), help="begin no search after so long")
    options.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "counterpoint-scores")
    chosen = options.parse_args()
    record = json.loads(chosen.record.read_text(encoding="utf-8")) if chosen.record.exists() else {}
    record = {"what": "search evidence", "search": SEARCH, "seconds": chosen.seconds, "runs": {}, **record}
    runs = ((name, run) for name, run in searches(chosen) if name not in record["runs"])
    for name, found in spread(runs, chosen.processes, chosen.stop_after):
        print(name, found, flush=True)
        if isinstance(found, dict):
            record["runs"][name] = found
            record["summary"] = summary(record["runs"])
            chosen.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def searches(chosen: argparse.Namespace) -> Iterator[tuple[str, Run]]:
    """Names of searches and how to run them, the longest first and then one seed of everything before the next."""
    if "draws" in chosen.what:
        yield f"h200 x1 | best of {DRAWS} draws | 0", partial(draws, chosen.cache)
    for seed in range(chosen.seeds):
        search = partial(one, seed=seed, seconds=chosen.seconds, folder=chosen.cache)
        if "cells" in chosen.what:
            for chip, rows in [each for each in CELLS if each[1] in chosen.rows]:
                for way in ("search", "random"):
                    yield f"{chip} x{rows} | {way} | {seed}", partial(search, (chip, rows), way)
        if "ablation" in chosen.what:
            for group, held in GROUPS.items():
                yield f"h200 x1 | without {group} | {seed}", partial(search, ("h200", 1), "search", *held)


def problem_of(chip: str, rows: int, *overrides: str) -> Problem:
    """The shipped search on another chip and batch."""
    return from_scratch(SEARCH, f'chip="../hardware/{chip}.toml"', f"buckets.0.rows={rows}", *overrides)


def one(cell: tuple[str, int], way: str, *held: str, seed: int, seconds: float, folder: Path) -> dict[str, object]:
    """One search, choices whose names begin with one of `held` being the hand plan's; times in ns on all layers."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    chip, rows = cell
    cache = Cache.of(folder, "evidence", chip, rows, way, *held, seed)
    random_only = ["proposals.step_percent=0", 'proposals.sampler="random"'] if way == "random" else []
    # One routing and two finalists: a proof of eight rows takes many seconds, and candidates are to have the most.
    budget = [f"budget.seconds={seconds}", f"proposals.seed={seed}", "proposals.batch=4"]
    budget += ["ladder.draws=1", "ladder.finalists=2", "ladder.lead_percent=2"]
    problem = problem_of(chip, rows, *budget, *random_only)
    meter = metered(problem.model, problem.config.buckets[0], problem.chip, cache, draws=problem.config.ladder.draws)
    study = study_of(problem, problem.config, meter, frozen=held)
    raced = study.run()
    by_choices = {each.choices: each.score.expected_ns for each in raced.standings}
    return {
        "best_ns": round(raced.standings[0].score.expected_ns),
        "floor_ns": round(study._floor_ns),
        "roofline_ns": round(raced.standings[0].score.roofline_ns),
        **{each.name: round(by_choices[each.choices]) for each in problem.racing(problem.config.buckets[0])},
        "candidates": len(raced.attempts),
        "cpu_s": round(raced.elapsed_s, 1),
    }


def draws(folder: Path) -> dict[str, object]:
    """The best of many random legal plans: all screened that their bound lets hope, the best few on all layers."""
    problem = problem_of("h200", 1)
    bucket = problem.config.buckets[0]
    space = Space(problem.model, bucket, problem.chip, problem.config.space)
    meter: Metered = metered(problem.model, bucket, problem.chip, Cache.of(folder, "evidence", "draws"))
    chance, screened, drawn = random.Random(0), {}, 0
    began_s = meter.clock()
    while drawn < DRAWS:
        choices = space.choices({each.name: chance.randrange(len(each.values)) for each in space.dimensions})
        if limits.reasons(problem.model, bucket, choices, problem.chip):
            continue
        drawn += 1
        bound = meter.evaluate(choices, Rung.BOUND)
        if isinstance(bound, Scored) and bound.expected_ns < min(screened.values(), default=float("inf")):
            found = meter.evaluate(choices, Rung.FEW_LAYERS)
            assert isinstance(found, Scored)
            screened[choices] = found.expected_ns
    best = sorted(screened, key=screened.__getitem__)[:5]
    proven = [meter.evaluate(each, Rung.ALL_LAYERS) for each in best]
    times = [each.expected_ns for each in proven if isinstance(each, Scored)]
    floor = bounds(problem.model, problem.chip, Workload.nominal(bucket)).lower_ns
    return {
        "best_ns": round(min(times)),
        "floor_ns": round(floor),
        "median_screened_ns": round(statistics.median(screened.values())),
        "candidates": drawn,
        "cpu_s": round(meter.clock() - began_s, 1),
    }


def summary(runs: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """By cell and way: medians over seeds, best and worst, and how far above the bound of any plan."""
    groups: dict[str, list[dict[str, object]]] = {}
    for name, run in runs.items():
        groups.setdefault(name.rpartition(" | ")[0], []).append(run)
    found = {}
    for name, each in groups.items():
        best = [run["best_ns"] for run in each]
        row = {"seeds": len(each), "median_ms": round(statistics.median(best) / 1e6, 4)}
        row |= {"best_ms": round(min(best) / 1e6, 4), "worst_ms": round(max(best) / 1e6, 4)}
        row["above_bound_percent"] = round(100 * (statistics.median(best) / each[0]["floor_ns"] - 1), 2)
        for rival in ("hand plan", "reference plan", "reference order, hand cap"):
            if rival in each[0]:
                row[f"{rival}_ms"] = round(each[0][rival] / 1e6, 4)
        row["candidates"] = statistics.median(run["candidates"] for run in each)
        found[name] = row
    return found


if __name__ == "__main__":
    main()
