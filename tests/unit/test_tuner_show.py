"""What `tuner show` and `tuner export` make of a plan and of its journal."""

import io
import json
import sys
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from rich.console import Console
from support import north
from support.searching import FakeEvaluator, problem

from megakernel.assets import asset
from megakernel.build import build_step
from megakernel.config import ConfigError, load_json, load_toml
from megakernel.plan import Plan, Score
from megakernel.tiling import Choices
from tuner import insight, report
from tuner.export import choices_toml, entry_of
from tuner.journal import open_journal, read_storage
from tuner.search import plan_of, search
from tuner.values import NO_CAP


def shipped() -> Plan:
    return load_json(asset("configs/plans/north-mini-code-h200.json"), Plan)


def test_every_choice_of_a_plan_is_shown():
    plan = shipped()
    printed = Console(width=160, record=True, file=io.StringIO())
    printed.print(report.plan(plan, [insight.Insight("", 0, {}, {}) for _ in plan.entries]))
    shown = {line.strip("│ ").split(" ")[0] for line in printed.export_text().splitlines()}
    assert {f"{group}.{key}" for group, part in plan.entries[0].choices for key, _ in part} <= shown


def test_who_was_slower_on_a_card_is_shown_beside_who_was_predicted_to_be():
    plan = shipped()
    (entry,) = plan.entries
    timed = Score(name="timed", predicted_ns=0.9 * entry.predicted_ns, choices=entry.choices, measured_ns=3.0e6)
    only_predicted = timed.model_copy(update={"name": "only predicted", "measured_ns": None})
    losers = {"losers": (timed, only_predicted), "measured_ns": 2.0e6}
    plan = plan.model_copy(update={"entries": (entry.model_copy(update=losers),)})
    printed = Console(width=160, record=True, file=io.StringIO())
    printed.print(report.plan(plan, [insight.Insight("", 0, {}, {})]))
    rows = [line.strip("│ ") for line in printed.export_text().splitlines()]
    shown = {name: row.split() for name in ("this plan", "timed", "only") for row in rows if row.startswith(f"{name} ")}
    assert shown["this plan"][-2:] == ["2.000", "0.0%"]
    assert (shown["timed"][3], shown["timed"][-2:]) == ("-10.0%", ["3.000", "50.0%"])
    assert shown["only"][-2] == "-10.0%", "nothing after what is predicted"


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


def test_pages_and_pictures_of_history_and_slices_are_drawn_without_a_browser(searched, tmp_path):
    pytest.importorskip("plotly", reason="needs the extra `plots`")
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    plan, path = searched
    (study,) = insight.studies_of(path, plan)
    written = insight.plot(study, tmp_path, 1)
    assert {each.name for each in written} == {
        "history-1.html", "history-1.png", "slices-1.html", "slices-1.png"
    }  # fmt: skip
    for each in written:
        if each.suffix == ".png":
            assert each.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
            assert each.stat().st_size > 5000
        else:
            text = each.read_text(encoding="utf-8")
            assert "Plotly.newPlot" in text
            assert "<script src=" not in text, "a page that needs the network"


def test_optunas_dashboard_reads_the_journal(searched):
    """The studies with their trials, as its own pages ask for them."""
    dashboard = pytest.importorskip("optuna_dashboard", reason="needs the extra `test`")
    plan, path = searched
    (study,) = insight.studies_of(path, plan)
    app = dashboard.wsgi(read_storage(path))

    def get(url):
        answer = {}
        environ = {"wsgi.errors": sys.stderr, "wsgi.input": io.BytesIO(), "wsgi.url_scheme": "http"}
        setup_testing_defaults(environ)
        url, _, query = url.partition("?")
        environ |= {"PATH_INFO": url, "QUERY_STRING": query}
        body = b"".join(app(environ, lambda status, _headers, *_: answer.update(status=status)))
        assert answer["status"].startswith("200"), body
        return json.loads(body)

    (summary,) = get("/api/studies")["study_summaries"]
    assert summary["study_name"] == study.study_name
    shown = get(f"/api/studies/{summary['study_id']}?after=0")
    assert len(shown["trials"]) == len(study.trials)
    assert {each["state"] for each in shown["trials"]} >= {"Complete"}
    best = min(each["values"][0] for each in shown["trials"] if each["state"] == "Complete")
    assert float(best) == study.best_value
