"""The sessions of a run: what each asks, and what it asks next when it has been answered.

Owns prompts. All of them follow from the seed and the run's name: two servers, or one server twice, get the same ones,
and two runs of a file find none of each other's in a cache. Only what a conversation repeats of the server's own words
differs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.bench.load import Load

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Ask:
    """One request; `pause_s` is waited before it is sent, `body` lacks what all requests of a run share."""

    path: str
    body: dict[str, Any]
    pause_s: float = 0.0


@dataclass
class Said:
    """The message that a chat was answered with, as far as it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


Session = Generator[Ask, Said, None]


def sessions(load: Load, *, vocab_size: int, tokens_per_word: float) -> Iterator[Session]:
    """Return the sessions of a run in the order in which they begin."""
    for number in range(load.num_prompts):
        rng = _rng(load, str(number))
        match load.dataset_name:
            case "random":
                yield _one(_random_body(load, rng, vocab_size))
            case "prefix_repetition":
                yield _one(_repeating_body(load, rng, number, vocab_size))
            case "multi_turn":
                yield _conversation(load, rng, tokens_per_word)


def shared_body(load: Load, model: str) -> dict[str, Any]:
    """What every request of a run has in its body: it streams, and says what a token was and what all cost."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"return_token_ids": True, "ignore_eos": load.ignore_eos}
    if load.temperature is not None:
        body["temperature"] = load.temperature
    return body | load.extra_body


def _one(body: dict[str, Any]) -> Session:
    yield Ask(TEXT, body)


def _random_body(load: Load, rng: random.Random, vocab_size: int) -> dict[str, Any]:
    def drawn(mean: int) -> int:
        ratio = load.random_range_ratio
        return max(1, round(rng.uniform(mean * (1 - ratio), mean * (1 + ratio))))

    prefix = _ids(_rng(load, "prefix"), load.random_prefix_len, vocab_size)
    prompt = prefix + _ids(rng, drawn(load.random_input_len), vocab_size)
    return {"prompt": prompt, "max_tokens": drawn(load.random_output_len)}


def _repeating_body(load: Load, rng: random.Random, number: int, vocab_size: int) -> dict[str, Any]:
    place = number % load.prefix_repetition_num_prefixes
    prefix = _ids(_rng(load, f"prefix {place}"), load.prefix_repetition_prefix_len, vocab_size)
    suffix = _ids(rng, load.prefix_repetition_suffix_len, vocab_size)
    return {"prompt": prefix + suffix, "max_tokens": load.prefix_repetition_output_len}


def _rng(load: Load, part: str) -> random.Random:
    return random.Random(f"{load.seed}/{load.name}/{part}")


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return rng.choices(range(vocab_size), k=count)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Return a part of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
]

SYLLABLES = ("ra", "to", "mi", "ne", "so", "lu", "ka", "ver", "din", "pol", "gar", "est")


def words(rng: random.Random, count: int) -> str:
    """Return so many words that mean nothing."""
    return " ".join("".join(rng.choices(SYLLABLES, k=2)) for _ in range(count))


def _conversation(load: Load, rng: random.Random, tokens_per_word: float) -> Session:
    """An agent at work: what the server said goes into the next prompt, and a call with its result behind it.

    A model that made no call gets a written one, so that all servers see the same shape; its own calls are kept.
    """

    def text(source: random.Random, tokens: int) -> str:
        return words(source, max(1, round(tokens / tokens_per_word)))

    system = text(_rng(load, "system"), load.multi_turn_system_len)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text(rng, load.multi_turn_input_len)})
    for turn in range(load.multi_turn_num_turns):
        body = {"messages": list(messages), "tools": TOOLS, "max_tokens": load.multi_turn_output_len}
        said = yield Ask(CHAT, body, load.multi_turn_tool_s if turn else 0.0)
        calls = said.calls or [_written_call(turn)]
        answer = {"role": "assistant", "content": said.content, "tool_calls": calls}
        messages.append(answer | ({"reasoning": said.reasoning} if said.reasoning else {}))
        messages += _results(calls, text(rng, load.multi_turn_tool_len))


def _written_call(turn: int) -> dict[str, Any]:
    arguments = json.dumps({"path": f"notes/{turn}.txt", "line": turn})
    return {"id": f"call_{turn}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}


def _results(calls: Sequence[dict[str, Any]], text: str) -> Iterator[dict[str, Any]]:
    """A result for every call, of which the first has the text."""
    for place, call in enumerate(calls):
        yield {"role": "tool", "tool_call_id": call["id"], "content": "done" if place else text}
