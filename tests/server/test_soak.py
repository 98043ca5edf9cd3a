"""The soak finds what it is there to find: a wrong token, a stuck stream, a leak; and nothing where nothing is."""

import asyncio
import time

import pytest
from bench import soak as soaking
from support.serving import END, VOCAB, listening

from runtime.bench.client import Answer, Client, connected
from runtime.bench.load import Load
from runtime.bench.sessions import shared_body
from runtime.request import Stats

pytestmark = pytest.mark.anyio


def script(context, sampling):
    """A token that follows from the whole context and the seed."""
    return 20 + (sum(context) + sampling.seed) % 60


async def soak(served, *, timeout_s=20.0, cases=12, lengths=(200, 12), between=lambda: None, **options):
    """Learn and soak for a second; `between` happens after the runs alone."""
    async with connected() as http:
        client = Client(http, served.url, timeout_s=timeout_s)
        client.shared = shared_body(Load(ignore_eos=False), "demo")
        made = soaking.make_cases(cases, seed=1, vocab_size=VOCAB, max_input=lengths[0], max_output=lengths[1])
        judge = soaking.Judge()
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
    assert sum(case.has_form for case in cases) == 6
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


class Recomputing:
    """A server whose tokens depend on which keys it computed as a prompt's and which when they were drawn."""

    block_tokens = 8

    def __init__(self):  # noqa: D107
        self.cached = {}

    def answer(self, prompt, max_tokens, salt=""):
        kinds = []
        while len(kinds) + self.block_tokens < len(prompt):
            block = self.cached.get((salt, *prompt[: len(kinds) + self.block_tokens]))
            if block is None:
                break
            kinds += block
        kinds += ["prompt"] * (len(prompt) - 1 - len(kinds))
        context, drawn = list(prompt), []
        for _ in range(max_tokens):
            kinds.append("drawn")
            turns = sum(place * place for place, kind in enumerate(kinds) if kind == "drawn")
            drawn.append(100 + (sum(context) + turns) % 997)
            context.append(drawn[-1])
        for end in range(self.block_tokens, len(kinds) + 1, self.block_tokens):
            self.cached.setdefault((salt, *context[:end]), kinds[end - self.block_tokens : end])
        return drawn

    async def ask(self, ask, _due):
        body = ask.body
        found = self.answer(body["prompt"], body["max_tokens"], body["cache_salt"])
        return Answer(0.0, token_ids=found, finish="length")


@pytest.mark.parametrize(("drawn", "kept"), [(3, 0), (20, 0), (20, 24), (20, 32), (5, 16)])
async def test_an_answer_that_was_begun_again_is_known_by_where(drawn, kept):
    """The row had drawn so many tokens, and found blocks of so many of its tokens: behind the prompt's, or none."""
    server, case = Recomputing(), soaking.Case(0, tuple(range(16)), 30, 0.0, 11)
    alone = server.answer(case.prompt, 30, "alone")
    if kept:
        server.answer(case.prompt, kept - 15, "load")
    found = alone[:drawn] + server.answer([*case.prompt, *alone[:drawn]], 30 - drawn, "load")
    assert found != alone
    judge = soaking.Judge(alone={case: Answer(0.0, token_ids=alone, finish="length")})
    judge.hear(case, Answer(0.0, token_ids=found, finish="length"))
    (way,) = (await judge.look(server, preemptions=1, block_tokens=8)).values()
    assert judge.wrong == []
    assert way == f"begun again behind {drawn} drawn tokens, with {kept} tokens kept"


@pytest.mark.parametrize(("preemptions", "token", "wrong"), [(1, 0, 1), (0, None, 1), (2, None, 0), (1, None, 1)])
async def test_an_answer_that_comes_in_no_way_is_wrong_and_so_are_more_than_rows_were_begun_again(
    preemptions, token, wrong
):
    """A token that no beginning again gives; the right one where no row gave up its blocks, two did, and only one."""
    server, case = Recomputing(), soaking.Case(0, tuple(range(16)), 30, 0.0, 11)
    alone = server.answer(case.prompt, 30, "alone")
    found = alone[:3] + server.answer([*case.prompt, *alone[:3]], 27, "load")
    if token is not None:
        found[3] = token
    judge = soaking.Judge(alone={case: Answer(0.0, token_ids=alone, finish="length")})
    for _ in range(2 if token is None else 1):
        judge.hear(case, Answer(0.0, token_ids=found, finish="length"))
    await judge.look(server, preemptions=preemptions, block_tokens=8)
    assert len(judge.wrong) == wrong


def begun_again(*places, tokens=30):
    """A server, a case alone on it, and what comes when it begins again behind so many drawn tokens, place by place."""
    server, case = Recomputing(), soaking.Case(0, tuple(range(16)), tokens, 0.0, 11)
    alone = found = server.answer(case.prompt, tokens, "alone")
    for drawn in places:
        found = found[:drawn] + server.answer([*case.prompt, *found[:drawn]], tokens - drawn, f"load {drawn}")
    judge = soaking.Judge(alone={case: Answer(0.0, token_ids=alone, finish="length")})
    return server, case, judge, found


@pytest.mark.parametrize("change", ["a later token", "the last token", "fewer", "more", "the end"])
async def test_what_follows_an_explained_token_is_held_to_the_last_one(change):
    """From the token on at which an answer parts, all of it has to be what the idle server says."""
    server, case, judge, found = begun_again(3)
    finish = "stop" if change == "the end" else "length"
    if change in ("a later token", "the last token"):
        found[9 if change == "a later token" else -1] = 0
    found = {"fewer": found[:-1], "more": [*found, 5]}.get(change, found)
    judge.hear(case, Answer(0.0, token_ids=found, finish=finish))
    assert await judge.look(server, preemptions=9, block_tokens=8) == {}
    assert len(judge.wrong) == 1


@pytest.mark.parametrize(("preemptions", "wrong"), [(2, 0), (1, 1)])
async def test_an_answer_may_be_begun_again_in_two_places_and_counts_twice_then(preemptions, wrong):
    server, case, judge, found = begun_again(3, 12)
    judge.hear(case, Answer(0.0, token_ids=found, finish="length"))
    (way,) = (await judge.look(server, preemptions=preemptions, block_tokens=8)).values()
    assert way == ", then ".join(f"begun again behind {drawn} drawn tokens, with 0 tokens kept" for drawn in (3, 12))
    assert len(judge.wrong) == wrong


async def test_of_two_places_the_one_that_explains_more_is_taken():
    """Two earlier places say the same for six tokens; taken, they would count as one beginning more."""
    server, case, judge, found = begun_again(3)
    recomputed = server.answer

    def answer(prompt, max_tokens, salt=""):
        drawn = len(prompt) - len(case.prompt)
        misleading = [*found[drawn:9], *[0] * 30]
        return misleading[:max_tokens] if drawn in (1, 2) else recomputed(prompt, max_tokens, salt)

    server.answer = answer
    judge.hear(case, Answer(0.0, token_ids=found, finish="length"))
    assert list((await judge.look(server, preemptions=1, block_tokens=8)).values()) == [
        "begun again behind 3 drawn tokens, with 0 tokens kept"
    ]
    assert judge.wrong == []


async def test_an_answer_whose_client_left_is_explained_as_far_as_it_came():
    server, case, judge, found = begun_again(3)
    judge.hear(case, Answer(0.0, token_ids=found[:9], is_cancelled=True))
    judge.hear(case, Answer(0.0, token_ids=[*found[:8], 0], is_cancelled=True))
    assert len(await judge.look(server, preemptions=2, block_tokens=8)) == 1
    assert len(judge.wrong) == 1


async def test_looking_ends_after_its_time_and_what_is_not_explained_by_then_is_wrong():
    server, case, judge, found = begun_again(3)
    judge.hear(case, Answer(0.0, token_ids=found, finish="length"))
    assert await judge.look(server, preemptions=1, block_tokens=8, seconds=0.0) == {}
    (wrong,) = judge.wrong
    assert wrong.endswith("not looked into for longer than 0 s")


async def test_a_form_goes_on_where_it_stood():
    case = soaking.Case(0, (5, 6), 4, 0.0, 11, has_form=True)
    assert case.ask.body["structured_outputs"] == {"regex": "[a-z]{5,40}"}
    assert case.behind([9, 8], 7, 2).body["structured_outputs"] == {"regex": "[a-z]{0,33}"}
    assert case.behind([9], 2, 3).body | {"seed": 0} == case.ask.body | {
        "prompt": [5, 6, 9], "max_tokens": 3, "structured_outputs": {"regex": "[a-z]{3,38}"}, "seed": 0,
    }  # fmt: skip


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
    asyncio.run(judge.look(None, preemptions=0, block_tokens=8))  # nothing is asked where no row was begun again
    assert len(judge.wrong) == 3
