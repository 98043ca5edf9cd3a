"""The plan that a server runs under: whether it is this checkpoint's and stands, and how far its buckets go.

Owns what a plan means to a server. The bucket with the most rows that keeps what the operator set is the one served;
its sizes bound the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megakernel.config import ConfigError, digest, load_json
from megakernel.families import read_model
from megakernel.plan import Plan
from megakernel.verify import verify
from runtime.server.config import ServeConfig


def under_plan(config: ServeConfig, folder: Path) -> tuple[ServeConfig, Plan | None]:
    """Return the config within the bounds of its plan, and that plan, if it has one.

    ConfigError when the plan can't be read, is stale, is for another model, or has no bucket of the sizes set.
    """
    path = config.plan
    if path is None:
        return config, None
    plan = load_json(path, Plan)
    if plan.stale:
        raise ConfigError(f"{path}: lowered by other code than this program's; run `tuner refresh {path}`")
    model = read_model(folder)
    if digest(model) != plan.model_digest:
        differing = [name for name in type(model).model_fields if getattr(model, name) != getattr(plan.model, name)]
        raise ConfigError(
            f"{path}: for another model than {folder / 'config.json'}, which differs in {', '.join(differing)}; "
            "needed: a plan that `tuner search` made for this checkpoint"
        )
    is_rows_set = "max_num_seqs" in config.model_fields_set
    rows, tokens = config.max_num_seqs if is_rows_set else 1, config.max_model_len or 1
    buckets = [entry.bucket for entry in plan.entries]
    fitting = [each for each in buckets if each.rows >= rows and each.max_context_tokens >= tokens]
    if not fitting:
        there = ", ".join(f"{each.rows} x {each.max_context_tokens}" for each in buckets)
        raise ConfigError(
            f"{path}: no bucket for {rows} rows of {tokens} tokens; it has rows x tokens {there}: lower `max_num_seqs` "
            "or `max_model_len`, or search a plan with such a bucket"
        )
    if not is_rows_set:
        rows = max(each.rows for each in fitting)
    longest = max(each.max_context_tokens for each in fitting if each.rows >= rows)
    return config.model_copy(update={"max_num_seqs": rows, "max_model_len": config.max_model_len or longest}), plan


def prove(plan: Plan, path: str) -> None:
    """Build every table of a plan and verify it, some seconds each; ConfigError when one is not what was scored."""
    for entry in plan.entries:
        try:
            step = plan.build(entry)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        found = verify(step.graph, step.table, most=1)
        if found:
            bucket = f"{entry.bucket.rows} x {entry.bucket.max_context_tokens}"
            raise ConfigError(
                f"{path}: the table of bucket {bucket} is not safe to run: {found[0]}\nrun `tuner search` for another"
            )


def describe(plan: Plan, path: str) -> dict[str, Any]:
    """What /server_info says of a plan: digest, chip, and of each bucket its sizes and nanoseconds a step."""
    return {
        "path": path,
        "digest": digest(plan),
        "chip": plan.hardware.name,
        "buckets": [
            each.bucket.model_dump()
            | {"table_digest": each.table_digest, "predicted_ns": each.predicted_ns}
            | ({} if each.measured_ns is None else {"measured_ns": each.measured_ns})
            for each in plan.entries
        ],
    }
