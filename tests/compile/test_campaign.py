"""A measurement file is checked before anything is allocated on a card."""

from types import SimpleNamespace

import pytest

from megakernel import limits
from megakernel.assets import asset
from megakernel.config import ConfigError, load_json, load_toml, override
from megakernel.families import read_model
from megakernel.hardware import load_hardware
from megakernel.plan import Plan
from megakernel.tiling import Choices
from tuner.problem import load_problem
from tuner.request import all_candidates

pytest.importorskip("cuda.core", reason="needs the launcher of the runtime extra")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("positions = [8191]", "positions = [8192]", "needed at most 1 from 0 to 8191"),
        ("positions = [8191]", "positions = [-5]", "needed at most 1 from 0 to 8191"),
        ("positions = [8191]", "positions = [1, 2]", "needed at most 1 from 0 to 8191"),
        ('name = "hand, uncapped"', 'name = "hand"', "needed a name of its own for each"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(tmp_path, old, new, message):
    from runtime.gpu.campaign import read_campaign

    text = asset("configs/measure/north-h200.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "measure.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_campaign(path)


def test_the_shipped_request_is_what_the_search_asks_for():
    """Runtime and tuner meet in this file: every candidate of the small space, as the runtime reads it."""
    from runtime.gpu.campaign import MeasureConfig

    problem = load_problem("configs/search/north-mini-code-h200-orders.toml")
    path = asset("configs/measure/north-h200-orders.toml")
    config = load_toml(path, MeasureConfig)
    assert (config.bucket,) == problem.config.buckets
    read = {each.name: override(load_toml(path.parent / each.choices, Choices), each.set) for each in config.variants}
    asked = all_candidates(problem, config.bucket)
    assert {name: read[name] for name in asked} == asked
    assert len(asked) > 20


@pytest.mark.parametrize("path", sorted(asset("configs/measure").glob("*.toml")), ids=lambda path: path.stem)
def test_every_variant_of_a_shipped_measurement_is_legal(path):
    from runtime.gpu.campaign import MeasureConfig, choices_of

    config = load_toml(path, MeasureConfig)
    model, chip = read_model(path.parent / config.model), load_hardware(path.parent / config.chip)
    for each in config.variants:
        choices = override(choices_of(path.parent / each.choices, config.bucket), each.set)
        assert limits.reasons(model, config.bucket, choices, chip) == [], each.name


def test_a_variant_may_be_the_plan_of_its_bucket_and_of_no_other():
    from runtime.gpu.campaign import choices_of

    path = asset("configs/plans/north-mini-code-h200.json")
    (entry,) = load_json(path, Plan).entries
    assert choices_of(path, entry.bucket) == entry.choices
    with pytest.raises(ConfigError, match="no entry for 3 x 16384, only 1 x 16384"):
        choices_of(path, entry.bucket.model_copy(update={"rows": 3}))


def test_a_tolerant_campaign_names_what_can_not_be_built(tmp_path):
    from runtime.gpu.campaign import read_campaign

    text = asset("configs/measure/north-h200-decode.toml").read_text(encoding="utf-8")
    text = text.replace("../", f"{asset('configs')}/").replace(
        'name = "hand"', 'name = "hand"\nset = ["ring.stages=64"]'
    )
    (tmp_path / "measure.toml").write_text(text, encoding="utf-8")
    faults = {}
    campaign = read_campaign(tmp_path / "measure.toml", faults)
    assert faults["hand"].kind == "illegal"
    assert "ring.stages is 64" in faults["hand"].text
    assert set(campaign.steps) == {each.name for each in campaign.config.variants} - {"hand"}


@pytest.fixture
def pretended(monkeypatch):
    """A card of which only the numbers are there."""
    from support.pretend_card import CARD

    from runtime.gpu import campaign

    monkeypatch.setattr(campaign, "read_card", lambda: CARD)
    monkeypatch.setattr(campaign, "LoadedTable", lambda *_, **__: SimpleNamespace(blocks_per_sm=1))
    return campaign


def test_a_card_is_checked_for_every_entry_of_a_plan(pretended):
    path = asset("configs/plans/north-mini-code-h200.json")
    (entry,) = load_json(path, Plan).entries
    (facts,) = pretended.check(path)
    assert facts["variant"] == "1 x 16384"
    assert facts["table"].startswith(entry.table_digest)
    with pytest.raises(ConfigError, match="no entry is called 3 x 16384; there are 1 x 16384"):
        pretended.check(path, "3 x 16384")


def test_a_card_is_checked_for_no_stale_plan(pretended, tmp_path):
    path = tmp_path / "plan.json"
    plan = load_json(asset("configs/plans/north-mini-code-h200.json"), Plan)
    path.write_text(plan.model_copy(update={"code_digest": "sha256:" + "0" * 64}).model_dump_json(), encoding="utf-8")
    with pytest.raises(ConfigError, match="tuner refresh"):
        pretended.check(path)


def test_a_card_with_fewer_sms_than_the_plan_is_refused(pretended, monkeypatch):
    card = pretended.read_card().model_copy(update={"num_sms": 114})
    monkeypatch.setattr(pretended, "read_card", lambda: card)
    with pytest.raises(ConfigError, match=r"the table is for 132 SMs, NVIDIA Pretended has 114"):
        pretended.check(asset("configs/plans/north-mini-code-h200.json"))


def test_a_card_is_checked_for_the_first_variant_of_a_measurement_or_the_one_named(pretended):
    path = asset("configs/measure/north-h200.toml")
    assert [each["variant"] for each in pretended.check(path)] == ["hand"]
    assert [each["variant"] for each in pretended.check(path, "reference")] == ["reference"]
