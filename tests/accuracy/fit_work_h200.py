"""Fits the work of a computing kernel's tasks to every other variant of two contests, and checks it on the others.

    python tests/accuracy/fit_work_h200.py [--fit ROUNDS] [--contest MEASUREMENT.json] [--record RECORD.json]

Prints every variant, measured and simulated, and figures of rank and regret; `--record` writes them. `--fit` improves
the constants that `configs/hardware/h200.toml` calls fitted by this script, on the fitted halves alone, and prints them
with intervals; write them there by hand. The times of memory and hand-offs are not touched: `fit_h200.py` fits those to
programs that stream. Another contest of North is only shown beside what is simulated.
"""

# ruff: noqa: T201, E402 - a script reports on stdout; the clone is not installed

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import numpy as np
from support.contest import contest, fitted_half, mean_error, measured_ms, regret, simulated_ms, spearman
from support.refit import refit

from megakernel.assets import asset
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.measurement import Record
from megakernel.work import WorkCosts

CONTESTS = ("configs/measurements/north-h200-orders.json", "configs/measurements/north-h200-plan.json")
TOP = 8


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="improve the constants first")
    options.add_argument("--contest", action="append", help="another one than those of the fit; repeat for more")
    options.add_argument("--record", type=Path)
    chosen = options.parse_args()
    chip = load_hardware(asset("configs/hardware/h200.toml"))
    if chosen.fit:
        chip = fitted(chip, chosen.fit)
    figures = {
        "what": "rank of the variants of contests",
        "work": {name: getattr(chip.work, name) for name in fitted_constants(chip)},
        "contests": {Path(path).stem: shown(path, chip) for path in chosen.contest or CONTESTS},
    }
    if chosen.record:
        chosen.record.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def shown(path: str, chip: HardwareSpec) -> dict[str, object]:
    """One contest's figures, printed after its variants."""
    record = contest(path)
    measured, found = measured_ms(record), simulated_ms(record, chip)
    half = fitted_half(record) if path in CONTESTS else ()
    print(f"{path}, measured {record.date}")
    for name, ms in found.items():
        kept = "fitted" if name in half else "kept for checking"
        print(f"{name:48} measured {measured[name]:.3f} simulated {ms:.3f} {ms / measured[name] - 1:+6.1%} {kept}")
    others = {name: ms for name, ms in found.items() if name not in half}
    figures = {
        "measured": record.date,
        "variants": len(found),
        "mean_error": round(mean_error(measured, found), 5),
        "mean_error_kept_for_checking": round(mean_error(measured, others), 5),
        "worst_error": round(max(abs(ms / measured[name] - 1) for name, ms in found.items()), 5),
        "spearman": round(spearman(measured, found), 4),
        "spearman_kept_for_checking": round(spearman(measured, others), 4),
        f"regret_top_{TOP}": round(regret(measured, found, TOP), 5),
        "regret_top_1": round(regret(measured, found, 1), 5),
        "simulated_ms": {name: round(ms, 4) for name, ms in found.items()},
    }
    print(json.dumps({key: value for key, value in figures.items() if key != "simulated_ms"}))
    return figures


def fitted_constants(chip: HardwareSpec) -> list[str]:
    """Names of the works whose source says that this script fitted them."""
    sources = {name: chip.sources.get(f"work.{name}", "") for name in WorkCosts.model_fields}
    return [name for name, source in sources.items() if source.startswith("fitted") and Path(__file__).name in source]


def fitted(chip: HardwareSpec, rounds: int) -> HardwareSpec:
    """Fit the chip's works to the fitted halves; prints them and their intervals."""
    records = [contest(path) for path in CONTESTS]
    halves: list[tuple[Record, tuple[str, ...]]] = [(record, fitted_half(record)) for record in records]
    measured = [measured_ms(record)[name] for record, names in halves for name in names]

    def simulate(changed: HardwareSpec) -> list[float]:
        return [ms for record, names in halves for ms in simulated_ms(record, changed, names).values()]

    before = np.array(simulate(chip)) / measured - 1.0
    print(f"{len(measured)} variants, mean error {np.abs(before).mean():.5f} before")
    return refit(chip, "work", fitted_constants(chip), measured, simulate, rounds)


if __name__ == "__main__":
    main()
