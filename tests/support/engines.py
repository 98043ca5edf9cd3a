"""Engines to test: requests in short, loops to the end, scripts that show a wrong context, tiny models over pages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from runtime.engine import EngineCore, EngineSettings, ScriptedBackend
from runtime.engine.backend import Backend
from runtime.engine.cpu_backend import CpuBackend
from runtime.kv_pages import layer_groups
from runtime.request import FinishReason, Output, Request, Stopping, TokenLogprobs
from runtime.sampling import GREEDY, SamplingParams
from runtime.weights import pack_weights

VOCAB = 192


def request(
    name: str, prompt: Iterable[int], max_tokens: int = 8, sampling: SamplingParams = GREEDY, **fields
) -> Request:
    """A request; fields of `Stopping` and of `Request` by name, sets given as any iterable."""
    stopping = {key: fields.pop(key) for key in list(fields) if key in Stopping.__dataclass_fields__}
    for key in ("end_ids", "stop_ids"):
        stopping[key] = frozenset(stopping.get(key, ()))
    return Request(name, tuple(prompt), sampling, Stopping(max_tokens=max_tokens, **stopping), **fields)


@dataclass
class Answer:
    """All outputs of one request together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    cached_tokens: int = 0

    def add(self, output: Output) -> None:
        assert self.finish is None, "an output after the end"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish, self.stop_id, self.error = output.finish, output.stop_id, output.error
        self.cached_tokens = output.cached_tokens


def step(core: EngineCore, answers: dict[str, Answer]) -> None:
    """One pass, its outputs added to `answers`, and all invariants checked."""
    for output in core.step():
        answers.setdefault(output.request, Answer()).add(output)
    core.roster.check()


def finish(core: EngineCore, answers: dict[str, Answer] | None = None, *requests: Request) -> dict[str, Answer]:
    """Submit, run until nothing is left, check that nothing leaked, and return the answers by name."""
    answers = {} if answers is None else answers
    for each in requests:
        core.submit(each)
    for _ in range(20_000):
        if not core.has_work:
            assert_idle(core)
            return answers
        step(core, answers)
    raise AssertionError("the engine does not come to an end")


def run(core: EngineCore, *requests: Request) -> dict[str, Answer]:
    """`finish` from nothing."""
    return finish(core, None, *requests)


def assert_idle(core: EngineCore) -> None:
    """Nobody is here, and every page is free or holds a cached block."""
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert not core.roster.groups


def mixed(context: tuple[int, ...], _sampling: SamplingParams) -> int:
    """A token that depends on every token of the context and on its length; never 0 to 3."""
    digest = hashlib.blake2b(np.array(context, dtype=np.int32).tobytes(), digest_size=8).digest()
    return 4 + int.from_bytes(digest, "little") % (VOCAB - 4)


def mixed_logits(context: tuple[int, ...], _sampling: SamplingParams) -> np.ndarray:
    """Logits [VOCAB] that depend on every token of the context."""
    digest = hashlib.blake2b(np.array(context, dtype=np.int32).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=VOCAB) * 2


def mixed_reply(prompt: Iterable[int], count: int) -> list[int]:
    """What `mixed` answers, told without an engine."""
    context = tuple(prompt)
    start = len(context)
    for _ in range(count):
        context += (mixed(context, GREEDY),)
    return list(context[start:])


def scripted(script=mixed, settings: EngineSettings | None = None, **sizes) -> EngineCore:
    """An engine on a scripted backend."""
    return EngineCore(ScriptedBackend(script, **{"vocab_size": VOCAB} | sizes), settings)


def with_settings(**fields) -> EngineSettings:
    return EngineSettings(**fields)


@cache
def tiny(family: str = "cohere2_moe", layers: int = 2, dtype: torch.dtype = torch.float64):
    """A tiny transformers model, its spec and its packed weights, made once."""
    from support import tiny_models

    model = getattr(tiny_models, family)(layers)
    spec = tiny_models.spec_of(model)
    rounding = tiny_models.choices_for(spec).rounding
    return model, spec, pack_weights(spec, dict(model.state_dict()), rounding, dtype)


def tiny_backend(
    family: str = "cohere2_moe",
    layers: int = 2,
    *,
    dtype: torch.dtype = torch.float64,
    rows: int = 4,
    page_tokens: int = 8,
    pages: int = 64,
    max_steps: int = 1,
) -> CpuBackend:
    """A tiny model on the CPU, with as many pages in each group."""
    _, spec, weights = tiny(family, layers, dtype)
    groups = len(layer_groups(spec)[0])
    return CpuBackend(spec, weights, rows=rows, page_tokens=page_tokens, pages=(pages,) * groups, max_steps=max_steps)


def solo(backend: Backend, each: Request) -> Answer:
    """The truth for one request: alone, nothing cached, nothing preempted."""
    return run(EngineCore(backend, EngineSettings(prefix_cache=False)), each)[each.id]
