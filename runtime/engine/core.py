"""The engine's loop without threads: `step` admits, prefills a slice, decodes all ready rows, and says what came of it.

Continuous batching: rows join and leave between steps, a row keeps its slot while it runs. First tokens, cache hits and
resumed rows are all alike: a row with one token left to compute decodes, one with more of them prefills.

Refuses text, threads and devices: the server, `AsyncEngine` and a `Backend` have those. Not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from runtime.engine.admission import Admission, reachable_context
from runtime.engine.backend import Backend, Result, Row, Span, Want
from runtime.engine.kv_cache import KvCache, root_hash
from runtime.engine.listener import Listener, Silent, StepTimes
from runtime.engine.prefill import Plan, Prefill
from runtime.engine.roster import Roster, rank
from runtime.engine.sequence import Sequence
from runtime.engine.settings import EngineSettings
from runtime.engine.tokens import News, RowError, advance, collect_prompt_logprobs, prepare, tokens_left
from runtime.request import (
    FinishReason,
    Output,
    PromptTooLongError,
    QueueFullError,
    RefusedError,
    Request,
    Stats,
    UnavailableError,
)

log = logging.getLogger(__name__)


@dataclass
class _Done:
    """What one pass of the loop did; see `StepTimes`."""

    rows: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    stalled_rows: int = 0
    prefill: float = 0.0
    decode: float = 0.0


class EngineCore:
    """Runs requests on a backend. `error` is set once a step failed; nothing is taken then, or while `is_draining`."""

    def __init__(
        self,
        backend: Backend,
        settings: EngineSettings | None = None,
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`listener` hears of steps and ends; `clock` is that of deadlines."""
        self.backend, self.settings, self.clock = backend, settings or EngineSettings(), clock
        self.listener: Listener = listener or Silent()
        self.max_context_tokens = reachable_context(backend)
        self.cache = KvCache(backend.rows, backend.page_tokens, backend.windows, backend.pages, self.max_context_tokens)
        self.roster = Roster(backend.rows, self.cache, self.listener, clock)
        self.error: BaseException | None = None
        self.is_draining = False
        self.pause: Callable[[], None] = lambda: None  # before a slice: outputs may be taken, and requests be made
        self._seats = Admission(backend, self.cache, self.roster, reuses=self.settings.prefix_cache)
        self._prefill = Prefill(backend, self.cache, self.settings.stall_ms / 1e3, clock)
        self._arrivals = 0

    # requests come and go

    def check(self, request: Request) -> None:
        """Raise the `RefusedError` for which a request can't be taken, now or ever. Reads only: any thread may ask."""
        vocab = self.backend.vocab_size
        if self.error is not None:
            raise UnavailableError("the engine has failed")
        if self.is_draining:
            raise UnavailableError("the engine is shutting down")
        if not request.prompt or min(request.prompt) < 0 or max(request.prompt) >= vocab:
            raise RefusedError(f"a prompt needs one token or more, each from 0 to {vocab - 1}")
        if len(request.prompt) + min(request.stopping.max_tokens, 1) > self.max_context_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(request.prompt)} tokens; prompt and answer have {self.max_context_tokens} in all"
            )
        if any(token >= vocab for token, _ in request.sampling.logit_bias):
            raise RefusedError(f"logit_bias takes token ids from 0 to {vocab - 1}")

    def check_queue(self, present: int, coming: int = 1) -> None:
        """Raise QueueFullError if there are no places beside `present` requests, running and waiting. Reads only.

        More than there are places at all are refused for good.
        """
        rows, limit = self.backend.rows, self.settings.max_waiting
        if coming > rows + limit:
            raise RefusedError(f"{coming} answers are asked for; at most {rows + limit} can run or wait at once")
        if present + coming > rows + limit:
            retry_after = max(1.0, self.roster.service_seconds / rows)
            raise QueueFullError(f"{max(0, present - rows)} requests wait already, the limit is {limit}", retry_after)

    def submit(self, request: Request) -> None:
        """Queue a request; RefusedError if it can't be taken, ValueError if its id is in use."""
        self.check(request)
        if request.group is None or request.group not in self.roster.groups:
            self.check_queue(len(self.roster.by_id))
        if request.id in self.roster.by_id:
            raise ValueError(f"request {request.id!r} is running already")
        root = root_hash(self.settings.model, self.settings.tokenizer, request.salt)
        pages, vocab = self.backend.page_tokens, self.backend.vocab_size
        self.roster.enter(Sequence(request, self._arrivals, root, pages, vocab, arrival_time=self.clock()))
        self._arrivals += 1

    def abort(self, request_id: str) -> None:
        """End a request with ABORT, at whatever stage; unknown ids are ignored, since it may just have ended."""
        self._end(request_id, FinishReason.ABORT)

    def finish(self, request_id: str) -> None:
        """End a request with STOP: a stop string was seen; unknown ids are ignored."""
        self._end(request_id, FinishReason.STOP)

    def _end(self, request_id: str, finish: FinishReason) -> None:
        sequence = self.roster.by_id.get(request_id)
        if sequence is not None:
            self.roster.end(sequence, finish)

    def abort_waiting(self) -> None:
        """End with ABORT what waits, cannot begin now and has not begun, nor any other of its group."""
        self._seats.admit()
        begun = {each.request.group for each in self.roster.by_id.values() if each.admitted_time is not None}
        for sequence in list(self.roster.waiting):
            if sequence.admitted_time is None and (
                sequence.request.group is None or sequence.request.group not in begun
            ):
                self.roster.end(sequence, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End everything with ABORT."""
        for request_id in list(self.roster.by_id):
            self.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks; running requests go on."""
        self.cache.clear()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something or has something to say."""
        return bool(self.roster.by_id or self.roster.outputs)

    def stats(self) -> Stats:
        """Gauges and counters now. Reads only: any thread may ask."""
        pools, counts = self.cache.pools, self.roster.counts
        return Stats(
            running=len(self.roster.running),
            waiting=len(self.roster.waiting),
            rows=self.backend.rows,
            blocks_total=sum(pool.total for pool in pools),
            blocks_free=sum(pool.free for pool in pools),
            blocks_cached=sum(pool.idle for pool in pools),
            kv_usage=max(1 - pool.available / pool.total for pool in pools),
            preemptions=counts.preemptions,
            corrupted=counts.corrupted,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            steps=counts.steps,
            finished=dict(counts.finished),
        )

    # the loop

    def step(self) -> list[Output]:
        """One pass; what happened since the last one. Never raises: a failure ends every request and sets `error`."""
        if self.roster.by_id and self.error is None:
            try:
                self._pass()
            except BaseException as error:  # extension modules panic with what is no Exception
                log.exception("a step failed; the engine takes no more requests")
                self.fail(error)
        return self.take_outputs()

    def take_outputs(self) -> list[Output]:
        """What happened since outputs were taken last."""
        outputs, self.roster.outputs = self.roster.outputs, []
        return outputs

    def fail(self, error: BaseException) -> None:
        """Take nothing more, and end every request with ERROR."""
        self.error = error
        for request_id, sequence in list(self.roster.by_id.items()):
            message = "the engine failed while it worked on this request"
            try:
                self.roster.end(sequence, FinishReason.ERROR, message)
            except Exception:  # whatever failed may have left things in disorder; nobody may be left waiting
                log.exception("request %s could not be cleared away", request_id)
                self.roster.by_id.pop(request_id, None)

    def _pass(self) -> None:
        begin, done = self.clock(), _Done()
        for sequence in self.roster.overdue(begin):
            self.roster.end(sequence, FinishReason.TIMEOUT)
        self._seats.admit()
        if self.backend.decodes_ahead:  # what is made already is handed over before a slice takes the device
            self._decode(done)
            self.pause()
            self._seats.admit()  # who came meanwhile shares the slice
            self._prefill_slice(done)
        else:
            self._prefill_slice(done)
            self._decode(done)
        if done.rows or done.prefill:
            self.roster.counts.steps += done.steps
            times = StepTimes(**vars(done), total=self.clock() - begin)
            self.roster.tell(partial(self.listener.on_step, times))

    # prefill

    def _prefill_slice(self, done: _Done) -> None:
        stalled = sum(sequence.left == 1 for sequence in self.roster.running.values())
        if not self._prefill.is_cut:
            plan = self._plan(stalls=stalled > 0)
            if not plan.spans:
                return
            self._prefill.begin(plan)
        done.stalled_rows = stalled
        done.prefill, plan, results = self._prefill.run(stalls=stalled > 0)
        if plan is None:
            return
        done.prefill_tokens = plan.tokens
        for sequence, span, result in zip(plan.sequences, plan.spans, results, strict=True):
            sequence.computed = span.end
            try:
                if span.want is Want.ALL_LOGITS:
                    assert result.logits is not None
                    collect_prompt_logprobs(sequence, span.begin, result.logits)
                    result = replace(result, logits=result.logits[-1])  # noqa: PLW2901
                if span.end == len(sequence.tokens):
                    self._advance(sequence, result)
                else:
                    self._settle(sequence)
            except RowError as error:
                self._fail_row(sequence, error)

    def _plan(self, *, stalls: bool) -> Plan:
        """The next chunk; its spans are empty if no row has anything to prefill, or none has pages for it."""
        plan, budget = Plan(), self._prefill.token_budget(stalls=stalls)
        computing: set[bytes] = set()
        for sequence in sorted(self.roster.running.values(), key=rank):
            if budget <= 0:
                break
            if sequence.slot is None:
                continue  # sent back just now
            if not sequence.is_started and sequence.left > 1:
                self._seats.attach(sequence, sequence.slot)  # more of its blocks may be cached by now
            first = sequence.computed // self.backend.page_tokens
            if sequence.left <= 1 or self._is_computed(sequence, first, computing):
                continue
            if not self._seats.make_room(sequence, sequence.computed + 1):
                continue
            end = self._prefill.reach(sequence, budget)
            self.cache.grow(sequence.slot, end)
            span = self._span(sequence, end)
            if span is not None:
                plan.sequences.append(sequence)
                plan.spans.append(span)
                plan.stays.append(sequence.admissions)
                computing |= {sequence.block(idx) for idx in range(first, end // self.backend.page_tokens)}
                budget -= len(span.tokens)
        return plan

    def _is_computed(self, sequence: Sequence, index: int, computing: set[bytes]) -> bool:
        """Whether another row of the chunk computes this block, so that it can be taken over afterwards."""
        could_be_taken = (index + 1) * self.backend.page_tokens < len(sequence.tokens)
        return could_be_taken and self.settings.prefix_cache and sequence.block(index) in computing

    def _span(self, sequence: Sequence, end: int) -> Span | None:
        """The row's tokens up to `end`, asking for what they take; None if the request failed."""
        want = Want.NOTHING
        try:
            if end == len(sequence.tokens):
                want = prepare(sequence)
        except RowError as error:
            self._fail_row(sequence, error)
            return None
        self._start(sequence)
        return self._prefill.span(sequence, end, want)

    def _start(self, sequence: Sequence) -> None:
        """Something is about to be computed: from the first time on it is known what the cache saved."""
        sequence.is_started = True
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.roster.counts.prefix_queries += len(sequence.request.prompt)
            self.roster.counts.prefix_hits += sequence.computed

    # decode

    def _decode(self, done: _Done) -> None:
        wants = self._ready()
        steps = self._chain(wants)
        sequences: list[Sequence] = []
        rows: list[Row] = []
        for sequence, want in wants.items():
            # better rows come first, so a row that is sent back for one of them is not in the batch yet
            left = tokens_left(sequence, self.max_context_tokens)
            if sequence.slot is None or not self._seats.make_room(sequence, sequence.computed + min(steps, left)):
                continue
            self._start(sequence)
            tables, changed = self.cache.views(sequence.slot)
            sampling, token = sequence.request.sampling, sequence.tokens[-1]
            sequences.append(sequence)
            rows.append(
                Row(
                    sequence.slot, token, sequence.computed, sampling, want, tables, changed,
                    stay=(sequence.arrived, sequence.admissions), end_position=sequence.computed + left,
                    stops=sequence.stops,
                )
            )  # fmt: skip
        if not rows:
            return
        begin = self.clock()
        results = self.backend.decode(rows, steps)
        done.decode, done.rows = self.clock() - begin, len(rows)
        done.steps = max(1, *(len(result.tokens) for result in results))
        for sequence, result in zip(sequences, results, strict=True):
            sequence.computed += 1
            try:
                self._advance(sequence, result)
            except RowError as error:
                self._fail_row(sequence, error)

    def _ready(self) -> dict[Sequence, Want]:
        """Rows with one token to compute, best first, and what each wants."""
        wants: dict[Sequence, Want] = {}
        for sequence in sorted(self.roster.running.values(), key=rank):
            if sequence.left == 1:
                try:
                    if sequence.request.stopping.max_tokens == 0:
                        self.roster.report(sequence, News(finish=FinishReason.LENGTH))
                    else:
                        wants[sequence] = prepare(sequence)
                except RowError as error:
                    self._fail_row(sequence, error)
        return wants

    def _chain(self, wants: dict[Sequence, Want]) -> int:
        """How many steps may run before the host has to look: 1 while anyone prefills or needs its work.

        Where tokens come only once all steps are made, also while anyone waits, and no more than every row takes.
        """
        is_ahead, most = self.backend.decodes_ahead, self.backend.max_steps
        steps = most if is_ahead else min(most, self.settings.chain_steps)
        if steps == 1 or (self.roster.waiting and not is_ahead) or len(wants) < len(self.roster.running):
            return 1
        if any(want is not Want.TOKEN or sequence.request.constraint is not None for sequence, want in wants.items()):
            return 1
        lefts = {sequence: tokens_left(sequence, self.max_context_tokens) for sequence in wants}
        if not is_ahead:
            steps = min([steps, *lefts.values()])
        ends = {self.roster.slot_of(each): each.computed + min(steps, left) for each, left in lefts.items()}
        return steps if all(self.cache.grow(slot, end) for slot, end in ends.items()) else 1

    # what came of it

    def _advance(self, sequence: Sequence, result: Result) -> None:
        """Take in what follows the last computed position."""
        if sequence.request.stopping.max_tokens == 0:
            self.roster.report(sequence, News(finish=FinishReason.LENGTH))
            return
        news = advance(sequence, result, self.max_context_tokens)
        sequence.computed += len(news.tokens) - 1
        self._settle(sequence)
        self.roster.report(sequence, news)

    def _settle(self, sequence: Sequence) -> None:
        """Publish full blocks, then give back what the window has passed."""
        slot = self.roster.slot_of(sequence)
        if self.settings.prefix_cache:
            self.cache.publish(slot, sequence)
        self.cache.slide(slot, sequence.computed)

    def _fail_row(self, sequence: Sequence, error: RowError) -> None:
        """End one request with ERROR; blocks that may hold what corrupted it leave the cache."""
        if error.corrupted:
            log.error("request %s: %s", sequence.request.id, error)
            self.roster.counts.corrupted += 1
            self.cache.forget(self.roster.slot_of(sequence), sequence)
        self.roster.end(sequence, FinishReason.ERROR, str(error))
