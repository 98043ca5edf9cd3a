"""Decodes rows ahead of the engine: a launch of many steps goes on while what it has made is handed over.

Owns which launch runs, over which bucket's table, and the tokens that nobody has fetched yet. A launch makes no more
steps than its rows have pages for, so that nothing need be said to it on its way; rows end in it by themselves, and
whoever leaves is dropped at a boundary. Rows that come have been prefilled, which took the whole card: they join by
the next launch. Between launches every row's state is the host's, so that any bucket with seats enough may run.

Refuses to choose: who decodes, and where KV lies, is the engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megakernel.abi import MAX_STOPS
from runtime.engine.backend import Result, Row, Want
from runtime.gpu.chain import Chain, Device, Made
from runtime.rows import Join
from runtime.sampling import GREEDY


class Bucket(Device, Protocol):
    """A device of so many rows, with its logits."""

    def logits(self, row: int) -> npt.NDArray[np.floating]:
        """Logits [vocab] that the last step left of a row."""
        ...


@dataclass
class _Seat:
    """A row as the engine knows it, which goes on with `token` at `position`, and the tokens beyond."""

    row: Row
    token: int
    position: int
    ahead: list[int] = field(default_factory=list[int])
    is_over: bool = False

    def is_of(self, row: Row) -> bool:
        """Whether the engine means to go on from here, in the same stay."""
        at = (row.stay, row.token, row.position, row.end_position)
        mine = (self.row.stay, self.token, self.position, self.row.end_position)
        return row.want is Want.TOKEN and at == mine and bool(self.ahead or not self.is_over)

    def join(self, row: Row, entries: int) -> Join:
        """What seats the row behind all that was made of it."""
        token = self.ahead[-1] if self.ahead else self.token
        sampling = row.sampling if row.want is Want.TOKEN else GREEDY
        pages = [table[:entries] for table in row.tables]
        position, stops = self.position + len(self.ahead), row.stops[:MAX_STOPS]  # the host sees to the others
        return Join(token, position, sampling, row.end_position, stops, pages)

    def hand_over(self) -> tuple[int, ...]:
        """The tokens beyond; the row goes on behind them."""
        found, self.ahead = tuple(self.ahead), []
        self.token, self.position = found[-1], self.position + len(found)
        return found


@dataclass
class _Launch:
    """One that goes on: its chain, what it makes, and the slots of its tickets."""

    chain: Chain
    bucket: Bucket
    made: Iterator[Made]
    row_of: dict[int, int]  # by slot
    slot_of: dict[int, int]  # by ticket


class Ahead:
    """Rows by slot, decoded over `buckets` that share their weights and pages."""

    def __init__(self, buckets: Collection[Bucket]) -> None:
        """Nobody else may seat rows in them."""
        self._chains = [(Chain(bucket), bucket) for bucket in sorted(buckets, key=_rows)]
        self._seats: dict[int, _Seat] = {}
        self._launch: _Launch | None = None

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        """What follows each row: one token, and more where they are there already.

        Pages cover `steps` more positions of every row; 1 says that the host has work before the next step, so that
        nothing runs any more when this returns. KernelStoppedError when a launch leaves early.
        """
        self._let_go([slot for slot in self._seats if all(row.slot != slot for row in rows)])
        coming = [row for row in rows if row.slot not in self._seats or not self._seats[row.slot].is_of(row)]
        if coming:
            self.land()
            self._seats |= {row.slot: _Seat(row, row.token, row.position) for row in coming}
        launch = self._launch
        while lacking := [row for row in rows if not self._seats[row.slot].ahead]:
            launch = self._launch or self._begin(rows, lacking, steps)
            self._read(launch, lacking)
        if steps == 1:
            self.land()
        results: list[Result] = []
        for row in rows:
            if row.want is Want.LOGITS:
                assert launch is not None, "a row that wants logits has nothing ahead"
                results.append(Result(logits=launch.bucket.logits(launch.row_of[row.slot])))
                del self._seats[row.slot]  # the host draws: its next token is not known here
            else:
                results.append(Result(tokens=self._seats[row.slot].hand_over()))
        return tuple(results)

    def forget(self, slots: Collection[int]) -> None:
        """Whoever sat there, another begins anew; only while nothing runs."""
        assert self._launch is None, "a launch may still write to the pages of those who leave"
        for slot in slots:
            self._seats.pop(slot, None)

    def land(self) -> None:
        """End what runs, within a step or two; what it made is kept."""
        launch, self._launch = self._launch, None
        if launch is not None:
            launch.chain.halt()
            for made in launch.made:
                self._take(launch, made)
            for made in launch.chain.take():
                self._take(launch, made)

    def _begin(self, rows: Sequence[Row], lacking: Sequence[Row], steps: int) -> _Launch:
        """Launch as many steps as there are pages for; only one, for those who lack it, where the host must look."""
        most = max(len(self._seats[row.slot].ahead) for row in rows)
        seated = [row for row in rows if not self._seats[row.slot].is_over]
        if steps <= most or steps == 1:
            seated, steps, most = list(lacking), 1, 0
        chain, bucket = next(each for each in self._chains if _rows(each[1]) >= len(seated))
        entries = bucket.mailbox.pages.shape[2]
        joins = {idx: self._seats[row.slot].join(row, entries) for idx, row in enumerate(seated)}
        tickets = chain.seat(joins)
        self._launch = launch = _Launch(
            chain,
            bucket,
            chain.tokens(steps - most),
            {row.slot: idx for idx, row in enumerate(seated)},
            {tickets[idx]: row.slot for idx, row in enumerate(seated)},
        )
        return launch

    def _read(self, launch: _Launch, lacking: Sequence[Row]) -> None:
        """Wait until everybody has a token, or the launch is over."""
        while any(not self._seats[row.slot].ahead for row in lacking):
            made = next(launch.made, None)
            if made is None:
                self.land()
                return
            self._take(launch, made)

    def _let_go(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._seats[slot]
            launch = self._launch
            if launch is not None and slot in launch.row_of:
                launch.chain.drop(launch.row_of.pop(slot))
                launch.slot_of = {ticket: at for ticket, at in launch.slot_of.items() if at != slot}

    def _take(self, launch: _Launch, made: Made) -> None:
        slot = launch.slot_of.get(made.ticket)
        if slot is not None:  # what is made of a row that was let go is nobody's
            seat = self._seats[slot]
            seat.ahead.append(made.token)
            seat.is_over = made.ended


def _rows(bucket: Bucket) -> int:
    return bucket.ring.shape[1]
