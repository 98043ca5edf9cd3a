"""What `tuner show` and `tuner export` make of a plan and of its journal."""

from pathlib import Path

import optuna
import pytest
from support import north
from support.searching import FakeEvaluator, problem

from megakernel.assets import asset
from megakernel.build import build_step
from megakernel.config import ConfigError, load_json, load_toml
from megakernel.plan import Plan
from megakernel.tiling import Choices
from tuner import insight
from tuner.export import choices_toml, entry_of
from tuner.journal import open_journal
from tuner.search import plan_of, search
from tuner.values import NO_CAP


def shipped() -> Plan:
    return load_json(asset("configs/plans/north-mini-code-h200.json"), Plan)


def test_exported_choices_make_the_table_of_the_plan(tmp_path):
    plan = shipped()
    entry = entry_of(plan, None)
    (tmp_path / "choices.toml").write_text(choices_toml(entry), encoding="utf-8")
    choices = load_toml(tmp_path / "choices.toml", Choices)
    assert choices == entry.choices
    assert build_step(plan.model, entry.bucket, choices, north.chip()).table.digest == entry.table_digest


def test_a_bucket_that_the_plan_lacks_is_refused_with_those_it_has():
    with pytest.raises(ConfigError, match="no such bucket; give --bucket with one of 1x16384"):
        entry_of(shipped(), "8x128")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A small search: its plan and its journal."""
    path = str(tmp_path_factory.mktemp("search") / "p.journal")
    asked = problem()
    with open_journal(path, asked, fresh=False) as journal:
        results = search(asked, lambda *_: None, lambda *_: FakeEvaluator(), journal)
    return plan_of(asked, results, "tests"), path


def test_the_best_time_with_every_value_is_that_of_the_journals_trials(searched):
    plan, path = searched
    (study,) = insight.studies_of(path, plan)
    found = insight.of_study(study)
    scored = [trial.value for trial in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))]
    assert found.num_candidates == len(scored)
    for worths in found.worths.values():
        assert min(worth.best_ns for worth in worths) == min(scored)
    for name, worths in found.worths.items():  # a choice that acts only beside others is not every candidate's
        acting = [each for each in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,)) if name in each.params]
        assert sum(worth.num_candidates for worth in worths) == len(acting)
        assert all(worth.value != str(NO_CAP) for worth in worths)


def test_another_plans_journal_is_refused(searched):
    _, path = searched
    with pytest.raises(ConfigError, match=r"no study|another model"):
        insight.studies_of(path, shipped())


def test_pages_of_a_journal_need_no_network(searched, tmp_path):
    pytest.importorskip("plotly", reason="needs the plots extra")
    plan, path = searched
    (study,) = insight.studies_of(path, plan)
    for page in insight.plot(study, tmp_path, 1):
        text = Path(page).read_text(encoding="utf-8")
        assert "Plotly.newPlot" in text
        assert "<script src=" not in text
