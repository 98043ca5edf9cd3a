"""The pages of one group: who is free, who is referenced, and which blocks idle pages still hold.

A page is free (holds nothing), referenced by one or more rows, or idle: no row uses it, but it holds a block that a
later request may want. Idle pages give way, least recently used first. Refuses to know rows, tokens and devices.
"""

from __future__ import annotations

from collections import OrderedDict


class PagePool:
    """Reference counts of `total` pages, and the blocks (by hash) that some of them hold."""

    def __init__(self, total: int) -> None:
        """All pages are free."""
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._block_of: list[bytes | None] = [None] * total
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that hold a block and can be taken."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `take` can still give."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A page of one's own, its old block forgotten; IndexError when none is available."""
        page = self._free.pop() if self._free else self._evict()
        self._references[page] = 1
        return page

    def _evict(self) -> int:
        if not self._idle:
            raise IndexError(f"all {self.total} pages are in use")
        page, _ = self._idle.popitem(last=False)
        self.forget(page)
        return page

    def find(self, block: bytes) -> int | None:
        """The page that holds a block."""
        return self._page_of.get(block)

    def share(self, page: int) -> None:
        """One more reference to a page that holds a block."""
        if self._references[page] == 0:
            del self._idle[page]
        self._references[page] += 1

    def release(self, page: int, *, is_wanted: bool = True) -> None:
        """One reference less; the last one leaves the page idle if it holds a block, else free.

        An idle page that is not likely to be wanted again is the next to give way.
        """
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._block_of[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None
                self._idle.move_to_end(page, last=is_wanted)

    def publish(self, page: int, block: bytes) -> None:
        """Say which block a referenced page holds; where another page already holds it, that one stays the block's."""
        if block not in self._page_of and self._block_of[page] is None:
            self._page_of[block] = page
            self._block_of[page] = block

    def forget(self, page: int) -> None:
        """Take the page's block out of the cache; whoever uses the page keeps it."""
        block = self._block_of[page]
        if block is not None:
            del self._page_of[block]
            self._block_of[page] = None
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def clear(self) -> None:
        """Forget every block."""
        for page in list(self._page_of.values()):
            self.forget(page)

    def references(self, page: int) -> int:
        """How many rows use the page."""
        return self._references[page]

    def check(self) -> None:
        """Assert that every page is free, idle or referenced, exactly one of them, and that blocks and pages agree."""
        free, idle = set(self._free), set(self._idle)
        used = {page for page, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert free | idle | used == set(range(self.total)), "a page is lost"
        assert len(free) + len(idle) + len(used) == self.total, "a page is in two states"
        assert min(self._references, default=0) >= 0, "a page was released too often"
        assert {block: page for page, block in enumerate(self._block_of) if block is not None} == self._page_of
        assert all(self._block_of[page] is not None for page in idle), "an idle page holds nothing"
        assert all(self._block_of[page] is None for page in free), "a free page holds a block"
