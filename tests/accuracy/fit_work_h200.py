"""Fits the work of a computing kernel's tasks to every other variant of a contest, and checks it on the others.

    python tests/accuracy/fit_work_h200.py [--fit ROUNDS] [--contest MEASUREMENT.json] [--record RECORD.json]

Prints every variant, measured and simulated, and figures of rank and regret; `--record` writes them. `--fit` improves
the constants that `configs/hardware/h200.toml` calls fitted to it, on the fitted half alone, and prints them with
intervals; write them there by hand. The times of memory and hand-offs are not touched: `fit_h200.py` fits those to
programs that stream. Another contest of North is only shown beside what is simulated.
"""

# ruff: noqa: T201, E402 - a script reports on stdout; the clone is not installed

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.contest import contest, mean_error, measured_ms, regret, simulated_ms, spearman
from support.refit import refit

from megakernel.assets import asset
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.work import WorkCosts

CONTEST = "north-h200-orders"
SHIPPED = f"configs/measurements/{CONTEST}.json"
TOP = 8


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="improve the constants first")
    options.add_argument("--contest", default=SHIPPED)
    options.add_argument("--record", type=Path)
    chosen = options.parse_args()
    record, chip = contest(chosen.contest), load_hardware(asset("configs/hardware/h200.toml"))
    measured = measured_ms(record)
    fitted_half = tuple(measured)[::2]
    if chosen.fit:
        chip = fitted(chip, fitted_half, chosen.fit)
    found = simulated_ms(record, chip)
    for name, ms in found.items():
        half = "fitted" if chosen.contest == SHIPPED and name in fitted_half else "kept for checking"
        print(f"{name:28} measured {measured[name]:.3f} simulated {ms:.3f} {ms / measured[name] - 1:+6.1%} {half}")
    kept = {name: ms for name, ms in found.items() if name not in fitted_half}
    orders = {name: ms for name, ms in found.items() if record.choices[name].counters.words == 1}
    figures = {
        "what": "rank of the orders of a contest",
        "contest": Path(chosen.contest).stem,
        "measured": record.date,
        "mean_error": round(mean_error(measured, found), 5),
        "mean_error_kept_for_checking": round(mean_error(measured, kept), 5),
        "worst_error": round(max(abs(ms / measured[name] - 1) for name, ms in found.items()), 5),
        "orders": len(orders),
        "spearman": round(spearman(measured, orders), 4),
        "spearman_kept_for_checking": round(spearman(measured, kept), 4),
        f"regret_top_{TOP}": round(regret(measured, orders, TOP), 5),
        "regret_top_1": round(regret(measured, orders, 1), 5),
        "work": {name: getattr(chip.work, name) for name in fitted_constants(chip)},
        "simulated_ms": {name: round(ms, 4) for name, ms in found.items()},
    }
    print(json.dumps(figures))
    if chosen.record:
        chosen.record.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def fitted_constants(chip: HardwareSpec) -> list[str]:
    """Names of the works whose source says that they are fitted to this contest."""
    sources = {name: chip.sources.get(f"work.{name}", "") for name in WorkCosts.model_fields}
    return [name for name, source in sources.items() if source.startswith("fitted") and CONTEST in source]


def fitted(chip: HardwareSpec, names: tuple[str, ...], rounds: int) -> HardwareSpec:
    """Fit the chip's works to the named variants; prints them and their intervals."""
    record = contest(SHIPPED)
    measured = measured_ms(record)

    return refit(
        chip,
        "work",
        fitted_constants(chip),
        [measured[name] for name in names],
        lambda changed: list(simulated_ms(record, changed, names).values()),
        rounds,
    )


if __name__ == "__main__":
    main()
