"""The soak finds what it is there to find: a wrong token, a stuck stream, a leak; and nothing where nothing is."""

import asyncio
import time

import numpy as np
import pytest
from bench import soak as soaking
from support.serving import END, VOCAB, listening

from runtime.bench.client import Answer, Client, connected
from runtime.bench.load import Load
from runtime.bench.sessions import shared_body
from runtime.request import Stats
from runtime.sampling import SamplingParams, sample

pytestmark = pytest.mark.anyio


def script(context, sampling):
    """A token that follows from the whole context and the seed."""
    return 20 + (sum(context) + sampling.seed) % 60


async def soak(served, *, near_tie=0.0, timeout_s=20.0, cases=12, lengths=(200, 12), between=lambda: None, **options):
    """Learn and soak for a second; `between` happens after the runs alone."""
    async with connected() as http:
        client = Client(http, served.url, timeout_s=timeout_s)
        client.shared = shared_body(Load(ignore_eos=False), "demo")
        made = soaking.make_cases(cases, seed=1, vocab_size=VOCAB, max_input=lengths[0], max_output=lengths[1])
        judge = soaking.Judge(near_tie)
        await judge.learn(client, made)
        between()
        options = {"seconds": 1.0, "clients": 6, **options}
        return await soaking.Soak(client, made, judge, **options).run()


async def test_a_server_that_is_right_passes_while_rows_are_preempted_and_clients_leave():
    async with listening(script=script, rows=6, pages=(26, 64)) as served:
        found = await soak(served, preempts=True, cases=16, lengths=(64, 120), clients=8)
    assert found["failures"] == []
    assert found["left"] > 0
    assert found["compared_answers"] == found["answers"] > 20
    assert found["compared_tokens"] == found["tokens"] > 100
    assert set(found["finish_reasons"]) == {"left", "length", "stop"}
    assert found["counted"]["prefix_cache_hits"] > 0
    assert found["counted"]["num_preemptions"] > 0


def test_cases_are_short_and_long_greedy_seeded_and_formed_and_share_beginnings():
    cases = soaking.make_cases(48, seed=0, vocab_size=1000, max_input=4096, max_output=64)
    assert cases == soaking.make_cases(48, seed=0, vocab_size=1000, max_input=4096, max_output=64)
    lengths = [len(case.prompt) for case in cases]
    assert sum(length <= 128 for length in lengths) > 20
    assert sum(length >= 2048 for length in lengths) >= 5
    assert max(lengths) <= 4096
    assert sum(case.temperature == 0 for case in cases) == 16
    assert sum(case.form is not None for case in cases) == 6
    assert all(1 <= case.max_tokens <= 64 and max(case.prompt) < 1000 for case in cases)
    begins = [case.prompt[:8] for case in cases if len(case.prompt) >= 64]
    assert len(begins) - len(set(begins)) >= 3, "no two long prompts begin alike"


async def test_one_wrong_token_is_found(monkeypatch):
    monkeypatch.setattr(soaking, "LEAVES", 0.0)
    is_armed = False

    def wrong_once(context, sampling):
        nonlocal is_armed
        if is_armed and sampling.seed == 1:
            is_armed = False
            return 90
        return script(context, sampling)

    def arm():
        nonlocal is_armed
        is_armed = True

    async with listening(script=wrong_once) as served:
        found = await soak(served, between=arm)
    (failure,) = found["failures"]
    assert failure.startswith("case 0, token ")
    assert "90, alone" in failure
    assert failure.endswith("(1 times)")
    assert found["compared_answers"] > 10


async def test_a_stream_cut_short_is_found_by_its_length():
    armed = False

    def ends_early(context, sampling):
        return END if armed and sum(context) % 7 == 0 else script(context, sampling)

    def arm():
        nonlocal armed
        armed = True

    async with listening(script=ends_early) as served:
        found = await soak(served, between=arm)
    assert any(f"{END}, alone" in each or "then stop; alone" in each for each in found["failures"])


async def test_a_stuck_stream_is_found(monkeypatch):
    monkeypatch.setattr(soaking, "LEAVES", 0.0)
    is_armed = False

    def sticks_once(context, sampling):
        nonlocal is_armed
        if is_armed:
            is_armed = False
            time.sleep(2.0)
        return script(context, sampling)

    def arm():
        nonlocal is_armed
        is_armed = True

    async with listening(script=sticks_once) as served:
        found = await soak(served, between=arm, timeout_s=1.0)
    assert any("no end after 1 s" in each for each in found["failures"])


async def test_a_gauge_that_stays_up_and_a_dead_probe_are_found(monkeypatch):
    monkeypatch.setattr(soaking, "_SETTLE_SECONDS", 0.3)
    async with listening(script=script) as served:

        def leak():
            served.service.metrics.watch(lambda: Stats(running=1, waiting=2), block_size=8, num_blocks=9)
            served.service.is_draining = True

        found = await soak(served, between=leak, seconds=0.0)
        served.service.is_draining = False
    assert found["failures"] == [
        "vllm:num_requests_running is 1 after all have gone",
        "vllm:num_requests_waiting is 2 after all have gone",
        "/ready answers 503",
    ]


async def test_without_preemptions_a_soak_that_wants_them_fails():
    async with listening(script=script) as served:
        found = await soak(served, preempts=True, seconds=0.3)
    assert found["failures"] == ["no row gave up its blocks; give the server fewer: --num-gpu-blocks"]


def test_memory_that_grows_is_told_from_memory_that_fills_once():
    megabyte = 2.0**20
    filled = [400 * megabyte] * 5 + [500 * megabyte] * 35
    leaking = [(500 + 4 * step) * megabyte for step in range(40)]
    assert not soaking.flatness(filled)["grows"]
    assert soaking.flatness(leaking)["grows"]
    assert soaking.flatness(leaking)["growth"] == pytest.approx(80 / 558, rel=0.01)
    assert not soaking.flatness([1.0, 9.0])["grows"], "two values say nothing"


def rivals(distance, case_seed, temperature):
    """Logits by which two tokens' scores are so far apart, the first ahead, at every position."""

    def answer(context, _sampling):
        logits = np.full(VOCAB, -500.0)
        logits[[30, 31]] = 0.0
        if temperature:
            params = SamplingParams(temperature=temperature, seed=case_seed)
            low, high = -60.0, 60.0  # where the draw turns from one to the other
            for _ in range(80):
                logits[30] = (low + high) / 2
                low, high = (low, logits[30]) if sample(logits, params, len(context) - 1) == 30 else (logits[30], high)
            logits[30] = high
        logits[30] += distance * (temperature or 1.0)
        return logits

    return answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("distance", "passes"), [(0.02, True), (0.8, False)])
async def test_a_near_tie_passes_and_anything_further_apart_does_not(temperature, distance, passes):
    """The other token comes under load; how far its score is behind is known. Noise is drawn as the server draws it."""
    case = soaking.Case(0, (5, 6, 7), 4, temperature, 11)
    ahead = rivals(distance, case.seed, temperature)
    is_loaded = False

    def answer(context, sampling):
        if is_loaded and len(context) == len(case.prompt) + 1 and sampling.seed == case.seed:
            return 31
        return ahead(context, sampling)

    async with listening(script=answer) as served, connected() as http:
        client = Client(http, served.url)
        client.shared = shared_body(Load(ignore_eos=False), "demo")
        for near_tie, wanted in ((0.1, passes), (0.0, False)):
            judge, is_loaded = soaking.Judge(near_tie), False
            await judge.learn(client, [case])
            assert judge.alone[case].token_ids == [30] * 4
            is_loaded = True
            judge.hear(case, await client.ask(case.ask, 0.0))
            is_loaded = False
            distances = await judge.look(client)
            assert judge.compared_tokens == 1, "what follows a difference is not compared"
            assert (judge.wrong == []) is wanted
            if near_tie:
                assert list(distances.values()) == [pytest.approx(distance, abs=0.01)]


async def test_tokens_that_differ_by_more_are_left_out_up_to_their_share_and_what_has_no_score_never():
    """The model has an id that its tokenizer has not; a server that does not know the model has no scores."""
    case = soaking.Case(0, (5, 6, 7), 4, 0.0, 11)
    async with listening(script=rivals(0.8, case.seed, 0.0)) as served, connected() as http:
        client = Client(http, served.url)
        for left_out, model, wrong in ((0.02, "demo", 0), (0.005, "demo", 1), (0.02, "nobody", 1)):
            client.shared = shared_body(Load(ignore_eos=False), model)
            judge = soaking.Judge(0.1, left_out)
            judge.alone[case] = Answer(0.0, token_ids=[30] * 4, finish="length")
            judge.compared_tokens = 100
            judge.differences[case, 1, 31] = 1
            distances = await judge.look(client)
            assert (len(judge.wrong), len(distances)) == (wrong, model == "demo")


async def test_a_case_that_fails_alone_stops_the_soak():
    async with listening(script=script) as served, connected() as http:
        client = Client(http, served.url)
        client.shared = {"model": "nobody", "stream": True}
        with pytest.raises(SystemExit, match="case 0 alone: HTTP 404"):
            await soaking.Judge().learn(client, [soaking.Case(0, (1,), 1, 0.0, 1)])


def test_an_answer_whose_client_left_is_compared_as_far_as_it_came():
    judge, case = soaking.Judge(), soaking.Case(0, (1,), 4, 0.0, 1)
    judge.alone[case] = Answer(0.0, token_ids=[1, 2, 3, 4], finish="length")
    judge.hear(case, Answer(0.0, token_ids=[1, 2], is_cancelled=True))
    judge.hear(case, Answer(0.0, token_ids=[], is_cancelled=True))
    assert (judge.compared_tokens, judge.wrong, judge.differences.total()) == (2, [], 0)
    judge.hear(case, Answer(0.0, token_ids=[1, 9], is_cancelled=True))
    assert judge.differences.total() == 1
    judge.hear(case, Answer(0.0, token_ids=[1, 2, 3], finish="length"))
    judge.hear(case, Answer(0.0, token_ids=[1, 2, 3, 4], finish="stop"))
    assert len(judge.wrong) == 2
    asyncio.run(judge.look(None))  # nothing is asked where no near-tie may pass
    assert len(judge.wrong) == 3
