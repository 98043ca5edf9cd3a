"""The same search on recorded measurements, without a card: every record that is shipped is replayed."""

import sys

import pytest

from megakernel.assets import asset
from megakernel.config import load_json
from megakernel.measurement import Record
from megakernel.plan import Plan
from tuner.cli import main
from tuner.problem import HAND

RECORDS = {
    path.stem: path
    for path in sorted(asset("configs/measurements").glob("north-*-orders.json"))
    if "contest" in path.read_text(encoding="utf-8")[:40]
}


@pytest.mark.skipif(not RECORDS, reason="no recorded contest is shipped yet")
@pytest.mark.parametrize("name", RECORDS)
def test_a_search_over_a_recorded_space_lets_the_record_decide(name, tmp_path, monkeypatch, capsys):
    record = load_json(RECORDS[name], Record)
    search = asset(f"configs/search/{name.replace('north-', 'north-mini-code-')}.toml")
    out = tmp_path / "plan.json"
    monkeypatch.setattr(
        sys, "argv", ["tuner", "search", str(search), "--replay", str(RECORDS[name]), "--out", str(out)]
    )
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
