"""The card's backend with the interpreter in place of the card answers as the CPU's backend does."""

from __future__ import annotations

import pytest
from support.ahead import interpreted
from support.engines import request, run, solo, tiny_backend
from support.engines import with_settings as engine_settings

from runtime.engine import EngineCore
from runtime.sampling import SamplingParams

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
