"""A server over scripted tokens: the real application, engine, tokenizer and parsers; only the model is a script."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2 as httpx
import numpy as np
import uvicorn
from support.ahead import AheadBackend

from megakernel.workload import ROW_TILE
from runtime.demo.checkpoint import CONFIG, write_tokenizer
from runtime.engine import AsyncEngine, EngineCore, EngineSettings, ScriptedBackend
from runtime.parsing.dialect import NORTH, Dialect
from runtime.sampling import SamplingParams
from runtime.server.app import make_app
from runtime.server.auth import KeyRing
from runtime.server.config import ServeConfig
from runtime.server.connection import http_settings
from runtime.server.metrics import Metrics
from runtime.server.requests import choice_seed
from runtime.server.run import Host
from runtime.server.service import Service, TextSide
from runtime.server.template import ChatTemplate
from runtime.server.tokenizer import TextTokenizer

BACKEND = "COUNTERPOINT_TEST_BACKEND"
"""Set by --backend: the same scripts, made step by step, or ahead as on a card."""

VOCAB = int(str(CONFIG["vocab_size"]))
END = int(str(CONFIG["eos_token_id"]))
USER = [{"role": "user", "content": "hi"}]


_FOLDER = TemporaryDirectory(prefix="counterpoint-tests-")


@cache
def folder() -> Path:
    """The demo checkpoint's text side, written once a process."""
    path = Path(_FOLDER.name)
    write_tokenizer(path)
    return path


@cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer.load(folder())


@cache
def template() -> ChatTemplate:
    found = ChatTemplate.load(folder(), tokenizer())
    assert found is not None
    return found


def ids(text: str) -> list[int]:
    """Ids of a text with markers written out."""
    return tokenizer().encode(text)


def bytewise(text: str) -> list[int]:
    """One token a byte of the text."""
    table = {piece: token for token, piece in enumerate(tokenizer().vocabulary.pieces) if len(piece) == 1}
    return [table[bytes([byte])] for byte in text.encode()]


def call_text(*calls: tuple[str, object]) -> str:
    """An action block as North writes it."""
    objects = [
        {"tool_call_id": str(place), "tool_name": name, "parameters": parameters}
        for place, (name, parameters) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(objects)}<|END_ACTION|>"


def thought(text: str) -> str:
    """What a model says after a prompt that has opened its thinking, up to its end."""
    return f"{text}<|END_THINKING|>"


def answered(text: str) -> str:
    """A text block."""
    return f"<|START_TEXT|>{text}<|END_TEXT|>"


def tool(name: str, strict: bool = False, **properties: object) -> dict[str, Any]:
    """A declared function."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


class Script:
    """What the model says, by the seed of a choice: tokens, logits [vocab] or exceptions to raise; then the end token.

    A prompt is as long as the shortest context seen with its seed, so every request of a test has a seed of its own.
    """

    def __init__(self, *parts: Any) -> None:
        """`parts`: what every other seed says."""
        self.default = self.flat(parts)
        self.by_seed: dict[int, list[Any]] = {}
        self.prompt_tokens: dict[int, int] = {}
        self.calls = 0
        self.on_call: Callable[[int], None] = lambda _calls: None

    @staticmethod
    def flat(parts: Iterable[Any]) -> list[Any]:
        """Tokens of texts, ids and lists of ids, logits and exceptions among them."""
        found: list[Any] = []
        for part in parts:
            if isinstance(part, str):
                found += ids(part)
            elif isinstance(part, (list, tuple)):
                found += part
            else:
                found.append(part)
        return found

    def on(self, seed: int, *parts: Any, choice: int = 0) -> None:
        """Say what a choice of the request with this seed answers."""
        self.by_seed[choice_seed(seed, choice)] = self.flat(parts)

    def __call__(self, context: tuple[int, ...], sampling: SamplingParams) -> Any:
        self.calls += 1
        self.on_call(self.calls)
        begin = min(len(context), self.prompt_tokens.get(sampling.seed, len(context)))
        self.prompt_tokens[sampling.seed] = begin
        reply = self.by_seed.get(sampling.seed, self.default)
        place = len(context) - begin
        found = reply[place] if place < len(reply) else END
        if isinstance(found, Exception):
            raise found
        return found


def wanting(*tokens: int) -> np.ndarray:
    """Logits that prefer ids in this order, all of them far above the rest."""
    logits = np.zeros(VOCAB)
    for place, token in enumerate(tokens):
        logits[token] = 50.0 - place
    return logits


@dataclass
class Served:
    """A running server and a client of it."""

    client: httpx.AsyncClient
    service: Service
    script: Script
    url: str = ""
    host: Host | None = None

    @property
    def engine(self) -> AsyncEngine:
        assert self.service.engine is not None
        return self.service.engine

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return await self.client.post(path, **options)

    async def chat(self, **body: Any) -> dict[str, Any]:
        """A chat's whole response; `messages` default to one word of the user."""
        response = await self.post("/v1/chat/completions", {"messages": USER, **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def message(self, **body: Any) -> dict[str, Any]:
        return (await self.chat(**body))["choices"][0]["message"]

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"prompt": "x", **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def chat_stream(self, **body: Any) -> Stream:
        response = await self.post("/v1/chat/completions", {"messages": USER, "stream": True, **body})
        assert response.status_code == 200, response.text
        return Stream.read(response.text)

    async def complete_stream(self, **body: Any) -> Stream:
        response = await self.post("/v1/completions", {"prompt": "x", "stream": True, **body})
        assert response.status_code == 200, response.text
        return Stream.read(response.text)

    async def refusal(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of a request that must fail with this status."""
        response = await self.post(path, body)
        assert response.status_code == status, response.text
        return error_of(response)

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.client.get("/metrics")).text
        for line in text.splitlines():
            if (
                line.startswith(name)
                and line[len(name)] in "{ "
                and all(f'{k}="{v}"' in line for k, v in labels.items())
            ):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels}")

    async def idle(self, seconds: float = 5.0) -> None:
        """Wait until nothing runs or waits; AssertionError when it takes too long."""
        async with asyncio.timeout(seconds):
            while (stats := self.engine.stats()).running or stats.waiting:
                await asyncio.sleep(0.005)  # the engine's thread has no event for this


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, whose shape is checked."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert "Error(" not in response.text
    return body["error"]


@dataclass
class Stream:
    """A stream's events."""

    chunks: list[dict[str, Any]]
    is_done: bool
    comments: int

    @classmethod
    def read(cls, text: str) -> Stream:
        """Check the framing of every event and read it."""
        chunks, done, comments = [], False, 0
        assert text.endswith("\n\n")
        for block in text.split("\n\n")[:-1]:
            assert "\n" not in block, "an event is one line"
            assert not done, "something follows [DONE]"
            if block.startswith(": "):
                comments += 1
                continue
            assert block.startswith("data: ")
            data = block.removeprefix("data: ")
            if data == "[DONE]":
                done = True
            else:
                chunks.append(json.loads(data, parse_constant=_refuse))
        return cls(chunks, done, comments)

    def deltas(self, index: int = 0) -> list[dict[str, Any]]:
        return [each["delta"] for chunk in self.chunks for each in chunk.get("choices", []) if each["index"] == index]

    def text(self, index: int = 0) -> str:
        """The text of a completion's choice."""
        choices = [each for chunk in self.chunks for each in chunk["choices"] if each["index"] == index]
        return "".join(each["text"] for each in choices)

    def content(self, index: int = 0) -> str:
        return "".join(delta.get("content", "") for delta in self.deltas(index))

    def reasoning(self, index: int = 0) -> str:
        return "".join(delta.get("reasoning", "") for delta in self.deltas(index))

    def finishes(self, index: int = 0) -> list[str]:
        return [
            each["finish_reason"]
            for chunk in self.chunks
            for each in chunk.get("choices", [])
            if each["index"] == index and each["finish_reason"] is not None
        ]

    def usages(self) -> list[dict[str, Any]]:
        return [chunk["usage"] for chunk in self.chunks if "usage" in chunk]

    def calls(self, index: int = 0) -> list[tuple[str, str]]:
        """Name and arguments of every call; the shape of the deltas is checked."""
        calls: list[tuple[str, str]] = []
        for delta in self.deltas(index):
            for each in delta.get("tool_calls", []):
                if "id" in each:
                    assert set(each) == {"index", "id", "type", "function"}
                    assert (each["index"], each["type"]) == (len(calls), "function")
                    assert each["function"]["arguments"] == ""
                    calls.append((each["function"]["name"], ""))
                else:
                    assert set(each) == {"index", "function"}
                    assert set(each["function"]) == {"arguments"}
                    name, arguments = calls[each["index"]]
                    calls[each["index"]] = (name, arguments + each["function"]["arguments"])
        return calls

    def errors(self) -> list[dict[str, Any]]:
        return [chunk["error"] for chunk in self.chunks if "error" in chunk]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def text_side(dialect: Dialect = NORTH, window: int = 1024, end_ids: Iterable[int] = (END,)) -> TextSide:
    return TextSide(
        names=("demo", "alias"),
        tokenizer=tokenizer(),
        template=template(),
        dialect=dialect,
        vocab_size=VOCAB,
        max_model_len=window,
        end_ids=frozenset(end_ids),
        defaults={"temperature": 1.0},
    )


def service_of(
    script: Script,
    *,
    config: ServeConfig | None = None,
    text: TextSide | None = None,
    max_waiting: int = 256,
    **sizes: Any,
) -> Service:
    """A service on a scripted engine; `sizes` are the backend's."""
    text = text or text_side()
    metrics = Metrics(text.names[0])
    service = Service(config or ServeConfig(), text, metrics)
    settings = {"rows": 8, "page_tokens": 8, "pages": (640, 640), "max_context_tokens": text.max_model_len, **sizes}
    if os.environ.get(BACKEND) == "ahead" and settings["rows"] <= ROW_TILE:  # a card has no more
        backend = AheadBackend(script, buckets=sorted({1, settings["rows"]}), vocab_size=VOCAB, **settings)
    else:
        backend = ScriptedBackend(script, vocab_size=VOCAB, **settings)
    service.engine = AsyncEngine(EngineCore(backend, EngineSettings(max_waiting=max_waiting), metrics))
    metrics.watch(service.engine.stats, block_size=settings["page_tokens"], num_blocks=sum(settings["pages"]))
    return service


@asynccontextmanager
async def serving(
    *parts: Any,
    script: Script | None = None,
    keys: Iterable[str] = (),
    admin_keys: Iterable[str] = (),
    headers: dict[str, str] | None = None,
    dies: bool = False,
    **options: Any,
) -> AsyncIterator[Served]:
    """The application without sockets; afterwards nothing may be left of any request."""
    script = script or Script(*parts)
    service = service_of(script, **options)
    app = make_app(service, KeyRing(keys, None), KeyRing(admin_keys, None))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers, timeout=30) as client:
        served = Served(client, service, script)
        try:
            yield served
            await no_leak(served, dies=dies)
        finally:
            served.engine.close()


@asynccontextmanager
async def listening(
    *parts: Any,
    script: Script | None = None,
    keys: Iterable[str] = (),
    admin_keys: Iterable[str] = (),
    dies: bool = False,
    **options: Any,
) -> AsyncIterator[Served]:
    """The server on a loopback socket, as `runtime serve` runs it."""
    script = script or Script(*parts)
    service = service_of(script, **options)
    async with hosted(service, keys=keys, admin_keys=admin_keys) as at:
        served = Served(at.client, service, script, at.url, at.host)
        yield served
        if not at.running.done():
            await no_leak(served, dies=dies)
    assert at.running.result() == (1 if dies else 0)


@dataclass(frozen=True)
class Hosted:
    """A served socket, a client of it, and the run that ends with the process' exit code."""

    client: httpx.AsyncClient
    url: str
    host: Host
    running: asyncio.Future[int]


@asynccontextmanager
async def hosted(
    service: Service, *, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()
) -> AsyncIterator[Hosted]:
    """A service whose engine runs, on a loopback socket, as `runtime serve` hosts it."""
    engine = service.engine
    assert engine is not None
    app = make_app(service, KeyRing(keys, None), KeyRing(admin_keys, None))
    config = uvicorn.Config(app, timeout_graceful_shutdown=2, **http_settings())
    host = Host(config, service, lambda: engine)
    bound = socket.create_server(("127.0.0.1", 0))
    bound.setblocking(False)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    running = asyncio.ensure_future(host.live(bound))
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        try:
            while not host.started:
                await asyncio.sleep(0.005)  # uvicorn has no event for this
            yield Hosted(client, url, host, running)
        finally:
            host.should_exit = True
            await running


async def no_leak(served: Served, *, dies: bool = False) -> None:
    """Nothing runs, waits, is counted or holds blocks once every client has gone."""
    await served.idle()
    async with asyncio.timeout(5):
        while served.service.live or served.service.per_key:
            await asyncio.sleep(0.005)  # the server's own tasks notice a closed socket by themselves
    stats = served.engine.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    if not dies:
        served.engine.core.roster.check()
        assert served.engine.is_ready or served.service.is_draining
