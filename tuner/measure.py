"""Measures candidates on a card: the protocol, the command that does it, and the replay of a record.

Tuner and runtime meet in files. A request is a measurement file, the answer a record, and between them stands a
command, because what may hang, crash or vanish with its machine must not take the search along; in front of the command
there may be any other that reaches a machine with a card. Owns what an exit, a silence or a missing record mean.
Refuses to rank: `finals.py` does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from time import monotonic
from typing import Literal, Protocol

from megakernel.config import ConfigError, digest, load_json
from megakernel.measurement import Fault, Record
from megakernel.tiling import Choices
from megakernel.workload import Bucket
from tuner import leash
from tuner.outcome import FailedBuild, Hung, Illegal, MachineLost, Measured, Timed, Unrecorded, Wrong
from tuner.problem import Problem, load_record
from tuner.request import request_toml
from tuner.search_config import Measuring

Stage = Literal["first", "confirmation"]
"""Measured before, or again on fresh samples."""

TAIL = 600
"""Characters of a failed command's last words that are kept."""


@dataclass(frozen=True)
class Batch:
    """Outcomes by name, all timed in turns, the seconds that a card was held for it, and which card."""

    outcomes: Mapping[str, Measured]
    device_s: float
    card: str = ""


class Measurer(Protocol):
    """Times candidates in turns; an outcome is never an exception.

    `source` tells those apart whose answers to one question may differ: a record from another, and from a card.
    """

    @property
    def source(self) -> str:
        """Who answers."""
        ...

    def measure(self, stage: Stage, named: Mapping[str, Choices], seconds: float) -> Batch:
        """Measure `named`, within `seconds` of a card's time."""
        ...


@dataclass(frozen=True)
class Command:
    """Measures by running a command on files in `folder`."""

    problem: Problem
    bucket: Bucket
    folder: Path

    @property
    def source(self) -> str:
        """A card, whichever the command reaches."""
        return "card"

    def measure(self, stage: Stage, named: Mapping[str, Choices], seconds: float) -> Batch:
        """Run the command until it has answered for everybody; whom it dies on is blamed and left out."""
        how = self.problem.config.ladder.measured
        left, outcomes = dict(named), dict[str, Measured]()
        began_s, failures = monotonic(), 0
        lost, card = "no device time left", ""
        while left and failures <= how.retries and (left_s := began_s + seconds - monotonic()) > 0:
            found = self._run(stage, left, min(how.timeout_s, left_s))
            if isinstance(found, Record):
                outcomes |= {name: outcome_of(found, name) for name in left}
                left, card = {}, _card(found)
            elif found.is_late and left_s <= how.timeout_s:  # the budget ended it
                break
            elif found.culprit in left:
                outcomes[found.culprit] = Hung(found.text) if found.is_late else Wrong(found.text)
                del left[found.culprit]
            else:
                failures, lost = failures + 1, found.text
        outcomes |= dict.fromkeys(left, MachineLost(lost))
        return Batch({name: outcomes[name] for name in named}, monotonic() - began_s, card)

    def _run(self, stage: Stage, named: Mapping[str, Choices], timeout_s: float) -> Record | _Failure:
        how = self.problem.config.ladder.measured
        request, out = self.folder / f"{stage}.toml", self.folder / f"{stage}.json"
        now = Path(f"{out}.now")
        for old in (out, now):
            old.unlink(missing_ok=True)
        request.write_text(request_toml(self.problem, self.bucket, named, self.folder), encoding="utf-8")
        said = self.folder / f"{stage}.log"
        try:
            code = _run([*how.command, str(request), "--out", str(out)], said, timeout_s)
        except subprocess.TimeoutExpired:
            return _Failure(_text(now), f"no answer for {timeout_s:.0f} s; left no post-mortem", is_late=True)
        if code:
            return _Failure(_text(now), f"{how.command[0]} ended with {code}: {_text(said).strip()[-TAIL:]}")
        try:
            return load_json(out, Record)
        except ConfigError as error:
            return _Failure("", f"no record came back: {error}")


@dataclass(frozen=True)
class _Failure:
    """A command that gave no record; `culprit` was at work when it ended."""

    culprit: str
    text: str
    is_late: bool = False


@dataclass(frozen=True)
class Replay:
    """Answers from a record: its earlier rounds are the first samples, its later ones the confirmation."""

    record: Record

    @property
    def source(self) -> str:
        """This record."""
        return digest(self.record)

    def measure(self, stage: Stage, named: Mapping[str, Choices], seconds: float) -> Batch:
        """Look everybody up; the device time is what their launches took."""
        del seconds
        by_choices = {choices: name for name, choices in self.record.choices.items()}
        outcomes: dict[str, Measured] = {}
        for name, choices in named.items():
            found = by_choices.get(choices)
            outcomes[name] = Unrecorded() if found is None else _part(outcome_of(self.record, found), stage)
        timed = [each for each in outcomes.values() if isinstance(each, Timed)]
        return Batch(outcomes, sum(sum(each.ms) for each in timed) / 1e3, f"{_card(self.record)}, replayed")


MeasurerFor = Callable[[Bucket], Measurer | None]


def measurers(problem: Problem, folder: str, replay: str | None, *, measure: bool) -> MeasurerFor:
    """Who times finalists, by bucket: the command, whose files stay in `folder`, a record in its bucket, or nobody.

    The record is `replay` or, where nothing else is asked, the latest of the bucket that the search file names.
    """
    if measure and replay is not None:
        raise ConfigError("--measure and --replay both say who decides; needed one of them")
    if not measure:
        told = problem if replay is None else replace(problem, records=(_replayed(replay, problem),))
        return lambda bucket: None if (record := told.record_of(bucket)) is None else Replay(record)
    check_command(problem.config.ladder.measured)

    def command(bucket: Bucket) -> Command:
        own = Path(folder) / f"{bucket.rows}x{bucket.max_context_tokens}"
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{own}: not a folder that can be made: {error.strerror}") from None
        return Command(problem, bucket, own)

    return command


def check_command(how: Measuring) -> None:
    """ConfigError unless the command that measures is there."""
    if which(how.command[0]) is None:
        raise ConfigError(
            f"--measure runs {' '.join(how.command)}, and {how.command[0]} is no command here; "
            "needed ladder.measured.command, a list such as ['ssh', 'box', 'runtime', 'measure', '--tolerant']"
        )


def _replayed(path: str, problem: Problem) -> Record:
    """The record to replay; ConfigError when it is of another model or chip, or not of a bucket of the search."""
    record = load_record(Path(path), problem.model, problem.chip)
    buckets = problem.config.buckets
    if record.bucket not in buckets:
        raise ConfigError(f"{path}: measured the bucket {record.bucket}, the search has {', '.join(map(str, buckets))}")
    return record


def outcome_of(record: Record, name: str) -> Measured:
    """What a record says of a variant."""
    fault = record.faults.get(name)
    if fault is not None:
        return _faulty(fault)
    samples: Sequence[float] = next((each.ms for each in record.samples if each.name == name), ())
    return Timed(tuple(samples)) if samples else MachineLost("the record has no time of it")


def _faulty(fault: Fault) -> Measured:
    match fault.kind:
        case "illegal":
            return Illegal((fault.text,))
        case "failed build":
            return FailedBuild(fault.text)
        case "wrong":
            return Wrong(fault.text)
        case "hung":
            return Hung(fault.text)


def _run(command: list[str], said: Path, timeout_s: float) -> int:
    """Exit code of a command whose words go to `said`; whatever it started ends with it, late or killed with us."""
    leashed = [sys.executable, "-I", leash.__file__, *command]
    with (
        said.open("wb") as log,
        subprocess.Popen(  # noqa: S603 - the user's command
            leashed, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _part(outcome: Measured, stage: Stage) -> Measured:
    if not isinstance(outcome, Timed):
        return outcome
    half = max(len(outcome.ms) // 2, 1)
    return Timed(outcome.ms[:half] if stage == "first" else outcome.ms[half:] or outcome.ms)


def _card(record: Record) -> str:
    return f"{record.card.name}, driver {record.card.driver}, {record.date}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
