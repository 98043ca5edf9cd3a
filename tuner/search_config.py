"""What a search is asked to do, as people write it: `configs/search/*.toml`.

Owns the file's keys and what they mean; paths in it are relative to the file. Refuses to look into the files that it
names: `problem.py` reads them. Called by the `tuner` command.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megakernel.arrival import DEFAULT_ARRIVAL
from megakernel.config import Frozen
from megakernel.tiling import MAX_TASKS, TILE_COLUMNS
from megakernel.workload import Bucket, Routing


class Baselines(Frozen):
    """Files of choices that race in every search, so that its result is never worse than any of them.

    `also` names others, the best that a card has seen so far, say; they are called by their files' names.
    """

    hand: str
    reference: str
    also: tuple[str, ...] = ()


class Budget(Frozen):
    """When to stop proposing, per bucket: whichever of the two comes first.

    `seconds` covers the whole search of a bucket, the final comparison included; `trials` counts proposed candidates.
    Only a search that is ended by its trials gives the same plan again. Either ends early once a proven plan is within
    `within_percent` of the bound of any plan.
    """

    seconds: float | None = Field(default=None, gt=0)
    trials: int | None = Field(default=None, ge=1)
    within_percent: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.seconds is None and self.trials is None:
            raise ValueError("needs seconds, trials or both: the search would never end")
        return self


class Proposals(Frozen):
    """How candidates are proposed.

    `step_percent` of them are small steps away from the best so far, the others are the sampler's, which draws
    `startup_trials` at random before it learns. `batch` candidates are proposed together and told together, so that
    the result does not depend on `jobs`, the number of processes that score them. Where several buckets share one
    rounding, each that all of them allow is first tried for `heat_trials` candidates in every bucket.
    """

    sampler: Literal["tpe", "random"] = "tpe"
    seed: int = Field(default=0, ge=0, lt=2**32)
    step_percent: int = Field(default=75, ge=0, le=100)
    startup_trials: int = Field(default=16, ge=0)
    batch: int = Field(default=8, ge=1, le=256)
    jobs: int = Field(default=1, ge=1, le=256)
    heat_trials: int = Field(default=8, ge=4)


class Measuring(Frozen):
    """The rung on a card, where --measure or --replay asks for it.

    `top` candidates and the plans that always race are timed in turns for `rounds` rounds, the best `confirmed` of them
    again on fresh samples. `seconds` of a card's time are spent on a bucket, `timeout_s` waited for one answer. A
    `command` that fails without a culprit is tried `retries` times more; it is given a measurement file and --out
    RECORD. `kernel` and `steps` a launch are how the plan will run.

    `records` are contests on this chip, the latest of a bucket before older ones: the latest decides where there is no
    --measure, as --replay would, and the fastest of it always races. So a plan that was only predicted never takes the
    place of one that a card has timed.
    """

    command: tuple[str, ...] = Field(default=("runtime", "measure", "--tolerant"), min_length=1)
    records: tuple[str, ...] = ()
    top: int = Field(default=4, ge=1)
    confirmed: int = Field(default=3, ge=1)
    rounds: int = Field(default=9, ge=1)
    seconds: float = Field(default=600.0, gt=0)
    timeout_s: float = Field(default=300.0, gt=0)
    retries: int = Field(default=1, ge=0)
    kernel: dict[str, str | int | bool] = Field(default_factory=lambda: {"arrival": DEFAULT_ARRIVAL})
    steps: int = Field(default=1, ge=1)


class Ladder(Frozen):
    """Who climbs how far.

    The first rung is the limits and, where `bound` says so, the closed-form bound: who can't beat the leader goes no
    further. The second, `screen`, ranks: a few layers, or all. Who leads there by `lead_percent` over the last proven
    leader is scored on all layers at once, `proofs` times at most; the best `finalists` are in the end. All layers are
    the mean of `draws` routings, or their p95, as `rank_by` says. The last rung is `measured`, on a card.
    """

    bound: bool = True
    screen: Literal["few_layers", "all_layers"] = "few_layers"
    lead_percent: float = Field(default=0.5, ge=0)
    proofs: int = Field(default=64, ge=0)
    finalists: int = Field(default=6, ge=1)
    draws: int = Field(default=3, ge=1)
    rank_by: Literal["expected", "p95"] = "expected"
    measured: Measuring = Measuring()


Tasks = Annotated[int, Field(ge=1, le=MAX_TASKS)]
CopyBytes = Annotated[int, Field(ge=1024, le=2**20)]
Tokens = Annotated[int, Field(ge=16, le=65536)]
Splits = Annotated[int, Field(ge=1, le=8)]
SliceColumns = Annotated[int, Field(ge=TILE_COLUMNS, le=256)]
Words = Annotated[int, Field(ge=1, le=4)]
Percent = Annotated[int, Field(ge=0, le=100)]
NotNegative = Annotated[int, Field(ge=0)]


class CutValues(Frozen):
    """Task counts to choose from, by operator; absent ones are derived from the model and the chip."""

    project: tuple[Tasks, ...] | None = Field(default=None, min_length=1)
    attend: tuple[Tasks, ...] | None = Field(default=None, min_length=1)
    merge: tuple[Tasks, ...] | None = Field(default=None, min_length=1)
    output: tuple[Tasks, ...] | None = Field(default=None, min_length=1)
    up: tuple[Tasks, ...] | None = Field(default=None, min_length=1)
    down: tuple[Tasks, ...] | None = Field(default=None, min_length=1)
    head: tuple[Tasks, ...] | None = Field(default=None, min_length=1)
    route: tuple[Tasks, ...] | None = Field(default=None, min_length=1)


class RingValues(Frozen):
    """Copy sizes, ring sizes and caps to choose from; a cap of 0 is none."""

    copy_bytes: tuple[CopyBytes, ...] = Field(default=(4096, 6144, 8192, 12288, 16384, 24576, 32768), min_length=1)
    ring_bytes: tuple[CopyBytes, ...] | None = Field(default=None, min_length=1)
    in_flight_cap_bytes: tuple[NotNegative, ...] | None = Field(default=None, min_length=1)


class RoundingValues(Frozen):
    """Choices that change rounding: shared by all buckets, and searched jointly over them."""

    chunk_tokens: tuple[Tokens, ...] = Field(default=(64, 128, 256, 512), min_length=1)
    project_k_splits: tuple[Splits, ...] = Field(default=(1, 2, 4), min_length=1)
    slice_columns: tuple[SliceColumns, ...] = Field(default=(128, 256), min_length=1)
    page_tokens: Tokens = 64


class InterleaveValues(Frozen):
    """Placements to choose from; `parts` is how finely the order may cut an operator, `attention_sms` 0 is all SMs."""

    parts: int = Field(default=2, ge=1, le=4)
    policy: tuple[Literal["balanced", "round_robin"], ...] = Field(default=("balanced", "round_robin"), min_length=1)
    loads: tuple[Literal["ahead", "after_wait"], ...] = Field(default=("ahead", "after_wait"), min_length=1)
    attention_sms: tuple[NotNegative, ...] | None = Field(default=None, min_length=1)
    takeover_percent: tuple[Percent, ...] = Field(default=(0, 10, 20, 30, 50), min_length=1)
    router_with_project: tuple[bool, ...] = Field(default=(True, False), min_length=1)


class CountersValues(Frozen):
    """Words that an operator's arrivals may be dealt to."""

    words: tuple[Words, ...] = Field(default=(1, 2), min_length=1)


class SpaceValues(Frozen):
    """Values that a search may give to each choice, under the names that a plan gives them."""

    cut: CutValues = CutValues()
    ring: RingValues = RingValues()
    rounding: RoundingValues = RoundingValues()
    interleave: InterleaveValues = InterleaveValues()
    counters: CountersValues = CountersValues()


class SearchConfig(Frozen):
    """A search file."""

    model: str
    chip: str
    baselines: Baselines
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    routing: Routing = Routing()
    budget: Budget
    proposals: Proposals = Proposals()
    ladder: Ladder = Ladder()
    space: SpaceValues = SpaceValues()
