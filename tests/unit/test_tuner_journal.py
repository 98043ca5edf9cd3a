"""The journal of a search: a search that was killed goes on as if it had not been, and another's file is refused."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import optuna
import pytest
from support.searching import BUCKET, FakeEvaluator, priced, problem

from megakernel.config import ConfigError, canonical_json
from megakernel.workload import Bucket
from tuner.journal import OUTCOMES, open_journal, read_storage
from tuner.outcome import Rung
from tuner.search import plan_of, search

ROOT = Path(__file__).parents[2]
LONGER = Bucket(rows=2, max_context_tokens=4096, nominal_context_tokens=4096)


@dataclass(frozen=True)
class Logged(FakeEvaluator):
    """Writes every scored point to a file; is killed, as by the system, before scoring number `killed_at`."""

    log: str = ""
    killed_at: int | None = None

    def evaluate(self, choices, rung):
        if len(self.calls) + 1 == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = super().evaluate(choices, rung)
        with Path(self.log).open("a", encoding="utf-8") as file:
            file.write(f"{rung.name} {canonical_json(choices)}\n")
        return outcome


def searched(folder: Path, evaluator, *, fresh=False, **settings):
    """Everything of a search's result that does not tell the time."""
    asked = problem(**settings)
    with open_journal(str(folder / "p.journal"), asked, fresh=fresh) as journal:
        results = search(asked, lambda *_: None, lambda *_: evaluator, journal)
    return canonical_json(plan_of(asked, results, "tests")), [
        (each.raced.counts, each.raced.attempts, each.raced.standings) for each in results
    ]


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
import importlib.util
spec = importlib.util.spec_from_file_location("journal_test", {this!r})
module = importlib.util.module_from_spec(spec)
sys.modules["journal_test"] = module
spec.loader.exec_module(module)
folder = Path(sys.argv[1])
module.searched(folder, module.Logged(log=str(folder / "log"), killed_at=int(sys.argv[2])), trials=32)
"""


def killed(folder: Path, at: int) -> int:
    code = KILLED.format(root=str(ROOT), tests=str(ROOT / "tests"), this=__file__)
    return subprocess.run([sys.executable, "-c", code, str(folder), str(at)], timeout=60, check=False).returncode


def test_a_search_that_is_killed_twice_comes_to_the_same_and_scores_nothing_twice(tmp_path):
    """Points scored on layers count; closed forms of candidates that were not told are computed again."""
    (tmp_path / "whole").mkdir()
    whole = searched(tmp_path / "whole", FakeEvaluator(), trials=32)
    folder = tmp_path / "killed"
    folder.mkdir()
    for at in (20, 35):
        assert killed(folder, at) == -signal.SIGKILL
    study = optuna.load_study(study_name=None, storage=read_storage(str(folder / "p.journal")))
    running = Counter(each.state for each in study.trials)
    assert running[optuna.trial.TrialState.RUNNING] > 0
    assert searched(folder, Logged(log=str(folder / "log")), trials=32) == whole
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    scored = [line for line in lines if not line.startswith("BOUND")]
    assert len(scored) == len(set(scored))
    reference = FakeEvaluator()
    search(problem(trials=32), lambda *_: None, lambda *_: reference)
    once = {f"{rung.name} {canonical_json(each)}" for each, rung in reference.calls if rung is not Rung.BOUND}
    assert set(scored) == once


def cut_short(folder: Path, lines: int, whole: bytes) -> None:
    """Leave the journal that a process had when it died after so many writes, the last of them torn."""
    kept = whole.splitlines(keepends=True)
    (folder / "p.journal").write_bytes(b"".join(kept[:lines]) + kept[lines][:7])
    (folder / "p.journal.lock").symlink_to("p.journal")


def test_wherever_the_journal_ends_the_search_comes_to_the_same(tmp_path):
    """Every kind of write is the last one once: a death while asking, scoring, telling, or in the finals."""
    whole = searched(tmp_path, FakeEvaluator(), trials=20)
    text = (tmp_path / "p.journal").read_bytes()
    num_lines = text.count(b"\n")
    for lines in range(0, num_lines, 3):
        cut_short(tmp_path, lines, text)
        assert searched(tmp_path, FakeEvaluator(), trials=20) == whole, f"after {lines} of {num_lines} writes"


def test_a_finished_search_is_not_run_again_and_a_larger_budget_goes_on(tmp_path):
    once = searched(tmp_path, FakeEvaluator(), trials=24)
    again = FakeEvaluator()
    assert searched(tmp_path, again, trials=24) == once
    assert again.calls == []
    more = FakeEvaluator()
    searched(tmp_path, more, trials=40)
    assert 0 < len(more.at(Rung.BOUND)) <= 16


def test_every_bucket_is_a_study_of_the_file(tmp_path):
    buckets = (BUCKET, LONGER)
    once = searched(tmp_path, FakeEvaluator(), trials=16, buckets=buckets)
    again = FakeEvaluator()
    assert searched(tmp_path, again, trials=16, buckets=buckets) == once
    assert again.calls == []
    studies = optuna.get_all_study_summaries(read_storage(str(tmp_path / "p.journal")))
    assert {each.study_name[:8] for each in studies} == {"bucket 1", "bucket 2"}
    assert sorted(each.n_trials for each in studies) == [8, 8, 16, 16]  # of two roundings, one lost in the heats


def test_optuna_reads_the_journal_as_any_other(tmp_path):
    searched(tmp_path, FakeEvaluator(), trials=24)
    study = optuna.load_study(study_name=None, storage=read_storage(str(tmp_path / "p.journal")))
    assert len(study.trials) == 24
    best = study.best_trial
    assert best.user_attrs[OUTCOMES]["FEW_LAYERS"]["expected_ns"] == best.value
    assert set(study.user_attrs["values"]) >= set(best.params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 5}, "the search in it has seed 0, this one has 5; give --fresh to start anew, or --journal FILE"),
        ({"batch": 3}, "the search in it has another configuration; give --fresh"),
        ({"buckets": (LONGER,)}, "the search in it has another configuration; give --fresh"),
    ],
)
def test_the_journal_of_another_search_is_refused(tmp_path, settings, message):
    searched(tmp_path, FakeEvaluator(), trials=4)
    with pytest.raises(ConfigError, match=message):
        searched(tmp_path, FakeEvaluator(), trials=4, **settings)
    searched(tmp_path, FakeEvaluator(), trials=4, fresh=True, **settings)


@pytest.mark.parametrize("what", ["chip", "code", "model"])
def test_scores_of_another_chip_model_or_code_are_refused(tmp_path, what):
    searched(tmp_path, FakeEvaluator(), trials=4)
    path = tmp_path / "p.journal"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        identity = line.get("user_attr", {}).get("search")
        if identity:
            identity[what] = "sha256:" + "0" * 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"the search in it has another {what}; give --fresh"):
        searched(tmp_path, FakeEvaluator(), trials=4)


def test_a_file_that_is_no_journal_or_is_in_use_is_refused(tmp_path):
    path = tmp_path / "p.journal"
    for damage in ("{}\n", "more\n"):
        path.write_text('{"op_code":0}\n' + damage, encoding="utf-8")
        with pytest.raises(ConfigError, match="not an Optuna journal, or a damaged one"):
            searched(tmp_path, FakeEvaluator())
    path.unlink()
    optuna.create_study(storage=read_storage_of(path)).set_user_attr("theirs", 1)
    with pytest.raises(ConfigError, match="is no search of plans"):
        searched(tmp_path, FakeEvaluator())
    with (
        open_journal(str(path), problem(), fresh=True),
        pytest.raises(ConfigError, match="another search is writing to it"),
    ):
        searched(tmp_path, FakeEvaluator())


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("text", ["notes in one line", "line one\na last line", '{"a": "plan"}\n'])
def test_a_file_that_no_search_began_is_refused_and_stays_as_it_is(tmp_path, text, fresh):
    """A name mistyped after --journal: what is torn off a journal, or forgotten, would be somebody's text."""
    path = tmp_path / "notes.txt"
    path.write_text(text, encoding="utf-8")
    with (
        pytest.raises(ConfigError, match="not an Optuna journal, and stays as it is"),
        open_journal(str(path), problem(), fresh=fresh),
    ):
        pass
    assert path.read_text(encoding="utf-8") == text


def read_storage_of(path: Path):
    path.touch()
    return read_storage(str(path))


def test_interrupted_candidates_are_scored_when_the_search_goes_on(tmp_path):
    whole = searched(tmp_path, FakeEvaluator(), trials=24)
    _, results = searched(tmp_path, FakeEvaluator(interrupt_after=30), trials=24, fresh=True)
    assert len(results[0][1]) < 24
    resumed, _ = searched(tmp_path, FakeEvaluator(), trials=24)
    assert resumed == whole[0]
    assert min(priced(each.choices) for each in whole[1][0][2]) == whole[1][0][2][0].score.expected_ns
