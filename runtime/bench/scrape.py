"""Reads a server's Prometheus text: what it counted during a run."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

COUNTED = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
"""Counters whose growth belongs to a run, under vLLM's names."""


def samples(text: str) -> dict[str, float]:
    """Every sample of the text by its name and, in braces, the labels other than the model's."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How much each counter of a run grew, as far as the server has it."""
    names = {each: f"vllm:{each}_total" for each in COUNTED}
    return {each: after[name] - before.get(name, 0.0) for each, name in names.items() if name in after}
