"""What serving keeps of the kernel's speed: the figures of a served model, each against its bar.

    python tests/bench/serve_figures.py --out DIR [--parts streams,ttft,itl,closed,shapes]
        [--measured ROWS=RECORD.json ...] [--demo] [--model CONFIG.json | --url URL] [--limit SECONDS]
        [-- FLAGS OF runtime serve]

Starts `runtime serve` on the geometry of North Mini Code with weights made up by the server (`--load-format dummy`, as
the default flags have it), or on the demo model with sizes for a CPU, or takes the server at URL, and puts on it what
`runtime bench` can:

    streams  1, 2, 4 and 8 streams: tokens a second while all of them run, against `runtime measure` at as many rows
    ttft     first token of a short and of a long prompt on an idle server
    itl      gaps of seven running streams while short prompts arrive, then long ones: step, stall budget and 10%
    closed   eight clients, each asking again as soon as it was answered: output tokens a second in all
    shapes   other loads, without bars: shared beginnings, agents' conversations, lengths that differ, at a rate

Each part writes DIR/serve-PART.json as soon as it has ended: figures, bars, and the records behind them. A part that
fails is named, and the next one begins. `--measured` are records of `runtime measure`, one a number of rows (it may be
left out where the record says its bucket), by the fastest of their variants or the one named; without any, steps are
those that the server measured at its start. Where none has the rows, there is no bar. Exit code 1 when a figure misses
its bar or a part has failed.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import aiohttp
import numpy as np
from served import Server, machine, serving, write_geometry

from megakernel.assets import asset
from megakernel.config import ConfigError, load_json, pretty_json
from megakernel.measurement import Record as Measured
from runtime.bench.client import Answer, Client, connected
from runtime.bench.load import Load
from runtime.bench.record import Record, gaps, throughput, together
from runtime.bench.run import run
from runtime.bench.scrape import samples

NORTH = "configs/models/CohereLabs--North-Mini-Code-1.0.json"
DUMMY = ("--load-format", "dummy", "--max-num-seqs", "8", "--max-model-len", "16384")

KEPT = 0.92
"""Share of `runtime measure` that streams keep."""
TTFT_MS = 57.0
"""First token of a prompt of 1024 tokens on an idle H200."""
STALL_MS = 25.0
"""The engine's stall budget, `EngineSettings.stall_ms`."""
SLACK = 1.1
SLICES = "counterpoint:prefill_slice_seconds"
CLOSED_TOKENS_PER_S = 1.2 * 759
"""vLLM 0.26.0 decodes 759 tok/s at batch 8, 8K, on an H200."""


@dataclass(frozen=True)
class Sizes:
    """Tokens and counts; streams run around `context` tokens, where `runtime measure` times its steps."""

    short: int = 1024
    long: int = 8192
    context: int = 8192
    streams: tuple[int, ...] = (1, 2, 4, 8)
    stream_tokens: int = 512
    ttft_prompts: tuple[int, int] = (20, 5)
    beside: int = 7
    beside_tokens: int = 1024
    arrivals: tuple[int, int] = (10, 5)
    arrival_rates: tuple[float, float] = (2.5, 1.0)
    settle_s: float = 2.0
    closed_streams: int = 8
    closed_prompts: int = 32
    closed_tokens: int = 512
    shapes: tuple[int, int] = (32, 8)
    shape_tokens: int = 128
    shape_rate: float = 4.0


DEMO = Sizes(
    short=48, long=192, context=48, streams=(1, 2), stream_tokens=64, ttft_prompts=(3, 2), beside=2, beside_tokens=160,
    arrivals=(3, 2), arrival_rates=(3.0, 3.0), settle_s=0.3, closed_streams=2, closed_prompts=4, closed_tokens=12,
    shapes=(6, 2), shape_tokens=8, shape_rate=8.0,
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A number, and what it must not fall below (`at_least`) or rise above (`at_most`), where there is a bar."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    beside: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most


@dataclass
class Bench:
    """A server under load; `records` of the present part."""

    http: aiohttp.ClientSession
    url: str
    sizes: Sizes
    step_ms: dict[int, float]
    records: list[Record] = field(default_factory=list)

    async def run(self, label: str, **options: Any) -> tuple[Record, list[Answer]]:
        """Run a load of random prompts, all of which must end well."""
        load = Load.model_validate({"label": label, "temperature": 1.0, "extra_body": {"seed": 1}, **options})
        record, answers = await run(self.http, self.url, load)
        self.records.append(record)
        assert not record["failed"], f"{label}: {record['errors']}"
        assert not record["miscounted"], f"{label}: usage and tokens differ in {record['miscounted']} answers"
        wanted = load.num_prompts * load.random_output_len
        assert load.dataset_name != "random" or load.random_range_ratio or record["total_output_tokens"] == wanted, (
            f"{label}: answers were cut short, the server's window is too small"
        )
        return record, answers

    async def metrics(self) -> dict[str, float]:
        """The server's, now."""
        return samples((await Client(self.http, self.url).get("/metrics"))[1].decode())

    def step(self, rows: int) -> float | None:
        """Milliseconds of a measured step of the smallest bucket with so many rows."""
        fitting = [each for each in self.step_ms if each >= rows]
        return self.step_ms[min(fitting)] if fitting else None


async def streams(bench: Bench) -> list[Figure]:
    """Streams that all run at once, none of which ends or begins meanwhile."""
    figures, sizes = [], bench.sizes
    for count in sizes.streams:
        lengths = {
            "random_input_len": sizes.context - sizes.stream_tokens // 2,
            "random_output_len": sizes.stream_tokens,
        }
        _, answers = await bench.run(f"streams-{count}", num_prompts=count, max_concurrency=count, **lengths)
        begin, end = together(answers)
        assert end > begin, f"{count} streams never ran all at once; give them more tokens"
        found, step = throughput(answers, begin, end), bench.step_ms.get(count)
        whole = None if step is None else 1e3 * count / step
        beside = {"seconds": end - begin, "measured_tokens_per_s": whole, "kept": whole and found / whole}
        figures.append(Figure(f"{count} streams", found, "tok/s", whole and KEPT * whole, beside=beside))
    return figures


async def ttft(bench: Bench) -> list[Figure]:
    """One prompt at a time; none was seen before."""
    figures, sizes = [], bench.sizes
    for length, count in zip((sizes.short, sizes.long), sizes.ttft_prompts, strict=True):
        options = {"num_prompts": count, "max_concurrency": 1, "num_warmups": 2, "random_output_len": 2}
        before = await bench.metrics()
        record, _ = await bench.run(f"ttft-{length}", random_input_len=length, **options)
        after = await bench.metrics()
        assert not record["cached_tokens"], "prompts were found in the cache"
        bar = TTFT_MS if length == 1024 else None
        beside = {name: record[name] for name in ("p90_ttft_ms", "p99_ttft_ms")}
        times = [
            after[f"vllm:request_prefill_time_seconds_{part}"]
            - before.get(f"vllm:request_prefill_time_seconds_{part}", 0)
            for part in ("sum", "count")
        ]
        beside["from_admission_ms"] = 1e3 * times[0] / times[1]
        figures.append(Figure(f"first token of {length}, median", record["median_ttft_ms"], "ms", None, bar, beside))
    return figures


async def itl(bench: Bench) -> list[Figure]:
    """Streams run, prompts arrive; only gaps while some prompt was on its way to its first token count."""
    figures, sizes = [], bench.sizes
    for length, count, rate in zip((sizes.short, sizes.long), sizes.arrivals, sizes.arrival_rates, strict=True):
        running = {"random_input_len": sizes.short, "random_output_len": sizes.beside_tokens}
        arriving = {"random_input_len": length, "random_output_len": 2, "request_rate": rate, "max_concurrency": 1}
        name = f"beside-{length}"

        async def later(name: str = name, options: dict[str, Any] = arriving, count: int = count) -> list[Answer]:
            await asyncio.sleep(sizes.settle_s)
            return (await bench.run(f"{name}-arrivals", num_prompts=count, **options))[1]

        before = await bench.metrics()
        streams = asyncio.ensure_future(bench.run(name, num_prompts=sizes.beside, **running))
        arrived = await later()
        _, answers = await streams
        begin, end = together(answers)
        first = max(begin, min(each.began for each in arrived))
        last = min(end, max(each.arrivals[0][0] for each in arrived))
        covered = sum(first <= each.began and each.arrivals[0][0] <= last for each in arrived)
        assert covered, f"no prompt of {length} arrived while all streams ran; give them more tokens"
        calm = [gap for each in answers for gap in gaps(each, begin, first)]
        found = [gap for each in answers for gap in gaps(each, first, last)]
        calm_ms, step = (1e3 * median(calm) if calm else None), bench.step(sizes.beside)
        beside = {
            "median_ms": 1e3 * median(found), "max_ms": 1e3 * max(found), "gaps": len(found), "arrivals": covered,
            "calm_median_ms": calm_ms, "measured_step_ms": step, "stall_ms": STALL_MS,
            "tokens_per_chunk": bench.records[-1]["tokens_per_chunk"],
            "slices": {
                name: value - before.get(name, 0) for name, value in (await bench.metrics()).items() if SLICES in name
            },
        }  # fmt: skip
        bar = None if step is None else SLACK * (step + STALL_MS)
        p99 = 1e3 * float(np.percentile(found, 99))
        figures.append(Figure(f"gap while prompts of {length} arrive, p99", p99, "ms", None, bar, beside))
    return figures


async def closed(bench: Bench) -> list[Figure]:
    """Clients that ask again as soon as they were answered, from the first request to the last token."""
    sizes = bench.sizes
    options = {"random_input_len": sizes.short, "random_output_len": sizes.closed_tokens, "num_warmups": 1}
    count = sizes.closed_streams
    record, _ = await bench.run(f"closed-{count}", num_prompts=sizes.closed_prompts, max_concurrency=count, **options)
    bar = CLOSED_TOKENS_PER_S if sizes.short == 1024 else None
    beside = {name: record[name] for name in ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")}
    return [Figure(f"{count} closed-loop streams", record["output_throughput"], "tok/s", bar, beside=beside)]


async def shapes(bench: Bench) -> list[Figure]:
    """Loads that no bar is about, one after the other."""
    sizes, figures = bench.sizes, []
    (prompts, clients), tokens = sizes.shapes, sizes.shape_tokens
    loads: dict[str, dict[str, Any]] = {
        "shared-prefix": {
            "dataset_name": "prefix_repetition", "num_prompts": prompts, "max_concurrency": clients,
            "prefix_repetition_prefix_len": sizes.short, "prefix_repetition_suffix_len": max(sizes.short // 8, 1),
            "prefix_repetition_num_prefixes": 4, "prefix_repetition_output_len": tokens,
        },
        "agents": {
            "dataset_name": "multi_turn", "num_prompts": clients, "max_concurrency": clients,
            "multi_turn_system_len": sizes.short, "multi_turn_tool_len": max(sizes.short // 4, 1),
            "multi_turn_input_len": max(sizes.short // 16, 1), "multi_turn_output_len": tokens,
            "multi_turn_num_turns": 4 if sizes.short >= 1024 else 2,
        },
        "ragged": {
            "num_prompts": prompts, "request_rate": sizes.shape_rate, "random_range_ratio": 0.9,
            "random_input_len": sizes.short, "random_output_len": tokens,
        },
    }  # fmt: skip
    for name, options in loads.items():
        record, _ = await bench.run(name, **options)
        shown = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "cached_tokens", "total_input_tokens")
        beside = {each: record[each] for each in shown}
        figures.append(Figure(f"{name}, output", record["output_throughput"], "tok/s", beside=beside))
    return figures


PARTS: dict[str, Callable[[Bench], Awaitable[list[Figure]]]] = {
    "streams": streams, "ttft": ttft, "itl": itl, "closed": closed, "shapes": shapes,
}  # fmt: skip


def measured_steps(given: list[str]) -> dict[int, float]:
    """Milliseconds of a step by its rows, from what --measured names: the variant, or the fastest of a record."""
    found: dict[int, float] = {}
    for each in given:
        rows, _, rest = each.rpartition("=")
        path, _, variant = rest.partition(":")
        record = load_json(path, Measured)
        if not rows and record.bucket is None:
            raise ConfigError(f"{path}: the record does not say its bucket; needed: ROWS={path}")
        times = {sample.name: sample.median_ms for sample in record.samples}
        if variant and variant not in times:
            raise ConfigError(f"{path}: no variant is called {variant!r}; there are {', '.join(times)}")
        count = int(rows) if rows or record.bucket is None else record.bucket.rows
        found[count] = times[variant] if variant else min(times.values())
    return found


async def own_steps(http: aiohttp.ClientSession, url: str) -> dict[int, float]:
    """Milliseconds of a step by rows, as a server on a card measured them when it started."""
    _, body = await Client(http, url).get("/server_info")
    card = json.loads(body).get("card") or {}
    return {bucket["rows"]: bucket["measured_ns"] / 1e6 for bucket in card.get("buckets", ())}


async def measure(server: Server, chosen: argparse.Namespace) -> bool:
    """Run the parts that were chosen; whether all of them held."""
    async with connected() as http:
        start_s = await server.ready(Client(http, server.url), chosen.limit)
        print(f"ready after {start_s:.1f} s", flush=True)
        step_ms = chosen.step_ms or await own_steps(http, server.url)
        bench = Bench(http, server.url, DEMO if chosen.demo else Sizes(), step_ms)
        good = True
        for name in chosen.parts:
            bench.records, begin = [], time.monotonic()
            figures, failure = [], None
            try:
                figures = await asyncio.wait_for(PARTS[name](bench), chosen.limit)
            except Exception as error:  # noqa: BLE001 - the other parts still have something to say
                failure = "".join(traceback.format_exception_only(error)).strip()
            record = {
                "what": f"serve figures: {name}", "machine": machine(),
                "serve": chosen.serve, "start_s": start_s, "seconds": time.monotonic() - begin, "failure": failure,
                "figures": [
                    {"name": each.name, "value": each.value, "unit": each.unit, "at_least": each.at_least,
                     "at_most": each.at_most, "holds": each.holds, **each.beside}
                    for each in figures
                ],
                "runs": bench.records,
            }  # fmt: skip
            (chosen.out / f"serve-{name}.json").write_text(pretty_json(record), encoding="utf-8")
            report(name, figures, failure, record["seconds"])
            good = good and failure is None and all(each.holds is not False for each in figures)
    return good


def report(part: str, figures: list[Figure], failure: str | None, seconds: float) -> None:
    """One line a figure."""
    for each in figures:
        bar = each.at_least if each.at_least is not None else each.at_most
        verdict = {None: "", True: "holds", False: "MISSED"}[each.holds]
        wanted = "" if bar is None else f"{'>=' if each.at_least is not None else '<='} {bar:.1f}"
        print(f"{each.name:45s} {each.value:10.2f} {each.unit:6s} {wanted:12s} {verdict}", flush=True)
    if failure:
        print(f"{part} FAILED: {failure}")
    print(f"  {part}: {seconds:.1f} s", flush=True)


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, required=True, metavar="DIR")
    options.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), metavar="PART,...")
    options.add_argument("--measured", nargs="+", default=[], metavar="[ROWS=]RECORD.json[:VARIANT]")
    options.add_argument("--demo", action="store_true", help="the demo model, sizes for a CPU, no bars")
    options.add_argument("--model", type=Path, default=asset(NORTH), metavar="CONFIG.json")
    options.add_argument("--url", help="a server that runs already")
    options.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for the start, and each part")
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    chosen = options.parse_args(own[:cut])
    try:
        chosen.step_ms = measured_steps(chosen.measured)
    except (ConfigError, ValueError) as error:
        options.error(str(error))
    unknown = set(chosen.parts) - set(PARTS)
    if unknown:
        options.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    chosen.serve = own[cut + 1 :] or ([] if chosen.demo or chosen.url else list(DUMMY))
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = list(chosen.serve)
        if not chosen.demo and not chosen.url:
            write_geometry(chosen.model, Path(scratch) / "model")
            arguments = [f"{scratch}/model", *arguments]
        with serving(arguments, chosen.out / "server.log", chosen.url) as server:
            good = asyncio.run(measure(server, chosen))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
