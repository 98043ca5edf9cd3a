"""What a soak asks again and again, and whether what came is what a request gets that runs alone.

A case is fixed to the last token: greedy or with a seed. `Judge` holds the answers of runs alone, from which no other
may part, with one exception. A row that gives up its blocks has the keys and values of tokens that were drawn one by
one computed again as a prompt's; their last bits may be others, and with them the choice between two tokens or two
experts that are as good as equal. Such an answer has to be, to the last bit, what the idle server gives when it begins
again in the same place: `Judge.look` tries all places.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.bench.client import Answer, Client
from runtime.bench.sessions import TEXT, Ask

FORM = (5, 40)
"""Lower-case letters that an answer with a form has, at least and at most."""
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
    has_form: bool = False

    @property
    def ask(self) -> Ask:
        """The request; ends of turns end it, unless a form does."""
        return self.behind([], 0, self.max_tokens)

    def behind(self, drawn: Sequence[int], letters: int, max_tokens: int, **more: Any) -> Ask:
        """The request for up to `max_tokens` tokens behind those `drawn` already, which have so many letters."""
        body: dict[str, Any] = {"prompt": [*self.prompt, *drawn], "max_tokens": max_tokens, "seed": self.seed}
        body |= {"temperature": self.temperature, "top_p": 1.0}
        if self.has_form:
            least, most = (max(0, bound - letters) for bound in FORM)
            body["structured_outputs"] = {"regex": f"[a-z]{{{least},{most}}}"}
        return Ask(TEXT, body | more)


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
        cases.append(Case(number, prompt, rng.randint(1, max_output), temperature, number + 1, number % 8 == 5))
    return cases


@dataclass
class Judge:
    """Compares answers with those of runs alone; see above."""

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

    async def look(self, client: Client, *, preemptions: int, block_tokens: int) -> dict[str, str]:
        """Say of each difference in which way the server, idle, comes to it; those that it does not are wrong.

        No more answers may part than rows gave up their blocks, which are of `block_tokens`.
        """
        ways: dict[str, str] = {}
        explained = 0
        for (case, at, token), times in self.differences.most_common():
            name = f"case {case.number}, token {at}: {token}, alone {self.alone[case].token_ids[at]} ({times} times)"
            way = await self._way(client, case, at, token, block_tokens) if preemptions else None
            if way is None:
                self.wrong.append(name)
            else:
                ways[name] = way
                explained += times
        if explained > preemptions:
            self.wrong.append(f"{explained} answers part from those alone, and {preemptions} rows gave up their blocks")
        return ways

    async def _way(self, client: Client, case: Case, at: int, token: int, block_tokens: int) -> str | None:
        """How a row that had drawn some tokens alone comes to another one, when it has to begin again."""
        known = self.alone[case].token_ids
        letters = [await _letters(client, known[:count]) if case.has_form else 0 for count in range(at + 1)]
        for kept in _kept(len(case.prompt), at, block_tokens):
            for drawn in range(1, at + 1):
                if kept >= len(case.prompt) + drawn:
                    continue
                salt = {"cache_salt": f"{case.number}/{at}/{kept}/{drawn}"}
                if kept:  # blocks of tokens that were drawn, which are taken from the cache then
                    await client.ask(case.behind([], 0, kept - len(case.prompt) + 1, **salt), 0.0)
                again = case.behind(known[:drawn], letters[drawn], at - drawn + 1, **salt)
                answer = await client.ask(again, 0.0)
                if answer.token_ids == [*known[drawn:at], token]:
                    return f"begun again behind {drawn} drawn tokens, with {kept} tokens kept"
        return None


def _kept(prompt: int, drawn: int, block_tokens: int) -> Iterator[int]:
    """Tokens in blocks that a row may find again: none that were drawn, or some; a prompt's last token is drawn's."""
    yield 0
    first = -(-prompt // block_tokens) * block_tokens
    yield from range(max(first, block_tokens), prompt + drawn, block_tokens)


async def _letters(client: Client, tokens: Sequence[int]) -> int:
    status, answer = await client.post("/detokenize", {"tokens": list(tokens)})
    return len(answer["prompt"]) if status == 200 else 0
