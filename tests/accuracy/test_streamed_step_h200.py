"""The streamed step of North Mini Code, whole tables and not skeletons, against what a card took for the same tables.

No constant was fitted to these: costs come from the synthetic cells of tests/data, the planner's work and the price of
reading results back from a trace and a microbenchmark of the same day (tests/bench/LOG.md). Every cell is printed.
"""

import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from support import north

from megakernel.build import build_step
from megakernel.workload import Bucket, Workload
from simulator.routing import mean_state
from simulator.step_run import run_step

RECORDS = Path(__file__).parents[1] / "bench" / "records"
BUCKET = Bucket(rows=1, max_context_tokens=8192, nominal_context_tokens=8192)
ATTENTION_FIRST = ("project", "attend", "up", "merge", "down", "output")
CAP = 40960

# record, sample, choices, order, policy, cap, arrival
CELLS = [
    ("step", "hand", "hand", None, None, CAP, "release"),
    ("step", "hand, relaxed arrivals", "hand", None, None, CAP, "relaxed"),
    ("step", "hand, uncapped", "hand", None, None, None, "release"),
    ("step", "hand, uncapped, relaxed arrivals", "hand", None, None, None, "relaxed"),
    ("step", "reference", "reference", None, None, None, "release"),
    ("step", "reference, relaxed arrivals", "reference", None, None, None, "relaxed"),
    ("step", "attention first", "hand", ATTENTION_FIRST, None, CAP, "release"),
    ("step", "attention first, relaxed arrivals", "hand", ATTENTION_FIRST, None, CAP, "relaxed"),
    ("step-read-back", "attention first, read_back, 40960, 1", "hand", ATTENTION_FIRST, None, CAP, "read_back"),
    ("step-read-back", "attention first, read_back, 49152, 1", "hand", ATTENTION_FIRST, None, 49152, "read_back"),
    ("step-read-back", "attention first, read_back, 65536, 1", "hand", ATTENTION_FIRST, None, 65536, "read_back"),
    ("step-round-robin", "hand, round robin", "hand", None, "round_robin", CAP, "release"),
    ("step-round-robin", "attention first, round robin", "hand", ATTENTION_FIRST, "round_robin", CAP, "release"),
    (
        "step-round-robin",
        "attention first, round robin, read-back arrivals",
        "hand",
        ATTENTION_FIRST,
        "round_robin",
        CAP,
        "read_back",
    ),
]


def measured_ms(record, sample):
    samples = json.loads((RECORDS / f"2026-11-30-{record}.json").read_text(encoding="utf-8"))["samples"]
    (times,) = [each["ms"] for each in samples if each["name"] == sample]
    return statistics.median(times)


def simulated_ms(cell):
    _, _, name, order, policy, cap, arrival = cell
    choices, chip = north.choices(name), north.chip().streaming()
    changes = {key: value for key, value in (("order", order), ("policy", policy)) if value is not None}
    choices = choices.model_copy(
        update={
            "ring": choices.ring.model_copy(update={"in_flight_cap_bytes": cap}),
            "interleave": choices.interleave.model_copy(update=changes),
        }
    )
    step = build_step(north.model(), BUCKET, choices, chip)
    state = mean_state(north.model(), Workload(contexts=(8192,)))
    return run_step(step, chip, state, arrival=arrival).result.total_ns / 1e6


@pytest.fixture(scope="module")
def found():
    """Measured and simulated ms, by cell."""
    with ProcessPoolExecutor(2) as pool:
        simulated = list(pool.map(simulated_ms, CELLS))
    pairs = {cell: (measured_ms(*cell[:2]), ms) for cell, ms in zip(CELLS, simulated, strict=True)}
    for cell, (measured, ms) in pairs.items():
        print(f"{cell[1]}: measured {measured:.3f} ms, simulated {ms:.3f}, {ms / measured - 1:+.1%}")  # noqa: T201
    return pairs


@pytest.mark.timeout(600)
def test_streamed_steps_are_met_within_eight_percent_and_two_and_a_half_on_average(found):
    """The worst are tables without a cap, which come out too fast: most of all the one whose loads wait."""
    errors = [abs(ms / measured - 1.0) for measured, ms in found.values()]
    assert max(errors) <= 0.08
    assert sum(errors) / len(errors) <= 0.025


def test_capped_rings_with_loads_ahead_are_met_within_four_percent(found):
    assert all(abs(ms / measured - 1.0) <= 0.04 for cell, (measured, ms) in found.items() if cell[5] is not None)


def test_tables_are_ordered_as_the_card_orders_them(found):
    pairs = list(found.values())
    wrong = [
        (one, other)
        for idx, one in enumerate(pairs)
        for other in pairs[:idx]
        if max(one[0], other[0]) / min(one[0], other[0]) > 1.02 and (one[0] < other[0]) != (one[1] < other[1])
    ]
    decided = sum(
        max(one[0], other[0]) / min(one[0], other[0]) > 1.02 for idx, one in enumerate(pairs) for other in pairs[:idx]
    )
    # Four, in which a deep queue and relaxed arrivals meet: 94.9%.
    assert decided == 78
    assert len(wrong) <= 4


@pytest.mark.parametrize("order", [None, ATTENTION_FIRST])
def test_what_an_arrival_costs_a_step_is_what_was_measured(found, order):
    """Release less relaxed: the price of waiting for the ring."""
    times = {cell[6]: pair for cell, pair in found.items() if cell[0] == "step" and cell[3] == order and cell[5] == CAP
             and cell[2] == "hand"}  # fmt: skip
    measured, simulated = (times["release"][side] - times["relaxed"][side] for side in (0, 1))
    assert simulated == pytest.approx(measured, rel=0.5)
