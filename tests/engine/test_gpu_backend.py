"""The card's backend with the interpreter in place of the card answers as the CPU's backend does."""

from __future__ import annotations

import numpy as np
import pytest
from support.ahead import interpreted
from support.engines import request, run, solo, tiny_backend
from support.engines import with_settings as engine_settings

from runtime.engine import EngineCore
from runtime.engine.backend import Chunk, Span, Want
from runtime.sampling import GREEDY, SamplingParams

SHARED = [idx % 180 + 4 for idx in range(40)]


@pytest.mark.parametrize("family", ["cohere2_moe", "qwen3_moe"])
def test_rows_that_share_prefixes_ask_for_logits_and_wait_have_the_answers_that_they_have_alone(family):
    backend = interpreted(family)
    backend.prefill_tokens = (8, 24)
    core = EngineCore(backend, engine_settings(stall_ms=0.001))
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    asked = [
        request("one", [7], 12),
        request("cut", SHARED, 9, drawn),
        request("same", SHARED, 6),
        request("longer", [*SHARED, 9, 8], 8),
        request("biased", SHARED[:20], 5, SamplingParams(logit_bias=((40, 3.0),))),
        request("logprobs", SHARED[5:30], 4, logprobs=2, prompt_logprobs=0),
    ]
    answers = run(core, *asked)
    for each in asked:
        truth, found = solo(tiny_backend(family), each), answers[each.id]
        assert (found.tokens, found.finish) == (truth.tokens, truth.finish), each.id
        values, expected = ([round(one.logprob, 6) for one in answer.logprobs] for answer in (found, truth))
        assert values == expected
        assert len(found.prompt_logprobs or ()) == len(truth.prompt_logprobs or ())
    assert core.stats().prefix_hits > 0
    assert any(backend.tables[0].launches)
    assert any(backend.tables[1].launches)


def test_a_small_pool_sends_rows_back_and_changes_no_answer():
    backend = interpreted("cohere2_moe", (2,), pages=6)
    core = EngineCore(backend)
    asked = [request(f"{seed}", SHARED[seed : seed + 30], 30) for seed in (0, 5)]
    answers = run(core, *asked)
    assert core.stats().preemptions > 0
    for each in asked:
        assert answers[each.id].tokens == solo(tiny_backend(), each).tokens


@pytest.mark.parametrize("open_backend", [interpreted, tiny_backend], ids=["card", "cpu"])
@pytest.mark.parametrize("family", ["cohere2_moe", "qwen3_moe"])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_chunk_cut_by_layers_goes_on_without_a_row(open_backend, family, gone):
    """The others' logits are those they have with it, to the bit; the pages of the one that left are let alone."""
    texts = [SHARED[:9], SHARED[5:21], SHARED[3:10]]
    kept = [idx for idx in range(3) if idx != gone]
    results = []
    for leaves in (False, True):
        backend = open_backend(family)
        last = (backend.model.pools if open_backend is interpreted else backend.model.kv)[-1].zero_()
        tables = [tuple(np.arange(4 * idx, 4 * idx + 4, dtype=np.int32) for _ in backend.windows) for idx in range(3)]
        spans = [
            Span(idx, texts[idx], 0, GREEDY, Want.ALL_LOGITS, tables[idx], tables_changed=True) for idx in range(3)
        ]
        assert backend.prefill(Chunk(tuple(spans), (0, 1))) == ()
        if leaves:
            spans = [spans[idx] for idx in kept]
        found = {}
        for layer in range(1, backend.prefill_layers):
            answers = backend.prefill(Chunk(tuple(spans), (layer, layer + 1)))
            found = {span.slot: answer.logits for span, answer in zip(spans, answers, strict=False)}
        assert bool(last[4 * gone : 4 * gone + 4].any()) is not leaves
        results.append(found)
    whole, rest = results
    assert list(rest) == kept
    for slot in kept:
        assert np.array_equal(rest[slot], whole[slot])
