"""The winning choices of a plan as a file that people edit and searches race against: a choices TOML.

Owns which entry is meant and the text. Refuses to invent: what is written reads back as the same choices. Called by
`tuner export`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from pydantic import BaseModel

from megakernel.config import ConfigError
from megakernel.plan import Plan, PlanEntry


def entry_of(plan: Plan, bucket: str | None) -> PlanEntry:
    """The entry of `bucket`, as ROWSxTOKENS; a plan of one bucket needs no name for it."""
    named = {f"{each.bucket.rows}x{each.bucket.max_context_tokens}": each for each in plan.entries}
    if bucket is None and len(plan.entries) == 1:
        return plan.entries[0]
    if bucket in named:
        return named[bucket]
    found = "the plan has several buckets" if bucket is None else f"--bucket {bucket}: the plan has no such bucket"
    raise ConfigError(f"{found}; give --bucket with one of {', '.join(named)}")


def choices_toml(entry: PlanEntry) -> str:
    """The choices of an entry as TOML; a choice that is none is left out, which means the same."""
    bucket = entry.bucket
    head = f"# Choices for {bucket.rows} x {bucket.max_context_tokens} tokens, from a plan whose table has the digest\n"
    return f"{head}# {entry.table_digest}.\n\n" + "\n\n".join(_tables(entry.choices)) + "\n"


def _tables(choices: BaseModel) -> Iterable[str]:
    for name, part in choices:
        # The JSON texts of whole numbers, strings and lists of them are TOML's too.
        lines = [f"{key} = {json.dumps(value)}" for key, value in part if value is not None]
        yield "\n".join([f"[{name}]", *lines])
