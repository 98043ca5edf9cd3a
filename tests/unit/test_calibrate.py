"""`simulator calibrate`: what a measurement's names mean, constants found again, and the chip file that comes out."""

import json
import sys

import numpy as np
import pytest
from support.h200 import CHIP

from megakernel.assets import asset
from megakernel.config import ConfigError
from megakernel.hardware import load_hardware
from simulator.calibrate import EVERY, calibrate, chip_toml, fitted_costs, split
from simulator.cli import main
from simulator.microbench import Measurement, measured_costs, read_measurement
from simulator.points import LAYERS, EvenPoint, SkeletonPoint

ORDER = ("QKV", "ATT", "UP", "DOWN", "O")


def paced(points):
    return [pair for pair in points if not pair[0].is_free]


CARD = {
    "name": "x", "compute_capability": "9.0", "num_sms": 132, "shared_memory_per_block_bytes": 232448,
    "memory_bytes": 150109880320, "l2_bytes": 62914560, "driver": "580", "cuda": "13.0",
}  # fmt: skip


def cells(chip, few):
    points = [SkeletonPoint(ORDER, False, None, None)]
    points += [SkeletonPoint(ORDER, False, cap, work) for cap in (32, 40, 64, None) for work in (0, 2000)][:few]
    points += [EvenPoint(8192, 25, 4, 32, cap, 1000) for cap in (None, 48, 96)]
    return [(point, point.estimated_ms(chip)) for point in points]


def measurement(card="a card", **ns):
    samples = [{"name": name, "ms": [each / 1e6]} for name, each in ns.items()]
    return Measurement.model_validate(
        {"what": "microbench", "date": "2026-11-30T00:00", "card": CARD | {"name": card}, "samples": samples}
    )


def without_fit_of(chip, keep):
    """A chip of which only the costs in `keep` say that they were fitted."""
    sources = {
        key: "measured" if text.startswith("fitted") and key.removeprefix("costs.") not in keep else text
        for key, text in chip.sources.items()
    }
    return chip.model_copy(update={"sources": sources})


OWN_NS = {
    "signal | release, 0 KB in flight": 600.0,
    "fan-in | release, 0 KB in flight": 993.0,
    "issue | 4096 B x 48, no cap": 81.0,
    "issue | 4096 B x 48, a cap of all but one": 120.04,
    "issue | 8192 B x 25, no cap": 85.0,
}


def test_costs_with_samples_of_their_own_are_not_fitted():
    assert measured_costs(measurement()) == {}
    assert measured_costs(measurement(**OWN_NS)) == {
        "handoff_ns": 600.0,
        "arrive_serial_ns": 3.0,
        "issue_ns": 81.0,
        "issue_capped_ns": 120.0,
    }


@pytest.mark.timeout(300)
def test_a_simulated_card_is_found_again():
    base = without_fit_of(load_hardware(CHIP), {"consume_copy_ns", "handoff_queue_share"})
    own = measurement(**OWN_NS)
    costs = {"consume_copy_ns": 90.0, "handoff_queue_share": 1.3, **measured_costs(own)}
    card = base.model_copy(update={"costs": base.costs.model_copy(update=costs)})
    shares: list[float] = []
    # eight cells: a simulation's grain of a percent leads a descent over four astray
    found = calibrate(base, own, cells(card, 8), "card.json", rounds=2, every=1, watch=shares.append)
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1.0
    assert fitted_costs(base) == ("consume_copy_ns", "handoff_queue_share")
    assert found.fitted.mape < 0.01
    assert found.chip.costs.handoff_queue_share == pytest.approx(1.3, rel=0.15)
    assert "95% within" in found.chip.sources["costs.handoff_queue_share"]
    assert "card.json, a card, 2026-11-30" in found.chip.sources["ceilings"]
    assert found.chip.costs.issue_capped_ns == 120.0
    assert found.chip.sources["costs.issue_capped_ns"] == "measured: card.json, a card, 2026-11-30"
    assert np.abs(found.unseen).max() < 0.03
    told = json.loads(json.dumps(found.to_json()))
    assert (told["fitted"]["samples"], told["unseen"]["samples"]) == (9, 2)
    assert told["measured"]["handoff_ns"] == 600.0


def test_what_is_fitted_has_every_work_order_and_cap():
    """The skeletons of a measurement stand in runs of four works: every fourth would be of one work alone."""
    _, points = read_measurement(asset("configs/measurements/h200.json"))
    chosen = [point for point, _ in split(paced(points), EVERY)[0] if isinstance(point, SkeletonPoint)]
    assert {point.work_cycles for point in chosen} == {0, 1000, 2000, 4000}
    assert {point.cap_kb for point in chosen} >= {32, 40, 48, 64, 96, None}
    assert len({point.order for point in chosen}) == 3
    assert {point.after_wait for point in chosen} == {False, True}


@pytest.mark.parametrize("cap", [40, None])
def test_one_run_of_few_layers_tells_the_time_of_all(cap):
    chip, point = load_hardware(CHIP), SkeletonPoint(ORDER, False, cap, 1000)
    assert point.estimated_ms(chip) == pytest.approx(point.simulated_ms(chip), rel=0.01)


def test_too_few_skeletons_for_the_constants_are_refused():
    with pytest.raises(ConfigError, match="steps for 11 constants; measure more, or take a smaller --every"):
        calibrate(load_hardware(CHIP), measurement(), [(SkeletonPoint(ORDER, False, None, None), 1.5)] * 2, "card.json")


@pytest.mark.parametrize("name", ["h200.toml", "h100-sxm.toml"])
def test_a_chip_is_read_back_as_it_was_written(tmp_path, name):
    chip = load_hardware(CHIP.with_name(name))
    (tmp_path / "chip.toml").write_text(chip_toml(chip, ["A chip."]), encoding="utf-8")
    assert load_hardware(tmp_path / "chip.toml") == chip


def test_the_shipped_measurement_is_understood():
    read, points = read_measurement(asset("configs/measurements/h200.json"))
    assert read.card.name == "NVIDIA H200"
    skeletons = [point for point, _ in points if isinstance(point, SkeletonPoint)]
    assert len(skeletons) == 107 + 3 * 4  # the data set and other rings; three variants of arrivals
    assert {point.arrival for point in skeletons} == {"release", "relaxed", "read_back"}
    rings = {(8192, 25), (4096, 50), (16384, 12), (32768, 6)}
    assert {(point.copy_bytes, point.stages) for point in skeletons} == rings
    even = [point for point, _ in points if isinstance(point, EvenPoint)]
    assert len(even) == 350
    assert {point.work_cycles for point in even} == {None, 0, 1000, 2000, 4000}
    assert sum(point.is_free for point in even) == 10
    assert set(measured_costs(read)) == {"handoff_ns", "arrive_serial_ns", "issue_ns", "issue_capped_ns"}
    described = points[0][0].program(LAYERS)
    copies = LAYERS * sum(phase.copies for phase in described.phases) + described.tail.copies
    assert copies * 132 * 8192 == 7_061_176_320  # the record's own count


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["simulator", "calibrate", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capsys.readouterr()

    return call


def sample(name):
    return {"what": "microbench", "date": "2026", "card": CARD, "samples": [{"name": name, "ms": [1.0]}]}


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (sample("default | QKV UP,free,,"), (), "is not ORDER,LOADS,CAP_KB,WORK_CYCLES"),
        (sample("default | QKV ATT UP DOWN O,sideways,,"), (), "is not ORDER,LOADS,CAP_KB,WORK_CYCLES"),
        (sample("streaming | 8192 B x 25,4 x 32,48"), (), "is not BYTES B x STAGES,PHASES x COPIES,CAP_KB,WORK_CYCLES"),
        (sample("streaming | 8192 B x 25,4 x 32,,"), (), "no free stream and skeletons among its samples"),
        (sample("default | QKV ATT UP DOWN O,free,,"), (), "no free stream and skeletons among its samples"),
        ({"what": "microbench"}, (), "date"),
        (sample("hand"), ("--out", "none/chip.toml"), "none/chip.toml: cannot be written"),
    ],
)
def test_bad_measurements_are_one_message_and_exit_2(command, tmp_path, content, arguments, message):
    (tmp_path / "m.json").write_text(json.dumps(content), encoding="utf-8")
    code, out, err = command("m.json", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_a_record_of_another_chip_is_refused(command):
    """An H200's, for an H100: equally many SMs, other memory."""
    chip = asset("configs/hardware/h100-sxm.toml")
    code, _, err = command(asset("configs/measurements/h200.json"), "--chip", chip)
    assert code == 2
    assert "measured on NVIDIA H200 (132 SMs, 150 GB), wanted for NVIDIA H100 SXM (132 SMs, " in err
