"""What may be asked of a row at a step boundary: to begin, to end, to grow; and its state as the kernel holds it.

Shared by everything that decodes: the interpreter carries the commands out itself, a card takes them from a mailbox.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megakernel.abi import MAX_STOPS, ROW_STATE
from runtime.sampling import GREEDY, SamplingParams

NO_END = 2**32 - 1
"""End position of a row that goes on."""

Pages = Sequence[npt.NDArray[np.integer]]
"""Page ids of a row, one array a group of layers; negative where a window has passed and nothing is read."""


@dataclass(frozen=True)
class Join:
    """The next step decodes `token` at `position`; the row's earlier KV is in its pages.

    It ends after one of `stops`, and before `end_position`. `pages` are the first entries of its page tables; None
    keeps what stands there.
    """

    token: int
    position: int
    sampling: SamplingParams = GREEDY
    end_position: int = NO_END
    stops: tuple[int, ...] = ()
    pages: Pages | None = None


@dataclass(frozen=True)
class Drop:
    """The row ends with the token that the step makes."""


@dataclass(frozen=True)
class Extend:
    """The row's page tables go on with `pages` from entry `begin`, and it may come up to `end_position`."""

    begin: int
    pages: Pages
    end_position: int = NO_END


Command = Join | Drop | Extend


class Decodes(ABC):
    """Rows that are told one by one what to do between steps: what interpreter and card have in common."""

    @abstractmethod
    def carry_out(self, row: int, command: Command) -> None:
        """Change a row."""

    def join(
        self,
        row: int,
        token: int,
        position: int,
        sampling: SamplingParams = GREEDY,
        *,
        end_position: int = NO_END,
        stops: tuple[int, ...] = (),
    ) -> None:
        """Activate `row` as `Join` says, its pages as they are; ValueError as in `row_state` on a card."""
        self.carry_out(row, Join(token, position, sampling, end_position, stops))

    def leave(self, row: int) -> None:
        """Deactivate `row`."""
        self.carry_out(row, Drop())


def row_state(join: Join) -> npt.NDArray[np.void]:
    """A joining row's state, one record [1].

    ValueError for more stop ids than fit, or parameters that change logits before the temperature: the host's work.
    """
    sampling: Any = join.sampling  # frozen, so it has a hash
    state = _row_state(sampling, join.end_position, join.stops).copy()
    state["position"] = join.position
    return state


@lru_cache(maxsize=256)
def _row_state(sampling: SamplingParams, end_position: int, stops: tuple[int, ...]) -> npt.NDArray[np.void]:
    """What of it stays the same from launch to launch: rows join again at each."""
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop ids, at most {MAX_STOPS} fit a row")
    if sampling.edits_logits:
        raise ValueError("penalties and logit_bias change logits, which the kernel does not: sample on the host")
    state = np.zeros(1, ROW_STATE.dtype)
    state["active"], state["end_position"] = 1, end_position
    state["num_stops"] = len(stops)
    state["stops"][0, : len(stops)] = stops
    # a temperature that single precision rounds to nothing is not greedy: equals draw
    temperature = 0.0 if sampling.is_greedy else max(sampling.temperature, float(np.finfo(np.float32).tiny))
    state["temperature"], state["top_p"], state["min_p"] = temperature, sampling.top_p, sampling.min_p
    state["top_k"], state["seed"] = min(sampling.top_k, 2**31), sampling.seed
    return state
