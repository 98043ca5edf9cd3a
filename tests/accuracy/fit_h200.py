"""How well the simulator meets the H200's measured cells, and the fit of its constants.

    python tests/accuracy/fit_h200.py [--exact] [--cells] [--fit ROUNDS]

Prints the figures of the fitted half, of the half kept for checking and of all cells, the fitted constants, with
`--cells` every residual, and last one JSON line. `--fit` improves the constants on the fitted half alone by least
squares over relative errors and prints them with intervals; write them to configs/hardware/h200.toml by hand. Those
there were found so in fast mode and rounded, `queue_ramp_ns` towards the round before (tests/bench/LOG.md). The model's
structure was chosen while looking at all cells.
"""

# ruff: noqa: T201 - a script reports on stdout

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.h200 import CHIP, Cell, Figures, figures, load_cells, simulate_cells
from support.refit import refit

from megakernel.hardware import HardwareSpec, load_hardware

FIT_STRIDE = 5  # every fifth cell of the fitted half is enough to tell steps apart


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--exact", action="store_true", help="one event per copy: takes twice as long")
    options.add_argument("--cells", action="store_true", help="print every residual")
    options.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="improve the constants first")
    chosen = options.parse_args()
    chip, cells = load_hardware(CHIP), load_cells()
    if chosen.fit:
        chip = fitted(chip, [cell for cell in cells if not cell.is_held_out], rounds=chosen.fit, exact=chosen.exact)
    started = time.perf_counter()
    found_ms = simulate_cells(cells, chip, exact=chosen.exact)
    seconds = time.perf_counter() - started
    if chosen.cells:
        print_residuals(cells, found_ms)
    report: dict[str, object] = {"mode": "exact" if chosen.exact else "fast", "seconds": round(seconds, 1)}
    halves = {"fitted": [False], "held out": [True], "all": [False, True]}
    for name, kept in halves.items():
        pairs = [(cell, ms) for cell, ms in zip(cells, found_ms, strict=True) if cell.is_held_out in kept]
        found = figures([cell for cell, _ in pairs], [ms for _, ms in pairs])
        print(f"\n{name}\n{found}")
        report[name] = summary(found)
    constants = {key: getattr(chip.costs, key) for key in fitted_constants(chip)}
    print("\nfitted constants: " + ", ".join(f"{key} {value:g}" for key, value in constants.items()))
    print(json.dumps({**report, "constants": constants}))


def summary(found: Figures) -> dict[str, float]:
    """Figures as they go into a record."""
    return {
        "capped_mape": round(found.capped_mape, 5),
        "mape": round(found.mape, 5),
        "within_8_percent": round(found.share_within_8_percent, 4),
        "worst": round(found.worst, 4),
        "cap_pairs_right": round(found.cap_pairs[0] / max(1, found.cap_pairs[1]), 4),
        "order_pairs_right": round(found.order_pairs[0] / max(1, found.order_pairs[1]), 4),
    }


def print_residuals(cells: list[Cell], found_ms: list[float]) -> None:
    """Print one line per cell."""
    for cell, ms in zip(cells, found_ms, strict=True):
        name = cell.order or f"{cell.copies} copies of {cell.copy_bytes}, {cell.phases} phases"
        half = "held out" if cell.is_held_out else "fitted"
        error = 100 * (ms / cell.ms - 1)
        print(
            f"{name:32} {cell.loads:15} cap {cell.cap_kb or 'none':>4} work {cell.work_cycles!s:>4} "
            f"measured {cell.ms:.3f} simulated {ms:.3f} {error:+5.1f}% {half}"
        )


def fitted_constants(chip: HardwareSpec) -> list[str]:
    """Names of the costs whose source says that they are fitted."""
    return [key for key in type(chip.costs).model_fields if chip.sources[f"costs.{key}"].startswith("fitted")]


def fitted(chip: HardwareSpec, cells: list[Cell], *, rounds: int, exact: bool) -> HardwareSpec:
    """Fit the chip's constants to every so many of `cells`; prints them and their intervals."""
    cells = cells[::FIT_STRIDE]
    return refit(
        chip,
        "costs",
        fitted_constants(chip),
        [cell.ms for cell in cells],
        lambda changed: simulate_cells(cells, changed, exact=exact),
        rounds,
    )


if __name__ == "__main__":
    main()
