"""Pages are counted right, give way in order of use, and blocks have the same names everywhere."""

from __future__ import annotations

import pytest
from support.engines import VOCAB, mixed_reply, request, run, scripted, with_settings

from runtime.engine.kv_cache import KvCache, Match, root_hash
from runtime.engine.pages import PagePool
from runtime.engine.sequence import Sequence


def sequence(tokens: list[int], root: bytes = b"root", computed: int = 0) -> Sequence:
    made = Sequence(request("x", tokens), 0, root, 4, VOCAB, 0.0)
    made.computed = computed
    return made


def test_idle_pages_give_way_least_recently_used_first_and_only_when_none_is_free() -> None:
    pool = PagePool(4)
    pages = {name: pool.take() for name in (b"a", b"b", b"c")}
    for name, page in pages.items():
        pool.publish(page, name)
    for name in (b"b", b"a", b"c"):
        pool.release(pages[name])
    assert (pool.free, pool.idle, pool.available) == (1, 3, 4)
    pool.take()
    assert pool.find(b"b") == pages[b"b"]
    assert pool.take() == pages[b"b"]
    assert pool.find(b"b") is None
    pool.share(pages[b"a"])  # in use again, so that the next in turn is c
    assert pool.take() == pages[b"c"]
    with pytest.raises(IndexError, match="all 4 pages"):
        pool.take()
    pool.check()


def test_a_page_is_free_only_when_its_last_reference_is_gone() -> None:
    pool = PagePool(2)
    page = pool.take()
    pool.publish(page, b"a")
    pool.share(page)
    pool.release(page)
    assert (pool.references(page), pool.available) == (1, 1)
    pool.forget(page)
    assert (pool.find(b"a"), pool.available) == (None, 1)
    pool.release(page)
    assert (pool.free, pool.idle) == (2, 0)
    pool.check()


def test_a_block_that_two_rows_computed_is_counted_once() -> None:
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    pool.release(second)
    pool.release(first)
    assert (pool.free, pool.idle) == (1, 1)
    pool.check()


def test_the_checks_notice_a_page_that_is_lost_or_used_twice() -> None:
    lost, twice = PagePool(2), PagePool(2)
    lost._free.pop()
    twice._references[1] = 1
    for pool in (lost, twice):
        with pytest.raises(AssertionError):
            pool.check()
    cache = KvCache(2, 4, (None,), (4,), 16)
    cache.grow(0, 8)
    cache.tables[0][1, 0] = cache.tables[0][0, 0]
    with pytest.raises(AssertionError, match="add up"):
        cache.check({0: sequence([5] * 8)})


def filled(cache: KvCache, tokens: list[int]) -> None:
    """A row computes `tokens` one by one and leaves."""
    row = sequence(tokens)
    for position in range(len(tokens)):
        assert cache.grow(0, position + 1)
        row.computed = position + 1
        cache.publish(0, row)
        cache.slide(0, row.computed)
    cache.leave(0)


def test_a_hit_needs_all_full_blocks_and_those_that_the_window_still_sees() -> None:
    cache = KvCache(1, 4, (None, 6), (16, 16), 64)
    tokens = list(range(10, 42))
    filled(cache, tokens)
    assert cache.match(sequence([*tokens, 7])) == Match(8, 8)
    assert cache.match(sequence(tokens)) == Match(7, 7)  # one token is left to compute
    assert cache.match(sequence(tokens[:5])) == Match(1, 1)
    assert cache.match(sequence([*tokens[:20], 9, 9, 9, 9, 9])) == Match(5, 5)
    # a window of 6 before position 32 sees positions 27 to 31: blocks 6 and 7
    for block, left in [(5, 8), (6, 5), (0, 5)]:
        page = cache.pools[1].find(sequence(tokens).block(block))
        assert page is not None
        cache.pools[1].forget(page)
        assert cache.match(sequence([*tokens, 7])) == Match(left, 8)
    page = cache.pools[0].find(sequence(tokens).block(2))
    assert page is not None
    cache.pools[0].forget(page)
    # before position 8 the window sees position 3 of block 0, which is gone; before position 4, too
    assert cache.match(sequence([*tokens, 7])) == Match(0, 2)


def test_a_passing_long_prompt_leaves_other_windows_in_the_cache() -> None:
    core = scripted(pages=(64, 14), prefill_tokens=(8, 8))  # a window takes three pages
    turns = {name: [idx + 4] * 40 for idx, name in enumerate("ab")}
    for name, text in turns.items():
        run(core, request(name, text, 2))
    run(core, request("long", range(4, 180), 2))  # its window passes 22 pages
    for name, text in turns.items():
        assert run(core, request(name, [*text, 9, 9], 2))[name].cached_tokens == 40


def test_where_a_prompt_parts_from_known_ones_the_third_to_come_finds_its_window() -> None:
    core, shared = scripted(pages=(400, 14), prefill_tokens=(8, 8), max_context_tokens=512), list(range(4, 84))

    def cached(tail: int) -> int:
        text = [*shared, *[tail] * 80]
        answer = run(core, request("a", text, 3))["a"]
        assert answer.tokens == mixed_reply(text, 3)
        run(core, request("passing", [tail + 50] * 300, 1))
        return answer.cached_tokens

    assert (cached(100), cached(101) < 80) == (0, True)  # the first could not know that 80 tokens would be shared
    assert [cached(tail) for tail in (102, 103, 104)] == [80, 80, 80]


def test_of_passed_windows_those_at_the_prompt_s_end_give_way_last() -> None:
    cache, row = KvCache(1, 4, (None, 6), (16, 16), 64), sequence(list(range(10, 30)))
    cache.attach(0, row, Match())
    row.tokens += range(30, 70)  # generated
    for position in range(60):
        assert cache.grow(0, position + 1)
        row.computed = position + 1
        cache.publish(0, row)
        cache.slide(0, row.computed)
    cache.leave(0)
    pool = cache.pools[1]
    while pool.available > 5:
        pool.take()
    # before position 16 or 20, a block apart, the window sees blocks 2 to 4; before the end it sees 13 and 14
    assert [idx for idx in range(15) if pool.find(row.block(idx)) is not None] == [2, 3, 4, 13, 14]


def test_a_row_holds_only_the_pages_that_its_window_sees() -> None:
    cache = KvCache(1, 4, (None, 6), (16, 16), 64)
    row = sequence(list(range(10, 42)))
    for position in range(32):
        assert cache.grow(0, position + 1)
        row.computed = position + 1
        cache.slide(0, row.computed)
        cache.check({0: row})
        assert cache.held(0, 0) == position // 4 + 1
        # the next token sees five earlier positions, which touch two blocks or three
        assert cache.held(0, 1) <= 3


def test_growing_takes_pages_in_every_group_or_in_none() -> None:
    cache = KvCache(2, 4, (None, 6), (8, 3), 64)
    assert cache.grow(0, 8)
    assert not cache.grow(1, 8)
    assert (cache.held(1, 0), cache.room(1)) == (0, 4)
    assert cache.grow(1, 4)
    cache.check({0: sequence([5] * 8), 1: sequence([5] * 4)})


def test_a_table_says_when_it_changed() -> None:
    cache = KvCache(1, 4, (None,), (8,), 64)
    assert [cache.views(0)[1] for _ in range(2)] == [True, False]
    cache.grow(0, 4)
    assert cache.views(0)[1]
    cache.grow(0, 4)
    assert not cache.views(0)[1]
    cache.leave(0)
    assert cache.views(0)[1]


def test_block_hashes_are_the_same_in_every_process() -> None:
    root = root_hash("model", "tokenizer", "")
    made = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], root)
    assert made.block(1).hex() == "f32e5f80a1390f7a7293df1e9e9f80ceb147ccc1a53c7c3b84c7aa7b6b4d0869"
    assert root != root_hash("model", "tokenizer", "tenant") != root_hash("other", "tokenizer", "tenant")
    assert root_hash("a", "bc", "") != root_hash("ab", "c", "")


def test_blocks_of_equal_tokens_behind_different_ones_are_different() -> None:
    core = scripted()
    first, second, third = [5] * 8, [6] * 8, [7] * 8
    run(core, request("a", [*first, *second, *third]))
    skipping = [*first, *third, *second, 9]
    answer = run(core, request("b", skipping, 5))["b"]
    assert (answer.cached_tokens, answer.tokens) == (8, mixed_reply(skipping, 5))


def test_tenants_with_different_salts_share_nothing() -> None:
    core, text = scripted(), [5] * 30
    run(core, request("a", text, salt="one"))
    assert run(core, request("b", text, salt="two"))["b"].cached_tokens == 0
    assert run(core, request("c", text, salt="one"))["c"].cached_tokens == 24


def test_generated_blocks_are_cached_like_those_of_prompts_and_can_be_switched_off_or_reset() -> None:
    text = list(range(10, 20))
    core = scripted()
    reply = run(core, request("a", text, 30))["a"].tokens
    longer = [*text, *reply, 9]
    assert run(core, request("b", longer, 3))["b"].cached_tokens == 32  # the last of 40 tokens has no KV yet
    core.reset_prefix_cache()
    assert core.stats().blocks_cached == 0
    assert run(core, request("c", longer, 3))["c"].cached_tokens == 0
    off = scripted(settings=with_settings(prefix_cache=False))
    for name in "ab":
        assert run(off, request(name, longer, 3))[name].cached_tokens == 0
    assert off.stats().blocks_cached == 0
