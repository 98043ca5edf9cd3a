"""How fast the simulator is, on one core: events and whole steps a second, and candidates a second on each rung.

    python tests/bench/simulator_speed.py [--repeat TIMES]

North Mini Code, one row of 8192 tokens, H200, the hand choices. Prints one JSON line of processor seconds, least of the
repeats, since a shared machine only ever adds: `step` simulates 49 layers of a built step; `bounds`, `few_layers` and
`all_layers` score a candidate as a search does, from choices: limits and closed-form bounds, then lowered, verified and
simulated with few layers (the table that is proved is the one that is simulated), then with all. Rates are of two
cores, at twice one core's.
"""

# ruff: noqa: T201 - a script reports on stdout

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import north

from megakernel import limits
from megakernel.build import build_step
from megakernel.verify import verify
from megakernel.workload import Workload
from simulator.bounds import bounds
from simulator.estimate import estimate_ns, shorten
from simulator.lowered import lower_program
from simulator.routing import mean_state
from simulator.simulate import simulate
from simulator.timer import Clock

CORES = 2


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--repeat", type=int, default=5, metavar="TIMES")
    chosen = options.parse_args()
    model, bucket, choices, chip = north.model(), north.BUCKET, north.choices("hand"), north.chip()
    workload = Workload(contexts=(bucket.nominal_context_tokens,))
    step = build_step(model, bucket, choices, chip)
    state = mean_state(model, workload)
    program = lower_program(step, state, chip).program

    def few_layers() -> None:
        assert not limits.reasons(model, bucket, choices, chip)
        few = shorten(model, bucket, choices, chip)
        assert not verify(few.step.graph, few.step.table)
        estimate_ns(few, chip, workload)

    def all_layers() -> None:
        built = build_step(model, bucket, choices, chip)
        assert not verify(built.graph, built.table)
        simulate(lower_program(built, state, chip).program, chip)

    def bounded() -> None:
        assert not limits.reasons(model, bucket, choices, chip)
        bounds(model, chip, workload, choices)

    events = count_events(lambda: simulate(program, chip))
    step_s = least_s(lambda: simulate(program, chip), chosen.repeat)
    rungs = {
        "bounds": least_s(bounded, 20 * chosen.repeat),
        "few_layers": least_s(few_layers, chosen.repeat),
        "all_layers": least_s(all_layers, chosen.repeat),
    }
    record = {
        "what": "simulator speed",
        "records": len(step.table.records),
        "step_cpu_s": round(step_s, 3),
        "events": events,
        "events_per_s": round(events / step_s),
        "candidate_cpu_s": {name: round(each, 5) for name, each in rungs.items()},
        "candidates_per_s_on_two_cores": {name: round(CORES / each, 2) for name, each in rungs.items()},
        "digest": simulate(program, chip).digest(),
    }
    print(json.dumps(record))


def count_events(run: Callable[[], object]) -> int:
    """How many timers fire."""
    fired, run_timers = 0, Clock.run_timers

    def counted(self: Clock) -> None:
        nonlocal fired
        run_timers(self)
        fired += next(self.numbers)  # every timer that was armed took a number, and has fired

    Clock.run_timers = counted
    try:
        run()
    finally:
        Clock.run_timers = run_timers
    return fired


def least_s(work: Callable[[], object], repeat: int) -> float:
    """Least processor time of a run."""
    spent: list[float] = []
    for _ in range(repeat):
        since = time.process_time()
        work()
        spent.append(time.process_time() - since)
    return min(spent)


if __name__ == "__main__":
    main()
