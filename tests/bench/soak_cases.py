"""What a soak asks again and again, and whether what came is what a request gets that runs alone.

A case is fixed to the last token: greedy or with a seed. `Judge` holds the answers of runs alone, from which no other
may part, with one exception. A row that gives up its blocks has the keys and values of tokens that were drawn one by
one computed again as a prompt's; their last bits may be others, and with them the choice between two tokens or two
experts that are as good as equal. Such an answer has to be, to its last token, what the idle server gives when it
begins again in the same place, or in several one after another: `Judge.look` tries all places.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from runtime.bench.client import Answer, Client
from runtime.bench.sessions import TEXT, Ask

FORM = (5, 40)
"""Lower-case letters that an answer with a form has, at least and at most."""
LOOK_SECONDS = 180.0
"""What is not explained after so long is wrong: a run may be cut off, and a fault tries all places in vain."""
_SALTS = count()
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


@dataclass(frozen=True)
class Parted:
    """An answer that parts at token `at` from the one alone; `finish` is None where its client left."""

    case: Case
    at: int
    tokens: tuple[int, ...]
    finish: str | None

    def parts_from(self, other: Answer, drawn: int) -> int | None:
        """The first token that `other`, begun behind so many, has otherwise; None if it is the same to the end."""
        own, its = self.tokens[drawn:], other.token_ids
        same = next((idx for idx, pair in enumerate(zip(own, its, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            whole = (len(own), self.finish) == (len(its), other.finish)
            ends_alike = len(own) <= len(its) if self.finish is None else whole
            same = None if ends_alike else min(len(own), len(its))
        return None if same is None else drawn + same


@dataclass
class Judge:
    """Compares answers with those of runs alone; see above."""

    alone: dict[Case, Answer] = field(default_factory=dict)
    compared_tokens: int = 0
    compared_answers: int = 0
    differences: Counter[Parted] = field(default_factory=Counter)
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
            self.differences[Parted(case, same, tuple(got), None if answer.is_cancelled else answer.finish)] += 1
        elif answer.is_cancelled:
            if len(got) > len(want):
                self.wrong.append(f"case {case.number}: {len(got)} tokens, alone {len(want)}")
        elif (len(got), answer.finish) != (len(want), self.alone[case].finish):
            self.wrong.append(
                f"case {case.number}: {len(got)} tokens, then {answer.finish}; alone {len(want)}, "
                f"then {self.alone[case].finish}"
            )

    async def look(
        self, client: Client, *, preemptions: int, block_tokens: int, seconds: float = LOOK_SECONDS
    ) -> dict[str, str]:
        """Say of each difference in which way the server, idle, comes to it; those that it does not are wrong.

        No more may have been begun again than rows gave up their blocks, which are of `block_tokens`.
        """
        ways: dict[str, str] = {}
        begun, end = 0, time.monotonic() + seconds
        for parted, times in self.differences.most_common():
            case, at = parted.case, parted.at
            name = (
                f"case {case.number}, token {at}: {parted.tokens[at]}, alone {self.alone[case].token_ids[at]}, "
                f"{len(parted.tokens)} tokens ({times} times)"
            )
            found = await self._ways(client, parted, block_tokens, end) if preemptions else None
            if found is None:
                late = f"; not looked into for longer than {seconds:g} s" if time.monotonic() > end else ""
                self.wrong.append(name + late)
            else:
                ways[name] = ", then ".join(found)
                begun += times * len(found)
        if begun > preemptions:
            self.wrong.append(f"answers were begun again {begun} times, and {preemptions} rows gave up their blocks")
        return ways

    async def _ways(self, client: Client, parted: Parted, block_tokens: int, end: float) -> list[str] | None:
        """Where a row has to begin again, one place after another, to come to an answer; None if it does not."""
        found: list[str] = []
        at: int | None = parted.at
        while at is not None:
            way = await self._way(client, parted, at, block_tokens, end) if at < len(parted.tokens) else None
            if way is None:
                return None
            text, at = way
            found.append(text)
        return found

    async def _way(
        self, client: Client, parted: Parted, at: int, block_tokens: int, end: float
    ) -> tuple[str, int | None] | None:
        """How a row comes to the token `at` behind those before it, and which of the later ones are others then.

        Of several places the one that explains most: another may say the same for a few tokens.
        """
        case, tokens = parted.case, parted.tokens
        best: tuple[str, int] | None = None
        letters = [await _letters(client, tokens[:count]) if case.has_form else 0 for count in range(at + 1)]
        for kept in _kept(len(case.prompt), parted.at, block_tokens):
            for drawn in range(1, at + 1):
                if kept >= len(case.prompt) + drawn:
                    continue
                if time.monotonic() > end:
                    return best

                async def again(max_tokens: int, kept: int = kept, drawn: int = drawn) -> Answer:
                    salt = {"cache_salt": str(next(_SALTS))}
                    if kept:  # blocks of tokens that were drawn, which are taken from the cache then
                        await client.ask(case.behind([], 0, kept - len(case.prompt) + 1, **salt), 0.0)
                    return await client.ask(case.behind(tokens[:drawn], letters[drawn], max_tokens, **salt), 0.0)

                if (await again(at - drawn + 1)).token_ids == list(tokens[drawn : at + 1]):
                    parts_at = parted.parts_from(await again(case.max_tokens - drawn), drawn)
                    way = f"begun again behind {drawn} drawn tokens, with {kept} tokens kept"
                    if parts_at is None:
                        return way, None
                    if parts_at > (best[1] if best else at):  # otherwise it does not say the same twice
                        best = way, parts_at
        return best


def _kept(prompt: int, drawn: int, block_tokens: int) -> Iterator[int]:
    """Tokens in blocks that a row may find again: none that were drawn, or some; a prompt's last token is drawn's."""
    yield 0
    first = -(-prompt // block_tokens) * block_tokens
    yield from range(max(first, block_tokens), prompt + drawn, block_tokens)


async def _letters(client: Client, tokens: Sequence[int]) -> int:
    status, answer = await client.post("/detokenize", {"tokens": list(tokens)})
    return len(answer["prompt"]) if status == 200 else 0
