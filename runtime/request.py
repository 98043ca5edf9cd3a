"""What a server asks of the engine and what it gets back: requests, constraints, tokens, refusals.

The engine knows token ids only: text, templates, stop strings, tools and grammars live in the server, which reaches
into sampling through one seam, `Constraint`. Owns no thread and no queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.sampling import SamplingParams

CONSTRAINT_FAILED = "the constraint on the output failed"
"""The `Output.error` of a request whose constraint could not go on: it is too large, or nothing may follow."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end id, a stop id, a constraint that is complete, or `Engine.finish`
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"  # cancelled
    TIMEOUT = "timeout"  # its deadline passed
    ERROR = "error"  # the step failed; `Output.error` says how


class RefusedError(Exception):
    """A request that the engine doesn't take; the message is fit for its sender."""


class PromptTooLongError(RefusedError):
    """The prompt and one token after it don't fit the context window, or all the pages there are."""


class QueueFullError(RefusedError):
    """As many requests wait as may; `retry_after` is how many seconds a place is likely to take."""

    def __init__(self, message: str, retry_after: float) -> None:
        """`retry_after`: seconds."""
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(RefusedError):
    """The engine drains, is closed, or died of a failed step."""


class Constraint(Protocol):
    """What a request's next token may be: a grammar, a reasoning budget, or several. Called by the engine's thread.

    A constraint lives as long as its request and is told every token once, in order, preemption or not.
    """

    def mask(self) -> npt.NDArray[np.int32] | None:
        """Bitmask [ceil(vocab / 32)] of allowed ids, bit `i % 32` of word `i // 32`; None: all are allowed."""
        ...

    def accept(self, token: int) -> None:
        """Take note of a sampled token; ValueError when it was not allowed."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow: the request then ends with STOP."""
        ...


@dataclass(frozen=True)
class Stopping:
    """When a request ends by itself. `end_ids` are the model's, which `ignore_eos` ignores; `stop_ids` the user's."""

    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass
class Request:
    """One choice to be generated.

    `logprobs`: how many alternatives to report beside each sampled token; None: no logprobs. `prompt_logprobs`
    likewise for the prompt. `priority`: smaller numbers go first, then whoever came first. `salt` separates tenants in
    the prefix cache. `group`: requests of one group are answered together; once one of them is in, the queue's
    limit lets the others in. `deadline`: `time.monotonic()` at which it ends with TIMEOUT.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: Stopping
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    priority: int = 0
    salt: str = ""
    group: str | None = None
    deadline: float | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a token before temperature and filters, its rank (1: likeliest), and the top alternatives."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step did for one request: usually one token, more from a device's chain, none when only the end is news.

    `cached_tokens` of the prompt came from the prefix cache; it is that of the first admission.
    """

    request: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Stats:
    """Gauges and counters of an engine at one moment; counters only grow.

    Blocks are counted over all page groups: `free` hold nothing, `cached` hold a prefix that no row uses and give way
    when pages are needed; the rest is in use. `kv_usage` is the share in use of the fullest group, 0 to 1.
    `prefix_queries` and `prefix_hits` count prompt tokens. `corrupted` requests ended because their logits were not
    numbers.
    """

    running: int = 0
    waiting: int = 0
    rows: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    corrupted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
