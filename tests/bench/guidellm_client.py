"""GuideLLM against `runtime serve` with the demo model and a key: whether a benchmark client gets what it counts on.

    python tests/bench/guidellm_client.py GUIDELLM [--out FILE]

GUIDELLM is the command of an environment of its own: with torch and its data sets it takes 1.5 GB.

    python -m venv ENV && ENV/bin/pip install guidellm && python tests/bench/guidellm_client.py ENV/bin/guidellm

It starts by asking /health without the key, streams chats with usage, and wants exactly as many tokens as it asked for.
Prints one JSON record; exit code 1 when a request failed or a count is off.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from served import serving

from runtime.demo.checkpoint import write_tokenizer

KEY, REQUESTS, OUTPUT_TOKENS, STREAMS = "sk-bench", 32, 48, 4


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("guidellm", type=Path)
    options.add_argument("--out", type=Path, metavar="FILE")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(chosen.guidellm, Path(scratch))
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n", encoding="utf-8")
    is_exact = found["output_tokens"] == {"min": OUTPUT_TOKENS, "max": OUTPUT_TOKENS}
    sys.exit(0 if found["requests"] == {"successful": REQUESTS, "errored": 0} and is_exact else 1)


def measure(guidellm: Path, scratch: Path) -> dict[str, object]:
    """Start the server, run the client, stop the server."""
    write_tokenizer(scratch)
    os.environ["COUNTERPOINT_API_KEY"] = KEY
    with serving(["--max-model-len", "2048"], scratch / "server.log") as server:
        while not is_ready(server.url):
            time.sleep(0.1)
        report = scratch / "report.json"
        backend = f"kind=openai_http,target={server.url},model=demo,api_key={KEY},request_format=/v1/chat/completions"
        data = f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"
        subprocess.run(
            [
                guidellm, "run", "--backend", backend, "--profile", f"kind=concurrent,streams={STREAMS}",
                "--constraint", f"kind=max_requests,count={REQUESTS}", "--data", data,
                "--tokenizer", f"kind=huggingface_auto,model={scratch}",
                "--output", f"kind=json,path={report}", "--disable-console",
            ],
            check=True, timeout=300, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return summary(json.loads(report.read_text(encoding="utf-8")))


def is_ready(url: str) -> bool:
    """Say whether the server takes requests."""
    try:
        with urlopen(f"{url}/ready", timeout=5) as response:
            return response.status == 200
    except (URLError, OSError):
        return False


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
        "requests": {name: totals[name] for name in ("successful", "errored")},
        "output_tokens": {"min": int(output["min"]), "max": int(output["max"])},
        "ttft_ms_median": round(metrics["time_to_first_token_ms"]["successful"]["median"], 1),
        "itl_ms_median": round(metrics["inter_token_latency_ms"]["successful"]["median"], 1),
        "output_tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 1),
    }


if __name__ == "__main__":
    main()
