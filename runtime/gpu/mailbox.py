"""What host and kernel write for each other while a launch goes on, in pinned memory: commands in, tokens out.

Owns the order of writes: a command is whole before its count says that it is there, and stays until the kernel has said
that it was taken. Needs no card where it is not pinned, so that tests read it as the kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megakernel.abi import MAILBOX, TOKEN_ENDED, TOKEN_IDLE, TOKEN_MASK, TOKEN_NONE, TOKEN_TAKEN, Order
from runtime.rows import Command, Drop, Extend, Join, Pages, row_state
from runtime.sampling import NO_TOKEN


@dataclass(frozen=True)
class Word:
    """What one step made of a row: its token (None: it was not active), and what happened after it."""

    token: int | None
    ended: bool
    taken: bool

    @staticmethod
    def read(word: int) -> Word:
        """From the lower half of a word of the ring."""
        low = word & TOKEN_MASK
        token = None if low == TOKEN_IDLE else NO_TOKEN if low == TOKEN_NONE else low
        return Word(token, bool(word & TOKEN_ENDED), bool(word & TOKEN_TAKEN))


class Mailbox:
    """Commands of up to eight rows, and the page tables that they bring, [groups, rows, pages a row]."""

    def __init__(self, pages: npt.NDArray[np.uint32], *, pinned: bool) -> None:
        """Take a copy of `pages`; `pinned` needs a card."""
        self._bytes = torch.zeros(MAILBOX.dtype.itemsize, dtype=torch.uint8, pin_memory=pinned)
        self._page_bytes = torch.from_numpy(pages.view(np.int32).copy())
        if pinned:
            self._page_bytes = self._page_bytes.pin_memory()
        self.record = self._bytes.numpy().view(MAILBOX.dtype)
        self.pages: npt.NDArray[np.uint32] = self._page_bytes.numpy().view(np.uint32)

    @property
    def address(self) -> int:
        """Of the mailbox."""
        return self._bytes.data_ptr()

    @property
    def pages_address(self) -> int:
        """Of its page tables."""
        return self._page_bytes.data_ptr()

    def clear(self) -> None:
        """Nothing is posted, read or halted: a launch begins."""
        self._bytes.zero_()

    def halt(self) -> None:
        """Ask for the end of the launch."""
        self.record["halt"] = 1

    def read(self, steps: int) -> None:
        """Say how many of the launch's steps were read."""
        self.record["read"] = steps

    def post(self, row: int, command: Command) -> None:
        """Leave a command for a row whose last one was taken."""
        slot = self.record["commands"][0, row]
        begin, end = put_pages(self.pages, row, command)
        slot["pages_begin"], slot["pages_end"] = begin, end
        match command:
            case Join():
                slot["order"], slot["token"] = Order.JOIN, command.token
                slot["state"] = row_state(command)[0]
            case Drop():
                slot["order"] = Order.DROP
            case Extend():
                slot["order"] = Order.EXTEND
                slot["state"]["end_position"] = command.end_position
        self.record["posted"][0, row] += 1


def page_span(tables: npt.NDArray[np.uint32], command: Command) -> tuple[int, int]:
    """Entries of a row's page tables that a command writes, in tables [groups, rows, pages a row].

    ValueError for more pages than a row has entries for, or groups that differ in number or length.
    """
    pages: Pages = () if isinstance(command, Drop) else command.pages or ()
    if not pages:
        return 0, 0
    begin = command.begin if isinstance(command, Extend) else 0
    ends = {begin + len(ids) for ids in pages}
    groups, _, most = tables.shape
    if len(pages) != groups or len(ends) != 1 or max(ends) > most:
        raise ValueError(
            f"pages up to entries {sorted(ends)} in {len(pages)} groups, needed as many in each of {groups}, "
            f"at most {most}"
        )
    return begin, max(ends)


def put_pages(tables: npt.NDArray[np.uint32], row: int, command: Command) -> tuple[int, int]:
    """Write a command's page ids into tables [groups, rows, pages a row]; `page_span` of it."""
    begin, end = page_span(tables, command)
    if end > begin and not isinstance(command, Drop):
        for table, ids in zip(tables, command.pages or (), strict=True):
            # a chunk is loaded whole, what a window has passed too: its entries need an id that exists
            table[row, begin:end] = np.maximum(ids, 0)
    return begin, end
