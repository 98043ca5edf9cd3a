"""Prometheus metrics, under vLLM's names, which routers and benchmark clients read, and under our own prefix.

Owns what is counted. Gauges and counters of the engine are read when metrics are asked for, so they are never stale;
histograms are filled as requests end. One registry a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.engine import RequestTimes, StepTimes
from runtime.request import FinishReason, Stats

VLLM, OURS = "vllm", "counterpoint"
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
_STEP_SECONDS = (
    0.0005,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    5.0,
)
_SLICE_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.0225, 0.025, 0.0275, 0.03, 0.035, 0.04, 0.05, 0.1, 0.5)
_TOKENS = tuple(float(2**power) for power in range(20))

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a choice.", _STEP_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _SECONDS),
    "request_queue_time_seconds": ("From arrival to admission.", _SECONDS),
    "request_prefill_time_seconds": ("From admission to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the end.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a choice.", _TOKENS),
}


class Metrics:
    """A server's metrics; an engine's `Listener`. Safe to use from any thread."""

    def __init__(self, model_name: str) -> None:
        """Begin with everything at zero."""
        self._labels = {"model_name": model_name}
        shared = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"{VLLM}:{name}", text, ["model_name"], registry=shared, buckets=buckets).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._stats: Callable[[], Stats] | None = None
        shared.register(_EngineCollector(self))
        self._registry = CollectorRegistry()
        self._registry.register(shared)  # pyright: ignore[reportArgumentType] - a registry collects too
        self._registry.register(_Renamed(shared))
        self._config: dict[str, str] | None = None
        self.http_requests = self._counter("http_requests", "Responses by route and status.", ("route", "status"))
        self.stream_errors = self._counter("stream_errors", "Streams that ended with an error event.")
        self._steps = Histogram(
            f"{OURS}:step_seconds", "Decode steps by rows.", ["rows"], registry=self._registry, buckets=_STEP_SECONDS
        )
        self._stalls = self._counter("prefill_stall_seconds", "Seconds that decoding rows waited for prefill.")
        self._slices = Histogram(
            f"{OURS}:prefill_slice_seconds", "How long decoding rows waited at once for a slice of prefill.",
            registry=self._registry, buckets=_SLICE_SECONDS,
        )  # fmt: skip

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"{OURS}:{name}", text, labels, registry=self._registry)

    def watch(self, stats: Callable[[], Stats], *, block_size: int, num_blocks: int) -> None:
        """Report an engine from now on."""
        self._stats = stats
        self._config = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}

    def expose(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def on_tokens(self, seconds: float, tokens: int) -> None:
        """Note that a choice's next tokens came after so long."""
        observe = self._histograms["inter_token_latency_seconds"].observe
        for _ in range(tokens):
            observe(seconds / tokens)

    def on_step(self, times: StepTimes) -> None:
        """Note a pass of the engine's loop."""
        if times.rows:
            step = self._steps.labels(str(times.rows))
            for _ in range(times.steps):
                step.observe(times.decode / times.steps)
        self._stalls.inc(times.prefill * times.stalled_rows)
        if times.prefill and times.stalled_rows:
            self._slices.observe(times.prefill)

    def on_end(self, times: RequestTimes) -> None:
        """Note the end of a request."""
        observed: dict[str, float] = {
            "e2e_request_latency_seconds": times.ended - times.arrived,
            "request_prompt_tokens": times.prompt_tokens,
            "request_generation_tokens": times.generated_tokens,
        }
        if times.admitted is not None:
            observed["request_queue_time_seconds"] = times.admitted - times.arrived
        if times.first_token is not None:
            observed["time_to_first_token_seconds"] = times.first_token - times.arrived
            observed["request_decode_time_seconds"] = times.ended - times.first_token
            if times.admitted is not None:
                observed["request_prefill_time_seconds"] = times.first_token - times.admitted
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def engine_families(self) -> Iterator[Metric]:
        """What the engine's statistics say now, under vLLM's names."""
        stats = self._stats() if self._stats else Stats()
        keys, values = ["model_name"], [self._labels["model_name"]]
        gauges = {
            "num_requests_running": ("Requests that have a row.", stats.running),
            "num_requests_waiting": ("Requests in the queue.", stats.waiting),
            "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            "gpu_cache_usage_perc": ("The same, under its older name.", stats.kv_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"{VLLM}:{name}", text, labels=keys)
            gauge.add_metric(values, value)
            yield gauge
        counters = {
            "prompt_tokens": ("Prompt tokens of requests taken on.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generated_tokens),
            "num_preemptions": ("Rows that gave up their blocks.", stats.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_hits),
            "corrupted_requests": ("Requests whose logits were not numbers.", stats.corrupted),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"{VLLM}:{name}", text, labels=keys)
            counter.add_metric(values, value)
            yield counter
        ended = CounterMetricFamily(
            f"{VLLM}:request_success", "Requests by how they ended.", labels=[*keys, "finished_reason"]
        )
        for reason in FinishReason:
            ended.add_metric([*values, reason.value], stats.finished.get(reason, 0))
        yield ended
        blocks = GaugeMetricFamily(f"{VLLM}:kv_blocks", "KV blocks by state.", labels=[*keys, "state"])
        used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        for state, count in (("free", stats.blocks_free), ("cached", stats.blocks_cached), ("used", used)):
            blocks.add_metric([*values, state], count)
        yield blocks
        if self._config is not None:
            info = InfoMetricFamily(f"{VLLM}:cache_config", "Size of the KV cache.", labels=keys)
            info.add_metric(values, self._config)
            yield info


class _EngineCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.engine_families()

    def describe(self) -> Iterable[Metric]:
        return ()


class _Renamed(Collector):
    """The same metrics under our prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            copy = Metric(_ours(metric.name), metric.documentation, metric.type, metric.unit)
            copy.samples = [sample._replace(name=_ours(sample.name)) for sample in metric.samples]
            yield copy

    def describe(self) -> Iterable[Metric]:
        return ()


def _ours(name: str) -> str:
    return name.replace(f"{VLLM}:", f"{OURS}:", 1)
