"""What the engine tells whoever keeps metrics. Called on the engine's thread: a listener counts and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from runtime.request import FinishReason


@dataclass(frozen=True)
class StepTimes:
    """One pass of the engine's loop, in seconds.

    `rows` decoded `steps` tokens each in `decode` seconds, after `prefill` seconds for `prefill_tokens` (0 until the
    last layers of a cut chunk are done), which `stalled_rows` had to wait for. `total` holds the engine's own time
    too.
    """

    rows: int
    steps: int
    prefill_tokens: int
    stalled_rows: int
    prefill: float
    decode: float
    total: float


@dataclass(frozen=True)
class RequestTimes:
    """When things happened to a request that ended (engine's clock); None: they did not."""

    request: str
    finish: FinishReason
    arrived: float
    admitted: float | None
    first_token: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int


class Listener(Protocol):
    """Hears of every step and of every request's end."""

    def on_step(self, times: StepTimes) -> None:
        """A pass of the loop that ran prefill, decode or both."""
        ...

    def on_end(self, times: RequestTimes) -> None:
        """A request ended, for whatever reason."""
        ...


class Silent:
    """A listener that does nothing."""

    def on_step(self, times: StepTimes) -> None:
        """Nothing."""

    def on_end(self, times: RequestTimes) -> None:
        """Nothing."""
