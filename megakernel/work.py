"""Serial work on the dependency chain, per task kind: what a kernel's instructions cost beside streaming.

Owns the one table of cycles that prices a plan's hand-offs, part of a chip's description. None of its defaults is
fitted to a kernel: the totals per hand-off are those of the measured skeleton (1000 cycles of work after every wait,
1000 of router, 1000 of top-k), how they are split over kinds is an estimate, and so is every number marked so. What
was fitted to a computing kernel replaces them, under `[work]` in a chip's file. Read by the simulator's front ends and
its `bounds`.
"""

from __future__ import annotations

from pydantic import Field

from megakernel.config import Frozen
from megakernel.kinds import TaskKind


class WorkCosts(Frozen):
    """Cycles; each is spent once by an SM whose staged rows are not yet those that a task needs."""

    multiply: float = Field(default=0.0, ge=0)
    """A warp, per KiB of a product's copy, reading it included; warps take copies in turn. Estimate: all is reading."""
    slice: float = Field(default=0.0, ge=0)
    """A warp, per slice of a copy: finding it, leaving its sums, adding up. Estimate: hidden."""
    finish: float = Field(default=300.0, ge=0)
    """After a task's last copy: sum over warps, store, fence. Estimate; with a start of 700, the skeleton's 1000."""
    norm: float = Field(default=700.0, ge=0)
    """Residual stream to staged rows: read, sum of squares, scale (projections, router, up, head). The skeleton's."""
    router: float = Field(default=1000.0, ge=0)
    """Dot products of one router row, which all warps of its SM share before the next one's. The skeleton's."""
    topk: float = Field(default=1000.0, ge=0)
    """Top-k of the routed rows, in the producer, before it can load experts. The skeleton's."""
    rope: float = Field(default=700.0, ge=0)
    """Query and key norm and RoPE, new key and value, before attention. The skeleton's."""
    attend: float = Field(default=0.0, ge=0)
    """A round of chunks, one a team of warps, per key of a warp's piece. Estimate: hidden, as a copy's."""
    merge: float = Field(default=700.0, ge=0)
    """Merge of a head's partial softmax results, head after head. Estimate: the skeleton has no such task."""
    fetch: float = Field(default=700.0, ge=0)
    """A warp, per copy of a product over attention's result or the MLP's hidden rows, which it reads from L2 anew while
    the copy is on its way. Estimate: one trip to L2 under load."""
    embed: float = Field(default=700.0, ge=0)
    """Embedding rows. Estimate."""
    sample: float = Field(default=2000.0, ge=0)
    """Best of all tiles' best logits, next token and position. Estimate: two trips to L2 and two barriers."""
    follow: float = Field(default=0.0, ge=0)
    """Issuer, from a record's last copy to the next one's first. Estimate: none."""
    plan: float = Field(default=1000.0, ge=0)
    """Planner, from a load wait that is met to its copies' addresses. Estimate, too low for the reference plan."""
    ids: float = Field(default=1400.0, ge=0)
    """Planner, routed ids read from L2 before top-k. Measured in a streaming trace: 0.7 us."""
    router_row: float = Field(default=1400.0, ge=0)
    """From a wait that is met to a task's first router row. Measured there: signal after 2 us, less the release."""
    more_rows: float = Field(default=50.0, ge=0)
    """Added to each of these per row beyond the first. Estimate: a row is one warp's, in turns of eight."""

    def start_cycles(self, kind: TaskKind, rows: int) -> float:
        """Cycles of the consumers between run wait and first copy, without the router's; none for some kinds."""
        start = _STARTS.get(kind)
        return self.with_rows(getattr(self, start), rows) if start else 0.0

    def streaming(self) -> WorkCosts:
        """What is left of a kernel that streams and computes nothing: planning, ids, and the router's rows as bytes."""
        left = {"plan", "ids", "router_row"}
        return self.model_copy(update={key: 0.0 for key in WorkCosts.model_fields if key not in left})

    def with_rows(self, cycles: float, rows: int) -> float:
        """What work that takes `cycles` for one row takes for `rows`."""
        return cycles + self.more_rows * (rows - 1)


_STARTS: dict[TaskKind, str] = {
    TaskKind.EMBED: "embed",
    TaskKind.PROJECT: "norm",
    TaskKind.ATTEND: "rope",
    TaskKind.MERGE: "merge",
    TaskKind.UP: "norm",
    TaskKind.HEAD: "norm",
    TaskKind.SAMPLE: "sample",
}
