"""What executes steps: the seam between the engine, which decides who runs and where KV lies, and a model on a device.

A backend owns weights, KV pools and activations. It keeps nothing about requests: a call says which tokens stand at
which positions, and the page tables say where their KV is. Refuses scheduling, page accounting and everything about
text.

A device backend plugs in here, and the protocol is shaped by what it can do well: rows keep their slot as long as they
run, so their state may stay on the device; page tables are host arrays that change rarely and say when they did; a
decode call may chain several steps without the host, sampling on the device; logits come back only for rows that need
host work. Pages are there before the call that writes them. Calls come from one thread, one at a time, and return when
results are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.rows import NO_END
from runtime.sampling import SamplingParams

Tables = tuple[npt.NDArray[np.int32], ...]
"""A row's page ids, one array a group: entry i holds positions i * page_tokens up to the next entry's; -1: no page."""


class Want(Enum):
    """What a row needs back from a step."""

    NOTHING = 0
    TOKEN = 1  # one token, sampled as its parameters say
    LOGITS = 2  # logits [vocab] of the last position: the host samples
    ALL_LOGITS = 3  # logits [tokens, vocab] of every position (prefill only)


@dataclass(frozen=True)
class Row:
    """One row of a decode step: `token` stands at `position`; its KV is appended, and the next token is wanted.

    `tables` are views of arrays that the engine owns; `tables_changed`: since the last call, of either kind, that had
    the slot. Pages cover `position` and those of the chained steps. In a group with a window, entries wholly before
    the window are -1 or stale and may not be read. The row goes on as long as its `stay` is the same, and ends before
    `end_position` and after one of `stops`.
    """

    slot: int
    token: int
    position: int
    sampling: SamplingParams
    want: Want
    tables: Tables
    tables_changed: bool
    stay: tuple[int, int] = (0, 0)
    end_position: int = NO_END
    stops: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one row in a prefill chunk, at positions `begin` on; earlier ones are in their pages.

    What is wanted follows the last token (ALL_LOGITS: each of them).
    """

    slot: int
    tokens: Sequence[int]
    begin: int
    sampling: SamplingParams
    want: Want
    tables: Tables
    tables_changed: bool

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.begin + len(self.tokens)


@dataclass(frozen=True)
class Chunk:
    """Spans of different rows, computed together through `layers` (begin, end).

    A chunk may come in several calls, whose `layers` follow one another from 0 to the last, with decode calls between.
    Spans of rows that have left meanwhile are missing from the later ones: their pages are others' now. A call that
    begins at layer 0 drops whatever chunk was unfinished.
    """

    spans: tuple[Span, ...]
    layers: tuple[int, int]


@dataclass(frozen=True)
class Result:
    """What a row wanted: `tokens` (one, or more of a chained decode) or `logits`, float32 or float64."""

    tokens: tuple[int, ...] = ()
    logits: npt.NDArray[np.floating] | None = None


class Backend(Protocol):
    """Executes prefill chunks and decode steps. Sizes are fixed for its life.

    `windows` and `pages` have one entry a group of layers (`kv_pages.layer_groups`): the window in tokens, None for
    all of the context, and how many pages there are. `prefill_tokens`: a chunk smaller than the first is not worth its
    fixed cost, a larger one than the second is not taken. `prefill_layers`: how many layers a chunk can be cut
    between, 1 if it can't. `max_steps`: how many decode steps one call may chain. `decodes_ahead`: it hands tokens over
    as they are made, goes on with its steps meanwhile, and draws a prompt's first token by a decode step too.
    """

    vocab_size: int
    rows: int
    page_tokens: int
    windows: tuple[int | None, ...]
    pages: tuple[int, ...]
    max_context_tokens: int
    prefill_tokens: tuple[int, int]
    prefill_layers: int
    max_steps: int
    decodes_ahead: bool

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        """Compute a chunk; one result a span once its last layer is done, () before.

        Any exception ends the engine: nothing is known of the device's state then.
        """
        ...

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        """Run `steps` decode steps, each feeding the last one's token; one result a row, in order.

        A backend that decodes ahead returns at least one token of each row, and the others of these steps in later
        calls that go on with the row. With `steps` above 1 every row wants TOKEN. A row whose logits are not numbers
        yields `NO_TOKEN` and nothing of worth after it; the others are not touched by it. Exceptions as in `prefill`.
        """
        ...
