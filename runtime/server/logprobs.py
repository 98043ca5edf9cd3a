"""How log probabilities are written, in chats and in completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runtime.parsing import Vocabulary
from runtime.request import TokenLogprobs
from runtime.sampling import LOGPROB_FLOOR
from runtime.server.choices import ScoredToken


def token_text(vocabulary: Vocabulary, token: int) -> str:
    """Return a token's text; one that is no UTF-8 by itself is spelled in bytes, so that different tokens differ."""
    piece = vocabulary.bytes_of(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(vocabulary: Vocabulary, scored: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return the logprobs object of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(vocabulary, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(vocabulary.bytes_of(token))}

    return {
        "content": [
            {
                **entry(each.token, each.logprobs.logprob),
                "top_logprobs": [entry(token, logprob) for token, logprob in each.logprobs.top],
            }
            for each in scored
        ]
    }


class CompletionLogprobs:
    """Writes the logprobs objects of a completion's choice, whose offsets run on from chunk to chunk."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Begin before the first token."""
        self._vocabulary = vocabulary
        self._offset = 0

    def take(self, scored: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """Return the object for the next tokens; a token without log probabilities, the prompt's first, has null."""
        tokens: list[str] = []
        values: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, logprobs in scored:
            text = token_text(self._vocabulary, token)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            values.append(None if logprobs is None else _finite(logprobs.logprob))
            top.append(None if logprobs is None else self._top(text, logprobs))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _top(self, text: str, logprobs: TokenLogprobs) -> dict[str, float]:
        best = {token_text(self._vocabulary, token): _finite(logprob) for token, logprob in logprobs.top}
        return best | {text: _finite(logprobs.logprob)}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)
