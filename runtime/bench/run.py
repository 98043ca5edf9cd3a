"""Runs what a configuration says against a server and returns the records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from megakernel.config import ConfigError, check_writable, pretty_json, write_text_atomic
from runtime.bench.client import Answer, Client, connected
from runtime.bench.drive import drive, watched
from runtime.bench.load import BenchConfig, Load
from runtime.bench.record import Record, record_of
from runtime.bench.scrape import counted, samples
from runtime.bench.sessions import sessions, shared_body, words

VOCAB_SIZE = 32_000
"""Random ids are below it where neither the load nor the server says."""
_SAMPLE_WORDS = 200
_SHOWN = ("version", "models", "max_model_len", "rows", "plan")
_WARM_SEED = 2**32


@dataclass(frozen=True)
class Facts:
    """What a load has to know of a server, and what a record says of it."""

    model: str
    vocab_size: int
    tokens_per_word: float
    info: dict[str, Any]


async def bench(config: BenchConfig, say: Callable[[Record], None] = lambda _record: None) -> list[Record]:
    """Run all loads, one after the other; `say` hears of each that has ended. ConfigError when nothing can be run."""
    paths = [Path(config.result_dir or ".") / f"{load.name}.json" for load in config.runs]
    if config.result_dir:
        Path(config.result_dir).mkdir(parents=True, exist_ok=True)
        for path in paths:
            check_writable(path)
    records: list[Record] = []
    async with connected() as http:
        await Client(http, config.base_url).ready(config.ready_check_timeout_sec)
        for load, path in zip(config.runs, paths, strict=True):
            record, _ = await run(http, config.base_url, load, detailed=config.save_detailed)
            if config.result_dir:
                write_text_atomic(path, pretty_json(record))
            records.append(record)
            say(record)
    return records


async def run(
    http: aiohttp.ClientSession, base_url: str, load: Load, *, detailed: bool = False
) -> tuple[Record, list[Answer]]:
    """Run one load: its record, and the answers that it is made of. Warm-ups are in neither."""
    client = Client(http, base_url, timeout_s=load.request_timeout_s)
    facts = await facts_of(client, load)
    client.shared = shared_body(load, facts.model)

    async def once(part: Load) -> list[Answer]:
        known = {"vocab_size": facts.vocab_size, "tokens_per_word": facts.tokens_per_word}
        return await drive(client, part, list(sessions(part, **known)))

    if load.num_warmups:
        await once(load.model_copy(update={"num_prompts": load.num_warmups, "seed": load.seed + _WARM_SEED}))
    before = await _scrape(client)
    async with watched() as punctual:
        answers = await once(load)
    after = await _scrape(client)
    record = record_of(load, answers, punctual, detailed=detailed)
    return record | {"server": facts.info, "server_counted": counted(before, after)}, answers


async def facts_of(client: Client, load: Load) -> Facts:
    """Ask a server for what the load leaves open; ConfigError when it does not even name a model."""
    info = await _info(client)
    return Facts(
        model=load.model or await _served_model(client),
        vocab_size=load.vocab_size or int(info.get("vocab_size") or VOCAB_SIZE),
        tokens_per_word=await _tokens_per_word(client) if load.dataset_name == "multi_turn" else 1.0,
        info={name: info[name] for name in _SHOWN if name in info},
    )


async def _served_model(client: Client) -> str:
    status, body = await client.get("/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"/v1/models answers {status} without a model; name one with --model, and a key in OPENAI_API_KEY if needed"
        ) from None


async def _info(client: Client) -> dict[str, Any]:
    """What /server_info says; nothing where there is no such route."""
    status, body = await client.get("/server_info")
    try:
        found = json.loads(body) if status == 200 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _tokens_per_word(client: Client) -> float:
    """How long the words of conversations are for this server's tokenizer; 2 where it does not encode."""
    status, body = await client.post("/tokenize", {"prompt": words(Random(0), _SAMPLE_WORDS)})
    if status != 200 or not isinstance(body, dict) or "count" not in body:
        return 2.0
    return max(float(body["count"]) / _SAMPLE_WORDS, 0.1)


async def _scrape(client: Client) -> dict[str, float]:
    status, body = await client.get("/metrics")
    return samples(body.decode()) if status == 200 else {}
