"""How many mutants of packed tables `verify` was tried on, and how it did.

    python tests/bench/mutants.py [--wanted HARMFUL] [--larger MUTANTS] [--schedules TIMES]

For every operator, mutants of tiny tables, judged by trying every interleaving, and mutants of larger ones, judged by
random schedules; then one JSON line with all counts. A mutant is only called harmless where exhaustion proves it.
"""

# ruff: noqa: T201 - a script reports on stdout

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.campaign import WANTED, Tally, exhaust, fuzz
from support.mutants import OPERATORS


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--wanted", type=int, default=WANTED, help="mutants proved harmful, per operator")
    options.add_argument("--larger", type=int, default=100, help="mutants of larger tables, per operator")
    options.add_argument("--schedules", type=int, default=50, help="random schedules of each of these")
    chosen = options.parse_args()
    record: dict[str, object] = {}
    for operator in OPERATORS:
        tiny, larger = exhaust(operator, chosen.wanted), fuzz(operator, chosen.larger, chosen.schedules)
        print(tiny)
        print(f"  larger tables: {larger}")
        record[operator] = {"exhausted": summary(tiny), "fuzzed": summary(larger)}
    print(json.dumps(record))


def summary(tally: Tally) -> dict[str, object]:
    """Counts as they go into a record."""
    return {
        "harmful": tally.harmful,
        "by_kind": dict(sorted(tally.kinds.items())),
        "missed": len(tally.missed),
        "harmless": tally.harmless,
        "refused": len(tally.refused),
        "no_verdict": tally.unknown,
        "no_verdict_refused": tally.doubted,
    }


if __name__ == "__main__":
    main()
