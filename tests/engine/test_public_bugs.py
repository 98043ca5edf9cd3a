"""Failures that other engines are known for, each with the right behaviour, and each against a run without company.

The tiny model has one full and one windowed layer; the scripted backend tells tokens from all of their context.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.engines import (
    VOCAB,
    Answer,
    assert_idle,
    finish,
    mixed,
    mixed_logits,
    mixed_reply,
    request,
    run,
    scripted,
    solo,
    step,
    tiny_backend,
)
from support.engines import with_settings as settings

from runtime.engine import EngineCore
from runtime.request import FinishReason, Request
from runtime.sampling import GREEDY, SamplingParams


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]


WARM = SamplingParams(temperature=0.8, top_p=0.95, seed=42)


# sampling


def test_a_seeded_row_does_not_depend_on_neighbours_row_or_preemption() -> None:
    mine = request("x", prompt(20), 30, WARM)
    truth = solo(tiny_backend(), mine).tokens
    unseeded = request("a", prompt(20, 1), 25, SamplingParams(temperature=1.0))
    seeded = request("b", prompt(20, 2), 25, WARM)
    assert run(EngineCore(tiny_backend()), unseeded, mine)["x"].tokens == truth
    assert run(EngineCore(tiny_backend()), seeded, unseeded, mine)["x"].tokens == truth
    assert run(EngineCore(tiny_backend()), request("same", mine.prompt, 30, WARM), mine)["x"].tokens == truth
    tight = EngineCore(tiny_backend(pages=9))
    assert run(tight, request("p", prompt(20, 3), 40, priority=-1), seeded, mine)["x"].tokens == truth
    assert tight.stats().preemptions > 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9), SamplingParams(temperature=1.0, top_k=1)])
def test_greedy_rows_take_the_lowest_of_equal_maxima_beside_random_rows(params: SamplingParams) -> None:
    logits = np.zeros(VOCAB)
    logits[[30, 70, 110]] = 5.0
    core = scripted(lambda *_: logits)
    others = [request(str(seed), [9], 20, SamplingParams(temperature=1.0, seed=seed)) for seed in range(3)]
    assert set(run(core, request("a", [9], 20, params))["a"].tokens) == {30}
    answers = run(core, *others, request("a", [9], 20, params))
    assert set(answers["a"].tokens) == {30}
    assert {30, 70, 110} <= {token for each in others for token in answers[each.id].tokens}


class Mask:
    is_complete = False

    def __init__(self, *allowed: int) -> None:
        """Allow only these, always."""
        words = np.zeros(VOCAB // 32, dtype=np.uint32)
        for token in allowed:
            words[token // 32] |= np.uint32(1 << (token % 32))
        self.words = words.view(np.int32)

    def mask(self) -> np.ndarray:
        return self.words

    def accept(self, token: int) -> None:
        pass


def test_masked_greedy_rows_stay_numbers_and_leave_their_neighbours_alone() -> None:
    together = run(scripted(mixed_logits), *masked().values())
    for name, each in masked().items():
        alone = run(scripted(mixed_logits), each)[name]
        assert (together[name].tokens, together[name].logprobs) == (alone.tokens, alone.logprobs)
    assert set(together["one"].tokens) == {77}
    assert set(together["greedy"].tokens) <= {3, 40, 41}
    assert all(np.isfinite(entry.logprob) for answer in together.values() for entry in answer.logprobs)


def masked() -> dict[str, Request]:
    negative = SamplingParams(logit_bias=((77, -100.0),), repetition_penalty=3.0)
    return {
        "greedy": request("greedy", prompt(9), 6, constraint=Mask(3, 40, 41), logprobs=2),
        "random": request("random", prompt(9), 6, WARM, logprobs=2),
        "one": request("one", prompt(9), 6, negative, constraint=Mask(77), logprobs=2),
    }


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 1, "top_p": 0.8}, {"top_k": 2, "top_p": 1e-4}, {"min_p": 1.0}, {"top_k": VOCAB, "top_p": 1e-4}],
)
def test_filters_together_always_leave_the_likeliest(filters: dict) -> None:
    params = SamplingParams(temperature=1.5, seed=4, **filters)
    best = run(scripted(mixed_logits), request("a", prompt(9), 12))["a"].tokens
    # the first token comes from prefill, the others from decode, a logprob takes both to the host
    assert run(scripted(mixed_logits), request("a", prompt(9), 12, params))["a"].tokens == best
    assert run(scripted(mixed_logits), request("a", prompt(9), 12, params, logprobs=0))["a"].tokens == best


def test_top_k_above_the_vocabulary_is_off() -> None:
    answers = [
        run(scripted(mixed_logits), request("a", prompt(9), 12, SamplingParams(temperature=1.5, seed=4, top_k=top_k)))
        for top_k in (0, VOCAB, VOCAB + 1, 10**6)
    ]
    assert all(answer == answers[0] for answer in answers)


def test_every_row_keeps_its_own_temperature() -> None:
    temperatures = [0.0, 0.1, 0.3, 0.5, 0.8, 1.0, 1.2, 1.5]
    requests = [
        request(str(idx), prompt(12), 15, SamplingParams(temperature=value, seed=7))
        for idx, value in enumerate(temperatures)
    ]
    together = run(EngineCore(tiny_backend(rows=8)), *requests)
    for each in requests:
        assert together[each.id].tokens == solo(tiny_backend(), each).tokens
    assert len({tuple(answer.tokens) for answer in together.values()}) > 4


# batch


def test_greedy_output_does_not_change_with_the_batch_or_with_admissions_while_it_decodes() -> None:
    requests = [request(f"r{idx}", prompt(length, idx), 12) for idx, length in enumerate([1, 8, 17, 21, 33])]
    truth = {each.id: solo(tiny_backend(), each).tokens for each in requests}
    for crowd in (3, 20):
        others = [request(f"o{idx}", prompt(5 + idx, 50 + idx), 3 + idx % 5, WARM) for idx in range(crowd)]
        core, answers = EngineCore(tiny_backend(rows=8)), {}
        for each in requests:
            core.submit(each)
        for other in others:
            core.submit(other)
            step(core, answers)
        finish(core, answers)
        assert {name: answers[name].tokens for name in truth} == truth


# cancel


def test_cancelling_a_queued_request_leaves_the_running_one_alone() -> None:
    core, answers = scripted(pages=(6, 6)), {}
    core.submit(request("a", prompt(30), 15))
    step(core, answers)
    core.submit(request("b", prompt(30, 1), 15))
    step(core, answers)
    assert (core.stats().running, core.stats().waiting) == (1, 1)
    core.abort("b")
    assert finish(core, answers)["a"].tokens == mixed_reply(prompt(30), 15)
    assert answers["b"].finish is FinishReason.ABORT


def test_a_thousand_requests_cancelled_at_random_leave_nothing_behind() -> None:
    generator, core, answers = random.Random(5), scripted(pages=(20, 20), settings=settings(max_waiting=5000)), {}
    requests = [request(f"r{idx}", prompt(generator.randrange(1, 40), idx), 8) for idx in range(1000)]
    due: dict[int, list[str]] = {}
    for idx, each in enumerate(requests):
        due.setdefault(idx // 3 + generator.randrange(12), []).append(each.id)
    at = 0
    while core.has_work or requests:
        for each in requests[:3]:
            core.submit(each)
        del requests[:3]
        for name in due.get(at, ()):
            core.abort(name)
        at += 1
        for output in core.step():
            answers.setdefault(output.request, Answer()).add(output)
        if at % 50 == 0:
            core.roster.check()
    assert_idle(core)
    core.roster.check()
    assert len(answers) == 1000
    for idx in range(1000):
        answer = answers[f"r{idx}"]
        assert answer.finish in {FinishReason.ABORT, FinishReason.LENGTH}
        generator_prompt = prompt_of(idx)
        assert answer.tokens == mixed_reply(generator_prompt, len(answer.tokens)), "a reply went to another request"


def prompt_of(idx: int) -> list[int]:
    generator = random.Random(5)
    lengths = [generator.randrange(1, 40) for _ in range(idx + 1)]
    return prompt(lengths[idx], idx)


def test_a_cancelled_turn_keeps_what_was_computed() -> None:
    core, answers, text = scripted(mixed), {}, prompt(60)
    core.submit(request("a", text, 100))
    while len(answers.get("a", Answer()).tokens) < 21:
        step(core, answers)
    core.abort("a")
    finish(core, answers)
    again = [*text, *answers["a"].tokens, *prompt(10, 1)]
    answer = run(core, request("b", again, 4))["b"]
    assert answer.cached_tokens == 80  # ten whole blocks of the 81 tokens
    assert answer.tokens == mixed_reply(again, 4)


# prefix cache


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(blocks: int) -> None:
    each = request("a", prompt(8 * blocks or 1), 9)
    truth = solo(tiny_backend(), each)
    core = EngineCore(tiny_backend())
    answers = [run(core, each)["a"] for _ in range(3)]
    assert [answer.tokens for answer in answers] == [truth.tokens] * 3
    assert answers[1].cached_tokens == answers[2].cached_tokens == max(0, 8 * (blocks - 1))


def test_a_resumed_row_counts_and_computes_only_what_is_new() -> None:
    shared = prompt(24)
    requests = [request(f"r{idx}", [*shared, *prompt(idx % 9, 100 + idx)], 20) for idx in range(64)]
    core = EngineCore(tiny_backend(rows=6, pages=16))
    answers = run(core, *requests)
    assert core.stats().preemptions > 0
    for each in requests:
        assert answers[each.id].tokens == solo(tiny_backend(), each).tokens
        assert answers[each.id].cached_tokens < len(each.prompt)
    assert core.stats().prefix_queries == sum(len(each.prompt) for each in requests)
    assert 0 < core.stats().prefix_hits == sum(answer.cached_tokens for answer in answers.values())


def test_repeats_of_a_prompt_longer_than_two_windows_are_identical() -> None:
    each = request("a", prompt(53), 12)
    truth = solo(tiny_backend(), each).tokens
    core = EngineCore(tiny_backend(pages=24))
    for turn in range(4):
        answer = run(core, each)["a"]
        assert answer.tokens == truth
        assert (answer.cached_tokens > 0) == (turn > 0)
    for turn in range(4):
        run(core, request("other", prompt(40, 10 + turn), 6))
        assert run(core, each)["a"].tokens == truth


def test_without_its_window_a_cached_prefix_is_no_hit() -> None:
    core = scripted(pages=(64, 8))
    text = prompt(64)
    run(core, request("a", text, 2))
    run(core, request("b", prompt(64, 1), 2))  # takes the few windowed pages, and none of the full ones
    assert core.cache.pools[0].find(core_block(core, text)) is not None
    answer = run(core, request("c", text, 4))["c"]
    assert (answer.cached_tokens, answer.tokens) == (0, mixed_reply(text, 4))


def core_block(core: EngineCore, text: list[int]) -> bytes:
    from runtime.engine.kv_cache import root_hash
    from runtime.engine.sequence import Sequence

    root = root_hash(core.settings.model, core.settings.tokenizer, "")
    return Sequence(request("x", text), 0, root, core.backend.page_tokens, VOCAB, 0.0).block(0)


def test_under_eviction_pressure_every_output_is_that_of_a_large_pool() -> None:
    generator, core = random.Random(9), EngineCore(tiny_backend(rows=3, pages=10))
    requests = [request(f"r{idx}", prompt(generator.randrange(20, 40), idx), 10) for idx in range(80)]
    answers: dict[str, Answer] = {}
    for each in requests:
        core.submit(each)
    full_steps = 0
    while core.has_work:
        step(core, answers)  # checks that nothing in use is free or idle
        full_steps += core.cache.pools[0].free == 0
    assert full_steps > 300
    for each in requests:
        assert answers[each.id].tokens == solo(tiny_backend(), each).tokens


def test_free_cached_and_referenced_pages_are_the_total_at_every_step() -> None:
    core, answers, shared = scripted(pages=(24, 20)), {}, prompt(32)
    for idx in range(12):
        core.submit(request(f"r{idx}", [*shared, idx + 5], 10))
    while core.has_work:
        step(core, answers)
        for pool in core.cache.pools:
            used = sum(pool.references(page) > 0 for page in range(pool.total))
            assert pool.free + pool.idle + used == pool.total
        running = core.stats().running
        if running == 4:  # four blocks shared and two of one's own, at most
            assert core.cache.pools[0].total - core.cache.pools[0].available <= 4 + 2 * running
    assert_idle(core)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_cached_block_of_nan_fails_its_request_once_and_leaves_the_cache(layer: int) -> None:
    backend = tiny_backend()
    core, text = EngineCore(backend), prompt(24)
    truth = solo(tiny_backend(), request("x", text, 8)).tokens
    assert run(core, request("a", text, 1))["a"].tokens == truth[:1]
    page = core.cache.pools[layer].find(core_block(core, text))
    assert page is not None
    backend.model.kv[layer][page] = float("nan")
    other = request("other", prompt(24, 5), 8)
    answers = run(core, request("b", text, 8), other)
    assert answers["b"].finish is FinishReason.ERROR
    assert answers["b"].tokens == []
    assert core.stats().corrupted == 1
    assert answers["other"].tokens == solo(tiny_backend(), other).tokens
    assert core.cache.pools[layer].find(core_block(core, text)) is None
    assert run(core, request("c", text, 8))["c"].tokens == truth
    assert core.error is None


# choices


def test_choices_of_a_prompt_share_its_blocks_and_compute_them_once() -> None:
    computed: list[int] = []
    core, text = scripted(mixed_logits, prefill_tokens=(8, 16)), prompt(60)
    prefill = core.backend.prefill

    def counting(chunk):
        computed.extend(len(span.tokens) for span in chunk.spans)
        return prefill(chunk)

    core.backend.prefill = counting  # type: ignore[method-assign]
    choices = [request(f"c{idx}", text, 10, SamplingParams(temperature=1.0, seed=idx), group="n") for idx in range(4)]
    answers = run(core, *choices)
    # seven blocks of eight once, and each choice's last four tokens
    assert sum(computed) == 7 * 8 + 4 * 4
    for each in choices:
        assert answers[each.id].tokens == run(scripted(mixed_logits), each)[each.id].tokens
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 4
