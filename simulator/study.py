"""A what-if study: which models, chips, batches and contexts to price, under which routings, and by which schemes.

Owns the shape of configs/studies/*.toml and the reading of every file that a study names, relative to its own. Refuses
a study that names a model of a family that no reader knows: by the model's name, before anything is priced. Called by
the `simulator` command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megakernel.assets import asset, locate
from megakernel.config import Frozen, load_json, load_toml, parse
from megakernel.config.override import assign
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.model import ModelSpec
from megakernel.plan import Plan
from megakernel.tiling import Choices
from megakernel.workload import Bucket, Routing
from simulator.baseline import GRAPH_GAP_NS
from simulator.recorded import load_picks

Scheme = Literal["plan", "hand", "kernels"]
"""A searched plan; the hand-placed choices, fitted to the bucket; one kernel per operator with the same tiles."""

MOST_ROWS = next(each.le for each in Bucket.model_fields["rows"].metadata if hasattr(each, "le"))

Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class RoutingChoice(Frozen):
    """A routing law: `uniform`, `zipf` with its exponent, or `picks`, a file of counts."""

    kind: Literal["uniform", "zipf", "picks"] = "uniform"
    exponent: float = Field(default=1.0, ge=0.0, le=8.0)
    file: str | None = None

    @model_validator(mode="after")
    def _file_goes_with_picks(self) -> RoutingChoice:
        if (self.kind == "picks") != (self.file is not None):
            raise ValueError('`file` and kind "picks" go together')
        return self


class HandFiles(Frozen):
    """Hand-placed choices for either kind of block; the shipped ones if left out."""

    parallel: str | None = None
    sequential: str | None = None


class Study(Frozen):
    """A study file. Every combination of its lists is a point; every scheme is priced at every point.

    Without `draws` a point is priced from few layers with mean routing; with them, on all layers and so many routings.
    """

    models: Annotated[tuple[Text, ...], Field(min_length=1)]
    chips: Annotated[tuple[Text, ...], Field(min_length=1)]
    batches: Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_ROWS)], ...], Field(min_length=1)]
    contexts: Annotated[tuple[Count, ...], Field(min_length=1)]
    routings: Annotated[tuple[RoutingChoice, ...], Field(min_length=1)] = (RoutingChoice(),)
    schemes: Annotated[tuple[Scheme, ...], Field(min_length=1)] = ("hand", "kernels")
    plans: tuple[Text, ...] = ()
    hand: HandFiles = HandFiles()
    gap_ns: float = Field(default=GRAPH_GAP_NS, ge=0.0, le=1e6)
    draws: Count | None = None
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _plans_where_asked(self) -> Study:
        if ("plan" in self.schemes) != bool(self.plans):
            raise ValueError('`plans` and the scheme "plan" go together')
        for name in ("models", "chips", "batches", "contexts", "schemes"):
            values: tuple[object, ...] = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"`{name}` names a value twice")
        return self


@dataclass(frozen=True)
class NamedModel:
    """A model, the name of its file, and its routing for each of the study's laws."""

    name: str
    spec: ModelSpec
    routings: tuple[Routing, ...]


@dataclass(frozen=True)
class Sweep:
    """A study with everything that it names."""

    study: Study
    models: tuple[NamedModel, ...]
    chips: tuple[HardwareSpec, ...]
    plans: tuple[tuple[str, Plan], ...]
    hands: Mapping[str, Choices]

    @property
    def num_points(self) -> int:
        """Combinations of its lists."""
        study = self.study
        lists = (study.models, study.chips, study.routings, study.batches, study.contexts)
        points = 1
        for each in lists:
            points *= len(each)
        return points


def load_study(given: str, overrides: Iterable[str] = ()) -> Sweep:
    """Read a study file and all that it names; ConfigError says what is missing, malformed or not supported."""
    path = locate(given)
    return gather(load_toml(path, Study, overrides), path.parent)


def single_point(model: str, chip: str, batch: int, context: int, plan: str | None, overrides: Iterable[str]) -> Sweep:
    """The study of one point that flags describe; paths in it are the user's own."""
    data: dict[str, object] = {"models": [model], "chips": [chip], "batches": [batch], "contexts": [context]}
    if plan is not None:
        data |= {"plans": [plan], "schemes": ["plan", "hand", "kernels"]}
    given = tuple(overrides)
    source = " ".join(f"--set {each}" for each in given) or "the flags"
    return gather(parse(assign(data, given), Study, source))


def gather(study: Study, folder: Path | None = None) -> Sweep:
    """Read what a study names: relative to `folder`, or as a user's own paths without one."""

    def find(name: str) -> Path:
        return locate(name) if folder is None else folder / name

    models = tuple(_model(find(name), study, find) for name in study.models)
    plans = tuple((name, load_json(find(name), Plan)) for name in study.plans)
    hands = {
        block: load_toml(asset(f"configs/choices/{shipped}.toml") if given is None else find(given), Choices)
        for block, given, shipped in (
            ("parallel", study.hand.parallel, "hand"),
            ("sequential", study.hand.sequential, "sequential-hand"),
        )
    }
    return Sweep(study, models, tuple(load_hardware(find(name)) for name in study.chips), plans, hands)


def _model(path: Path, study: Study, find: Callable[[str], Path]) -> NamedModel:
    spec = read_model(path)
    name = path.parent.name if path.name == "config.json" else path.stem
    return NamedModel(name, spec, tuple(_routing(each, spec, find) for each in study.routings))


def _routing(choice: RoutingChoice, model: ModelSpec, find: Callable[[str], Path]) -> Routing:
    if choice.file is not None:
        return load_picks(find(choice.file), model)
    return Routing() if choice.kind == "uniform" else Routing(kind="zipf", exponent=choice.exponent)
