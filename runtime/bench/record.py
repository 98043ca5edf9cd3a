"""What a run's answers amount to: one flat record, in milliseconds and tokens a second.

Owns what each figure means. Names as `vllm bench serve` writes them: `itl` is the gap between two chunks with tokens,
whatever their number; `tpot` the mean time a token of one request after its first; `e2el` from sending to the end.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from runtime.bench.client import Answer
from runtime.bench.drive import Punctuality
from runtime.bench.load import Load

Record = dict[str, Any]

PERCENTILES = (90, 99)


def record_of(load: Load, answers: Sequence[Answer], punctual: Punctuality, *, detailed: bool = False) -> Record:
    """Return a run's record; figures of requests are those of answers without an error."""
    whole = [answer for answer in answers if not answer.error]
    seconds = max((each.ended for each in answers), default=0.0) - min((each.began for each in answers), default=0.0)
    read, written = (sum(_used(each, name) for each in whole) for name in ("prompt_tokens", "completion_tokens"))
    tokens = sum(each.tokens for each in whole)
    chunks = sum(len(each.arrivals) for each in whole)
    record: Record = {
        "what": "runtime bench",
        "label": load.name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "load": load.model_dump(mode="json"),
        "client": _client(punctual),
        "duration": seconds,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "errors": dict(Counter(each.error for each in answers if each.error)),
        "finish_reasons": dict(Counter(str(each.finish) for each in whole)),
        "total_input_tokens": read,
        "total_output_tokens": tokens,
        "cached_tokens": sum(each.cached_tokens for each in whole),
        "reported_output_tokens": written,
        "miscounted": sum(bool(each.usage) and _used(each, "completion_tokens") != each.tokens for each in whole),
        "tokens_per_chunk": tokens / chunks if chunks else 0.0,
        "request_throughput": len(whole) / seconds if seconds else 0.0,
        "output_throughput": tokens / seconds if seconds else 0.0,
        "total_token_throughput": (read + tokens) / seconds if seconds else 0.0,
    }
    firsts = [each for each in whole if each.arrivals]
    paces = [pace for each in firsts if (pace := _pace(each))]
    record |= spread("stream_throughput", paces, "")
    record |= spread("ttft", (each.arrivals[0][0] - each.began for each in firsts))
    record |= spread("tpot", (1 / pace for pace in paces))
    record |= spread("itl", (gap for each in whole for gap in gaps(each)))
    record |= spread("e2el", (each.ended - each.began for each in whole))
    if load.max_concurrency is not None and load.request_rate is not None:
        record |= spread("client_queue_time", (each.began - each.due for each in whole))
    return record | (_details(answers) if detailed else {})


def gaps(answer: Answer, begin: float = -math.inf, end: float = math.inf) -> list[float]:
    """Seconds between two chunks with tokens, of those chunks that came within a time."""
    times = [moment for moment, _ in answer.arrivals if begin <= moment <= end]
    return [after - before for before, after in pairwise(times)]


def together(answers: Sequence[Answer]) -> tuple[float, float]:
    """When all of some streams were running: from the last one's first chunk to the first one's last."""
    return max(each.arrivals[0][0] for each in answers), min(each.arrivals[-1][0] for each in answers)


def throughput(answers: Iterable[Answer], begin: float, end: float) -> float:
    """Tokens a second that came after `begin`, up to `end`."""
    return sum(n for each in answers for moment, n in each.arrivals if begin < moment <= end) / (end - begin)


def spread(name: str, seconds: Iterable[float], unit: str = "_ms") -> dict[str, float | None]:
    """Mean, median and percentiles under their names; in milliseconds, or as they are without a unit."""
    values = np.fromiter(seconds, dtype=np.float64) * (1e3 if unit else 1.0)
    names = ("mean", "median", *(f"p{each}" for each in PERCENTILES))
    if not len(values):
        return {f"{each}_{name}{unit}": None for each in names}
    found = (values.mean(), np.median(values), *np.percentile(values, PERCENTILES))
    return {f"{each}_{name}{unit}": float(value) for each, value in zip(names, found, strict=True)}


def _pace(answer: Answer) -> float | None:
    """Tokens a second after the first chunk."""
    (begin, first), (end, _) = answer.arrivals[0], answer.arrivals[-1]
    return (answer.tokens - first) / (end - begin) if end > begin else None


def _used(answer: Answer, name: str) -> int:
    return int(answer.usage.get(name) or 0)


def _client(punctual: Punctuality) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "cpu_share": punctual.cpu_share,
        **spread("late", punctual.late),
    }


def _details(answers: Sequence[Answer]) -> Record:
    """Every request by itself, in the order of their ends; times in seconds."""
    first = min((each.began for each in answers), default=0.0)
    return {
        "start_times": [each.began - first for each in answers],
        "input_lens": [_used(each, "prompt_tokens") for each in answers],
        "output_lens": [each.tokens for each in answers],
        "cached_lens": [each.cached_tokens for each in answers],
        "ttfts": [each.arrivals[0][0] - each.began if each.arrivals else None for each in answers],
        "itls": [gaps(each) for each in answers],
        "latencies": [each.ended - each.began for each in answers],
        "request_errors": [each.error for each in answers],
    }
