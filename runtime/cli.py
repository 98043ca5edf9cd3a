"""The `runtime` command.

Owns its arguments and the printing of results. Refuses to compute: each command calls one function and shows
what it returns. torch is imported inside the commands that need it, so that the others work without it.
"""

import asyncio
import json as json_module
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megakernel.assets import locate
from megakernel.config import ConfigError, check_writable, pretty_json, write_text_atomic
from megakernel.families import SUPPORTED_FAMILIES, read_model
from megakernel.hardware import load_hardware
from megakernel.header import render
from megakernel.measurement import Fault, Record
from runtime.report import bench_table, facts_table, model_table, samples_table

if TYPE_CHECKING:
    from runtime.server.config import ServeConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Serve models, time task tables on a card, and check what runs them.",
)


@app.callback()
def runtime() -> None:
    """Serve models, show what they are, and time task tables on a card (streaming mode: real bytes, waits, order)."""


@app.command()
def model(
    config: Annotated[
        str,
        typer.Argument(help=f"A Hugging Face config.json ({', '.join(SUPPORTED_FAMILIES)}), or its directory."),
    ],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the model as JSON.")] = False,
) -> None:
    """Show how a model's config is understood: block, layers, router, parameters and bytes."""
    spec = read_model(locate(config))
    if json:
        sys.stdout.write(pretty_json(spec))
    else:
        Console().print(model_table(spec))


@app.command()
def abi(
    header: Annotated[str, typer.Argument(help="The generated header.")] = "csrc/abi.cuh",
    *,
    write: Annotated[bool, typer.Option("--write", help="Write it instead of comparing.")] = False,
) -> None:
    """Check that the device header says what the host packs, or write it anew."""
    path = Path(header)
    if write:
        write_text_atomic(path, render())
    elif not path.is_file():
        raise ConfigError(f"{path}: no such file; run this in a clone, or name the header")
    elif path.read_bytes() != render().encode():
        raise ConfigError(f"{path}: differs from what this program packs; run `runtime abi {path} --write`")


@app.command()
def check(
    config: Annotated[
        str, typer.Argument(help="A plan, or a measurement file such as configs/measure/north-h200.toml.")
    ],
    *,
    variant: Annotated[
        str | None,
        typer.Option(help="Which of a measurement file's variants (the first without), or of a plan's entries (all)."),
    ] = None,
) -> None:
    """Say whether this card can run a table: SMs, architecture, shared memory, occupancy, proof, the plan's digest."""
    path = locate(config)
    _need_card()
    from runtime.gpu.campaign import check as check_path  # noqa: PLC0415 - torch and the compiler

    for facts in check_path(path, variant):
        Console().print(facts_table(facts))


@app.command()
def measure(
    config: Annotated[str, typer.Argument(help="A measurement file, such as configs/measure/north-h200.toml.")],
    *,
    out: Annotated[str | None, typer.Option(help="Where the JSON record goes.")] = None,
    tolerant: Annotated[
        bool, typer.Option("--tolerant", help="Gate each variant first, and go on without those that fail.")
    ] = False,
) -> None:
    """Time all variants of a file, interleaved, as each one's kernel options say.

    With --tolerant, as searches measure: a variant that is illegal, does not compile, computes other than those before
    it, or hangs is named with its reason in the record; OUT.now names the variant at work.
    """
    path = locate(config)
    if out:
        check_writable(out)
    _need_card()
    from runtime.gpu.campaign import measure as measure_campaign  # noqa: PLC0415 - torch and the compiler
    from runtime.gpu.campaign import read_campaign  # noqa: PLC0415
    from runtime.gpu.contest import measure_tolerantly  # noqa: PLC0415

    faults: dict[str, Fault] = {}
    campaign = read_campaign(path, faults if tolerant else None)
    if tolerant:
        now = Path(f"{out}.now") if out else None
        found = measure_tolerantly(campaign, faults, lambda name: now.write_text(name, encoding="utf-8") if now else 0)
        if now:
            now.unlink(missing_ok=True)
    else:
        found = measure_campaign(campaign)
    if out:
        write_text_atomic(out, pretty_json(found))
    Console().print(samples_table(found.samples, float(found.facts.get("roofline_ms", 0)) or None))
    _print_faults(found)


def _print_faults(found: Record) -> None:
    for name, fault in found.faults.items():
        Console().print(f"{name}: {fault.kind}: {fault.text}", markup=False)


@app.command()
def trace(
    config: Annotated[str, typer.Argument(help="A measurement file, such as configs/measure/north-h200.toml.")],
    out: Annotated[str, typer.Argument(help="Where the Perfetto trace goes.")],
    *,
    variant: Annotated[str | None, typer.Option(help="Which of its variants; the first without.")] = None,
) -> None:
    """Trace one step of a variant, task by task, and say what tracing costs."""
    path = locate(config)
    check_writable(out)
    _need_card()
    from runtime.gpu.campaign import read_campaign  # noqa: PLC0415 - torch and the compiler
    from runtime.gpu.campaign import trace as trace_campaign  # noqa: PLC0415

    timeline, plain, traced = trace_campaign(read_campaign(path), variant)
    write_text_atomic(out, timeline.to_perfetto())
    overhead = 100 * (traced.median_ms / plain.median_ms - 1)
    Console().print(
        f"{out}: {len(timeline.spans)} tasks, {timeline.total_ns / 1e6:.4f} ms; a step takes {plain.median_ms:.4f} ms, "
        f"traced {traced.median_ms:.4f} ms ({overhead:+.1f}%)"
    )


@app.command()
def microbench(
    *,
    out: Annotated[str, typer.Option(help="Where the JSON record goes.")],
    chip: Annotated[str, typer.Option(help="The chip's description.")] = "configs/hardware/h200.toml",
) -> None:
    """Measure what a card's steps cost: streamed steps, ways of handing over, single signals, hand-offs, copies."""
    hardware = load_hardware(locate(chip))
    check_writable(out)
    _need_card()
    from runtime.gpu.microbench import microbench as run_microbench  # noqa: PLC0415 - torch and the compiler

    found = run_microbench(hardware)
    write_text_atomic(out, pretty_json(found))
    Console().print(samples_table(found.samples, None))
    _print_faults(found)


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="A TOML file, or a Hugging Face checkpoint folder; a tiny demo model without.")
    ] = None,
    *,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda; auto, as without, is a card where one can be used.")
    ] = None,
    load_format: Annotated[
        str | None, typer.Option(help="auto, or dummy: random weights, for measuring; the folder needs none.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="A plan of `tuner search` for this model; its buckets bound rows and context.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 without.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for any free one; 8000 without.")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="A name of the model; may be repeated.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients need; may be repeated. Files and environment keep them secret."),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="A file with one key a line, read again when it changes.")
    ] = None,
    admin_key_file: Annotated[str | None, typer.Option(help="Likewise, for the admin routes.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file instead of the checkpoint's template.")
    ] = None,
    parser: Annotated[str | None, typer.Option(help="How turns are marked: auto, north, hermes or plain.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.")] = None,
    num_gpu_blocks: Annotated[int | None, typer.Option(help="KV blocks; as many as the memory holds without.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a card's memory that may be taken; 0.9 without.")
    ] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Requests that may queue.")] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Keep the KV of prompts for the next request.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="A browser origin that may call the server; may be repeated.")
    ] = None,
) -> None:
    """Serve a model with OpenAI's HTTP interface."""
    flags = {name: value for name, value in locals().items() if name != "model"}
    flags["plan"] = plan and str(locate(plan))
    serving = _need_serving()
    sys.exit(serving.serve(_serve_config(model, flags), Console().print))


@app.command()
def bench(
    target: Annotated[str, typer.Argument(metavar="URL_OR_CONFIG", help="A server's address, or a TOML file of runs.")],
    *,
    label: Annotated[
        str | None, typer.Option(help="Name of the run and of its record; the workload's without.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model's name; the first that is served without.")] = None,
    dataset_name: Annotated[
        str | None, typer.Option(help="Workload: random, prefix_repetition (shared beginnings) or multi_turn (agents).")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Requests, or conversations; 100 without.")] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests a second, as a Poisson process; without, as soon as there is room.")
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests under way at most; no limit without.")] = None,
    num_warmups: Annotated[int | None, typer.Option(help="Requests before, which do not count.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same prompts and arrivals.")] = None,
    random_input_len: Annotated[int | None, typer.Option(help="Tokens of a random prompt.")] = None,
    random_output_len: Annotated[int | None, typer.Option(help="Tokens of its answer.")] = None,
    random_prefix_len: Annotated[int | None, typer.Option(help="Tokens before it that all prompts share.")] = None,
    random_range_ratio: Annotated[
        float | None, typer.Option(help="Lengths between (1 - RATIO) and (1 + RATIO) times theirs.")
    ] = None,
    prefix_repetition_prefix_len: Annotated[int | None, typer.Option(help="Tokens of a repeated beginning.")] = None,
    prefix_repetition_suffix_len: Annotated[int | None, typer.Option(help="Tokens that follow it.")] = None,
    prefix_repetition_num_prefixes: Annotated[int | None, typer.Option(help="Different beginnings.")] = None,
    prefix_repetition_output_len: Annotated[int | None, typer.Option(help="Tokens of an answer.")] = None,
    multi_turn_num_turns: Annotated[int | None, typer.Option(help="Requests of a conversation.")] = None,
    multi_turn_system_len: Annotated[int | None, typer.Option(help="Tokens, about, of the shared beginning.")] = None,
    multi_turn_input_len: Annotated[int | None, typer.Option(help="Tokens, about, of the user's question.")] = None,
    multi_turn_tool_len: Annotated[int | None, typer.Option(help="Tokens, about, of a tool's result.")] = None,
    multi_turn_output_len: Annotated[int | None, typer.Option(help="Tokens of an answer.")] = None,
    multi_turn_tool_s: Annotated[float | None, typer.Option(help="Seconds that a tool takes.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option(help="Go on after the model's end tokens; so without.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the server's default without.")] = None,
    extra_body: Annotated[str | None, typer.Option(help="A JSON object, put into every request's body.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Random ids are below it; what the server says without.")
    ] = None,
    request_timeout_s: Annotated[float | None, typer.Option(help="Seconds that a request may take.")] = None,
    result_dir: Annotated[str | None, typer.Option(help="Where a JSON record of each run goes.")] = None,
    save_detailed: Annotated[bool | None, typer.Option(help="Put every request's times into the record.")] = None,
    ready_check_timeout_sec: Annotated[float | None, typer.Option(help="Seconds to wait for the server.")] = None,
) -> None:
    """Put a load on a server with OpenAI's HTTP interface and say how fast it answered.

    The key is in the environment, OPENAI_API_KEY. Exit code 1 when a request failed.
    """
    flags = {name: value for name, value in locals().items() if name != "target"}
    flags["extra_body"] = _json_object("--extra-body", extra_body)
    sys.exit(_bench(target, flags))


def _bench(target: str, flags: dict[str, object]) -> int:
    try:
        from runtime.bench.load import load_config  # noqa: PLC0415 - the client's library
        from runtime.bench.run import bench as run_bench  # noqa: PLC0415
    except ImportError as missing:
        raise ConfigError(f"no module {missing.name!r}, which this command needs: pip install '.[runtime]'") from None
    config = load_config(target if target.startswith("http") else str(locate(target)), flags)
    records = asyncio.run(run_bench(config))
    Console().print(bench_table(records))
    for record in records:
        for error, count in record["errors"].items():
            Console().print(f"{record['label']}: {count} x {error}", markup=False)
    return 1 if any(record["failed"] for record in records) else 0


def _json_object(flag: str, text: str | None) -> dict[str, object] | None:
    if text is None:
        return None
    try:
        found = json_module.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}; needed: a JSON object") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} is {text!r}; needed: a JSON object")
    return found


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="A user's message; with --raw, text to be continued.")],
    *,
    model: Annotated[str | None, typer.Option(help="A TOML file or checkpoint folder; the demo model without.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the model's default without.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without the chat template.")] = False,
) -> None:
    """Run one prompt without a server and print what the model says."""
    _need_serving()
    from runtime.server.offline import generate as generate_text  # noqa: PLC0415 - torch and the engine

    asked = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    for piece in generate_text(_serve_config(model, {}), prompt, asked, raw=raw):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _serve_config(model: str | None, flags: dict[str, object]) -> "ServeConfig":
    """Read a TOML file, or make a config for a folder or the demo model; flags win."""
    from runtime.server.config import load_config, make_config  # noqa: PLC0415 - light, but the server's

    if model is not None and model.endswith(".toml"):
        return load_config(Path(locate(model)), flags)
    return make_config({"model": model}, flags)


def _need_serving() -> ModuleType:
    """Return the module that serves, or refuse in one line where what it needs is not installed."""
    try:
        from runtime.server import run  # noqa: PLC0415 - torch, transformers, FastAPI
    except ImportError as missing:
        raise ConfigError(f"no module {missing.name!r}, which this command needs: pip install '.[runtime]'") from None
    return run


def _need_card() -> None:
    """Refuse in one line where torch, the run-time compiler or a card is missing."""
    try:
        import cuda.core  # noqa: F401, PLC0415 - only the commands that launch need them
        import torch  # noqa: F401, PLC0415

        from runtime.gpu.presence import absence, present  # noqa: PLC0415
    except ImportError as missing:
        raise ConfigError(f"no module {missing.name!r}, which this command needs: pip install '.[runtime]'") from None
    why = absence(present())
    if why is not None:
        raise ConfigError(f"no card, which this command needs: {why}")


def main() -> None:
    """Run the command; bad input becomes one message and exit code 2."""
    try:
        app()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
