"""One request over HTTP, and when each part of its answer arrived.

Owns the reading of event streams. A time is taken before what arrived is looked at, so that reading one stream's events
delays those of others by microseconds and changes no gap of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from megakernel.config import ConfigError
from runtime.bench.sessions import Ask, Said

KEY = "OPENAI_API_KEY"
_POLL_SECONDS = 0.1


@dataclass
class Answer:
    """What became of a request. Times are seconds of `time.perf_counter`.

    `due`: when it should have been sent; `arrivals`: when a chunk with tokens came, and how many; `token_ids` is empty
    where the server doesn't tell. `finish` is None where the stream ended without a reason, and `error` says why; it is
    cancelled where the client left.
    """

    due: float
    began: float = 0.0
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    said: Said = field(default_factory=Said)
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    is_done: bool = False
    is_cancelled: bool = False
    error: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that came: by their ids, else as the server's usage says, else one a chunk."""
        return len(self.token_ids) or int(self.usage.get("completion_tokens") or len(self.arrivals))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server says it had already."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def event(self, now: float, data: dict[str, Any]) -> None:
        """Take one event of the stream."""
        if "error" in data:
            error = data["error"]
            self.error = str(error.get("message", error)) if isinstance(error, dict) else str(error)
            return
        if data.get("usage"):
            self.usage = data["usage"]
        for choice in data.get("choices") or ():
            ids = choice.get("token_ids") or ()
            self.token_ids += ids
            has_text = self._take(choice)
            if ids or has_text:
                self.arrivals.append((now, len(ids) or 1))
            self.finish = choice.get("finish_reason") or self.finish

    def _take(self, choice: dict[str, Any]) -> bool:
        """Keep what a chunk says; whether it says anything."""
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text") or ""
            self.text.append(text)
            return bool(text)
        content, reasoning = delta.get("content") or "", delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.said.content += content
        self.said.reasoning += reasoning
        calls = delta.get("tool_calls") or ()
        for each in calls:
            self._take_call(each)
        return bool(content or reasoning or calls)

    def _take_call(self, piece: dict[str, Any]) -> None:
        function = piece.get("function") or {}
        if piece.get("id"):
            written = {"name": function.get("name", ""), "arguments": ""}
            self.said.calls.append({"id": piece["id"], "type": "function", "function": written})
        if self.said.calls:
            self.said.calls[-1]["function"]["arguments"] += function.get("arguments") or ""

    def settle(self) -> None:
        """Say what is wrong with a stream that has ended, if anything."""
        if self.error or self.is_cancelled:
            return
        if self.finish is None:
            self.error = "the stream ended without a finish reason"
        elif not self.is_done:
            self.error = "the stream ended without [DONE]"


class Client:
    """Requests to one server; `shared` is in the body of each, `timeout_s` the longest that one may take."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, *, timeout_s: float = 60.0) -> None:
        """Send nothing yet."""
        self.shared: dict[str, Any] = {}
        self._http, self._url, self._timeout_s = http, base_url.rstrip("/"), timeout_s

    async def ask(self, ask: Ask, due: float, leave_after_s: float | None = None) -> Answer:
        """Send a request and read its answer to the end, or leave; what goes wrong is in the answer."""
        answer = Answer(due)
        body = json.dumps(self.shared | ask.body).encode()
        answer.began = time.perf_counter()
        limit = self._timeout_s if leave_after_s is None else min(leave_after_s, self._timeout_s)
        try:
            async with asyncio.timeout(limit):
                await self._read(answer, self._url + ask.path, body)
        except TimeoutError:
            answer.is_cancelled = limit == leave_after_s
            answer.error = "" if answer.is_cancelled else f"no end after {limit:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        answer.settle()
        return answer

    async def _read(self, answer: Answer, url: str, body: bytes) -> None:
        async with self._http.post(url, data=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {_message(await response.read())}"
                return
            rest = b""
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event == b"data: [DONE]":
                        answer.is_done = True
                    elif event.startswith(b"data: "):
                        answer.event(now, json.loads(event[6:]))

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return a GET's status and body."""
        async with self._http.get(self._url + path) as response:
            return response.status, await response.read()

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return a POST's status and its body's JSON, None where it is none."""
        async with self._http.post(self._url + path, json=body) as response:
            text = await response.read()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, None

    async def ready(self, seconds: float) -> None:
        """Wait until the server takes work; ConfigError when it does not in time. Without /ready, /health says it."""
        end = time.perf_counter() + seconds
        path, found = "/ready", "nothing answers"
        while True:
            try:
                status, body = await self.get(path)
            except (aiohttp.ClientError, OSError) as error:
                found = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    return
                if status == 404 and path == "/ready":
                    path = "/health"
                    continue
                found = f"{path} answers {status}: {_message(body)}"
            if time.perf_counter() > end:
                raise ConfigError(f"{self._url}: not ready after {seconds:g} s: {found}")
            await asyncio.sleep(_POLL_SECONDS)


def _message(body: bytes) -> str:
    """What an error's body says, in its own words where it has the usual shape."""
    text = body.decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


@asynccontextmanager
async def connected() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections without limits of the library's own: load and deadlines are the run's."""
    key = os.environ.get(KEY)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        yield http
