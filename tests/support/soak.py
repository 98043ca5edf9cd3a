"""Rows that join and leave a running chain at random; every row's tokens must be those that it has alone."""

from __future__ import annotations

import random
import time
from collections import Counter

from runtime.rows import Join
from runtime.sampling import GREEDY, SamplingParams


def chained(decoder):
    """A chain on a decoder."""
    from runtime.gpu.chain import Chain

    return Chain(decoder)


def alone(decoder, token: int, count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """Tokens of a row that runs by itself, launch by launch, in the last seat."""
    row = decoder.step.bucket.rows - 1
    for other in range(row):
        decoder.leave(other)
    decoder.join(row, token, 0, sampling)
    found = [tokens[row] for tokens in decoder.run(count)]
    decoder.leave(row)
    return found


SOAKED = (
    (7, GREEDY),
    (99, GREEDY),
    (40, SamplingParams(temperature=0.8, seed=5)),
    (141, SamplingParams(temperature=1.0, top_p=0.9, top_k=30, seed=6)),
)


class Soak:
    """Rows that join and leave at random; every row's tokens must be those that it has alone."""

    def __init__(self, decoder, longest: int) -> None:
        """Every row is seated."""
        self.decoder, self.longest, self.rng = decoder, longest, random.Random(1)
        self.rows = decoder.step.bucket.rows
        self.expected = [alone(decoder, token, longest, sampling) for token, sampling in SOAKED]
        self.chain = chained(decoder)
        self.asked: dict[int, tuple[int, int]] = {}
        self.found: dict[int, list[int]] = {}
        self.checked = 0
        self.active: Counter[int] = Counter()  # steps by the rows that were active in them
        self._step: tuple[int, int] = (0, 0)  # the present one, and its rows so far
        for row in range(self.rows):
            self.join(row)

    def join(self, row: int) -> None:
        kind, count = self.rng.randrange(len(SOAKED)), self.rng.randrange(1, self.longest)
        token, sampling = SOAKED[kind]
        ticket = self.chain.join(row, Join(token, 0, sampling, end_position=count))
        self.asked[ticket], self.found[ticket] = (kind, count), []

    def take(self, made) -> None:
        step, rows = self._step
        if rows and step != made.step:
            self.active[rows] += 1
        self._step = made.step, rows + 1 if step == made.step else 1
        tokens = self.found[made.ticket]
        tokens.append(made.token)
        if made.ended:
            kind, count = self.asked[made.ticket]
            assert tokens == self.expected[kind][:count], (made, kind)
            self.checked += 1
        if self.rng.random() < (0.7 if made.ended else 0.002):
            self.join(made.row)  # whoever sits there leaves
        if self.rng.random() < 0.002:
            self.join(self.rng.randrange(self.rows))

    def run(self, steps: int, seconds: float) -> int:
        """Steps made, at least `steps` unless the time is over."""
        first, until, made_steps = self.decoder.next_step, time.monotonic() + seconds, 0
        while made_steps < steps and time.monotonic() < until:
            for made in self.chain.tokens():
                self.take(made)
                if (made.step - first) % 2**32 > steps:
                    self.chain.halt()
            made_steps = (self.decoder.next_step - first) % 2**32
            for row in self.rng.sample(range(self.rows), self.rng.randrange(1, self.rows + 1)):
                self.join(row)
        return made_steps
