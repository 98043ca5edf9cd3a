"""What a run sends, and how fast: one TOML file, or flags of the same names.

Owns names, defaults and bounds. Lengths are in tokens; those of conversations are met as well as words can.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, JsonValue, model_validator

from megakernel.config import ConfigError, Frozen, parse, read_toml


class Load(Frozen):
    """One run: `num_prompts` requests, or conversations, in one of the shapes that `dataset_name` has.

    `random`: prompts of random ids with `random_input_len` tokens behind `random_prefix_len` that all share, answers of
    `random_output_len`; `random_range_ratio` r draws both lengths evenly from (1 - r) to (1 + r) times what they are.
    `prefix_repetition`: `num_prefixes` beginnings in turn, each followed by ids of its own.
    `multi_turn`: agents' conversations with tools over a shared system text; every turn but the first brings a tool's
    result, and sends all that was said again. `multi_turn_tool_s` is how long a tool takes.

    Prompts follow from `seed` and the run's name. Requests begin at `request_rate` a second, as a Poisson process does,
    without one all at once; at most `max_concurrency` are under way. `vocab_size`: random ids are below it; what the
    server says without.
    """

    label: str = Field(default="", max_length=128, pattern=r"^[\w.+-]*$")
    model: str | None = None
    dataset_name: Literal["random", "prefix_repetition", "multi_turn"] = "random"
    num_prompts: int = Field(default=100, gt=0)
    request_rate: float | None = Field(default=None, gt=0)
    max_concurrency: int | None = Field(default=None, gt=0)
    num_warmups: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)
    random_input_len: int = Field(default=1024, gt=0)
    random_output_len: int = Field(default=128, gt=0)
    random_prefix_len: int = Field(default=0, ge=0)
    random_range_ratio: float = Field(default=0.0, ge=0, lt=1)
    prefix_repetition_prefix_len: int = Field(default=256, gt=0)
    prefix_repetition_suffix_len: int = Field(default=256, gt=0)
    prefix_repetition_num_prefixes: int = Field(default=10, gt=0)
    prefix_repetition_output_len: int = Field(default=128, gt=0)
    multi_turn_num_turns: int = Field(default=5, gt=0)
    multi_turn_system_len: int = Field(default=1024, gt=0)
    multi_turn_input_len: int = Field(default=64, gt=0)
    multi_turn_tool_len: int = Field(default=256, gt=0)
    multi_turn_output_len: int = Field(default=128, gt=0)
    multi_turn_tool_s: float = Field(default=0.0, ge=0)
    ignore_eos: bool = True
    temperature: float | None = Field(default=None, ge=0)
    extra_body: dict[str, JsonValue] = Field(default_factory=dict)
    vocab_size: int | None = Field(default=None, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)

    @property
    def name(self) -> str:
        """What the run is called in tables and files."""
        return self.label or self.dataset_name


class BenchConfig(Frozen):
    """Runs against the server at `base_url`, one after the other; each writes `result_dir`/NAME.json.

    The key is in the environment, OPENAI_API_KEY.
    """

    base_url: str = Field(pattern=r"^https?://[^/\s]+(/\S*)?$")
    runs: tuple[Load, ...]
    result_dir: str | None = None
    save_detailed: bool = False
    ready_check_timeout_sec: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [run.name for run in self.runs]
        if not names:
            raise ValueError("there is no run; give one, [[runs]], or leave `runs` out")
        if len(set(names)) < len(names):
            raise ValueError(f"two runs are called {max(names, key=names.count)}; give each a label of its own")
        return self


_OF_ALL = frozenset(BenchConfig.model_fields) - {"runs"}


def load_config(target: str, flags: dict[str, object]) -> BenchConfig:
    """Read a server's address, or a TOML file; flags that are not None win, over every run's own fields too.

    In a file, fields of a run may stand at the top, for all runs; without `runs` there is one.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if target.startswith(("http://", "https://")):
        data, source = cast("dict[str, object]", {"base_url": target}), "the command line"
    else:
        data, source = read_toml(Path(target)), target
        if isinstance(data.get("result_dir"), str):
            data["result_dir"] = str(Path(target).parent / str(data["result_dir"]))
    shared = {name: data.pop(name) for name in set(data) - set(BenchConfig.model_fields)}
    runs = data.pop("runs", [{}])
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in cast("list[Any]", runs)):
        raise ConfigError(f"{source}: `runs` is no list of tables; needed: [[runs]]")
    of_runs = {name: value for name, value in given.items() if name not in _OF_ALL}
    data["runs"] = [_bounded(shared | run | of_runs) for run in cast("list[dict[str, object]]", runs)]
    return parse(data | {name: value for name, value in given.items() if name in _OF_ALL}, BenchConfig, source)


def _bounded(run: dict[str, object]) -> dict[str, object]:
    """A rate of `inf`, as others write it, is none."""
    return {name: value for name, value in run.items() if (name, value) != ("request_rate", math.inf)}
