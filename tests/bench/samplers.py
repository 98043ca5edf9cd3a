"""Which sampler finds the best candidates of North Mini Code on an H200 in a minute of one core.

    python tests/bench/samplers.py RECORD.json [--seconds 60] [--seeds 5] [--only NAME ...] [--processes N]
                                   [--stop-after SECONDS] [--cache FOLDER]

Every method starts from the hand and reference plans and screens on few layers; times are the best as screened
over the bound of any plan, by seed, at each quarter of the budget. Each search is a process on one core, which counts
its own processor seconds. RECORD.json is written after every search and gone on from.
"""

# ruff: noqa: T201, E402 - a script reports on stdout; the clone is not installed

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import optuna
from optuna.samplers import CmaEsSampler, GPSampler, RandomSampler, TPESampler
from support.metered import Cache, from_scratch, metered, study_of
from support.spread import spread

from tuner.study import Progress

STARTUP = 16
METHODS = {
    "random": (0, lambda seed: RandomSampler(seed=seed)),
    "TPE": (0, lambda seed: TPESampler(seed=seed, n_startup_trials=STARTUP)),
    "CMA-ES": (0, lambda seed: CmaEsSampler(seed=seed, n_startup_trials=STARTUP, warn_independent_sampling=False)),
    "GP": (0, lambda seed: GPSampler(seed=seed, n_startup_trials=STARTUP, warn_independent_sampling=False)),
    "steps alone": (100, lambda seed: RandomSampler(seed=seed)),
    "TPE and steps": (75, lambda seed: TPESampler(seed=seed, n_startup_trials=STARTUP)),
    "GP and steps": (75, lambda seed: GPSampler(seed=seed, n_startup_trials=STARTUP, warn_independent_sampling=False)),
}
"""Share of small steps in percent, and the sampler of the others."""


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("record", type=Path)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--only", nargs="*", default=list(METHODS))
    options.add_argument("--search", default="north-mini-code-h200")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--stop-after", type=float, default=float("inf"), help="begin no search after so long")
    options.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "counterpoint-scores")
    chosen = options.parse_args()
    record = json.loads(chosen.record.read_text(encoding="utf-8")) if chosen.record.exists() else {}
    record = {"what": "samplers", "search": chosen.search, "seconds": chosen.seconds, "runs": {}, **record}
    asked = [(name, str(seed)) for seed in range(chosen.seeds) for name in chosen.only]
    runs = [
        (f"{name}|{seed}", partial(run, chosen.search, name, int(seed), chosen.seconds, chosen.cache))
        for name, seed in asked
        if seed not in record["runs"].get(name, {})
    ]
    for both, found in spread(runs, chosen.processes, chosen.stop_after):
        print(both, found, flush=True)
        if isinstance(found, dict):
            name, seed = both.split("|")
            record["runs"].setdefault(name, {})[seed] = found
            record["summary"] = summary(record["runs"])
            chosen.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run(search: str, name: str, seed: int, seconds: float, folder: Path) -> dict[str, object]:
    """One search: best over the bound at each quarter of the budget, candidates, and the sampler's own seconds."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    percent, make = METHODS[name]
    sampler = make(seed)
    cache = Cache.of(folder, "samplers", search, name, seed)
    problem = from_scratch(
        search,
        f"budget.seconds={seconds}",
        "budget.trials=1000000",
        f"proposals.seed={seed}",
        f"proposals.step_percent={percent}",
        "proposals.batch=4",
    )
    meter = metered(problem.model, problem.config.buckets[0], problem.chip, cache)
    study = study_of(problem, problem.config, meter, sampler_for=lambda _proposals, _seed: sampler)
    began_s, curve = meter.clock(), []

    def watch(progress: Progress) -> None:
        curve.append((meter.clock() - began_s, study._race.leader_ns, progress.num_trials))

    study._watch = watch
    study.heat()
    floor_ns = study._floor_ns
    quarters = [
        min((ns for at_s, ns, _ in curve if at_s <= seconds * part / 4), default=float("nan")) / floor_ns
        for part in (1, 2, 3, 4)
    ]
    return {"over_bound": [round(each, 5) for each in quarters], "candidates": curve[-1][2]}


def summary(runs: dict[str, dict[str, dict[str, object]]]) -> dict[str, object]:
    """By method: median, best and worst over the bound at the end, and the median at half time."""
    found = {}
    for name, by_seed in runs.items():
        ends = [each["over_bound"][3] for each in by_seed.values()]
        halves = [each["over_bound"][1] for each in by_seed.values()]
        found[name] = {
            "seeds": len(ends),
            "median": round(statistics.median(ends), 5),
            "best": min(ends),
            "worst": max(ends),
            "half_time_median": round(statistics.median(halves), 5),
            "candidates": statistics.median(each["candidates"] for each in by_seed.values()),
        }
    return found


if __name__ == "__main__":
    main()
