"""What a step is asked to do: the bucket that one table serves, and the live state that one price is for.

A `Bucket` is static (a table holds for all of it); a `Workload` is one live state inside it. Tables and
placements never read a `Workload`; the simulator and the closed-form bounds do.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megakernel.config import Frozen

ROW_TILE = 8
"""Rows of one activation tile: the N of `mma.m16n8k16`. More rows are more tiles, never another record."""


class Bucket(Frozen):
    """The range of decode states that one table serves.

    `rows` is the number of row slots (active or not); `max_context_tokens` bounds every row's length,
    the token being decoded included; `nominal_context_tokens` is the length that placement weights assume.
    """

    rows: int = Field(ge=1, le=64)
    max_context_tokens: int = Field(ge=1)
    nominal_context_tokens: int = Field(ge=1)

    @model_validator(mode="after")
    def _nominal_fits(self) -> Bucket:
        if self.nominal_context_tokens > self.max_context_tokens:
            raise ValueError(
                f"nominal_context_tokens is {self.nominal_context_tokens}, needed at most "
                f"max_context_tokens = {self.max_context_tokens}"
            )
        return self

    @property
    def row_tiles(self) -> int:
        """Activation tiles of eight rows."""
        return -(-self.rows // ROW_TILE)


class Routing(Frozen):
    """How tokens choose experts: `uniform` without replacement, or `zipf` with weight 1 / rank^exponent."""

    kind: Literal["uniform", "zipf"] = "uniform"
    exponent: float = Field(default=1.0, ge=0.0, le=8.0)


class Workload(Frozen):
    """One live state: the length of every active row (current token included) and the routing law."""

    contexts: tuple[int, ...] = Field(min_length=1)
    routing: Routing = Routing()

    @model_validator(mode="after")
    def _contexts_positive(self) -> Workload:
        if any(tokens < 1 for tokens in self.contexts):
            raise ValueError(f"contexts are {list(self.contexts)}, needed at least 1 token in each row")
        return self

    @staticmethod
    def nominal(bucket: Bucket) -> Workload:
        """Every row of `bucket` active at its nominal context, routed uniformly."""
        return Workload(contexts=(bucket.nominal_context_tokens,) * bucket.rows)

    def check(self, bucket: Bucket) -> None:
        """Raise ValueError when this state lies outside `bucket`."""
        if len(self.contexts) > bucket.rows:
            raise ValueError(f"{len(self.contexts)} active rows, the bucket has {bucket.rows}")
        if max(self.contexts) > bucket.max_context_tokens:
            raise ValueError(
                f"a context of {max(self.contexts)} tokens, the bucket ends at {bucket.max_context_tokens}"
            )
