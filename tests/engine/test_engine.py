"""What a request gets: its tokens, its end, its log probabilities, its place in the queue; on a scripted backend."""

from __future__ import annotations

import numpy as np
import pytest
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
    step,
)
from support.engines import with_settings as settings

from runtime.engine import EngineCore, StepTimes, replies
from runtime.engine.listener import Silent
from runtime.request import FinishReason, PromptTooLongError, QueueFullError, RefusedError, UnavailableError
from runtime.sampling import LOGPROB_FLOOR, SamplingParams

PROMPT = list(range(10, 30))


def bits(*tokens: int) -> np.ndarray:
    mask = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return mask.view(np.int32)


class Only:
    """A constraint that allows one token after another from a list of sets, and is complete after the last."""

    def __init__(self, *sets: set[int] | None) -> None:
        """None in place of a set allows every token."""
        self.sets, self.seen = sets, []

    def mask(self) -> np.ndarray | None:
        allowed = self.sets[len(self.seen)]
        return None if allowed is None else bits(*allowed)

    def accept(self, token: int) -> None:
        allowed = self.sets[len(self.seen)]
        if allowed is not None and token not in allowed:
            raise ValueError(f"{token} is not allowed")
        self.seen.append(token)

    @property
    def is_complete(self) -> bool:
        return len(self.seen) == len(self.sets)


# tokens and ends


def test_a_request_gets_what_follows_its_prompt() -> None:
    answer = run(scripted(), request("a", PROMPT, 12))["a"]
    assert answer == Answer(mixed_reply(PROMPT, 12), finish=FinishReason.LENGTH)


def test_an_end_id_stops_and_is_named_even_on_the_last_allowed_token() -> None:
    core = scripted(replies({(5,): [7, 8, 9]}))
    early = run(core, request("a", [5], 3, end_ids=[9]))["a"]
    assert (early.tokens, early.finish, early.stop_id) == ([7, 8, 9], FinishReason.STOP, 9)
    user = run(core, request("b", [5], 9, stop_ids=[8]))["b"]
    assert (user.tokens, user.finish, user.stop_id) == ([7, 8], FinishReason.STOP, 8)
    at_once = run(core, request("c", [5], 1, end_ids=[7]))["c"]
    assert (at_once.tokens, at_once.finish, at_once.stop_id) == ([7], FinishReason.STOP, 7)


def test_ignore_eos_ignores_every_end_id_but_no_stop_id() -> None:
    core = scripted(replies({(5,): [7, 8, 9, 7, 8, 9]}))
    ignoring = run(core, request("a", [5], 6, end_ids=[7, 8, 9], ignore_eos=True))["a"]
    assert (ignoring.tokens, ignoring.finish) == ([7, 8, 9, 7, 8, 9], FinishReason.LENGTH)
    user = run(core, request("b", [5], 6, end_ids=[7, 8], stop_ids=[9], ignore_eos=True))["b"]
    assert (user.tokens, user.stop_id) == ([7, 8, 9], 9)


def test_min_tokens_masks_every_end_id_until_it_is_reached_then_no_longer() -> None:
    # both ends are likelier than anything else, one by bias: exactly four other tokens come first
    logits = np.zeros(VOCAB)
    logits[[9, 20]] = [50.0, 1.0]
    core = scripted(lambda *_: logits)
    params = SamplingParams(logit_bias=((8, 100.0),))
    fields = {"end_ids": [8, 9], "stop_ids": [9]}
    answer = run(core, request("a", [5], 32, params, min_tokens=4, **fields))["a"]
    assert (answer.tokens, answer.stop_id) == ([20, 20, 20, 20, 8], 8)
    assert run(core, request("b", [5], 32, params, **fields))["b"].tokens == [8]


def test_the_context_window_ends_with_length_and_the_next_request_works() -> None:
    core = scripted(max_context_tokens=40)
    answer = run(core, request("a", PROMPT, 1000))["a"]
    assert (len(answer.tokens), answer.finish) == (20, FinishReason.LENGTH)
    assert run(core, request("b", PROMPT, 3))["b"].tokens == mixed_reply(PROMPT, 3)
    with pytest.raises(PromptTooLongError, match="40 tokens"):
        core.submit(request("c", range(100, 140)))
    assert run(core, request("d", range(100, 139), 5))["d"].finish is FinishReason.LENGTH


def test_a_prompt_for_which_there_are_not_pages_enough_is_refused_at_once() -> None:
    core = scripted(pages=(4, 4))
    assert core.max_context_tokens == 32
    with pytest.raises(PromptTooLongError):
        core.submit(request("a", range(40)))
    # of windows alone, four pages of eight tokens hold any context
    assert scripted(windows=(16,), pages=(4,)).max_context_tokens == 256


def test_max_tokens_zero_generates_nothing() -> None:
    core = scripted(mixed_logits)
    for prompt in ([5], PROMPT):
        answer = run(core, request("a", prompt, 0))["a"]
        assert (answer.tokens, answer.finish) == ([], FinishReason.LENGTH)
        answer = run(core, request("a", prompt, 0, prompt_logprobs=1))["a"]
        assert (answer.tokens, answer.finish, len(answer.prompt_logprobs or ())) == (
            [],
            FinishReason.LENGTH,
            len(prompt),
        )


@pytest.mark.parametrize(
    "bad",
    [
        request("a", []),
        request("a", [5, VOCAB]),
        request("a", [-1]),
        request("a", [5], sampling=SamplingParams(logit_bias=((VOCAB, 1.0),))),
    ],
    ids=["empty", "above", "below", "bias"],
)
def test_ids_outside_the_vocabulary_are_refused_and_disturb_nobody(bad) -> None:
    core = scripted()
    core.submit(request("other", PROMPT))
    with pytest.raises(RefusedError):
        core.submit(bad)
    assert finish(core)["other"].tokens == mixed_reply(PROMPT, 8)


def test_an_id_in_use_is_refused() -> None:
    core = scripted()
    core.submit(request("a", PROMPT))
    with pytest.raises(ValueError, match="running already"):
        core.submit(request("a", PROMPT))
    finish(core)


# the host's part of sampling


def test_a_bias_forbids_and_forces_from_the_first_token_on() -> None:
    core = scripted(lambda *_: 7)
    banned = run(core, request("a", [5], 3, SamplingParams(logit_bias=((7, -100.0),))))["a"]
    assert 7 not in banned.tokens
    forced = run(core, request("b", [5], 3, SamplingParams(logit_bias=((50, 100.0),))))["b"]
    assert forced.tokens == [50, 50, 50]


def test_penalties_look_at_what_they_say() -> None:
    logits = np.zeros(VOCAB)
    logits[[10, 11, 12, 13]] = [4.0, 3.5, 3.0, 2.9]
    core = scripted(lambda *_: logits)
    # a token once generated costs 1: presence alone lets the first come back as soon as the others have cost it too
    presence = run(core, request("a", [10], 6, SamplingParams(presence_penalty=1.0)))["a"]
    assert presence.tokens == [10, 11, 10, 10, 10, 10]
    frequency = run(core, request("b", [10], 6, SamplingParams(frequency_penalty=1.0)))["b"]
    assert frequency.tokens == [10, 11, 10, 12, 13, 11]
    # repetition counts the prompt's 10 and 11 from the start
    repetition = run(core, request("c", [10, 11], 3, SamplingParams(repetition_penalty=2.0)))["c"]
    assert repetition.tokens == [12, 13, 10]


def test_a_constraint_is_told_every_token_once_and_ends_the_request_when_complete() -> None:
    core = scripted(mixed_logits)
    constraint = Only({40, 41}, None, {42})
    answer = run(core, request("a", PROMPT, 9, constraint=constraint))["a"]
    assert answer.tokens == constraint.seen
    assert (answer.tokens[0] in {40, 41}, answer.tokens[2], answer.finish) == (True, 42, FinishReason.STOP)
    assert answer.tokens[1] == int(np.argmax(mixed_logits((*PROMPT, answer.tokens[0]), SamplingParams())))


def test_a_constraint_is_told_once_though_its_row_is_preempted() -> None:
    core = scripted(mixed_logits, rows=3, pages=(7, 7), windows=(None, 16))
    constraints = [Only(*[set(range(30 + idx, 190))] * 40) for idx in range(3)]
    requests = [
        request(str(idx), [idx + 5] * 9, 50, constraint=constraint) for idx, constraint in enumerate(constraints)
    ]
    answers = run(core, *requests)
    assert core.stats().preemptions > 0
    for idx, constraint in enumerate(constraints):
        assert answers[str(idx)].tokens == constraint.seen
        assert len(constraint.seen) == 40


class Broken(Only):
    def mask(self) -> np.ndarray | None:
        raise RuntimeError("grammar")


@pytest.mark.parametrize("constraint", [Broken(), Only({9}, set()), Only(set())], ids=["raises", "later", "nothing"])
def test_a_constraint_that_fails_fails_its_request_alone(constraint) -> None:
    core = scripted(mixed_logits)
    answers = run(core, request("a", PROMPT, constraint=constraint), request("b", PROMPT))
    assert answers["a"].finish is FinishReason.ERROR
    assert answers["a"].error
    assert "grammar" not in answers["a"].error
    assert answers["b"].finish is FinishReason.LENGTH
    assert core.error is None


def test_logprobs_come_from_the_unfiltered_distribution_and_are_finite() -> None:
    core = scripted(mixed_logits)
    hard = SamplingParams(temperature=0.7, top_k=1, logit_bias=((3, 100.0),))
    answer = run(core, request("a", PROMPT, 3, hard, logprobs=5))["a"]
    assert answer.tokens == [3, 3, 3]
    context = list(PROMPT)
    for token, entry in zip(answer.tokens, answer.logprobs, strict=True):
        logits = mixed_logits(tuple(context), hard)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(expected[token])
        assert entry.rank == 1 + (logits > logits[token]).sum()
        assert [each for each, _ in entry.top] == np.argsort(-logits)[:5].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(expected)[::-1][:5])
        context.append(token)
    silent = np.where(np.arange(VOCAB) == 7, 0.0, -np.inf)
    floor = run(scripted(lambda *_: silent), request("a", [5], 1, logprobs=2))["a"].logprobs[0]
    assert floor.top == ((7, 0.0), (0, LOGPROB_FLOOR))


@pytest.mark.parametrize("chunk", [(4, 4), (8, 64)])
def test_prompt_logprobs_say_how_likely_each_prompt_token_was_cached_or_not(chunk) -> None:
    core = scripted(mixed_logits, prefill_tokens=chunk)
    run(core, request("warm", PROMPT))
    params = SamplingParams(temperature=1.0, top_k=1)
    answer = run(core, request("a", PROMPT, 2, params, prompt_logprobs=2, logprobs=0))["a"]
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    for idx, entry in enumerate(answer.prompt_logprobs[1:], 1):
        assert entry is not None
        logits = mixed_logits(tuple(PROMPT[:idx]), params)
        assert entry.logprob == pytest.approx(logits[PROMPT[idx]] - np.log(np.exp(logits).sum()))
        assert len(entry.top) == 2
    assert len(answer.prompt_logprobs) == len(PROMPT)
    assert answer.cached_tokens == 0


# queue, priority, deadline, cancel


def test_more_requests_than_rows_wait_and_all_are_served_in_order() -> None:
    core = scripted(rows=2)
    requests = [request(str(idx), [idx + 4] * 3, 4) for idx in range(7)]
    for each in requests:
        core.submit(each)
    answers: dict[str, Answer] = {}
    step(core, answers)
    assert (core.stats().running, core.stats().waiting) == (2, 5)
    finish(core, answers)
    assert list(answers) == [each.id for each in requests]
    assert all(answers[each.id].tokens == mixed_reply(each.prompt, 4) for each in requests)


def test_smaller_priority_numbers_go_first() -> None:
    core = scripted(rows=1)
    order = list(run(core, *[request(name, PROMPT, priority=level) for name, level in [("a", 1), ("b", 0), ("c", 0)]]))
    assert order == ["b", "c", "a"]


def test_a_full_queue_is_refused_with_a_hint_but_a_group_comes_in_whole() -> None:
    core = scripted(rows=1, settings=settings(max_waiting=2))
    for name in "abc":
        core.submit(request(name, PROMPT, group="n" if name == "c" else None))
    with pytest.raises(QueueFullError, match="limit is 2") as refusal:
        core.submit(request("d", PROMPT))
    assert refusal.value.retry_after >= 1.0
    core.submit(request("e", PROMPT, group="n"))
    assert set(finish(core)) == set("abce")
    run(core, request("d", PROMPT))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_request_is_cancelled_within_a_step_at_any_stage(steps: int) -> None:
    core = scripted(rows=2, prefill_tokens=(8, 8))
    answers: dict[str, Answer] = {}
    for name in "abc":
        core.submit(request(name, [ord(name)] * 20, 30))
    for _ in range(steps):
        step(core, answers)
    for name in "bc":
        core.abort(name)
    core.abort("unknown")
    step(core, answers)
    assert answers["b"].finish is answers["c"].finish is FinishReason.ABORT
    assert finish(core, answers)["a"].tokens == mixed_reply([ord("a")] * 20, 30)


def test_finish_is_a_stop_that_the_server_saw() -> None:
    core, answers = scripted(), {}
    core.submit(request("a", PROMPT, 30))
    while len(answers.get("a", Answer()).tokens) < 3:
        step(core, answers)
    core.finish("a")
    step(core, answers)
    assert answers["a"].finish is FinishReason.STOP
    assert answers["a"].tokens == mixed_reply(PROMPT, len(answers["a"].tokens))
    assert_idle(core)


def test_a_deadline_ends_running_and_waiting_requests_and_no_others() -> None:
    core = scripted(rows=1)
    now = [0.0]
    core.clock = lambda: now[0]
    answers: dict[str, Answer] = {}
    for name, deadline in [("a", 5.0), ("b", 5.0), ("c", None), ("d", 50.0)]:
        core.submit(request(name, PROMPT, 20, deadline=deadline))
    for _ in range(4):
        step(core, answers)
    now[0] = 5.0
    finish(core, answers)
    reasons = [answers[name].finish for name in "abcd"]
    assert reasons == [FinishReason.TIMEOUT, FinishReason.TIMEOUT, FinishReason.LENGTH, FinishReason.LENGTH]
    assert answers["a"].tokens == mixed_reply(PROMPT, len(answers["a"].tokens))
    assert core.stats().finished[FinishReason.TIMEOUT] == 2


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    core = scripted(rows=1)
    core.submit(request("a", PROMPT))
    core.submit(request("b", PROMPT))
    core.is_draining = True
    with pytest.raises(UnavailableError):
        core.submit(request("c", PROMPT))
    assert {answer.finish for answer in finish(core).values()} == {FinishReason.LENGTH}


# failure


@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_failed_step_ends_every_request_and_the_engine(at: int) -> None:
    calls = 0

    def script(context, sampling):
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("device lost")
        return mixed(context, sampling)

    core = scripted(script, rows=2)
    answers = run(core, *[request(name, PROMPT, 10, group="g") for name in "abc"])
    assert {answer.finish for answer in answers.values()} == {FinishReason.ERROR}
    assert all(answer.error and "device lost" not in answer.error for answer in answers.values())
    assert isinstance(core.error, RuntimeError)
    with pytest.raises(UnavailableError, match="failed"):
        core.submit(request("d", PROMPT))
    assert core.step() == []


def test_a_listener_that_fails_stops_nothing() -> None:
    class Failing(Silent):
        def on_step(self, times: StepTimes) -> None:
            raise RuntimeError(f"metrics of {times}")

    core = scripted()
    core.listener = Failing()
    assert run(core, request("a", PROMPT))["a"].tokens == mixed_reply(PROMPT, 8)


# chains


class Watching(Silent):
    """Notes how many steps each decode call chained, and for how many rows."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self.calls: list[tuple[int, int]] = []

    def on_step(self, times: StepTimes) -> None:
        if times.rows:
            self.calls.append((times.rows, times.steps))


def chaining(**sizes) -> tuple[EngineCore, Watching]:
    core, seen = scripted(max_steps=4, settings=settings(chain_steps=4), max_context_tokens=64, **sizes), Watching()
    decode, core.listener = core.backend.decode, seen

    def bounded(rows, steps):
        assert all(row.position + steps <= core.max_context_tokens for row in rows), "a step beyond the context"
        return decode(rows, steps)

    core.backend.decode = bounded  # type: ignore[method-assign]
    return core, seen


def test_a_chain_of_steps_gives_the_same_tokens_and_stops_where_one_step_would() -> None:
    core, seen = chaining()
    reply = mixed_reply(PROMPT, 44)
    answer = run(core, request("a", PROMPT, 100))["a"]
    assert (answer.tokens, answer.finish) == (reply, FinishReason.LENGTH)
    assert (1, 4) in seen.calls
    assert core.stats().generated_tokens == 44
    stop = reply[9]
    ended = run(core, request("b", PROMPT, 40, end_ids=[stop]))["b"]
    assert (ended.tokens, ended.stop_id) == (reply[: reply.index(stop) + 1], stop)
    seen.calls.clear()
    assert run(core, request("c", PROMPT, 7))["c"].tokens == reply[:7]
    assert sum(steps for _, steps in seen.calls) == 7 - 1 * (len(PROMPT) % 8 > 1)  # the first may come from prefill


def test_rows_that_need_the_host_are_not_chained() -> None:
    core, seen = chaining()
    reply = mixed_reply(PROMPT, 10)
    host = run(core, request("a", PROMPT, 10, logprobs=0))["a"]
    assert (host.tokens, len(host.logprobs)) == (reply, 10)
    constraint = Only(None, None, {42}, None)  # that allows everything now may be another matter in two steps
    assert run(core, request("b", PROMPT, 10, constraint=constraint))["b"].tokens[:3] == [*reply[:2], 42]
    assert {steps for _, steps in seen.calls} == {1}


def test_nothing_is_chained_while_anyone_waits() -> None:
    core, seen = chaining(rows=1)
    run(core, request("a", [5], 30), request("b", [6], 12))
    calls = [steps for _, steps in seen.calls]
    assert calls[:30] == [1] * 30
    assert calls[30:] == [4, 4, 4]


# admission


def test_a_row_is_admitted_only_when_no_running_row_lacks_pages_for_it() -> None:
    core, answers = scripted(pages=(8, 8), windows=(None, None), prefill_tokens=(8, 8)), {}
    texts = {name: [ord(name)] * 32 for name in "abc"}
    for name, text in texts.items():
        core.submit(request(name, text, 8))
    step(core, answers)
    # the first has taken one page of its four, but the second does not get those
    assert (core.stats().running, core.stats().waiting) == (1, 2)
    finish(core, answers)
    assert core.stats().preemptions == 0
    assert all(answers[name].tokens == mixed_reply(text, 8) for name, text in texts.items())


def test_a_preempted_row_comes_back_before_newer_ones_and_the_best_is_never_preempted() -> None:
    core, answers = scripted(pages=(10, 10), windows=(None, None), rows=3), {}
    for name in "abcd":
        core.submit(request(name, [ord(name)] * 7, 50))
    order: list[str] = []
    while core.has_work:
        before = {sequence.request.id for sequence in core.roster.running.values()}
        step(core, answers)
        after = {sequence.request.id for sequence in core.roster.running.values()}
        order += sorted(after - before)
        assert "a" in after or answers["a"].finish
    assert core.stats().preemptions >= 1
    assert order[:3] == ["a", "b", "c"]
    assert order.index("d") > max(idx for idx, name in enumerate(order) if name == "c")
    assert all(answers[name].tokens == mixed_reply([ord(name)] * 7, 50) for name in "abcd")
