"""The shipped measurement of an H200, beside the two data sets and the direct measurements of tests/data's cards.

Cards stream differently fast, so steps are compared by their time over that of their own run's free stream.
"""

import csv
from pathlib import Path
from statistics import fmean

import pytest

from megakernel.assets import asset
from megakernel.config import load_json
from megakernel.measurement import Record
from runtime.gpu.even import STREAMING_CELLS
from runtime.gpu.skeleton import RING_CELLS, SHIPPED_CELLS

DATA = Path(__file__).parents[1] / "data"
CLOCK_GHZ = 1.98
SMS = 132


@pytest.fixture(scope="module")
def shipped():
    return load_json(asset("configs/measurements/h200.json"), Record)


@pytest.fixture(scope="module")
def ns(shipped):
    """Medians in nanoseconds by name."""
    return {sample.name: 1e6 * sample.median_ms for sample in shipped.samples}


def test_all_cells_were_measured_and_none_hung(shipped, ns):
    assert shipped.faults == {}
    assert {f"streaming | {cell.name}" for cell in STREAMING_CELLS} <= set(ns)
    assert {f"default | {cell.name}" for cell in (*SHIPPED_CELLS, *RING_CELLS)} <= set(ns)


@pytest.fixture(scope="module")
def streaming(ns):
    """Of every row of the data set with a wait or a cap: copy bytes, whether anything waits, and how far off it is."""
    with (DATA / "streaming-h200.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    keys = ("copy_bytes", "ring_stages", "dependencies_per_layer", "copies_per_dependency")
    shape = "streaming | {} B x {},{} x {},".format
    free = {
        tuple(row[key] for key in keys): float(row["ms"])
        for row in rows
        if not row["in_flight_cap_kb"] and not row["work_cycles"]
    }
    found = []
    for row in rows:
        of = tuple(row[key] for key in keys)
        cap, work = row["in_flight_cap_kb"], row["work_cycles"]
        if cap or work.isdigit():
            ratio = ns[f"{shape(*of)}{cap},{work}"] / ns[f"{shape(*of)},"]
            found.append((int(of[0]), work.isdigit(), ratio / (float(row["ms"]) / free[of]) - 1))
    return found


@pytest.mark.parametrize(
    ("copy_bytes", "within_3", "mean", "worst"), [(8192, 64, 0.033, 0.103), (16384, 22, 0.057, 0.151)]
)
def test_streamed_steps_take_what_the_data_set_says(streaming, copy_bytes, within_3, mean, worst):
    errors = [abs(error) for each, _, error in streaming if each == copy_bytes]
    assert sum(error <= 0.03 for error in errors) >= within_3
    assert fmean(errors) <= mean
    assert max(errors) <= worst


def test_without_waits_they_take_it_within_two_percent(streaming):
    assert max(abs(error) for copy_bytes, waits, error in streaming if copy_bytes > 4096 and not waits) < 0.02


def test_small_copies_are_bound_by_their_issue(ns):
    """Two groups that share no table: an SM's copies from L2, and the whole card's from memory."""
    for capped, case in (("", "no cap"), ("96", "a cap of all but one")):
        issue = ns[f"issue | 4096 B x 48, {case}"]
        work = "none" if capped else ""
        for phases, copies in ((2, 131), (4, 65), (6, 43), (8, 32)):
            step = ns[f"streaming | 4096 B x 48,{phases} x {copies},{capped},{work}"]
            assert step / (49 * phases * copies) == pytest.approx(issue, rel=0.05)


def test_issue_takes_as_long_for_any_size(ns):
    for case in ("no cap", "a cap of all but one"):
        each = [ns[f"issue | {ring}, {case}"] for ring in ("2048 B x 48", "4096 B x 48", "8192 B x 25", "16384 B x 12")]
        assert max(each) < 1.05 * min(each)


def test_skeletons_take_what_their_data_set_says(ns):
    with (DATA / "skeleton-h200.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    free = {row["order"]: float(row["ms"]) for row in rows if row["loads"] == "free"}
    errors = []
    for row in rows:
        if row["loads"] != "free":
            name = f"default | {row['order']},{row['loads']},{row['in_flight_cap_kb']},{row['work_cycles']}"
            ratio = ns[name] / ns[f"default | {row['order']},free,,"]
            errors.append(abs(ratio / (float(row["ms"]) / free[row["order"]]) - 1))
    assert len(errors) == 96
    assert sum(error <= 0.03 for error in errors) == 47
    assert max(errors) < 0.091


def test_signals_in_idle_memory_take_what_was_measured_directly(ns):
    assert ns["signal | release, 0 KB in flight"] * CLOCK_GHZ == pytest.approx(1140, rel=0.16)
    assert ns["fan-in | release, 0 KB in flight"] * CLOCK_GHZ == pytest.approx(1820, rel=0.03)


@pytest.mark.parametrize("group", ["signal", "fan-in"])
def test_a_release_waits_for_copies_and_a_read_back_for_fewer(ns, group):
    release, read_back = (
        [ns[f"{group} | {arrival}, {kb} KB in flight"] for kb in (0, 40, 64, 192)]
        for arrival in ("release", "read back")
    )
    assert release == sorted(release)
    assert read_back == sorted(read_back)
    assert all(one > other for one, other in zip(release, read_back, strict=True))
    assert release[1] > 1.7 * read_back[1]


def test_a_hand_off_of_the_loop_takes_half_a_microsecond_more_than_its_barrier(ns):
    for arrival in ("release", "read back"):
        loop, alone = ns[f"hand-off | {arrival}, {SMS} SMs, 1 word"], ns[f"fan-in | {arrival}, 0 KB in flight"]
        assert 450 < loop - alone < 600
        # More words are no better where nothing is in flight.
        assert all(abs(ns[f"hand-off | {arrival}, {SMS} SMs, {words} words"] / loop - 1) < 0.02 for words in (2, 4))


@pytest.mark.parametrize(("copy_bytes", "few", "expected"), [(4096, 16, 77), (8192, 8, 57), (16384, 4, 46)])
def test_a_landed_copy_is_consumed_at_the_pace_that_was_measured(ns, copy_bytes, few, expected):
    """45 ns per 8 KB in the data set's kernel; this one's warps spend some time a copy besides."""
    many = 3 * few
    slope = (ns[f"consume | {many} copies of {copy_bytes} B"] - ns[f"consume | {few} copies of {copy_bytes} B"]) / (
        many - few
    )
    assert slope * 8192 / copy_bytes == pytest.approx(expected, rel=0.01)
