"""The same search on recorded measurements, without a card: a contest of a whole space is shipped, and replayed."""

import sys

import pytest

from megakernel.assets import asset
from megakernel.config import load_json
from megakernel.measurement import Record
from megakernel.plan import Plan
from tuner.cli import main
from tuner.problem import HAND

RECORD = "configs/measurements/north-h200-orders.json"
SEARCH = "configs/search/north-mini-code-h200-orders.toml"


def test_a_search_over_a_recorded_space_lets_the_record_decide(tmp_path, monkeypatch, capsys):
    record = load_json(asset(RECORD), Record)
    out = tmp_path / "plan.json"
    monkeypatch.setattr(sys, "argv", ["tuner", "search", SEARCH, "--replay", str(asset(RECORD)), "--out", str(out)])
    with pytest.raises(SystemExit) as left:
        main()
    printed = capsys.readouterr().out
    assert not left.value.code, printed
    (entry,) = load_json(out, Plan).entries
    times = {choices: record.median_ms(name) for name, choices in record.choices.items() if name not in record.faults}
    assert entry.measured_ns == pytest.approx(times[entry.choices] * 1e6, rel=0.02)
    hand = next(choices for name, choices in record.choices.items() if name == HAND)
    assert times[entry.choices] <= 1.002 * times[hand]
    assert times[entry.choices] <= 1.03 * min(times.values()), "the best of the record was not among the measured"
