"""How long the whole step of North Mini Code takes to build and to verify.

    python tests/bench/verify.py [hand|reference] [--repeat TIMES]

Warms up once, then prints one JSON line: medians of processor and wall seconds, and what was verified.
"""

# ruff: noqa: T201 - a script reports on stdout

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import north

from megakernel.build import build_step
from megakernel.verify import verify


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("choices", nargs="?", default="hand", choices=["hand", "reference"])
    options.add_argument("--repeat", type=int, default=5, metavar="TIMES")
    chosen = options.parse_args()
    inputs = north.model(), north.BUCKET, north.choices(chosen.choices), north.chip()
    step = build_step(*inputs)
    findings = verify(step.graph, step.table)
    record = {
        "choices": chosen.choices,
        "layers": step.model.num_layers,
        "records": len(step.table.records),
        "sms": step.table.num_sms,
        "table_digest": step.table.digest,
        "findings": len(findings),
        "build": seconds(lambda: build_step(*inputs), chosen.repeat),
        "verify": seconds(lambda: verify(step.graph, step.table), chosen.repeat),
    }
    print(json.dumps(record))


def seconds(work: Callable[[], object], repeat: int) -> dict[str, float]:
    """Medians over `repeat` runs."""
    spent: list[tuple[float, float]] = []
    for _ in range(repeat):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        spent.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu_s, wall_s = (round(statistics.median(times), 3) for times in zip(*spent, strict=True))
    return {"cpu_s": cpu_s, "wall_s": wall_s}


if __name__ == "__main__":
    main()
