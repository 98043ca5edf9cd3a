"""What an operator may set about the engine, apart from what its backend fixes."""

from __future__ import annotations

from pydantic import Field

from megakernel.config import Frozen


class EngineSettings(Frozen):
    """`model` and `tokenizer` (with its template) say whose blocks are whose: replicas of one name have equal hashes.

    `max_waiting`: requests that may be there beyond the backend's rows. `stall_ms`: how long decoding rows may wait
    for a slice of prefill. `chain_steps`: decode steps that a backend may run without the host while nobody waits,
    where it hands tokens over only after the last of them; a new request waits that long.
    """

    model: str = ""
    tokenizer: str = ""
    max_waiting: int = Field(default=256, ge=0)
    stall_ms: float = Field(default=25.0, gt=0)
    chain_steps: int = Field(default=4, gt=0)
    prefix_cache: bool = True
