"""The CPU's model computes what transformers does, the same to the bit in any company; so does the interpreter."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support.decoding import prompts, reference_greedy
from support.engines import request, run, scripted, solo, tiny, tiny_backend, with_settings
from support.tiny_models import WINDOW, built

from runtime.engine import EngineCore
from runtime.engine.backend import Chunk, Row, Span, Want
from runtime.engine.cpu_backend import CpuBackend
from runtime.engine.interpreter_backend import InterpreterBackend
from runtime.sampling import GREEDY, SamplingParams

FAMILIES = ["cohere2_moe", "qwen3_moe"]
# one token, both sides of a block (8) and of the window, and beyond it
LENGTHS = [1, 7, 8, 9, WINDOW - 1, WINDOW, WINDOW + 1, 45]
WARM = SamplingParams(temperature=0.9, seed=11)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tables(backend: CpuBackend, blocks: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(blocks, dtype=np.int32) for _ in backend.windows)


def span(backend: CpuBackend, tokens: list[int], begin: int, want: Want, blocks: list[int]) -> Span:
    return Span(0, tokens, begin, GREEDY, want, tables(backend, blocks), tables_changed=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [2, 5])
def test_logits_of_every_position_are_those_of_transformers(family: str, layers: int) -> None:
    backend, (text,) = tiny_backend(family, layers), prompts([45])
    chunk = Chunk((span(backend, text, 0, Want.ALL_LOGITS, list(range(20, 26))),), (0, layers))
    (result,) = backend.prefill(chunk)
    with torch.no_grad():
        expected = tiny(family, layers)[0](torch.tensor([text])).logits[0]
    # their router's softmax runs in float32
    torch.testing.assert_close(torch.from_numpy(result.logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers(family: str) -> None:
    texts = prompts(LENGTHS)
    answers = run(EngineCore(tiny_backend(family, 5)), *[request(str(idx), text, 12) for idx, text in enumerate(texts)])
    for idx, text in enumerate(texts):
        assert answers[str(idx)].tokens == reference_greedy(tiny(family, 5)[0], text, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_error_stays_within_that_of_transformers(family: str) -> None:
    (text,) = prompts([45], seed=5)
    backend = tiny_backend(family, dtype=torch.bfloat16)
    (result,) = backend.prefill(Chunk((span(backend, text, 0, Want.ALL_LOGITS, list(range(6))),), (0, 2)))
    rough = copy.deepcopy(tiny(family)[0]).bfloat16()
    exact = copy.deepcopy(rough).float()  # only the arithmetic differs
    with torch.no_grad():
        truth, theirs = (model(torch.tensor([text])).logits[0].float() for model in (exact, rough))
    assert (torch.from_numpy(result.logits) - truth).norm() <= 1.5 * (theirs - truth).norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_are_equal_to_the_bit_however_the_prompt_is_cut_and_placed(family: str, dtype: torch.dtype) -> None:
    (text,) = prompts([45])
    whole = tiny_backend(family, dtype=dtype)
    (expected,) = whole.prefill(Chunk((span(whole, text, 0, Want.ALL_LOGITS, [0, 1, 2, 3, 4, 5]),), (0, 2)))
    assert expected.logits is not None
    backend, places = tiny_backend(family, dtype=dtype), [31, 7, 50, 2, 19, 40]
    for pool in backend.model.kv:  # what old pages hold is never read
        pool.fill_(float("nan"))
    other = Span(1, text[::-1], 0, WARM, Want.TOKEN, tables(backend, [60, 61, 62, 63, 59, 58]), tables_changed=True)
    at = 0
    for count, layers in [(3, 1), (13, 2), (1, 2), (20, 1)]:
        mine = span(backend, text[at : at + count], at, Want.ALL_LOGITS, places)
        for begin in range(0, 2, layers):
            results = backend.prefill(Chunk((other, mine), (begin, begin + layers)))
        assert np.array_equal(results[1].logits, expected.logits[at : at + count])
        at += count
    for position in range(at, 45):
        row = Row(0, text[position], position, GREEDY, Want.LOGITS, tables(backend, places), tables_changed=False)
        (result,) = backend.decode([row], 1)
        assert np.array_equal(result.logits, expected.logits[position])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_answers_do_not_depend_on_chains_chunks_cache_or_company(family: str, dtype: torch.dtype) -> None:
    requests = [request(str(idx), text, 20, WARM) for idx, text in enumerate(prompts(LENGTHS))]
    truth = {each.id: solo(tiny_backend(family, dtype=dtype), each).tokens for each in requests}
    backend = tiny_backend(family, dtype=dtype, rows=8, max_steps=3)
    backend.prefill_tokens = (4, 16)
    core = EngineCore(backend, with_settings(stall_ms=0.05, chain_steps=3))
    for _ in range(2):
        assert {name: answer.tokens for name, answer in run(core, *requests).items()} == truth
    assert core.stats().prefix_hits > 0


@pytest.mark.parametrize("params", [WARM, GREEDY, SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01)])
def test_the_host_draws_what_the_backend_draws(params: SamplingParams) -> None:
    for core in (EngineCore(tiny_backend()), EngineCore(tiny_backend(max_steps=4))):
        drawn = run(core, request("a", prompts([9])[0], 20, params))["a"].tokens
        assert run(core, request("a", prompts([9])[0], 20, params, logprobs=1))["a"].tokens == drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_the_interpreted_table_serves_the_same_answers(family: str) -> None:
    _, spec, weights = tiny(family)
    texts = prompts([17, 22, 1])
    requests = [
        request(str(idx), text, 6, params)
        for idx, (text, params) in enumerate(zip(texts, [GREEDY, WARM, WARM], strict=True))
    ]
    requests.append(request("host", texts[0], 6, WARM, logprobs=2))
    backend = InterpreterBackend(built(spec, rows=2), weights, pages=(5,) * len(tiny_backend(family).windows))
    core = EngineCore(backend)
    answers = run(core, *requests)
    for each in requests:
        expected = solo(tiny_backend(family), each)
        assert answers[each.id].tokens == expected.tokens
        for found, wanted in zip(answers[each.id].logprobs, expected.logprobs, strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-9)
    assert run(core, request("again", texts[1], 6, WARM))["again"].cached_tokens == 16


def test_the_interpreter_reports_a_row_that_is_not_a_number() -> None:
    _, spec, weights = tiny("cohere2_moe")
    backend = InterpreterBackend(built(spec, rows=2), weights, pages=(5, 5))
    core, text = EngineCore(backend), prompts([17])[0]
    truth = run(core, request("a", text, 3))["a"].tokens
    page = next(iter(core.cache.pools[0]._idle))
    backend.memory.kv[0][page] = float("nan")
    answers = run(core, request("b", text, 3), request("c", prompts([9], seed=1)[0], 3))
    assert (answers["b"].error is None, answers["c"].error) == (False, None)
    assert run(core, request("d", text, 3))["d"].tokens == truth


def test_pages_that_are_no_whole_tiles_are_refused() -> None:
    _, spec, weights = tiny("cohere2_moe")
    with pytest.raises(ValueError, match="multiples of 8"):
        CpuBackend(spec, weights, page_tokens=12, pages=(4, 4))


def test_a_row_alone_in_its_prompt_needs_no_prefill() -> None:
    core = scripted()
    core.backend.prefill = None  # type: ignore[assignment]
    assert len(run(core, request("a", [5], 4))["a"].tokens) == 4
