"""Steps that run on a card one after another without the host: rows join, leave and grow at their boundaries.

Owns who sits in a row, and the commands that wait for the row's last one to be taken. A chain ends when it is halted,
when no row is left, after a number of steps, or when the host has fallen behind by the ring of tokens; commands that it
did not take any more are carried out after it. Refuses text, requests and the choice of pages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.gpu.mailbox import Mailbox, Word, page_span
from runtime.rows import NO_END, Command, Drop, Extend, Join, Pages, row_state

MOST_STEPS = 2**31 - 16
"""Of one launch: differences of steps have a sign."""

_PAUSE_S = 20e-6


class Device(Protocol):
    """What a chain runs on: a `Decoder`, or what stands for one in tests."""

    mailbox: Mailbox

    @property
    def ring(self) -> npt.NDArray[np.uint64]:
        """Words [steps, rows]: step + 1, then `Word`."""
        ...

    def begin(self, steps: int) -> int:
        """Launch up to `steps` steps that read the mailbox; the number of the first. Its ring holds no such step."""
        ...

    def is_running(self) -> bool:
        """Whether the launch goes on."""
        ...

    def finish(self) -> int:
        """Wait for the launch; how many steps it made."""
        ...

    def carry_out(self, row: int, command: Command) -> None:
        """Change a row while nothing runs."""
        ...

    def seat(self, joins: Mapping[int, Join]) -> None:
        """Have exactly these rows while nothing runs."""
        ...


@dataclass(frozen=True)
class Made:
    """A row's token in a step, `NO_TOKEN` where nothing could be drawn. `ticket` is that of the join."""

    step: int
    row: int
    ticket: int
    token: int
    ended: bool


class Chain:
    """One chain at a time on one device. Rows keep their state from chain to chain."""

    def __init__(self, device: Device) -> None:
        """All seats are empty."""
        self._device = device
        rows = device.ring.shape[1]
        self._running = False
        self._tickets = 0
        self._seated: list[int | None] = [None] * rows
        self._posted: list[tuple[Command, int] | None] = [None] * rows
        self._unread: deque[Made] = deque()
        self._waiting: list[deque[tuple[Command, int]]] = [deque() for _ in range(rows)]

    @property
    def has_rows(self) -> bool:
        """Whether any row goes on, is about to join, or has tokens that nobody took."""
        asked = any(self._waiting) or any(self._posted) or bool(self._unread)
        return asked or any(seat is not None for seat in self._seated)

    def join(self, row: int, join: Join) -> int:
        """Seat somebody in `row` at the next boundary, whoever sat there; the ticket that comes with every token.

        ValueError as in `row_state`, or for pages that don't fit.
        """
        row_state(join)  # refuse here what can't be done there
        self._tickets += 1
        self._ask(row, join, self._tickets)
        return self._tickets

    def seat(self, joins: Mapping[int, Join]) -> dict[int, int]:
        """Have exactly these rows in the next chain, at the price of one; tickets by row. Only while none runs."""
        assert not self._running, "rows join a chain that runs one by one"
        self._device.seat(joins)
        self._seated = [None] * len(self._seated)
        for row in joins:
            self._tickets += 1
            self._seated[row] = self._tickets
        return {row: ticket for row, ticket in enumerate(self._seated) if ticket is not None}

    def take(self) -> list[Made]:
        """Tokens that were made and not yielded: those of a chain that was closed or has ended."""
        found = list(self._unread)
        self._unread.clear()
        return found

    def drop(self, row: int) -> None:
        """End `row` at the next boundary; one more step may give it a token."""
        self._ask(row, Drop(), 0)

    def extend(self, row: int, begin: int, pages: Pages, end_position: int = NO_END) -> None:
        """Give `row` pages from entry `begin` of its tables on, and a later end, at the next boundary."""
        self._ask(row, Extend(begin, pages, end_position), 0)

    def halt(self) -> None:
        """End the chain after the step that runs and at most one more; rows stay as they are."""
        self._device.mailbox.halt()

    def tokens(self, steps: int = MOST_STEPS) -> Iterator[Made]:
        """Run a chain of up to `steps` steps, yielding tokens as they are made; commands may be given meanwhile.

        KernelStoppedError when the launch leaves early. The chain is over when the iterator is; if the iterator is
        closed before, the chain is halted, and the next one begins with the tokens that were not taken.
        """
        device, mailbox = self._device, self._device.mailbox
        yield from self._take_unread()
        mailbox.clear()
        first = device.begin(steps)
        self._running = True
        read = 0
        try:
            while (words := self._await(first + read)) is not None:
                self._read(first + read, words)
                read += 1
                mailbox.read(read)
                self._post_waiting()
                yield from self._take_unread()
        finally:
            mailbox.halt()
            self._running = False
            self._settle(first, read, device.finish())

    def _take_unread(self) -> Iterator[Made]:
        while self._unread:
            yield self._unread.popleft()

    def _await(self, step: int) -> list[Word] | None:
        """Words of a step once all are there; None when the chain has ended before it."""
        ring = self._device.ring
        words = ring[step % len(ring)]
        while True:
            is_last_look = not self._device.is_running()
            if (words >> np.uint64(32) == _tag(step)).all():
                return [Word.read(int(word)) for word in words]
            if is_last_look:
                return None
            time.sleep(_PAUSE_S)

    def _read(self, step: int, words: list[Word]) -> None:
        for row, word in enumerate(words):
            ticket = self._seated[row]
            if word.ended:
                self._seated[row] = None
            if word.taken:
                posted = self._posted[row]
                assert posted is not None, f"row {row} took a command that was not posted"
                self._posted[row] = None
                self._seat(row, *posted)
            if word.token is not None and ticket is not None:
                self._unread.append(Made(step % 2**32, row, ticket, word.token, word.ended))

    def _settle(self, first: int, read: int, made: int) -> None:
        """After a launch: read the rest of its steps, and carry out what was not taken."""
        ring = self._device.ring
        for step in range(first + read, first + made):
            words = ring[step % len(ring)]
            assert (words >> np.uint64(32) == _tag(step)).all(), f"step {step} was not made"
            self._read(step, [Word.read(int(word)) for word in words])
        for row, waiting in enumerate(self._waiting):
            posted = self._posted[row]
            self._posted[row] = None
            for command, ticket in ((posted,) if posted else ()) + tuple(waiting):
                self._carry_out(row, command, ticket)
            waiting.clear()

    def _ask(self, row: int, command: Command, ticket: int) -> None:
        page_span(self._device.mailbox.pages, command)  # likewise
        if self._running:
            self._waiting[row].append((command, ticket))
            self._post_waiting()
        else:
            self._carry_out(row, command, ticket)

    def _post_waiting(self) -> None:
        for row, waiting in enumerate(self._waiting):
            if waiting and self._posted[row] is None:
                command, ticket = waiting.popleft()
                self._posted[row] = command, ticket
                self._device.mailbox.post(row, command)

    def _carry_out(self, row: int, command: Command, ticket: int) -> None:
        self._device.carry_out(row, command)
        self._seat(row, command, ticket)

    def _seat(self, row: int, command: Command, ticket: int) -> None:
        match command:
            case Join():
                self._seated[row] = ticket
            case Drop():
                self._seated[row] = None
            case Extend():
                pass


def _tag(step: int) -> np.uint64:
    """Upper half of the words that `step` leaves."""
    return np.uint64((step + 1) % 2**32)
