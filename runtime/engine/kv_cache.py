"""Which pages a row's tokens lie in, and which blocks it can take over from earlier rows.

A block is `page_tokens` consecutive tokens, and takes one page in every group. Full blocks are published under a
chained hash of all tokens up to their end, prompt and generated alike, and stay when their row leaves. A row may start
behind k cached blocks when all of them are there in groups without a window, and in groups with one those that the
next token still sees.

Rows give back pages that their window has passed. These stay cached too, but most of them are the next to give way, or
a long prompt would push out all others' windows: only a prompt that parts from this one right behind a page's window
could use it. Where that is likely (at the end of the prompt, and where the row itself parted from what was known) they
stay on.

Refuses to choose who runs: it says whether pages can be had.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from runtime.engine.backend import Tables
from runtime.engine.pages import PagePool
from runtime.engine.sequence import Sequence

FORMAT = "counterpoint block 1"
"""Part of every hash; to be changed with the layout of what is hashed."""


def root_hash(model: str, tokenizer: str, salt: str) -> bytes:
    """Parent of every first block of a model, a tokenizer (with its template) and a tenant."""
    return hashlib.sha256(json.dumps([FORMAT, model, tokenizer, salt]).encode()).digest()


@dataclass(frozen=True)
class Match:
    """What the cache has of a prompt: `blocks` can be taken over, `known` are there in groups without a window."""

    blocks: int = 0
    known: int = 0


class KvCache:
    """Page tables of rows over one pool a group. `tables[group]` is [rows, blocks] of page ids, -1 where none is."""

    def __init__(
        self, rows: int, page_tokens: int, windows: tuple[int | None, ...], pages: tuple[int, ...], max_tokens: int
    ) -> None:
        """`windows` and `pages` have one entry a group; `max_tokens` bounds a row."""
        self.page_tokens, self.windows = page_tokens, windows
        self.pools = tuple(PagePool(count) for count in pages)
        blocks = -(-max_tokens // page_tokens) + 1
        self.tables = tuple(np.full((rows, blocks), -1, dtype=np.int32) for _ in windows)
        self._views: list[Tables] = [tuple(table[row] for table in self.tables) for row in range(rows)]
        self._begin = [[0] * len(windows) for _ in range(rows)]  # first block held, by row and group
        self._end = [0] * rows  # block after the last one held, the same in all groups
        self._published = [0] * rows
        self._partings: list[tuple[int, ...]] = [()] * rows  # blocks before the places where others may part from it
        self._changed = [True] * rows

    def views(self, slot: int) -> tuple[Tables, bool]:
        """The row's tables, and whether they changed since they were last asked for."""
        changed, self._changed[slot] = self._changed[slot], False
        return self._views[slot], changed

    def first_block(self, group: int, position: int) -> int:
        """First block that the token at `position` still sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position + 1 - window) // self.page_tokens

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.page_tokens)

    def match(self, sequence: Sequence) -> Match:
        """How many leading blocks can be taken over, leaving at least one token to compute."""
        best, known, runs = 0, 0, [0] * len(self.pools)
        for count in range(1, (len(sequence.tokens) - 1) // self.page_tokens + 1):
            block = sequence.block(count - 1)
            for group, pool in enumerate(self.pools):
                runs[group] = runs[group] + 1 if pool.find(block) is not None else 0
                if not runs[group] and self.windows[group] is None:
                    return Match(best, known)
            known = count
            needed = (count - self.first_block(group, count * self.page_tokens) for group in range(len(runs)))
            if all(run >= need for run, need in zip(runs, needed, strict=True)):
                best = count
        return Match(best, known)

    def attach(self, slot: int, sequence: Sequence, match: Match) -> None:
        """Let a row that holds nothing start behind the blocks that `match` found."""
        count = match.blocks
        self._partings[slot] = (match.known, len(sequence.request.prompt) // self.page_tokens)
        for group, pool in enumerate(self.pools):
            begin = self.first_block(group, count * self.page_tokens)
            self._begin[slot][group] = begin
            for idx in range(begin, count):
                page = pool.find(sequence.block(idx))
                assert page is not None
                pool.share(page)
                self.tables[group][slot, idx] = page
        self._end[slot] = self._published[slot] = count
        self._changed[slot] = True

    def covers(self, slot: int, end: int) -> bool:
        """Whether positions before `end` have pages."""
        return end <= self._end[slot] * self.page_tokens

    def grow(self, slot: int, end: int) -> bool:
        """Take pages up to position `end`, in all groups or, if one lacks them, in none."""
        more = self.blocks(end) - self._end[slot]
        if more <= 0:
            return True
        if any(pool.available < more for pool in self.pools):
            return False
        for idx in range(self._end[slot], self._end[slot] + more):
            for table, pool in zip(self.tables, self.pools, strict=True):
                table[slot, idx] = pool.take()
        self._end[slot] += more
        self._changed[slot] = True
        return True

    def room(self, slot: int) -> int:
        """The position up to which `grow` would succeed."""
        return (self._end[slot] + min(pool.available for pool in self.pools)) * self.page_tokens

    def held(self, slot: int, group: int) -> int:
        """Pages of one group that the row holds."""
        return self._end[slot] - self._begin[slot][group]

    def publish(self, slot: int, sequence: Sequence) -> None:
        """Offer the row's newly filled blocks to later requests."""
        for idx in range(self._published[slot], sequence.computed // self.page_tokens):
            block = sequence.block(idx)
            for group, pool in enumerate(self.pools):
                if idx >= self._begin[slot][group]:
                    pool.publish(int(self.tables[group][slot, idx]), block)
            self._published[slot] = idx + 1

    def slide(self, slot: int, position: int) -> None:
        """Give back pages that tokens from `position` on don't see."""
        for group, pool in enumerate(self.pools):
            begin, keep = self._begin[slot][group], self.first_block(group, position)
            if begin < keep:
                table = self.tables[group]
                for idx in range(begin, keep):
                    pool.release(int(table[slot, idx]), is_wanted=self._is_near_parting(slot, group, idx))
                    table[slot, idx] = -1
                self._begin[slot][group] = keep

    def _is_near_parting(self, slot: int, group: int, block: int) -> bool:
        """Whether a row that parts from this one where that is likely, or a block earlier, would see the block."""
        return any(
            self.first_block(group, max(0, parting - 1) * self.page_tokens) <= block < parting
            for parting in self._partings[slot]
        )

    def leave(self, slot: int) -> None:
        """Give back all pages of a row, the last block first, so that it gives way first."""
        for group, pool in enumerate(self.pools):
            table, begin = self.tables[group], self._begin[slot][group]
            for idx in range(self._end[slot] - 1, begin - 1, -1):
                pool.release(int(table[slot, idx]))
                table[slot, idx] = -1
            self._begin[slot][group] = 0
        self._end[slot] = self._published[slot] = 0
        self._changed[slot] = True

    def forget(self, slot: int, sequence: Sequence) -> None:
        """Take the blocks of a row out of the cache: its own pages', and those its window has passed."""
        for idx in range(self._end[slot]):
            for group, pool in enumerate(self.pools):
                held = int(self.tables[group][slot, idx])
                page = held if held >= 0 else pool.find(sequence.block(idx))
                if page is not None:
                    pool.forget(page)

    def clear(self) -> None:
        """Forget every cached block; rows keep their pages."""
        for pool in self.pools:
            pool.clear()

    def check(self, running: dict[int, Sequence]) -> None:
        """Assert that pages are referenced exactly as often as the tables of `running` (by slot) name them."""
        for group, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            pool.check()
            named = np.bincount(table[table >= 0], minlength=pool.total)
            assert named.tolist() == [pool.references(page) for page in range(pool.total)], "references don't add up"
            for slot in range(len(table)):
                held = np.flatnonzero(table[slot] >= 0).tolist()
                assert held == list(range(self._begin[slot][group], self._end[slot])), "a row's pages have holes"
                assert slot in running or not held, "a row without a request holds pages"
        for slot, sequence in running.items():
            assert self.covers(slot, sequence.computed), "a computed token has no page"
