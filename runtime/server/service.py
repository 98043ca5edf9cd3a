"""What all routes share: the model's text side, its engine, keys, limits and metrics.

Owns the state of a server: loading, ready, draining, dead. Text is there from the start, the engine once it has loaded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megakernel.plan import Plan
from runtime.constraints import Grammars
from runtime.parsing import Dialect
from runtime.server.config import ServeConfig
from runtime.server.errors import ApiError, unavailable
from runtime.server.metrics import Metrics
from runtime.server.template import ChatTemplate
from runtime.server.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from runtime.engine import AsyncEngine


@dataclass(frozen=True)
class TextSide:
    """What a checkpoint says about text. `end_ids`: its end tokens; `defaults`: sampling from its generation config."""

    names: tuple[str, ...]
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    dialect: Dialect
    vocab_size: int
    max_model_len: int
    end_ids: frozenset[int]
    defaults: Mapping[str, float]


@dataclass
class Service:
    """One server. `live`: the response's id of every request on the engine, for /abort; `card`: what it serves on."""

    config: ServeConfig
    text: TextSide
    metrics: Metrics
    engine: AsyncEngine | None = None
    plan: Plan | None = None
    card: dict[str, Any] | None = None
    is_draining: bool = False
    live: dict[str, str] = field(default_factory=dict)
    per_key: dict[str, int] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    form_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="form"))
    _grammars: Grammars | None = None

    @property
    def is_ready(self) -> bool:
        """Whether new work is taken."""
        return self.engine is not None and self.engine.is_ready and not self.is_draining

    def ready_engine(self) -> AsyncEngine:
        """Return the engine, or refuse because there is none that takes work."""
        if self.engine is None:
            raise unavailable("the model is still loading")
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if self.engine.error is not None:
            raise unavailable("the engine has failed; the server is about to stop")
        return self.engine

    def grammars(self) -> Grammars:
        """Return the compiler of grammars. The first call takes a second for a large vocabulary: not on the loop."""
        if self._grammars is None:
            tokenizer = self.text.tokenizer
            self._grammars = Grammars(
                tokenizer.vocabulary, tokenizer.encode_plain, self.text.vocab_size, self.text.end_ids
            )
        return self._grammars

    def check_model(self, name: str | None) -> str:
        """Return the name to answer under; 404 for a model that is not served."""
        if name is not None and name not in self.text.names:
            served = ", ".join(self.text.names)
            message = f"the model {name[:200]!r} is not served here; served: {served}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return name or self.text.names[0]
