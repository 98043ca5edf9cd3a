"""A backend without a model: a script says what follows a context, and the KV pages hold nothing but the tokens.

A row's context is read back through its page tables at every step, so a page that was shared, freed or evicted wrongly
shows as a wrong context. For tests of the engine and of servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from runtime.engine.backend import Chunk, Result, Row, Span, Tables, Want
from runtime.sampling import NO_TOKEN, SamplingParams, sample

Context = tuple[int, ...]
Script = Callable[[Context, SamplingParams], "int | npt.NDArray[np.floating]"]
"""What follows a context: a token id, or logits [vocab]. Raising fails the step; logits of NaN corrupt the row."""

SURE = 20.0
"""Logit of a token that a script names, where logits are wanted; that of all others is its negative."""


def replies(by_prompt: Mapping[Context, Sequence[int]], default: Sequence[int] = ()) -> Script:
    """A script that answers known prompts with their tokens and others with `default`, then repeats the last one.

    An unknown context is a prompt of its own unless an earlier one and a part of its answer lead up to it.
    """
    known: dict[Context, Sequence[int]] = {tuple(prompt): tokens for prompt, tokens in by_prompt.items()}

    def answer(context: Context, _sampling: SamplingParams) -> int:
        for length in range(len(context), 0, -1):
            reply = known.get(context[:length])
            if reply is not None and _follows(context[length:], reply):
                return reply[min(len(context) - length, len(reply) - 1)]
        if not default:
            raise KeyError(f"the script knows nothing about a context of {len(context)} tokens")
        known[context] = default
        return default[0]

    return answer


def _follows(generated: Context, reply: Sequence[int]) -> bool:
    return all(token == reply[min(idx, len(reply) - 1)] for idx, token in enumerate(generated))


class ScriptedBackend:
    """Plays a script. Sizes default to something small with one full and one windowed group.

    `seconds` is slept at every call, for tests that need time to pass.
    """

    decodes_ahead = False

    def __init__(  # noqa: PLR0913 - the sizes of the protocol, all with defaults
        self,
        script: Script,
        *,
        vocab_size: int = 256,
        rows: int = 4,
        page_tokens: int = 8,
        windows: tuple[int | None, ...] = (None, 16),
        pages: tuple[int, ...] = (64, 64),
        max_context_tokens: int = 256,
        prefill_tokens: tuple[int, int] = (8, 64),
        prefill_layers: int = 1,
        max_steps: int = 1,
        seconds: float = 0.0,
    ) -> None:
        """`script` is asked once for every token, in the thread of the engine."""
        self.script, self.seconds = script, seconds
        self.vocab_size, self.rows, self.page_tokens = vocab_size, rows, page_tokens
        self.windows, self.pages, self.max_context_tokens = windows, pages, max_context_tokens
        self.prefill_tokens, self.prefill_layers, self.max_steps = prefill_tokens, prefill_layers, max_steps
        self.kv = [np.full((count, page_tokens), -1, dtype=np.int64) for count in pages]

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        """See `Backend`; every call stores the spans' tokens, as every layer would its own KV."""
        time.sleep(self.seconds)
        for span in chunk.spans:
            for offset, token in enumerate(span.tokens):
                self._store(span.tables, span.begin + offset, token)
        if chunk.layers[1] < self.prefill_layers:
            return ()
        return tuple(self._span(span) for span in chunk.spans)

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        """See `Backend`."""
        time.sleep(self.seconds)
        return tuple(self._decode(row, steps) for row in rows)

    def _decode(self, row: Row, steps: int) -> Result:
        token, tokens = row.token, []
        for position in range(row.position, row.position + steps):
            self._store(row.tables, position, token)
            result = self._result(row.tables, position, row.sampling, row.want)
            if row.want is Want.LOGITS:
                return result
            (token,) = result.tokens
            tokens.append(token)
            if token == NO_TOKEN:
                break
        return Result(tokens=tuple(tokens))

    def _span(self, span: Span) -> Result:
        if span.want is Want.NOTHING:
            return Result()
        if span.want is not Want.ALL_LOGITS:
            return self._result(span.tables, span.end - 1, span.sampling, span.want)
        rows = [
            self._result(span.tables, position, span.sampling, Want.LOGITS).logits
            for position in range(span.begin, span.end)
        ]
        return Result(logits=np.array(rows))

    def _store(self, tables: Tables, position: int, token: int) -> None:
        block, slot = divmod(position, self.page_tokens)
        for kv, table in zip(self.kv, tables, strict=True):
            assert table[block] >= 0, f"position {position} has no page to be written to"
            kv[table[block], slot] = token

    def context(self, tables: Tables, position: int) -> Context:
        """The tokens up to `position`, as the first group holds them; the others must agree as far as they see."""
        seen: Context | None = None
        for kv, table, window in zip(self.kv, tables, self.windows, strict=True):
            begin = 0 if window is None else max(0, position + 1 - window)
            pages = table[begin // self.page_tokens : position // self.page_tokens + 1]
            assert (pages >= 0).all(), f"position {position} sees a page that the row gave back"
            start = begin % self.page_tokens
            tokens = tuple(kv[pages].reshape(-1)[start : start + position + 1 - begin].tolist())
            seen = tokens if seen is None else seen
            assert seen[len(seen) - len(tokens) :] == tokens, "two groups hold different tokens"
        assert seen is not None
        return seen

    def _result(self, tables: Tables, position: int, sampling: SamplingParams, want: Want) -> Result:
        answer = self.script(self.context(tables, position), sampling)
        if want is Want.TOKEN:
            if isinstance(answer, np.ndarray):
                answer = sample(answer.astype(np.float64), sampling, position)
            return Result(tokens=(answer,))
        if isinstance(answer, np.ndarray):
            return Result(logits=answer)
        logits = np.full(self.vocab_size, -SURE)
        logits[answer] = SURE
        return Result(logits=logits)
