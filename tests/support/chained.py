"""A device for chains that is an interpreted table: it makes a step whenever it is asked whether it runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megakernel.abi import MAILBOX, TOKEN_ENDED, TOKEN_IDLE, TOKEN_NONE, TOKEN_TAKEN, Order
from runtime.gpu.mailbox import Mailbox, put_pages
from runtime.reference import Interpreter
from runtime.rows import Command, Drop, Extend, Join
from runtime.sampling import NO_TOKEN, SamplingParams


class InterpretedDevice:
    """See `Device`: reads the mailbox's bytes and writes the ring's words as csrc says, and nothing else."""

    def __init__(self, machine: Interpreter, *, ring_steps: int = 16) -> None:
        """A small ring, so that a host falls behind soon."""
        self.machine, self.memory = machine, machine.memory
        rows = machine.memory.step.bucket.rows
        self.ring = np.zeros((ring_steps, rows), np.uint64)
        pages = np.stack([table.numpy() for table in machine.memory.pages]).astype("<u4")
        self.mailbox = Mailbox(pages, pinned=False)
        self.steps_left = 0

    def begin(self, steps: int) -> int:
        self.first = self.machine.step_idx
        self.ring[:] = np.uint64(self.first % 2**32 << 32)
        self.taken = [0] * self.ring.shape[1]
        self.made, self.steps_left, self.has_ended = 0, steps, False
        return self.first

    def is_running(self) -> bool:
        if self.steps_left == 0:
            return False
        self._step()
        return self.steps_left > 0

    def finish(self) -> int:
        while self.is_running():
            pass
        return self.made

    def carry_out(self, row: int, command: Command) -> None:
        put_pages(self.mailbox.pages, row, command)
        self.memory.carry_out(row, command)

    def seat(self, joins: Mapping[int, Join]) -> None:
        for row in range(self.ring.shape[1]):
            self.carry_out(row, joins.get(row, Drop()))

    def _step(self) -> None:
        memory, mail = self.memory, self.mailbox.record[0]
        active = list(memory.active)
        posted = [row for row, taken in enumerate(self.taken) if mail["posted"][row] != taken]
        halts = mail["halt"] or self.made + 1 - int(mail["read"]) + 4 >= len(self.ring) or not (any(active) or posted)
        for row in posted:
            memory.mail[row] = read_command(mail, self.mailbox.pages, row)
            self.taken[row] = int(mail["posted"][row])
        words = self._words(active, posted)
        step = self.machine.step_idx - 1
        self.ring[step % len(self.ring)] = [np.uint64((step + 1) % 2**32 << 32 | word) for word in words]
        self.made += 1
        self.steps_left -= 1
        if halts and not self.has_ended:
            self.has_ended, self.steps_left = True, min(self.steps_left, 1)

    def _words(self, active: list[bool], posted: list[int]) -> list[int]:
        """One step of the machine; the words it leaves."""
        memory = self.memory
        drawn: dict[int, tuple[int, bool]] = {}
        carry_out = memory.carry_out

        def record(row: int, command: Command) -> None:
            if not isinstance(command, Extend):  # what was drawn is overwritten by a join
                drawn[row] = memory.tokens[row], memory.active[row]
            carry_out(row, command)

        memory.carry_out = record  # type: ignore[method-assign]
        try:
            self.machine.step()
        finally:
            memory.carry_out = carry_out  # type: ignore[method-assign]
        words: list[int] = []
        for row in range(len(active)):
            token, goes_on = drawn.get(row, (memory.tokens[row], memory.active[row]))
            word = TOKEN_IDLE
            if active[row]:
                word = TOKEN_NONE if token == NO_TOKEN else token
                word |= 0 if goes_on else TOKEN_ENDED
            words.append(word | (TOKEN_TAKEN if row in posted else 0))
        return words


def read_command(mail: np.void, pages: np.ndarray, row: int) -> Command:
    """The command that a mailbox holds for a row, from its bytes."""
    assert mail.dtype == MAILBOX.dtype
    slot = mail["commands"][row]
    begin, end = int(slot["pages_begin"]), int(slot["pages_end"])
    new = [table[row, begin:end].astype(np.int64) for table in pages]
    state = slot["state"]
    match Order(int(slot["order"])):
        case Order.JOIN:
            assert begin == 0
            sampling = SamplingParams(
                temperature=float(state["temperature"]), top_p=float(state["top_p"]), min_p=float(state["min_p"]),
                top_k=int(state["top_k"]), seed=int(state["seed"]),
            )  # fmt: skip
            stops = tuple(int(stop) for stop in state["stops"][: int(state["num_stops"])])
            return Join(
                int(slot["token"]), int(state["position"]), sampling, int(state["end_position"]), stops, new or None
            )
        case Order.DROP:
            return Drop()
        case Order.EXTEND:
            return Extend(begin, new, int(state["end_position"]))
        case Order.NONE:
            raise AssertionError("a command without an order was posted")
