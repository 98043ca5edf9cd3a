"""Whatever happens in whatever order, every request gets what it would have got alone, and nothing is lost.

Rules join, step, cancel, stop, expire and reset; tiny pools evict and preempt by themselves. Invariants hold after
each.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.ahead import AheadBackend
from support.engines import (
    VOCAB,
    Answer,
    assert_idle,
    finish,
    mixed_logits,
    request,
    scripted,
    solo,
    step,
    tiny_backend,
)
from support.engines import with_settings as engine_settings

from runtime.engine import EngineCore
from runtime.request import FinishReason, Request, UnavailableError
from runtime.sampling import SamplingParams, sample

BASES = [[idx % 180 + 4 for idx in range(seed, seed + 40)] for seed in (0, 50)]
"""Prompts are beginnings of these with a tail of their own, so that they share blocks."""


ORDERS = st.fixed_dictionaries(
    {
        "base": st.sampled_from(BASES),
        "shared": st.sampled_from([0, 7, 17, 25, 40]),
        "tokens": st.sampled_from([1, 5, 20, 40]),
        "temperature": st.sampled_from([0.0, 0.9]),
        "priority": st.integers(0, 1),
        "choices": st.integers(1, 3),
        "patience": st.sampled_from([None, None, 3]),
        "logprobs": st.sampled_from([None, None, 1]),  # the host draws, as for a mask
    }
)


class Machine(RuleBasedStateMachine):
    """An engine on logits that depend on the whole context."""

    context: ClassVar[int] = 64

    def build(self, rows: int, pages: tuple[int, int], chunk: int, layers: int, steps: int) -> EngineCore:
        return scripted(
            mixed_logits, engine_settings(chain_steps=steps, stall_ms=0.001), rows=rows, pages=pages, max_steps=steps,
            max_context_tokens=self.context, prefill_tokens=(chunk, 2 * chunk), prefill_layers=layers,
        )  # fmt: skip

    def truth(self, each: Request) -> list[int]:
        """All tokens up to max_tokens or the window, without an engine."""
        tokens = list(each.prompt)
        while len(tokens) < min(self.context, len(each.prompt) + each.stopping.max_tokens):
            tokens.append(sample(mixed_logits(tuple(tokens), each.sampling), each.sampling, len(tokens) - 1))
        return tokens[len(each.prompt) :]

    @initialize(
        rows=st.integers(2, 4),
        pages=st.tuples(st.integers(8, 14), st.integers(8, 14)),
        chunk=st.sampled_from([1, 5, 8, 32]),
        layers=st.sampled_from([1, 2]),
        steps=st.sampled_from([1, 3]),
    )
    def start(self, rows: int, pages: tuple[int, int], chunk: int, layers: int, steps: int) -> None:
        self.core = self.build(rows, pages, chunk, layers, steps)
        self.core.clock = lambda: self.now
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.draining = False

    @rule(order=ORDERS, tail=st.lists(st.integers(4, 190), min_size=1, max_size=6))
    def join(self, order: dict, tail: list[int]) -> None:
        text = [*order["base"][: order["shared"]], *tail]
        deadline = None if order["patience"] is None else self.now + order["patience"]
        name = f"r{len(self.requests)}"
        for choice in range(order["choices"]):
            sampling = SamplingParams(temperature=order["temperature"], seed=choice)
            each = request(
                f"{name}.{choice}",
                text,
                order["tokens"],
                sampling,
                priority=order["priority"],
                deadline=deadline,
                group=name,
                logprobs=order["logprobs"],
            )
            if self.draining:
                with pytest.raises(UnavailableError):
                    self.core.submit(each)
            else:
                self.core.submit(each)
                self.requests[each.id] = each

    @rule(times=st.integers(1, 15))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            step(self.core, self.answers)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 100), stop=st.booleans())
    def end_one(self, pick: int, stop: bool) -> None:
        name = sorted(self.live())[pick % len(self.live())]
        (self.core.finish if stop else self.core.abort)(name)
        step(self.core, self.answers)
        assert self.answers[name].finish is (FinishReason.STOP if stop else FinishReason.ABORT)

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0

    @rule()
    def reset(self) -> None:
        self.core.reset_prefix_cache()

    @precondition(lambda self: len(self.requests) > 12)
    @rule()
    def drain(self) -> None:
        self.draining = self.core.is_draining = True

    def live(self) -> set[str]:
        return {name for name in self.requests if self.answers.get(name, Answer()).finish is None}

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "core"):
            self.core.roster.check()
            assert set(self.core.roster.by_id) == self.live()
            assert self.core.error is None

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        finish(self.core, self.answers)
        assert_idle(self.core)
        for name, each in self.requests.items():
            answer, truth = self.answers[name], self.truth(each)
            if answer.finish is FinishReason.LENGTH:
                assert answer.tokens == truth
            else:
                assert answer.finish in {FinishReason.ABORT, FinishReason.STOP, FinishReason.TIMEOUT}
                assert answer.tokens == truth[: len(answer.tokens)]


class AheadMachine(Machine):
    """The same on a device that makes steps ahead of the engine, over two buckets."""

    def build(self, rows: int, pages: tuple[int, int], chunk: int, layers: int, steps: int) -> EngineCore:
        backend = AheadBackend(
            mixed_logits, buckets=sorted({2, rows}), seed=chunk, vocab_size=VOCAB, pages=pages, max_steps=3 * steps + 2,
            max_context_tokens=self.context, prefill_tokens=(chunk, 2 * chunk), prefill_layers=layers,
        )  # fmt: skip
        return EngineCore(backend, engine_settings(stall_ms=0.001))


class ModelMachine(Machine):
    """The same on the tiny model: one full layer, one with a window."""

    known: ClassVar[dict[tuple, list[int]]] = {}

    def build(self, rows: int, pages: tuple[int, int], chunk: int, layers: int, steps: int) -> EngineCore:
        backend = tiny_backend(rows=rows, pages=min(pages), max_steps=steps)
        backend.prefill_tokens, backend.max_context_tokens = (chunk, 2 * chunk), self.context
        assert backend.prefill_layers == 2
        return EngineCore(backend, engine_settings(chain_steps=steps, stall_ms=0.1 if layers > 1 else 1e3))

    def truth(self, each: Request) -> list[int]:
        key = (each.prompt, each.stopping.max_tokens, each.sampling)
        if key not in self.known:
            backend = tiny_backend()
            backend.max_context_tokens = self.context
            self.known[key] = solo(backend, request("t", each.prompt, each.stopping.max_tokens, each.sampling)).tokens
        return self.known[key]


@pytest.mark.parametrize(
    ("machine", "examples", "steps"), [(Machine, 250, 40), (AheadMachine, 150, 40), (ModelMachine, 30, 25)]
)
def test_any_history_leaves_every_answer_as_it_would_be_alone(machine, examples: int, steps: int) -> None:
    torch.set_num_threads(1)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
