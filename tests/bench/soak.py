"""Minutes of a mixed load, and afterwards whether anything leaked, stuck, or came out other than alone.

    python tests/bench/soak.py --out FILE [--seconds 420] [--clients 12] [--preempts]
        [--model CONFIG.json | --url URL [--process ID]] [-- FLAGS OF runtime serve]

Starts `runtime serve`, on the demo model or with a model's geometry (see serve_figures.py), or takes the server at URL,
whose memory is that of process ID. First every case runs alone; then clients come, ask, leave in the middle or go on,
prompts short and long, greedy, seeded and held to a form. Checked:

    every stream ended with a reason, or its client left        no answer differs from the one alone (soak_cases.py)
    gauges of /metrics are at zero again, no block in use       /health and /ready say yes, the process exits 0
    memory of the server and of the card does not grow          with --preempts: rows did give up their blocks

Writes one JSON record and says what failed; exit code 1 then.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from served import Server, card_bytes, machine, resident_bytes, serving, write_geometry
from soak_cases import Case, Judge, make_cases

from megakernel.config import pretty_json
from runtime.bench.client import Client, connected
from runtime.bench.load import Load
from runtime.bench.run import facts_of
from runtime.bench.scrape import counted, samples
from runtime.bench.sessions import shared_body

LEAVES = 0.25
"""Share of requests whose client leaves, at any time up to one and a half times what it takes alone."""
RESTS = 0.1
"""Share of answers after which a client stays away for a while, so that rows come and go."""
ZERO = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    'vllm:kv_blocks{state="used"}',
)
GROWTH, GROWTH_BYTES = 0.02, 32 * 2**20
"""What memory may grow by, the larger of the two, from the second quarter of the time to the last."""
_WATCH_SECONDS = 2.0
_SETTLE_SECONDS = 10.0
_START_SECONDS = 300.0


@dataclass
class Soak:
    """`clients` of a server for `seconds`, then what there is to be checked; `watch` are sizes in bytes, by name."""

    client: Client
    cases: Sequence[Case]
    judge: Judge
    seconds: float = 420.0
    clients: int = 12
    seed: int = 0
    preempts: bool = False
    watch: Mapping[str, Callable[[], int | None]] = field(default_factory=dict)
    tally: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    sizes: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def run(self) -> dict[str, Any]:
        """Put the load on, then check: the record, with `failures` in it."""
        before = await self._metrics()
        watching = asyncio.ensure_future(self._watch())
        begin = time.monotonic()
        try:
            await asyncio.gather(*(self._visit(number, begin + self.seconds) for number in range(self.clients)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        seconds = time.monotonic() - begin
        gauges = await self._gauges()
        grew = counted(before, await self._metrics())
        probes = {path: (await self.client.get(path))[0] for path in ("/health", "/ready")}
        memory = {name: flatness(values) for name, values in self.sizes.items()}
        parted, preemptions = self.judge.differences.total(), int(grew.get("num_preemptions", 0))
        ways = await self.judge.look(self.client, preemptions=preemptions, block_tokens=await self._block_tokens())
        failures = [f"{count} x {error}" for error, count in self.errors.items()]
        failures += [f"{name} is {value:g} after all have gone" for name, value in gauges.items() if value]
        failures += [f"{path} answers {status}" for path, status in probes.items() if status != 200]
        failures += [f"{name} memory grew by {each['growth']:.1%}" for name, each in memory.items() if each["grows"]]
        if self.preempts and not grew.get("num_preemptions"):
            failures.append("no row gave up its blocks; give the server fewer: --num-gpu-blocks")
        return {
            "seconds": seconds, "clients": self.clients, **self.tally, "finish_reasons": dict(self.finishes),
            "compared_answers": self.judge.compared_answers, "compared_tokens": self.judge.compared_tokens,
            "parted": parted, "ways": ways,
            "gauges": gauges, "counted": grew, "memory": memory, "failures": failures + self.judge.wrong,
        }  # fmt: skip

    async def _visit(self, number: int, end: float) -> None:
        """One client: ask until the time is over; the last answer is waited for."""
        rng = random.Random(f"{self.seed}/{number}")
        while time.monotonic() < end:
            case = rng.choice(self.cases)
            alone = self.judge.alone[case]
            patience = rng.uniform(0.0, 1.5) * (alone.ended - alone.began) if rng.random() < LEAVES else None
            answer = await self.client.ask(case.ask, 0.0, patience)
            self.tally.update(answers=1, left=int(answer.is_cancelled), tokens=len(answer.token_ids))
            self.finishes["left" if answer.is_cancelled else str(answer.finish)] += 1
            if answer.error:
                self.errors[answer.error] += 1
            else:
                self.judge.hear(case, answer)
            await asyncio.sleep(rng.uniform(0.5, 3.0) if rng.random() < RESTS else 0.0)

    async def _watch(self) -> None:
        while True:
            for name, read in self.watch.items():
                value = await asyncio.to_thread(read)
                if value is not None:
                    self.sizes[name].append(float(value))
            await asyncio.sleep(_WATCH_SECONDS)

    async def _gauges(self) -> dict[str, float]:
        """What should be zero, once it is or has had its time: a client that left is noticed a moment later."""
        end = time.monotonic() + _SETTLE_SECONDS
        while True:
            now = await self._metrics()
            found = {name: now[name] for name in ZERO}
            if not any(found.values()) or time.monotonic() > end:
                return found
            await asyncio.sleep(0.1)

    async def _metrics(self) -> dict[str, float]:
        return samples((await self.client.get("/metrics"))[1].decode())

    async def _block_tokens(self) -> int:
        (config,) = (name for name in await self._metrics() if name.startswith("vllm:cache_config_info"))
        return int(re.findall(r'block_size="(\d+)"', config)[0])


def flatness(values: Sequence[float]) -> dict[str, Any]:
    """Means of the second quarter and the last; the first quarter is the time in which caches fill."""
    quarter = len(values) // 4
    if not quarter:
        return {"values": len(values), "growth": 0.0, "grows": False}
    early, late = fmean(values[quarter : 2 * quarter]), fmean(values[-quarter:])
    grows = late - early > max(GROWTH * early, GROWTH_BYTES)
    return {"values": len(values), "early": early, "late": late, "growth": late / early - 1, "grows": grows}


async def soaked(server: Server, chosen: argparse.Namespace) -> dict[str, Any]:
    """Learn what the cases are alone, then soak."""
    async with connected() as http:
        client = Client(http, server.url, timeout_s=chosen.request_timeout)
        start_s = await server.ready(client, _START_SECONDS)
        facts = await facts_of(client, Load())
        client.shared = shared_body(Load(ignore_eos=False), facts.model)
        sizes = {"max_input": chosen.max_input, "max_output": chosen.max_output}
        cases = make_cases(chosen.cases, seed=chosen.seed, vocab_size=facts.vocab_size, **sizes)
        judge, begin = Judge(), time.monotonic()
        await judge.learn(client, cases)
        print(
            f"ready after {start_s:.1f} s; {len(cases)} cases alone took {time.monotonic() - begin:.1f} s", flush=True
        )
        load = {"seconds": chosen.seconds, "clients": chosen.clients, "seed": chosen.seed, "preempts": chosen.preempts}
        process = server.process.pid if server.process else chosen.process
        watch = {"resident": lambda: process and resident_bytes(process), "card": card_bytes}
        found = await Soak(client, cases, judge, watch=watch, **load).run()
    head = {"what": "soak", "machine": machine(), "serve": chosen.serve, "server": facts.info, "start_s": start_s}
    return head | found


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, required=True, metavar="FILE")
    options.add_argument("--seconds", type=float, default=420.0)
    options.add_argument("--clients", type=int, default=12)
    options.add_argument("--cases", type=int, default=48)
    options.add_argument("--max-input", type=int, default=4096, metavar="TOKENS")
    options.add_argument("--max-output", type=int, default=256, metavar="TOKENS")
    options.add_argument("--request-timeout", type=float, default=120.0, metavar="SECONDS")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--preempts", action="store_true", help="fail unless rows gave up their blocks")
    options.add_argument("--model", type=Path, metavar="CONFIG.json", help="a geometry instead of the demo model")
    options.add_argument("--url", help="a server that runs already")
    options.add_argument("--process", type=int, metavar="ID", help="its process, whose memory is watched")
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    chosen = options.parse_args(own[:cut])
    chosen.serve = own[cut + 1 :]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = list(chosen.serve)
        if chosen.model:
            write_geometry(chosen.model, Path(scratch) / "model")
            arguments = [f"{scratch}/model", *arguments]
        with serving(arguments, chosen.out.with_suffix(".log"), chosen.url) as server:
            found = asyncio.run(soaked(server, chosen))
            found["exit_code"] = server.end()
    if found["exit_code"] != 0:
        found["failures"].append(f"the server exited with {found['exit_code']}")
    chosen.out.write_text(pretty_json(found), encoding="utf-8")
    shown = ("seconds", "answers", "left", "tokens", "compared_tokens", "counted", "memory", "exit_code")
    print(*(f"{name}: {found[name]}" for name in shown), f"parted: {found['parted']}, {found['ways']}", sep="\n")
    for each in found["failures"][:20]:
        print("FAILED:", each)
    sys.exit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
