"""Prefill runs between decode steps and does not make them wait too long, on a clock that the backend moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from support.engines import mixed, mixed_reply, request, run, scripted, step, with_settings

from runtime.engine import EngineCore, ScriptedBackend, StepTimes
from runtime.engine.backend import Chunk
from runtime.engine.chunk_cost import ChunkCost
from runtime.engine.listener import Silent

STALL_MS = 25.0


class Timed(ScriptedBackend):
    """Prefill takes `fixed` seconds and so much `each` token, spread over its layers; a decode step takes 2 ms."""

    def __init__(self, fixed: float, each: float, **sizes) -> None:
        """Pages and context are plenty."""
        big = {"vocab_size": 192, "pages": (600, 600), "max_context_tokens": 4096}
        super().__init__(mixed, **big | sizes)
        self.now, self.fixed, self.each = 0.0, fixed, each
        self.chunks: list[Chunk] = []

    def prefill(self, chunk: Chunk):
        self.chunks.append(chunk)
        share = (chunk.layers[1] - chunk.layers[0]) / self.prefill_layers
        self.now += share * (self.fixed + self.each * sum(len(span.tokens) for span in chunk.spans))
        return super().prefill(chunk)

    def decode(self, rows, steps):
        self.now += 0.002 * steps
        return super().decode(rows, steps)


@dataclass
class Stalls(Silent):
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def on_step(self, times: StepTimes) -> None:
        if times.stalled_rows and times.prefill:
            self.seconds.append(times.prefill)
            self.tokens.append(times.prefill_tokens)


def serve_beside_a_decoding_row(backend: Timed) -> Stalls:
    core, answers, stalls = (
        EngineCore(backend, with_settings(stall_ms=STALL_MS), clock=lambda: backend.now),
        {},
        Stalls(),
    )
    core.submit(request("decoding", [5], 600))
    step(core, answers)
    core.listener = stalls
    text = [idx % 150 + 5 for idx in range(2000)]
    for name in "abc":
        core.submit(request(name, [ord(name), *text], 2))
        while name not in answers or answers[name].finish is None:
            step(core, answers)
        assert answers[name].tokens == mixed_reply([ord(name), *text], 2)
    assert answers["decoding"].tokens == mixed_reply([5], len(answers["decoding"].tokens))
    return stalls


@pytest.mark.parametrize(("fixed", "each"), [(0.0, 1e-4), (0.005, 1e-4), (0.015, 2e-5), (0.0, 2e-3)])
def test_chunks_are_sized_by_what_earlier_ones_took(fixed: float, each: float) -> None:
    stalls = serve_beside_a_decoding_row(Timed(fixed, each, prefill_tokens=(8, 1024)))
    fitting = int((STALL_MS / 1e3 - fixed) / each)
    assert max(stalls.seconds) <= STALL_MS / 1e3 * 1.001
    # once the costs are known, full chunks use most of the time there is
    assert sorted(stalls.tokens)[-2] > 0.8 * min(fitting, 1024)


def test_a_chunk_that_takes_too_long_is_cut_by_layers() -> None:
    backend = Timed(0.08, 1e-5, prefill_tokens=(256, 1024), prefill_layers=49)
    stalls = serve_beside_a_decoding_row(backend)
    assert max(stalls.seconds) <= STALL_MS / 1e3 * 1.001
    cuts = [chunk.layers for chunk in backend.chunks[-8:]]
    assert all(end - begin < 49 for begin, end in cuts)
    following = zip(backend.chunks, backend.chunks[1:], strict=False)
    assert all(then.layers[0] == (first.layers[1] if first.layers[1] < 49 else 0) for first, then in following)


def test_with_nobody_decoding_a_chunk_is_as_large_as_the_backend_takes_and_whole() -> None:
    backend = Timed(0.08, 1e-3, prefill_tokens=(8, 256), prefill_layers=49)
    core = EngineCore(backend, clock=lambda: backend.now)
    run(core, request("a", [idx % 150 + 5 for idx in range(1000)], 1))
    assert [(len(chunk.spans[0].tokens), chunk.layers) for chunk in backend.chunks] == [(256, (0, 49))] * 3 + [
        (1000 - 3 * 256, (0, 49))
    ]


def test_short_prompts_share_a_chunk() -> None:
    backend = Timed(0.0, 0.0)
    core = EngineCore(backend)
    run(core, *[request(name, [ord(name)] * 12, 2) for name in "abcd"])
    assert [len(chunk.spans) for chunk in backend.chunks] == [4]


@pytest.mark.parametrize("leave", ["abort", "send back"])
def test_a_chunk_cut_by_layers_goes_on_without_a_row_that_leaves(leave: str) -> None:
    backend = Timed(0.08, 1e-5, prefill_tokens=(256, 1024), prefill_layers=8)
    core, answers = EngineCore(backend, clock=lambda: backend.now), {}
    core.submit(request("a", [5], 100))
    step(core, answers)
    texts = {"warm": list(range(20, 60)), "b": list(range(60, 99)), "c": list(range(99, 140))}
    core.submit(request("warm", texts["warm"], 1))
    for _ in range(10):
        step(core, answers)
    for name in "bc":
        core.submit(request(name, texts[name], 3))
    step(core, answers)
    assert backend.chunks[-1].layers[1] < 8
    assert [len(span.tokens) for span in backend.chunks[-1].spans] == [39, 41]
    if leave == "abort":
        core.abort("b")
    else:  # as for a better row that needs its pages
        core.roster.send_back(core.roster.by_id["b"])
    step(core, answers)
    before, after = backend.chunks[-2:]
    assert after.layers[0] == before.layers[1]
    assert [len(span.tokens) for span in after.spans] == [41]
    while core.has_work:
        step(core, answers)
    assert answers["c"].tokens == mixed_reply(texts["c"], 3)
    assert answers["b"].tokens == ([] if leave == "abort" else mixed_reply(texts["b"], 3))


def test_costs_are_a_line_through_recent_chunks() -> None:
    cost = ChunkCost()
    assert (cost.seconds(100), cost.tokens(1.0)) == (0.0, 0)
    cost.observe(10, 0.02)
    assert cost.tokens(1.0) == 21  # no faith in more than twice what was seen
    for tokens in (20, 40, 80, 10, 160, 320):
        cost.observe(tokens, 0.005 + 0.001 * tokens)
    assert cost.seconds(200) == pytest.approx(0.205, rel=0.02)
    assert cost.tokens(0.1) == pytest.approx(95, rel=0.05)
    for tokens in (100, 200, 100, 200, 100, 200, 100, 200, 100, 200, 100, 200):  # a chunk now costs thrice as much
        cost.observe(tokens, 0.015 + 0.003 * tokens)
    assert cost.seconds(150) == pytest.approx(0.465, rel=0.05)


def test_noise_does_not_turn_the_line_over() -> None:
    cost, generator = ChunkCost(), np.random.default_rng(0)
    for _ in range(200):
        cost.observe(int(generator.integers(50, 100)), float(generator.uniform(0.01, 0.05)))
        assert cost.seconds(60) <= cost.seconds(600)
        assert 0 <= cost.tokens(0.025) <= 201


def test_a_scripted_engine_prefills_in_layers_too() -> None:
    core = scripted(prefill_layers=3)
    assert run(core, request("a", range(4, 60), 5))["a"].tokens == mixed_reply(range(4, 60), 5)
