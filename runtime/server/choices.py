"""One choice under way: the engine's tokens become events, up to a stop string or the end.

Owns stop strings, which apply to the answer only, never to reasoning or calls, and count from min_tokens on; and what
the usage of a choice is. Refuses to know how a reply is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.parsing import CallEnd, Content, Event, Parser, Reasoning
from runtime.parsing.find import Finder, Hit
from runtime.request import CONSTRAINT_FAILED, FinishReason, Output, Request, TokenLogprobs
from runtime.server.errors import ApiError, invalid, server_error, timed_out, unavailable

if TYPE_CHECKING:
    from runtime.engine import AsyncEngine


@dataclass(frozen=True)
class ScoredToken:
    """A token of the answer with its log probabilities."""

    token: int
    logprobs: TokenLogprobs


@dataclass
class Step:
    """What a choice gained at once; `finish` with the last of it. `tokens`: all of them, markers and ends too."""

    choice: Choice
    tokens: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: str | None = None


@dataclass(frozen=True)
class StopRules:
    """Stop strings of a request; `one_call`: end after the first complete tool call."""

    stops: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    one_call: bool = False


class Choice:
    """One of a response's choices."""

    def __init__(self, index: int, request: Request, parser: Parser, rules: StopRules) -> None:
        """Begin before the first token."""
        self.index, self.request = index, request
        self.tokens = self.cached_tokens = 0
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.has_calls = False
        self._parser, self._rules = parser, rules
        self._finder = Finder(rules.stops)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking so far."""
        return self._parser.reasoning_tokens

    def take(self, output: Output) -> Step:
        """Take what the engine says; ApiError when the request failed. After `finish` nothing more may come."""
        step = Step(self, prompt_logprobs=output.prompt_logprobs)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        for idx, token in enumerate(output.tokens):
            self.tokens += 1
            step.tokens.append(token)
            is_end = output.stop_id is not None and idx == len(output.tokens) - 1
            if is_end and not (self._rules.include and token in self.request.stopping.stop_ids):
                break
            self._feed(token, step)
            if output.logprobs and self._parser.in_content:
                step.scored.append(ScoredToken(token, output.logprobs[idx]))
            if self.finish is not None:
                return step
        if output.finish is not None:
            self._end(output, step)
        return step

    def _feed(self, token: int, step: Step) -> None:
        for each in self._parser.feed(token):
            self._add(each, step)
            if self.finish is not None:
                break
            if isinstance(each, CallEnd) and self._rules.one_call:
                self._stop(step)
                break

    def _add(self, each: Event, step: Step) -> None:
        if not isinstance(each, Content):
            self.has_calls = self.has_calls or not isinstance(each, Reasoning)
            rest = self._finder.flush()  # no stop string reaches over a block
            step.events += [Content(rest), each] if rest else [each]
            return
        found = self._finder.push(each.text, armed=self.tokens >= self._rules.min_tokens)
        text = found.before + (found.needle if self._rules.include else "") if isinstance(found, Hit) else found
        if text:
            step.events.append(Content(text))
        if isinstance(found, Hit):
            self.stop_reason = found.needle
            self._stop(step)

    def _stop(self, step: Step) -> None:
        self.finish = step.finish = self._named(FinishReason.STOP)

    def _named(self, reason: FinishReason) -> str:
        return "tool_calls" if reason is FinishReason.STOP and self.has_calls else reason.value

    def _end(self, output: Output, step: Step) -> None:
        match output.finish:
            case FinishReason.ERROR if output.error == CONSTRAINT_FAILED:
                raise invalid(
                    "the form cannot be followed to its end: it is too large, or leads where nothing fits",
                    code="invalid_schema",
                )
            case FinishReason.ERROR:
                raise server_error(output.error or "the engine failed on this request")
            case FinishReason.TIMEOUT:
                raise timed_out("the request took longer than the server allows")
            case _:
                pass
        for each in self._parser.finish():
            if self.finish is None:
                self._add(each, step)
        if self.finish is not None:
            return
        rest = self._finder.flush()
        if rest:
            step.events.append(Content(rest))
        assert output.finish is not None
        self.finish = step.finish = self._named(output.finish)
        if output.stop_id is not None and output.stop_id not in self.request.stopping.end_ids:
            self.stop_reason = output.stop_id


class Run:
    """All choices of a response, on the engine from construction on; close it, however it ends."""

    def __init__(
        self,
        engine: AsyncEngine,
        choices: list[Choice],
        *,
        first_token_s: float,
        on_tokens: Callable[[float, int], None] = lambda _seconds, _tokens: None,
    ) -> None:
        """Put all choices on the engine; RefusedError when it does not take one, and none runs then."""
        self.choices = choices
        self._engine, self._first_token_s, self._on_tokens = engine, first_token_s, on_tokens
        self._streams = []
        engine.check_room(len(choices))
        try:
            for choice in choices:
                self._streams.append(engine.generate(choice.request))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what still runs."""
        for stream in self._streams:
            stream.close()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield steps of all choices as they come, until each has finished; ApiError when one failed."""
        try:
            if len(self.choices) == 1:
                async for step in self._steps_of(0):
                    yield step
            else:
                async for step in self._merged():
                    yield step
        finally:
            self.close()

    async def _steps_of(self, idx: int) -> AsyncGenerator[Step, None]:
        choice, stream = self.choices[idx], self._streams[idx]
        last = time.monotonic()
        try:
            async with asyncio.timeout(self._first_token_s):
                output = await anext(stream)
        except TimeoutError:
            raise timed_out(f"no token came within {self._first_token_s:g} s") from None
        while True:
            if output.tokens:
                now = time.monotonic()
                if choice.tokens:
                    self._on_tokens(now - last, len(output.tokens))
                last = now
            self._refuse_loss(output)
            step = choice.take(output)
            if choice.finish is not None and output.finish is None:
                self._engine.finish(choice.request.id)
            yield step
            if choice.finish is not None:
                return
            output = await anext(stream)

    def _refuse_loss(self, output: Output) -> None:
        """An end that nobody asked for, on an engine that takes no more work: the server stops, drained or dead."""
        if output.finish in (FinishReason.ABORT, FinishReason.ERROR) and not self._engine.is_ready:
            raise unavailable("the server stopped before this request was done")

    async def _merged(self) -> AsyncGenerator[Step, None]:
        queue: asyncio.Queue[Step | ApiError | Exception | None] = asyncio.Queue()

        async def pump(idx: int) -> None:
            try:
                async for step in self._steps_of(idx):
                    queue.put_nowait(step)
            except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
                queue.put_nowait(error)
            else:
                queue.put_nowait(None)

        tasks = [asyncio.ensure_future(pump(idx)) for idx in range(len(self.choices))]
        try:
            left = len(tasks)
            while left:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
