"""A search's record on disk: an Optuna journal file, from which a search that was killed goes on.

Owns the file: who may write to it, what a process that was killed leaves in it, and whether it is this search's. Every
bucket is a study of it, so that Optuna's own tools read it. What is not a trial stands in the studies' attributes:
scores on all layers, the values behind indices, the search's identity. Refuses a file of another search. `study.py`
writes to it, `insight.py` reads it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import BinaryIO

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import TypeAdapter

from megakernel.config import ConfigError, canonical_json, check_writable, digest, parse
from megakernel.tiling import Choices
from tuner.outcome import Outcome, Rung, Scored
from tuner.problem import Problem

IDENTITY, VALUES, ELAPSED = "search", "values", "elapsed_s"
"""Attributes of a study: whose it is, the values that indices mean, how long it has run."""

OUTCOMES, BATCH = "outcomes", "batch"
"""Attributes of a trial: what became of it by rung, and the number of the first trial that was asked with it."""

OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)

FIRST_BYTES = b'{"op_code":'
"""Of every Optuna journal, and so of what a search may cut or forget."""

DAMAGED = "not an Optuna journal, or a damaged one; --fresh starts anew"


class BucketJournal:
    """One bucket's study."""

    def __init__(self, storage: BaseStorage, name: str, identity: dict[str, str]) -> None:
        """Open the study, or make it."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # the command shows progress of its own
        found = {each.study_name: each for each in storage.get_all_studies()}
        is_new = name not in found
        self._storage = storage
        self._study_id = (
            storage.create_new_study((StudyDirection.MINIMIZE,), name)
            if is_new
            else storage.get_study_id_from_name(name)
        )
        self.study = optuna.load_study(study_name=name, storage=storage)
        attributes = self.study.user_attrs
        if attributes.get(IDENTITY) != identity:
            self.study.set_user_attr(IDENTITY, identity)
        self.elapsed_s = float(attributes.get(ELAPSED, 0.0))
        self.trials: tuple[FrozenTrial, ...] = tuple(self.study.get_trials(deepcopy=False))
        """The trials that were there when the study was opened."""
        self._ids = {
            each.number: storage.get_trial_id_from_study_id_trial_number(self._study_id, each.number)
            for each in self.trials
        }
        self._running: dict[Choices, int] = {}
        self._known: dict[tuple[Choices, Rung], Outcome] = {}
        for value in attributes.values():
            match value:
                case {"choices": choices, "rung": rung, "outcome": outcome}:
                    key = parse(choices, Choices, name), Rung(rung)
                    self._known[key] = OUTCOME.validate_python(outcome)
                case _:
                    pass

    def outcome(self, choices: Choices, rung: Rung) -> Outcome | None:
        """What became of `choices` at `rung`, if that was noted."""
        return self._known.get((choices, rung))

    def resume(self, trial: FrozenTrial, choices: Choices) -> None:
        """Learn what was noted of a trial that was there before; one that still runs takes notes again."""
        for rung, outcome in trial.user_attrs.get(OUTCOMES, {}).items():
            self._known.setdefault((choices, Rung[rung]), OUTCOME.validate_python(outcome))
        if trial.state is TrialState.RUNNING:
            self._running.setdefault(choices, trial.number)

    def begin(
        self, point: dict[str, int], distributions: dict[str, BaseDistribution], batch: int, choices: Choices
    ) -> int:
        """Note that a candidate was proposed; its number."""
        trial = create_trial(
            state=TrialState.RUNNING, params=point, distributions=distributions, user_attrs={BATCH: batch}
        )
        trial_id = self._storage.create_new_trial(self._study_id, trial)
        number = self._storage.get_trial_number_from_id(trial_id)
        self._ids[number] = trial_id
        self._running.setdefault(choices, number)
        return number

    def note(self, choices: Choices, rung: Rung, outcome: Outcome) -> None:
        """Note an outcome at once, so that it is never asked for again.

        A bound is cheap: it is written with what follows, or when the trial is told.
        """
        self._known[choices, rung] = outcome
        if rung is Rung.BOUND:
            return
        if rung is Rung.FEW_LAYERS and choices in self._running:
            self._write(self._running[choices], choices)
            return
        key = f"{rung.name.lower().replace('_', ' ')} {digest(choices).removeprefix('sha256:')[:12]}"
        noted = {"choices": json.loads(canonical_json(choices)), "rung": int(rung), "outcome": _plain(outcome)}
        self.study.set_user_attr(key, noted)

    def tell(self, number: int, choices: Choices, outcome: Outcome) -> None:
        """End a trial."""
        if self._running.get(choices) == number:
            del self._running[choices]
            if (choices, Rung.FEW_LAYERS) not in self._known:
                self._write(number, choices)
        tell(self.study, self._storage, self._ids[number], outcome)

    def describe(self, values: dict[str, Sequence[object]]) -> None:
        """Note which values the indices of the trials mean, for those who read the file."""
        if VALUES not in self.study.user_attrs:
            self.study.set_user_attr(VALUES, {name: list(each) for name, each in values.items()})

    def measured(self, asked: str) -> object:
        """A batch that was measured before, if it was; `asked` is the digest of the question."""
        return self.study.user_attrs.get(f"measured {asked}")

    def note_measured(self, asked: str, batch: object) -> None:
        """Note a batch that was measured."""
        self.study.set_user_attr(f"measured {asked}", batch)

    def spent(self, elapsed_s: float) -> None:
        """Note how long the search has run in all."""
        self.study.set_user_attr(ELAPSED, elapsed_s)

    def _write(self, number: int, choices: Choices) -> None:
        rungs = (Rung.BOUND, Rung.FEW_LAYERS)
        found = {rung.name: self._known[choices, rung] for rung in rungs if (choices, rung) in self._known}
        plain = {name: _plain(outcome) for name, outcome in found.items()}
        self._storage.set_trial_user_attr(self._ids[number], OUTCOMES, plain)


@dataclass(frozen=True)
class Journal:
    """The studies of one search, in a file or in memory."""

    storage: BaseStorage
    identity: dict[str, str]

    @staticmethod
    def in_memory() -> Journal:
        """A journal that is lost with the process."""
        return Journal(InMemoryStorage(), {})

    def bucket(self, name: str) -> BucketJournal:
        """The study of a bucket."""
        return BucketJournal(self.storage, name, self.identity)

    @property
    def num_trials(self) -> int:
        """Candidates of all buckets so far."""
        return sum(each.n_trials for each in optuna.get_all_study_summaries(self.storage))


def tell(study: optuna.Study, storage: BaseStorage, trial_id: int, outcome: Outcome) -> None:
    """End a trial; a bound is no time: it counts as pruned, which ranks it behind all that were scored."""
    number = storage.get_trial_number_from_id(trial_id)
    match outcome:
        case Scored(rung=Rung.BOUND):
            storage.set_trial_intermediate_value(trial_id, 0, outcome.expected_ns)
            study.tell(number, state=TrialState.PRUNED)
        case Scored():
            study.tell(number, outcome.expected_ns)
        case _:
            study.tell(number, state=TrialState.FAIL)


@contextmanager
def open_journal(path: str, problem: Problem, *, fresh: bool) -> Generator[Journal]:
    """The journal in a file, for this process alone; ConfigError when it is another search's or in use."""
    check_writable(path)
    _check_ours(path)
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path}: another search is writing to it; wait for it, or give --journal FILE") from None
        if fresh:
            file.truncate(0)
        else:
            _cut_torn_line(path)
        Path(f"{path}.lock").unlink(missing_ok=True)  # of a writer that was killed: the lock above says there is none
        storage = read_storage(path)
        identity = identity_of(problem)
        _check_identity(path, storage, identity)
        yield Journal(storage, identity)


def read_storage(path: str) -> JournalStorage:
    """The studies in a journal file, to read; ConfigError when it is none."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file; a search keeps one beside its plan, PLAN.json.journal")
    try:
        return JournalStorage(JournalFileBackend(path))
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        raise ConfigError(f"{path}: {DAMAGED}") from None


def identity_of(problem: Problem) -> dict[str, str]:
    """What scores and proposals depend on; budget and processes may change between runs of one search."""
    config = problem.config
    proposals = config.proposals.model_dump(exclude={"jobs", "seed"})
    left_out = {"budget": True, "proposals": True, "model": True, "chip": True, "baselines": True}
    asked = config.model_dump(exclude={**left_out, "ladder": {"measured"}})
    return {
        "seed": str(config.proposals.seed),
        "chip": digest(problem.chip),
        "model": digest(problem.model),
        "configuration": digest([asked, proposals, [each.choices for each in problem.baselines]]),
        "code": code_digest(),
    }


def code_digest(*packages: str) -> str:
    """Digest of the sources of some packages; of those that propose, lower and score by default."""
    total = sha256()
    for package in packages or ("megakernel", "simulator", "tuner"):
        root = Path(str(resources.files(package)))
        for source in sorted(root.rglob("*.py")):
            total.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes())
    return f"sha256:{total.hexdigest()}"


def _check_identity(path: str, storage: BaseStorage, identity: dict[str, str]) -> None:
    anew = "give --fresh to start anew, or --journal FILE to keep another record"
    for each in storage.get_all_studies():
        noted = each.user_attrs.get(IDENTITY)
        if noted is None:
            if each.user_attrs:
                raise ConfigError(f"{path}: study {each.study_name} is no search of plans; {anew}")
            continue  # killed in the moment of its birth
        for what, value in identity.items():
            if noted.get(what) != value:
                found = f"seed {noted.get(what)}, this one has {value}" if what == "seed" else f"another {what}"
                raise ConfigError(f"{path}: the search in it has {found}; {anew}")


def _check_ours(path: str) -> None:
    """Refuse a file that no search began, before anything is cut off it: --fresh forgets a search, not a text."""
    if not Path(path).is_file():
        return
    with Path(path).open("rb") as file:
        start = file.read(len(FIRST_BYTES))
    if start != FIRST_BYTES[: len(start)]:
        raise ConfigError(f"{path}: not an Optuna journal, and stays as it is; give --journal FILE another name")


def _opened(path: str) -> BinaryIO:
    try:
        return Path(path).open("ab+")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; give --journal FILE another name") from None


def _cut_torn_line(path: str) -> None:
    """Take off a last line that a killed writer did not finish; whatever came after it would be lost."""
    with Path(path).open("rb+") as file:
        text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        file.truncate(len(whole))
    try:
        json.loads(whole.splitlines()[-1] if whole else b"{}")  # Optuna takes a last line that is no JSON for torn
    except ValueError:
        raise ConfigError(f"{path}: {DAMAGED}") from None


def _plain(outcome: Outcome) -> object:
    return OUTCOME.dump_python(outcome, mode="json")
