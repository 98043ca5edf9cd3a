"""How the `runtime` command shows its results.

Owns tables for people only; the machine's form of a result is its JSON. Called by runtime/cli.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rich.table import Table

from megakernel.model import DenseMlp, LayerSpec, ModelSpec, RoutedMlp


class TimedSample(Protocol):
    """A measured variant, as `megakernel.measurement` has them."""

    @property
    def name(self) -> str:
        """What was timed."""
        ...

    @property
    def median_ms(self) -> float:
        """Median."""
        ...

    @property
    def spread(self) -> float:
        """Largest minus smallest, as a share of the median."""
        ...


def model_table(spec: ModelSpec) -> Table:
    """Return a table of a model's geometry and size."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    head = "tied to the embedding" if spec.tied_embeddings else "a matrix of its own"
    table.add_row("family", f"{spec.family}, {spec.block} block" + (", q/k norm" if spec.qk_norm else ""))
    table.add_row("hidden size", str(spec.hidden_size))
    table.add_row("heads", f"{spec.num_heads} query, {spec.num_kv_heads} key/value, {spec.head_dim} wide")
    table.add_row("vocabulary", f"{spec.vocab_size} tokens, head {head}")
    table.add_row("context", f"at most {spec.max_context_tokens} tokens")
    for described, count in Counter(_describe(layer) for layer in spec.layers).items():
        table.add_row("1 layer" if count == 1 else f"{count} layers", described)
    table.add_row("parameters", f"{spec.num_parameters:,}, of which a token reads {spec.decode_active_parameters:,}")
    table.add_row("weights", f"{spec.weight_bytes / 1e9:.2f} GB in bfloat16")
    table.add_row("KV cache", f"{spec.kv_bytes_per_token_per_layer} bytes a token and layer")
    return table


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of named facts."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def samples_table(samples: Iterable[TimedSample], roofline_ms: float | None) -> Table:
    """Return a table of medians and spreads, with the share of the roofline where there is one."""
    table = Table(box=None, pad_edge=False)
    table.add_column("variant")
    for title in ("ms", "roofline", "spread"):
        table.add_column(title, justify="right")
    for sample in samples:
        share = f"{100 * roofline_ms / sample.median_ms:.1f}%" if roofline_ms else ""
        digits = 4 if sample.median_ms >= 0.1 else 6  # a step's milliseconds, or a signal's
        table.add_row(sample.name, f"{sample.median_ms:.{digits}f}", share, f"{100 * sample.spread:.1f}%")
    return table


def bench_table(records: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of runs against a server: latencies in milliseconds, rates in tokens a second."""
    table = Table(box=None, pad_edge=False)
    table.add_column("run")
    for title in ("ended", "failed", "tok/s", "a stream", "TTFT p50, p99", "ITL p50, p90, p99", "cached"):
        table.add_column(title, justify="right")
    for each in records:
        read = each["total_input_tokens"]
        table.add_row(
            each["label"],
            str(each["completed"]),
            str(each["failed"]),
            _shown(each, "output_throughput"),
            _shown(each, "median_stream_throughput"),
            _shown(each, "median_ttft_ms", "p99_ttft_ms"),
            _shown(each, "median_itl_ms", "p90_itl_ms", "p99_itl_ms"),
            f"{100 * each['cached_tokens'] / read:.0f}%" if read else "",
        )
    return table


def _shown(record: Mapping[str, Any], *names: str) -> str:
    return ", ".join("-" if record[name] is None else f"{record[name]:.1f}" for name in names)


def _describe(layer: LayerSpec) -> str:
    reach = "all tokens" if layer.window_tokens is None else f"a window of {layer.window_tokens} tokens"
    position = "no position embedding" if layer.rope is None else f"RoPE {layer.rope.theta:g} ({layer.rope.pairing})"
    match layer.mlp:
        case DenseMlp(width=width):
            return f"attention to {reach}, {position}; dense MLP {width}"
        case RoutedMlp() as mlp:
            score = mlp.score + (", renormalised" if mlp.renormalise else "")
            experts = f"{mlp.top_k} of {mlp.num_experts} experts of {mlp.width} ({score})"
            return f"attention to {reach}, {position}; {experts}"
