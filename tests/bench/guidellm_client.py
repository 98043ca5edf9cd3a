"""GuideLLM against the server, with a key: whether it gets what it counts on, and measures what our client does.

    python tests/bench/guidellm_client.py GUIDELLM [--out FILE]

GUIDELLM is the command of an environment of its own: with torch and its data sets it takes 1.5 GB.

    python -m venv ENV && ENV/bin/pip install guidellm && python tests/bench/guidellm_client.py ENV/bin/guidellm

It starts by asking /health without the key, streams chats with usage, and wants exactly as many tokens as it asked for.
The model is a script that gives a token each 10 ms. Then `runtime bench` puts the same load on, and its figures stand
beside: two clients that share nothing. One request at a time: with several, who comes first after a round decides what
is prefilled together. What GuideLLM calls inter-token latency is a request's mean, our tpot. Prints one JSON record;
exit code 1 when a request failed or a count is off.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.serving import listening, text_side

from runtime.demo.checkpoint import write_tokenizer
from runtime.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
KEY, REQUESTS, OUTPUT_TOKENS, STREAMS, STEP_S = "sk-bench", 16, 48, 1, 0.01


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("guidellm", type=Path)
    options.add_argument("--out", type=Path, metavar="FILE")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(measure(chosen.guidellm, Path(scratch)))
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n", encoding="utf-8")
    is_exact = found["output_tokens"] == {"min": OUTPUT_TOKENS, "max": OUTPUT_TOKENS}
    sys.exit(0 if found["requests"] == {"successful": REQUESTS, "errored": 0} and is_exact else 1)


async def measure(guidellm: Path, scratch: Path) -> dict[str, object]:
    """Serve a script here, run the two clients in processes of their own, one after the other."""
    write_tokenizer(scratch)
    sizes = {"rows": 8, "prefill_tokens": (64, 2048), "seconds": STEP_S, "text": text_side(window=2048), "keys": [KEY]}
    async with listening(script=script, pages=(4000, 4000), **sizes) as served:
        report = scratch / "report.json"
        backend = f"kind=openai_http,target={served.url},model=demo,api_key={KEY},request_format=/v1/chat/completions"
        data = f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"
        await command(
            str(guidellm), "run", "--backend", backend, "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_requests,count={REQUESTS}", "--data", data,
            "--tokenizer", f"kind=huggingface_auto,model={scratch}",
            "--output", f"kind=json,path={report}", "--disable-console",
        )  # fmt: skip
        found = summary(json.loads(report.read_text(encoding="utf-8")))
        await command(
            sys.executable, "-c", "from runtime.cli import main; main()", "bench", served.url,
            "--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS), "--random-input-len", "64",
            "--random-output-len", str(OUTPUT_TOKENS), "--result-dir", str(scratch),
        )  # fmt: skip
    record = json.loads((scratch / "random.json").read_text(encoding="utf-8"))
    return found | {
        "runtime_bench": {
            "requests": {"successful": record["completed"], "errored": record["failed"]},
            "ttft_ms_median": round(record["median_ttft_ms"], 1),
            "itl_ms_median": round(record["median_tpot_ms"], 1),
            "output_tokens_per_s": round(record["output_throughput"], 1),
        }
    }


def script(context: tuple[int, ...], _sampling: SamplingParams) -> int:
    """A token that follows from the context."""
    return 20 + sum(context) % 60


async def command(*arguments: str) -> None:
    """Run a client to its end; RuntimeError when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": KEY}
    client = await asyncio.create_subprocess_exec(*arguments, env=environment, stdout=subprocess.DEVNULL)
    if await client.wait() != 0:
        raise RuntimeError(f"{arguments[0]} ended with {client.returncode}")


def summary(report: dict[str, object]) -> dict[str, object]:
    """The figures that matter from the client's report."""
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    output = metrics["output_token_count"]["successful"]
    return {
        "what": "guidellm against runtime serve",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "guidellm": report["metadata"]["guidellm_version"],
        "streams": STREAMS,
        "step_ms": 1e3 * STEP_S,
        "requests": {name: totals[name] for name in ("successful", "errored")},
        "output_tokens": {"min": int(output["min"]), "max": int(output["max"])},
        "ttft_ms_median": round(metrics["time_to_first_token_ms"]["successful"]["median"], 1),
        "itl_ms_median": round(metrics["inter_token_latency_ms"]["successful"]["median"], 1),
        "output_tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 1),
    }


if __name__ == "__main__":
    main()
