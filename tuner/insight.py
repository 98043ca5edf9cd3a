"""What a search's record teaches: what each choice is worth, which choices matter, and pictures of both.

Owns the reading of a journal for one bucket of a plan. Optuna says what matters and draws; refuses to compute either
itself. Called by `tuner show`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from megakernel.config import ConfigError, write_text_atomic
from megakernel.plan import Plan, PlanEntry
from tuner.journal import IDENTITY, VALUES, read_storage
from tuner.search import study_name
from tuner.values import NO_CAP

HISTORY_INCHES, SLICE_INCHES = (9.0, 5.0), (2.8, 3.6)
"""Width and height of the history's picture, and of one slice in theirs."""

PICTURED = 7
"""Choices whose slices are in the picture, those that matter most; the page has all."""

LEAST_TRIALS = 8
"""Scored candidates below which Optuna is not asked what matters: it would say something all the same."""


@dataclass(frozen=True)
class Worth:
    """The best time with one value of a choice, of so many candidates that had it."""

    value: str
    best_ns: float
    num_candidates: int


@dataclass(frozen=True)
class Insight:
    """What one bucket's record teaches: values of every choice, best first; shares of what matters, if known."""

    source: str
    num_candidates: int
    worths: Mapping[str, tuple[Worth, ...]]
    importances: Mapping[str, float]


Sample = tuple[Mapping[str, str], float]
"""Values of a candidate's choices as text, and its time in ns."""


def of_plan(entry: PlanEntry) -> Insight:
    """What the few candidates that a plan keeps say, scored on all layers."""
    kept = [(each.choices, each.predicted_ns) for each in entry.losers]
    if entry.predicted_ns is not None:
        kept.insert(0, (entry.choices, entry.predicted_ns))
    samples = [
        ({f"{group}.{key}": shown(value) for group, part in choices for key, value in part}, ns) for choices, ns in kept
    ]
    return Insight("on all layers, of those in the plan", len(samples), _worths(samples), {})


def of_study(study: optuna.Study) -> Insight:
    """What all candidates of a bucket's study say, scored on few layers."""
    valued = _with_values(study)
    scored = valued.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    samples = [
        ({name: shown(value) for name, value in trial.params.items()}, trial.value)
        for trial in scored
        if trial.value is not None
    ]
    return Insight("on few layers, of all in the journal", len(samples), _worths(samples), _importances(study))


def studies_of(path: str, plan: Plan) -> list[optuna.Study]:
    """The study of every bucket of a plan; ConfigError when the journal in `path` is of another search."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = read_storage(path)
    settled = plan.entries[0].choices.rounding if len(plan.entries) > 1 else None
    names = [study_name(idx, each.bucket, settled) for idx, each in enumerate(plan.entries)]
    return [_study(path, storage, name, plan) for name in names]


def check_plots() -> None:
    """ConfigError unless pages and pictures can be drawn."""
    for name, module in (("plotly", optuna.visualization), ("matplotlib", optuna.visualization.matplotlib)):
        if not module.is_available():
            raise ConfigError(f"--plots needs {name}, which is not installed; pip install 'counterpoint[plots]'")


def plot(study: optuna.Study, folder: Path, number: int) -> list[Path]:
    """Write the history and the slices of a bucket's study; their paths.

    Each is a page that needs no network, and a picture, which matplotlib draws without a browser.
    """
    valued = _with_values(study)
    figures = {
        "history": optuna.visualization.plot_optimization_history(valued, target_name="predicted ns"),
        "slices": optuna.visualization.plot_slice(valued, target_name="predicted ns"),
    }
    written: list[Path] = []
    for name, figure in figures.items():
        path = folder / f"{name}-{number}.html"
        page: str = figure.to_html(include_plotlyjs=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        write_text_atomic(path, page)
        written.append(path)
    return written + [_pictured(valued, name, folder / f"{name}-{number}.png") for name in figures]


def _pictured(valued: optuna.Study, name: str, path: Path) -> Path:
    """Draw one picture; its path."""
    drawn, importances = optuna.visualization.matplotlib, _importances(valued)
    shown = sorted(importances, key=importances.__getitem__, reverse=True)[:PICTURED] or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls it experimental, matplotlib a choice of one value narrow
        axis: Any = (
            drawn.plot_optimization_history(valued, target_name="predicted ns")
            if name == "history"
            else drawn.plot_slice(valued, params=shown, target_name="predicted ns")
        )
    plots = list(getattr(axis, "flat", [axis]))
    width, height = SLICE_INCHES
    plots[0].figure.set_size_inches(*(HISTORY_INCHES if name == "history" else (max(width * len(plots), 4.0), height)))
    for each in plots if name == "slices" else ():
        each.tick_params("x", rotation=60, labelsize=7)
    plots[0].figure.savefig(path, dpi=100, bbox_inches="tight")
    return path


def _importances(study: optuna.Study) -> dict[str, float]:
    """What Optuna says that each choice matters, if there is enough to say something of."""
    if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < LEAST_TRIALS:
        return {}
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())


def _study(path: str, storage: BaseStorage, name: str, plan: Plan) -> optuna.Study:
    known = [each.study_name for each in storage.get_all_studies()]
    if name not in known:
        raise ConfigError(f"{path}: no study {name!r}, found {', '.join(map(repr, known)) or 'none'}; another plan's?")
    study = optuna.load_study(study_name=name, storage=storage)
    identity = study.user_attrs.get(IDENTITY, {})
    for what, stated in (("model", plan.model_digest), ("chip", plan.hardware_digest)):
        if identity.get(what) != stated:
            raise ConfigError(f"{path}: the search in it has another {what} than the plan; give the plan's own journal")
    return study


def _with_values(study: optuna.Study) -> optuna.Study:
    """A copy of the study in memory that has values in place of their indices."""
    values = {name: [_plain(each) for each in listed] for name, listed in study.user_attrs.get(VALUES, {}).items()}
    copy = optuna.create_study(direction=study.direction, study_name=study.study_name)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        params: dict[str, Any] = {name: values[name][idx] for name, idx in trial.params.items()}
        copy.add_trial(
            create_trial(
                params=params,
                distributions={name: CategoricalDistribution(values[name]) for name in params},
                value=trial.value,
            )
        )
    return copy


def _plain(value: object) -> bool | int | str:
    if value == NO_CAP:
        return "none"
    return value if isinstance(value, bool | int) else str(value)


def _worths(samples: Iterable[Sample]) -> dict[str, tuple[Worth, ...]]:
    """Every choice that took several values: the best time with each."""
    times: dict[str, dict[str, list[float]]] = {}
    for values, ns in samples:
        for name, value in values.items():
            times.setdefault(name, {}).setdefault(value, []).append(ns)
    return {
        name: tuple(
            sorted(
                (Worth(value, min(each), len(each)) for value, each in found.items()), key=lambda worth: worth.best_ns
            )
        )
        for name, found in times.items()
        if len(found) > 1
    }


def shown(value: object) -> str:
    """A value of a choice, for people."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case tuple():
            return " ".join(str(each) for each in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return str(value)
