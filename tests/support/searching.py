"""Searches without a simulator: a small problem, an evaluator with known answers, and files for the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support import north, small

from megakernel.assets import asset
from megakernel.config import pretty_json, read_json
from megakernel.tiling import Choices
from megakernel.workload import Bucket
from tuner.outcome import Illegal, Outcome, Refused, Rung, Scored
from tuner.problem import Problem, baselines
from tuner.search_config import (
    Baselines,
    Budget,
    Ladder,
    Proposals,
    RoundingValues,
    SearchConfig,
    SpaceValues,
)

BUCKET = Bucket(rows=1, max_context_tokens=4096, nominal_context_tokens=2048)
FLOOR_NS = 1e6


def priced(choices: Choices) -> float:
    """Made-up time: best with 16 KB copies, a cap of 64 KB, loads ahead and the head in 264 tasks."""
    ring, interleave = choices.ring, choices.interleave
    cap = ring.in_flight_cap_bytes or ring.bytes
    ns = FLOOR_NS
    ns += 2.0 * abs(ring.copy_bytes - 16384) + abs(cap - 65536) + 10.0 * abs(choices.cut.head - 264)
    ns += 50_000.0 * (interleave.loads == "after_wait") + 30_000.0 * (interleave.policy == "round_robin")
    ns += 5_000.0 * interleave.order.index("output") if "output" in interleave.order else 20_000.0
    return ns


@dataclass(frozen=True)
class FakeEvaluator:
    """Scores with `price`; `few_layers_error` is the ratio by which the middle rung is off."""

    price: Callable[[Choices], float] = priced
    few_layers_error: float = 1.0
    illegal: Callable[[Choices], bool] | None = None
    refused: Callable[[Choices], bool] | None = None
    calls: list[tuple[Choices, Rung]] = field(default_factory=list)
    interrupt_after: int | None = None

    def evaluate(self, choices: Choices, rung: Rung) -> Outcome:
        """Score `choices`, or be interrupted as a user would."""
        self.calls.append((choices, rung))
        if self.interrupt_after is not None and len(self.calls) > self.interrupt_after:
            raise KeyboardInterrupt
        if self.illegal is not None and self.illegal(choices):
            return Illegal(("made illegal",))
        if rung is Rung.ALL_LAYERS and self.refused is not None and self.refused(choices):
            return Refused(("made wrong",))
        ns = self.price(choices)
        shown = {Rung.BOUND: FLOOR_NS / 2, Rung.FEW_LAYERS: ns * self.few_layers_error, Rung.ALL_LAYERS: ns}[rung]
        return Scored(rung, shown, shown, FLOOR_NS / 2, FLOOR_NS / 4)

    def at(self, rung: Rung) -> list[Choices]:
        """Choices that were scored at a rung, in that order."""
        return [choices for choices, called in self.calls if called is rung]


FEW_ROUNDINGS = SpaceValues(
    rounding=RoundingValues(chunk_tokens=(128, 256), project_k_splits=(1,), slice_columns=(256,))
)


def problem(
    *,
    buckets: tuple[Bucket, ...] = (BUCKET,),
    ladder: dict[str, object] | None = None,
    space: SpaceValues | None = None,
    **proposals: object,
) -> Problem:
    """A search over the small model on an H200, of 40 candidates; several buckets have few roundings to share."""
    budget = Budget(**{"trials": 40} | {key: proposals.pop(key) for key in Budget.model_fields if key in proposals})
    config = SearchConfig(
        model="model",
        chip="chip",
        baselines=Baselines(hand="hand", reference="reference"),
        buckets=buckets,
        budget=budget,
        proposals=Proposals(**{"startup_trials": 10, **proposals}),
        ladder=Ladder(**{"finalists": 3} | (ladder or {})),
        space=space or (FEW_ROUNDINGS if len(buckets) > 1 else SpaceValues()),
    )
    racing = baselines(north.choices("hand"), north.choices("reference"))
    return Problem("tests", config, small.model(), small.chip(), racing)


def write_search(folder: Path) -> Path:
    """A search file with all that it names: North's shape with three narrow layers, on sixteen SMs of an H200."""
    model = read_json(asset("configs/models/CohereLabs--North-Mini-Code-1.0.json"))
    model |= {"num_hidden_layers": 3, "layer_types": model["layer_types"][:3], "vocab_size": 4096, "hidden_size": 512}
    (folder / "model.json").write_text(json.dumps(model), encoding="utf-8")
    chip = small.chip()
    sixteen = {"name": "sixteen SMs", "num_sms": 16, "ceilings": chip.ceilings[:2]}
    (folder / "chip.toml").write_text(_toml(json.loads(pretty_json(chip.model_copy(update=sixteen)))), encoding="utf-8")
    for name in ("hand", "reference"):
        shipped = asset(f"configs/choices/{name}.toml").read_text(encoding="utf-8")
        (folder / f"{name}.toml").write_text(shipped, encoding="utf-8")
    (folder / "search.toml").write_text(SEARCH, encoding="utf-8")
    return folder / "search.toml"


SEARCH = """
model = "model.json"
chip = "chip.toml"

[baselines]
hand = "hand.toml"
reference = "reference.toml"

[[buckets]]
rows = 1
max_context_tokens = 1024
nominal_context_tokens = 512

[budget]
trials = 6

[proposals]
batch = 3
startup_trials = 4

[ladder]
draws = 1
finalists = 1
"""


def _toml(table: dict[str, object]) -> str:
    """Plain data as TOML; JSON's texts of numbers, strings and lists of them are TOML's too."""
    plain = [f"{key} = {_inline(value)}" for key, value in table.items() if not isinstance(value, dict)]
    tables = [
        f"[{key}]\n" + "\n".join(f'"{name}" = {_inline(each)}' for name, each in value.items())
        for key, value in table.items()
        if isinstance(value, dict)
    ]
    return "\n".join([*plain, *tables]) + "\n"


def _inline(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_inline(each) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
