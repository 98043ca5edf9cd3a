"""What a soak asks again and again, and whether what came is what a request gets that runs alone.

A case is fixed to the last token: greedy or with a seed. `Judge` holds the answers of runs alone. Where a server
computes keys and values again in other batches, sums may differ in their last bits, and with them the choice between
two tokens that are as good as equal: with a `near_tie`, a first difference passes where the two tokens' scores, log
probability over temperature and the noise of the seed, are no further apart. What follows it is another text.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.bench.client import Answer, Client
from runtime.bench.sessions import TEXT, Ask
from runtime.sampling import uniform_noise

FORM = "[a-z]{5,40}"
_SHORT, _LONG = 0.6, 0.15
_SHARED, _PREFIXES = 0.5, 3


@dataclass(frozen=True)
class Case:
    """A request whose answer is known once it has run alone."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    form: str | None = None

    @property
    def ask(self) -> Ask:
        """The request; ends of turns end it, unless a form does."""
        body: dict[str, Any] = {"prompt": list(self.prompt), "max_tokens": self.max_tokens, "seed": self.seed}
        body |= {"temperature": self.temperature, "top_p": 1.0}
        return Ask(TEXT, body | ({"structured_outputs": {"regex": self.form}} if self.form else {}))


def make_cases(count: int, *, seed: int, vocab_size: int, max_input: int, max_output: int) -> list[Case]:
    """Cases of many lengths: most prompts short, some near `max_input`, half of them begin as others do.

    Every third is greedy, every eighth has a form.
    """
    rng = random.Random(seed)
    prefixes = [rng.choices(range(vocab_size), k=max_input // 4) for _ in range(_PREFIXES)]
    cases: list[Case] = []
    for number in range(count):
        kind = number / count
        low, high = (1, max_input // 32) if kind < _SHORT else (max_input // 32, max_input // 4)
        if kind >= 1 - _LONG:
            low, high = max_input // 2, max_input
        length = rng.randint(max(1, low), max(1, high))
        shared = rng.choice(prefixes)[: length // 2] if rng.random() < _SHARED else []
        prompt = (*shared, *rng.choices(range(vocab_size), k=length - len(shared)))
        temperature = 0.0 if number % 3 == 0 else 1.0
        form = FORM if number % 8 == 5 else None
        cases.append(Case(number, prompt, rng.randint(1, max_output), temperature, number + 1, form))
    return cases


@dataclass
class Judge:
    """Compares answers with those of runs alone; `near_tie` is a score's distance, 0 lets nothing pass.

    `left_out` is the share of compared tokens that may differ by more: behind a router's near-tie, which is of experts,
    scores are others.
    """

    near_tie: float = 0.0
    left_out: float = 0.0
    alone: dict[Case, Answer] = field(default_factory=dict)
    compared_tokens: int = 0
    compared_answers: int = 0
    differences: Counter[tuple[Case, int, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def learn(self, client: Client, cases: Sequence[Case]) -> None:
        """Run every case alone, nothing of others in the cache; SystemExit when one does not end."""
        for case in cases:
            await client.post("/reset_prefix_cache", {})
            answer = await client.ask(case.ask, 0.0)
            if answer.error or not answer.token_ids:
                raise SystemExit(f"case {case.number} alone: {answer.error or 'no token ids came'}")
            self.alone[case] = answer

    def hear(self, case: Case, answer: Answer) -> None:
        """Take an answer, whole or as far as its client read; what differs is looked into by `look`."""
        want, got = self.alone[case].token_ids, answer.token_ids
        same = next((at for at, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), None)
        self.compared_answers += 1
        self.compared_tokens += min(len(want), len(got)) if same is None else same
        if same is not None:
            self.differences[case, same, got[same]] += 1
        elif answer.is_cancelled:
            if len(got) > len(want):
                self.wrong.append(f"case {case.number}: {len(got)} tokens, alone {len(want)}")
        elif (len(got), answer.finish) != (len(want), self.alone[case].finish):
            self.wrong.append(
                f"case {case.number}: {len(got)} tokens, then {answer.finish}; alone {len(want)}, "
                f"then {self.alone[case].finish}"
            )

    async def look(self, client: Client, most: int = 1000) -> dict[str, float]:
        """Say of each difference whether it is a near-tie, the server idle; the distance of each that was looked at."""
        distances: dict[str, float] = {}
        apart: list[str] = []
        parted = 0
        for (case, at, token), times in self.differences.most_common():
            name = f"case {case.number}, token {at}: {token}, alone {self.alone[case].token_ids[at]} ({times} times)"
            if self.near_tie <= 0 or len(distances) >= most:
                self.wrong.append(name)
                continue
            distance = await self._distance(client, case, at, token)
            if distance is None:
                self.wrong.append(f"{name}, whose scores the server does not tell")
                continue
            distances[name] = distance
            if not distance <= self.near_tie:
                apart.append(f"{name}, {distance:.3g} apart")
                parted += times
        if parted > self.left_out * self.compared_tokens:
            self.wrong += apart
        return distances

    async def _distance(self, client: Client, case: Case, at: int, token: int) -> float | None:
        """How far apart the scores of the two tokens are, as the server itself computes them; None if it can't."""
        known = self.alone[case].token_ids
        scores: list[float] = []
        for each in (known[at], token):
            logprob = await self._logprob(client, [*case.prompt, *known[:at]], each)
            if logprob is None:
                return None
            scores.append(logprob if case.temperature == 0 else logprob / case.temperature + _noise(case, at, each))
        return abs(scores[0] - scores[1])

    async def _logprob(self, client: Client, prompt: list[int], token: int) -> float | None:
        """Of a token behind a prompt: forced, since log probabilities are those before; or as a part of the prompt.

        A model may have ids that its tokenizer has not, which can't be forced.
        """
        body = {"model": client.shared["model"], "max_tokens": 1, "ignore_eos": True, "logprobs": 0}
        status, answer = await client.post(TEXT, {**body, "prompt": prompt, "allowed_token_ids": [token]})
        at = 0
        if status != 200:
            status, answer = await client.post(TEXT, {**body, "prompt": [*prompt, token], "echo": True})
            at = len(prompt)
        return float(answer["choices"][0]["logprobs"]["token_logprobs"][at]) if status == 200 else None


def _noise(case: Case, at: int, token: int) -> float:
    """The Gumbel noise of a token, which follows from seed and position."""
    position = len(case.prompt) + at - 1
    return float(-np.log(-np.log(uniform_noise(case.seed, position, np.array([token]))))[0])
