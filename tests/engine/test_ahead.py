"""A device that makes steps ahead: tokens come one by one, launches are few, who comes or goes costs no other."""

from __future__ import annotations

import numpy as np
import pytest
from support.ahead import AheadBackend
from support.engines import VOCAB, Answer, finish, mixed, mixed_logits, mixed_reply, request, run, solo, step

from runtime.engine import EngineCore, ScriptedBackend
from runtime.engine.backend import Chunk, Row, Span, Want
from runtime.gpu.chain import MOST_STEPS
from runtime.request import FinishReason
from runtime.sampling import GREEDY, SamplingParams

PROMPT = list(range(10, 31))


def opened(script=mixed, **sizes) -> tuple[EngineCore, AheadBackend]:
    backend = AheadBackend(script, **{"vocab_size": VOCAB} | sizes)
    return EngineCore(backend), backend


def launches(backend: AheadBackend) -> list[list[int]]:
    """Steps asked of each launch, by bucket."""
    return [table.launches for table in backend.tables]


def test_a_row_gets_its_tokens_one_by_one_of_few_launches():
    core, backend = opened(max_steps=12)
    core.submit(request("a", PROMPT, 30))
    answers = {"a": Answer()}
    step(core, answers)  # the prompt
    counts = []
    while core.has_work:
        before = len(answers["a"].tokens)
        step(core, answers)
        counts.append(len(answers["a"].tokens) - before)
    assert answers["a"].tokens == mixed_reply(PROMPT, 30)
    assert counts == [1] * 30, "each pass hands over what is there, and does not wait for more"
    one, *others = launches(backend)
    assert len(one) == 3
    assert max(one) == 12
    assert not any(others), "one row runs over the table of one row"


def test_rows_run_over_the_smallest_table_with_seats_for_all():
    core, backend = opened()
    run(core, *(request(f"{idx}", [40 + idx, *PROMPT], 6) for idx in range(3)))
    assert [bool(each) for each in launches(backend)] == [False, False, True]


def test_a_cancelled_row_leaves_the_launch_and_the_others_go_on_in_it():
    core, backend = opened(max_steps=100, max_context_tokens=128, pages=(64, 64))
    answers: dict[str, Answer] = {}
    for name in "ab":
        core.submit(request(name, [ord(name), *PROMPT], 40))
    for _ in range(4):
        step(core, answers)
    made = sum(map(len, launches(backend)))
    rows, before = backend.tables[1].memory, list(backend.tables[1].memory.positions)
    assert rows.active == [True, True]
    core.abort("a")
    assert core.stats().running == 1, "its pages are others' at once"
    while all(rows.active):
        step(core, answers)
    gone = rows.active.index(False)
    assert rows.positions[gone] - before[gone] <= 1, "a step that had begun, and no other"
    assert sum(rows.active) == 1, "nobody decodes what nobody reads"
    finish(core, answers)
    assert answers["a"].finish is FinishReason.ABORT
    assert answers["b"].tokens == mixed_reply([ord("b"), *PROMPT], 40)
    assert sum(map(len, launches(backend))) - made <= 3, "only the host falling behind ends a launch"


def test_a_row_with_a_mask_runs_single_steps_and_alone_again_the_other_does_not():
    core, backend = opened(mixed_logits)
    biased = SamplingParams(logit_bias=((7, 1.0),))
    asked = request("a", PROMPT, 5, biased), request("b", [9, *PROMPT], 40)
    answers = run(core, *asked)
    for each in asked:
        truth = solo(ScriptedBackend(mixed_logits, vocab_size=VOCAB), each)
        assert answers[each.id].tokens == truth.tokens
    two = backend.tables[1].launches
    assert two.count(1) >= 4, "steps of both are single"
    assert max(backend.tables[0].launches) > 1


def test_a_token_that_ends_a_row_ends_it_on_the_device():
    reply = mixed_reply(PROMPT, 30)
    core, backend = opened(max_steps=64, max_context_tokens=128)
    answers = run(core, request("a", PROMPT, 60, end_ids={reply[20]}))
    assert answers["a"].tokens == reply[: reply.index(reply[20]) + 1]
    assert answers["a"].finish is FinishReason.STOP
    assert not backend.tables[0].memory.active[0]
    assert backend.tables[0].machine.step_idx <= 24, "a step or two are made for nobody"


def test_more_stops_than_fit_a_row_still_end_it():
    reply = mixed_reply(PROMPT, 30)
    stops = {reply[9], *range(150, 180)} - set(reply[:9])
    core, _ = opened()
    assert run(core, request("a", PROMPT, 60, stop_ids=stops))["a"].tokens == reply[:10]


def test_a_row_that_ran_ahead_and_lost_its_pages_is_computed_anew():
    """Two rows that outgrow the pool: one is sent back, and both have the answers that they have alone."""
    core, _ = opened(buckets=(2,), pages=(9, 9), max_context_tokens=64, max_steps=20)
    asked = [request(name, [ord(name), *PROMPT], 30) for name in "ab"]
    answers = run(core, *asked)
    assert core.stats().preemptions > 0
    for each in asked:
        assert answers[each.id].tokens == mixed_reply(each.prompt, 30)


def test_what_is_no_number_ends_its_row_alone():
    def script(context, sampling):
        return np.full(VOCAB, np.nan) if context[0] == 9 and len(context) == 30 else mixed_logits(context, sampling)

    core, _ = opened(script)
    answers = run(core, request("a", [9, *PROMPT], 20), request("b", PROMPT, 20))
    assert answers["a"].finish is FinishReason.ERROR
    assert len(answers["a"].tokens) == 8
    assert answers["b"].finish is FinishReason.LENGTH


def test_a_launch_that_fails_fails_what_is_there_and_the_engine():
    core, backend = opened()
    (device, *_), answers = backend.tables, {}
    core.submit(request("a", PROMPT, 30))
    step(core, answers)
    device.finish = lambda: (_ for _ in ()).throw(RuntimeError("lost"))
    while core.has_work:
        step(core, answers)
    assert answers["a"].finish is FinishReason.ERROR
    assert str(core.error) == "lost"


@pytest.mark.parametrize("steps", [1, 7, MOST_STEPS])
def test_answers_do_not_depend_on_how_far_a_launch_may_go(steps):
    core, _ = opened(max_steps=min(steps, 40), max_context_tokens=128, pages=(64, 64))
    asked = [request(f"{idx}", PROMPT[: 3 + 4 * idx], 10 + 7 * idx) for idx in range(4)]
    answers = run(core, *asked)
    assert all(answers[each.id].tokens == mixed_reply(each.prompt, each.stopping.max_tokens) for each in asked)


def tables_of(*pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables of both groups that begin with these pages and hold no more."""
    table = np.full(32, -1, np.int32)
    table[: len(pages)] = pages
    return table, table


def prefilled(backend: AheadBackend, slot: int, tokens: list[int], tables) -> None:
    """All but the last token are in the pages."""
    backend.prefill(Chunk((Span(slot, tokens[:-1], 0, GREEDY, Want.NOTHING, tables, True),), (0, 1)))


def row(slot: int, tokens: list[int], tables, stay: int = 0) -> Row:
    return Row(slot, tokens[-1], len(tokens) - 1, GREEDY, Want.TOKEN, tables, True, stay=(slot, stay))


def test_rows_that_are_ahead_when_another_comes_run_no_further_than_their_pages():
    """Pages for 24 positions and no more: a row of 14 tokens takes eleven steps, however they come."""
    _, backend = opened(windows=(None, 24), buckets=(2,))
    first, second = PROMPT[:14], [9, *PROMPT][:14]
    mine, other = tables_of(1, 2, 3), tables_of(4, 5, 6)
    prefilled(backend, 0, first, mine)
    (found,) = backend.decode([row(0, first, mine)], 11)
    text = first + list(found.tokens)
    assert text == [*first, *mixed_reply(first, len(text) - len(first))]
    prefilled(backend, 1, second, other)  # what runs lands, a step or two ahead
    while len(text) < 25:
        left = 24 - len(text) + 1
        found, beside = backend.decode([row(0, text, mine), row(1, second, other)], left)
        text, second = text + list(found.tokens), second + list(beside.tokens)
        while backend.tables[0].is_running():
            pass  # the host is busy
    assert text == [*first, *mixed_reply(first, len(text) - len(first))]


def test_a_row_that_came_back_to_the_same_place_goes_on_over_its_new_pages():
    _, backend = opened(windows=(None, 24), buckets=(2,))
    before, after = tables_of(1, 2, 3, 4), tables_of(5, 6, 7, 8)
    prefilled(backend, 0, PROMPT, before)
    (found,) = backend.decode([row(0, PROMPT, before)], 8)
    text = PROMPT + list(found.tokens)
    prefilled(backend, 1, text, after)  # another slot's, as a cache would keep them
    for _ in range(6):
        (found,) = backend.decode([row(0, text, after, stay=1)], 1)
        text += found.tokens
    assert text == [*PROMPT, *mixed_reply(PROMPT, len(text) - len(PROMPT))]


def test_what_is_made_is_handed_over_before_a_prompt_takes_the_device():
    core, backend = opened(max_steps=64, max_context_tokens=128, pages=(64, 64))
    core.submit(request("a", PROMPT, 60))
    answers = {"a": Answer(), "b": Answer()}
    for _ in range(4):
        step(core, answers)
    core.submit(request("b", [9, *PROMPT], 5))
    handed_over = []
    prefill = backend.prefill

    def watched(chunk):
        handed_over.append(core.roster.by_id["a"].generated)
        assert backend.tables[0].steps_left == 0, "nothing runs beside a prefill"
        return prefill(chunk)

    backend.prefill = watched
    finish(core, answers)
    made = backend.tables[0].launches
    assert handed_over
    assert handed_over[0] > 3, "with what was made until the launch had ended"
    assert len(made) >= 2
    assert answers["a"].tokens == mixed_reply(PROMPT, 60)


def test_who_comes_while_a_launch_lands_shares_the_slice():
    core, backend = opened(max_steps=64, max_context_tokens=128, pages=(64, 64))
    answers = {name: Answer() for name in "abc"}
    core.submit(request("a", PROMPT, 60))
    for _ in range(4):
        step(core, answers)
    core.submit(request("b", [9, *PROMPT], 5))
    late = [request("c", [10, *PROMPT], 5)]
    core.pause = lambda: core.submit(late.pop()) if late else None
    chunks = []
    prefill = backend.prefill

    def watched(chunk):
        chunks.append(chunk)
        return prefill(chunk)

    backend.prefill = watched
    finish(core, answers)
    assert len(chunks[0].spans) == 2
    assert answers["b"].tokens == mixed_reply([9, *PROMPT], 5)
    assert answers["c"].tokens == mixed_reply([10, *PROMPT], 5)
