"""Candidates to be scored by workers anywhere: a queue in any storage of Optuna's that several machines reach.

The search proposes and ranks as it always does; only the scoring is elsewhere, so that seed and trials decide the
result whoever scores. Owns the study that is the queue: a trial is a candidate at a rung, taken by one worker, given
back when that worker falls silent, and never put twice, also by a search that was killed and goes on. Silence is told
by a count that stands still, not by clocks, which differ between machines. `worker.py` takes, `RemoteWorkers` puts.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from types import TracebackType
from typing import Self

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, get_storage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from megakernel.config import ConfigError, canonical_json, digest, parse
from megakernel.tiling import Choices
from megakernel.workload import Bucket
from tuner.evaluate import Evaluator
from tuner.journal import OUTCOME
from tuner.outcome import Outcome, Rung

KEY, CHOICES, BUCKET, RUNG, BEAT, RESULT = "key", "choices", "bucket", "rung", "beat", "outcome"
ENDED = "ended"
POLL_S = 0.1
OPEN_TRIES = 3
BEAT_S = 2.0
"""A worker counts on this often while it scores."""

LEAST_LOST_AFTER_S = 2 * BEAT_S
"""Who is given up sooner is given up at work, again and again, and the search never ends."""


@dataclass(frozen=True)
class Item:
    """A candidate of a bucket at a rung."""

    bucket: Bucket
    choices: Choices
    rung: Rung

    @property
    def key(self) -> str:
        """Equal items have equal keys."""
        return digest([self.bucket, self.choices, int(self.rung)])


def open_storage(url: str) -> BaseStorage:
    """A storage that machines share: `grpc://HOST:PORT` of `tuner storage`, or a database's URL."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scheme, _, rest = url.partition("://")
    if scheme != "grpc":
        return _open_database(url)
    host, _, port = rest.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--storage {url}: needed grpc://HOST:PORT, as `tuner storage` prints it")
    try:
        from optuna.storages import GrpcStorageProxy  # noqa: PLC0415 - needs the extra `remote`

        proxy = GrpcStorageProxy(host=host, port=int(port))
        proxy.wait_server_ready(timeout=30)
    except ImportError as missing:
        raise ConfigError(f"--storage {url}: no module {missing.name!r}; pip install 'counterpoint[remote]'") from None
    except Exception as error:  # noqa: BLE001 - gRPC's, and Optuna's wrapping of them
        raise ConfigError(f"--storage {url}: no answer: {type(error).__name__}") from None
    return proxy


def no_answers() -> tuple[type[Exception], ...]:
    """What a storage's calls raise when it is gone."""
    grpc = sys.modules.get("grpc")  # which Optuna loads for its proxy, if the extra `remote` is there
    return (optuna.exceptions.StorageInternalError, *(() if grpc is None else (grpc.RpcError,)))


@contextmanager
def answering(url: str | None) -> Generator[None]:
    """One message for a storage that was open and is gone: its server has ended, or its database."""
    try:
        yield
    except no_answers() as error:
        raise ConfigError(
            f"--storage {url}: answers no more: {type(error).__name__}; start it again, and the same command goes on"
        ) from None


def _open_database(url: str) -> BaseStorage:
    """A database; of several processes that make its tables at once, all but one have to look again."""
    for attempt in range(OPEN_TRIES):
        try:
            return get_storage(url)
        except Exception as error:  # noqa: BLE001 - every database has errors of its own
            if attempt == OPEN_TRIES - 1:
                raise ConfigError(f"--storage {url}: can't be opened: {str(error).splitlines()[0]}") from None
            sleep(10 * POLL_S)
    raise AssertionError


def serve(url: str, host: str, port: int, ready: Callable[[], None]) -> None:
    """Serve the storage behind `url` until the process ends; `ready` is called before."""
    try:
        from optuna.storages import run_grpc_proxy_server  # noqa: PLC0415 - needs the extra `remote`
    except ImportError as missing:
        raise ConfigError(f"no module {missing.name!r}; pip install 'counterpoint[remote]'") from None
    storage = open_storage(url)
    _check_address(host, port)
    ready()
    run_grpc_proxy_server(storage, host=host, port=port)


def _check_address(host: str, port: int) -> None:
    """ConfigError unless this process can listen there: gRPC shares a port that is taken, and traps otherwise."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: can't be listened at: {error.strerror}; needed an address of this machine "
            "and a port that is free"
        ) from None


class WorkQueue:
    """The queue of one search; `identity` says which, and workers of another are refused."""

    def __init__(self, storage: BaseStorage, identity: dict[str, str]) -> None:
        """Open the study, or make it."""
        self._storage = storage
        name = f"work {digest(identity).removeprefix('sha256:')[:16]}"
        try:
            self._study_id = storage.create_new_study((StudyDirection.MINIMIZE,), name)
        except optuna.exceptions.DuplicatedStudyError:
            self._study_id = storage.get_study_id_from_name(name)

    def trials(self) -> list[FrozenTrial]:
        """All items, in the order in which they were put."""
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def put(self, item: Item) -> None:
        """Let somebody score an item."""
        attributes = {
            KEY: item.key,
            CHOICES: canonical_json(item.choices),
            BUCKET: canonical_json(item.bucket),
            RUNG: int(item.rung),
        }
        self._storage.create_new_trial(self._study_id, create_trial(state=TrialState.WAITING, user_attrs=attributes))

    def take(self) -> tuple[int, Item] | None:
        """An item that nobody else gets; None when there is none."""
        for trial in self._storage.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.WAITING,)):
            try:
                is_mine = self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            except UpdateFinishedTrialError:
                continue
            if is_mine:
                return trial._trial_id, _item(trial)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return None

    def beat(self, trial_id: int, count: int) -> None:
        """Say that an item is being scored."""
        self._storage.set_trial_user_attr(trial_id, BEAT, count)

    def finish(self, trial_id: int, outcome: Outcome) -> bool:
        """Answer; False when the item was given to another meanwhile."""
        try:
            self._storage.set_trial_user_attr(trial_id, RESULT, OUTCOME.dump_python(outcome, mode="json"))
            return self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [0.0])
        except UpdateFinishedTrialError:
            return False

    def give_back(self, trial: FrozenTrial) -> None:
        """Take an item from a worker that fell silent, and put it again."""
        try:
            self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        except UpdateFinishedTrialError:
            return  # it has answered after all
        self.put(_item(trial))

    @property
    def has_ended(self) -> bool:
        """Whether the search is over."""
        return bool(self._storage.get_study_user_attrs(self._study_id).get(ENDED))

    def end(self, *, ended: bool) -> None:
        """Send workers home, or say that there will be more."""
        self._storage.set_study_user_attr(self._study_id, ENDED, ended)


@dataclass
class RemoteWorkers:
    """Workers that take from a queue; stands where a search has processes of its own."""

    queue: WorkQueue
    jobs: int
    lost_after_s: float = 60.0
    bucket_of: Callable[[Evaluator], Bucket] = lambda evaluator: evaluator.bucket  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownLambdaType, reportUnknownVariableType]
    _beats: dict[int, tuple[object, float]] = field(default_factory=dict[int, tuple[object, float]])

    def __enter__(self) -> Self:
        """Open the queue."""
        self.queue.end(ended=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the workers home."""
        self.queue.end(ended=True)

    def evaluate(self, evaluator: Evaluator, choices: Sequence[Choices], rung: Rung) -> Iterator[Outcome]:
        """Outcomes of all `choices` at `rung`, as workers answer; what was put by an earlier run is not put again."""
        items = [Item(self.bucket_of(evaluator), each, rung) for each in choices]
        there = {each.user_attrs[KEY] for each in self.queue.trials() if each.state is not TrialState.FAIL}
        for item in items:
            if item.key not in there:
                self.queue.put(item)
        for item in items:
            yield self._answer(item.key)

    def _answer(self, key: str) -> Outcome:
        while True:
            for trial in self.queue.trials():
                if trial.state is TrialState.COMPLETE and trial.user_attrs[KEY] == key:
                    return OUTCOME.validate_python(trial.user_attrs[RESULT])
                if trial.state is TrialState.RUNNING and self._is_silent(trial):
                    self.queue.give_back(trial)
            sleep(POLL_S)

    def _is_silent(self, trial: FrozenTrial) -> bool:
        beat, since_s = self._beats.get(trial.number, (None, 0.0))
        now = trial.user_attrs.get(BEAT, 0)
        if trial.number not in self._beats or beat != now:
            self._beats[trial.number] = now, monotonic()
            return False
        return monotonic() - since_s > self.lost_after_s


def _item(trial: FrozenTrial) -> Item:
    attributes = trial.user_attrs
    return Item(
        parse(json.loads(attributes[BUCKET]), Bucket, "queue"),
        parse(json.loads(attributes[CHOICES]), Choices, "queue"),
        Rung(attributes[RUNG]),
    )
