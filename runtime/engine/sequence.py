"""A request on its way: its tokens so far, how many of them have KV, where it sits, and when things happened to it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from runtime.request import Request, TokenLogprobs
from runtime.sampling import Edits


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt's and the generated ones; the first `computed` have KV in the row's pages.

    A row with one token left to compute decodes, one with more prefills: first tokens, resumed rows and cache hits are
    no special cases. `arrived` numbers requests in order of arrival; `root` is the parent of its first block's hash.
    """

    request: Request
    arrived: int
    root: bytes
    page_tokens: int
    vocab_size: int
    arrival_time: float
    admitted_time: float | None = None
    first_token_time: float | None = None
    computed: int = 0
    slot: int | None = None
    admissions: int = 0  # so that what was planned for an earlier stay can be told from this one
    is_started: bool = False  # since its last admission, something was computed
    cached_tokens: int | None = None  # of the first admission
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    mask: npt.NDArray[np.int32] | None = None  # the constraint's, for the next token
    _blocks: list[bytes] = field(default_factory=list)
    _prompt_ids: npt.NDArray[np.bool_] | None = None
    _counts: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        request, stopping = self.request, self.request.stopping
        self.tokens = list(request.prompt)
        self.key = (request.priority, self.arrived)
        ending = stopping.stop_ids if stopping.ignore_eos else stopping.stop_ids | stopping.end_ids
        self.ending = frozenset(token for token in ending if 0 <= token < self.vocab_size)
        self.stops = tuple(sorted(self.ending))
        if request.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        if request.sampling.has_penalties:
            self._prompt_ids = np.zeros(self.vocab_size, dtype=np.bool_)
            self._prompt_ids[np.array(request.prompt, dtype=np.int64)] = True
            self._counts = np.zeros(self.vocab_size, dtype=np.int32)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Tokens without KV; the logits of the last of them give the next token."""
        return len(self.tokens) - self.computed

    @property
    def banned(self) -> Collection[int]:
        """Ids that would end the request before min_tokens; none where the constraint lets nothing else follow."""
        if self.generated >= self.request.stopping.min_tokens or (self.mask is not None and self._must_end(self.mask)):
            return ()
        return self.ending

    def _must_end(self, mask: npt.NDArray[np.int32]) -> bool:
        others = mask.copy()
        for token in self.ending:
            others[token // 32] &= ~np.int32(1 << token % 32 if token % 32 < 31 else -(2**31))
        return not others.any()

    @property
    def needs_host(self) -> bool:
        """Whether the next token takes work on its logits that devices don't do; after the mask is known."""
        request = self.request
        return (
            self.mask is not None or request.logprobs is not None or request.sampling.edits_logits or bool(self.banned)
        )

    @property
    def collects_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's log probabilities are still to come."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt)

    def edits(self) -> Edits:
        """What its history and constraint do to the next logits."""
        return Edits(allowed=self.mask, banned=self.banned, prompt=self._prompt_ids, generated=self._counts)

    def append(self, token: int) -> None:
        """Take a generated token in."""
        self.tokens.append(token)
        if self._counts is not None:
            self._counts[token] += 1

    def block(self, index: int) -> bytes:
        """Hash of all tokens up to the end of block `index`, which must be known: chained, equal in every process."""
        while len(self._blocks) <= index:
            begin = len(self._blocks) * self.page_tokens
            parent = self._blocks[-1] if self._blocks else self.root
            content = struct.pack(f"<{self.page_tokens}I", *self.tokens[begin : begin + self.page_tokens])
            self._blocks.append(hashlib.sha256(parent + content).digest())
        return self._blocks[index]
