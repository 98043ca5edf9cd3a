"""What is prefilled between two decode steps: chunks of tokens, cut so that decoding rows don't wait too long.

A chunk takes rows in order of rank, and as many of their tokens as are expected to fit into the time there is. Where
even the smallest chunk worth its cost takes longer, it is cut by layers, and decode steps run between its slices. A
block that a chunk computes for one row is left to be found in the cache by the others: choices of one prompt compute
it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.engine.backend import Backend, Chunk, Result, Span, Want
from runtime.engine.chunk_cost import ChunkCost
from runtime.engine.kv_cache import KvCache
from runtime.engine.sequence import Sequence

PROMPT_LOGPROB_TOKENS = 32
"""Positions of one span whose logits come to the host at once."""

SLICE = 0.94
"""Share of a stall that a slice takes: the rest is what ends one launch and begins the next."""


@dataclass
class Plan:
    """A chunk whose rows have pages; `layer` layers of it are done. `stays` tell the rows' admissions apart.

    It `is_whole` while all rows that it began with are there.
    """

    sequences: list[Sequence] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    stays: list[int] = field(default_factory=list)
    layer: int = 0
    seconds: float = 0.0
    is_whole: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of all spans."""
        return sum(len(span.tokens) for span in self.spans)

    def leave_out_who_left(self) -> None:
        """Go on without rows that are not where they were: their pages may be others' by now."""
        here = [
            number
            for number, (sequence, stay) in enumerate(zip(self.sequences, self.stays, strict=True))
            if sequence.slot is not None and sequence.admissions == stay
        ]
        self.is_whole = self.is_whole and len(here) == len(self.spans)
        self.sequences = [self.sequences[number] for number in here]
        self.spans = [self.spans[number] for number in here]
        self.stays = [self.stays[number] for number in here]


class Prefill:
    """Plans chunks and runs them in slices that keep within `stall_seconds` while anyone decodes."""

    def __init__(self, backend: Backend, cache: KvCache, stall_seconds: float, clock: Callable[[], float]) -> None:
        """Nothing is known of costs yet: the first chunk is the smallest worth its cost, its first slice one layer."""
        self._backend, self._cache, self._clock = backend, cache, clock
        self._stall = stall_seconds * SLICE
        self._cost = ChunkCost()
        self._plan: Plan | None = None

    @property
    def is_cut(self) -> bool:
        """Whether a chunk is done in part, some of its rows still there."""
        if self._plan is not None:
            self._plan.leave_out_who_left()
            if not self._plan.spans:
                self._plan = None
        return self._plan is not None

    def begin(self, plan: Plan) -> None:
        """Make a plan the one that `run` works on."""
        self._plan = plan

    def token_budget(self, *, stalls: bool) -> int:
        """Tokens for the next chunk; `stalls`: decoding rows wait for it."""
        low, high = self._backend.prefill_tokens
        return min(max(self._cost.tokens(self._stall), low), high) if stalls else high

    def reach(self, sequence: Sequence, budget: int) -> int:
        """Position up to which a row with at least one more page would go, with this many tokens left in the chunk."""
        assert sequence.slot is not None
        if sequence.collects_prompt_logprobs:
            budget = min(budget, PROMPT_LOGPROB_TOKENS)
        end = len(sequence.tokens) - self._backend.decodes_ahead
        return min(sequence.computed + budget, end, self._cache.room(sequence.slot))

    def run(self, *, stalls: bool) -> tuple[float, Plan | None, tuple[Result, ...]]:
        """Run the next slice: its seconds, and the plan with its results when this was the last one."""
        plan = self._plan
        assert plan is not None
        layers = end = self._backend.prefill_layers
        if stalls:
            end = min(layers, plan.layer + self._fitting_layers(plan))
        begin = self._clock()
        results = self._backend.prefill(Chunk(tuple(plan.spans), (plan.layer, end)))
        seconds = self._clock() - begin
        plan.layer, plan.seconds = end, plan.seconds + seconds
        if end < layers:
            return seconds, None, ()
        self._plan = None
        if plan.is_whole:
            self._cost.observe(plan.tokens, plan.seconds)
        return seconds, plan, results

    def _fitting_layers(self, plan: Plan) -> int:
        """How many more fit into a stall, at the pace of the plan's layers so far, or of its like; else one."""
        layers = self._backend.prefill_layers
        each = plan.seconds / plan.layer if plan.layer else self._cost.seconds(plan.tokens) / layers
        if not each and not plan.layer:
            return 1
        return layers if each * layers <= self._stall else max(1, int(self._stall / each))

    def span(self, sequence: Sequence, end: int, want: Want) -> Span:
        """The row's next tokens, up to `end`."""
        assert sequence.slot is not None
        if sequence.collects_prompt_logprobs:
            want = Want.ALL_LOGITS
        tokens = sequence.tokens[sequence.computed : end]
        tables, changed = self._cache.views(sequence.slot)
        return Span(sequence.slot, tokens, sequence.computed, sequence.request.sampling, want, tables, changed)
