"""Proof that a packed table does what its graph means, whatever the timing; `verify` lists what it finds wrong.

A table is judged as the kernel runs it, step after step: every SM's producer and consumers walk its records in order, a
run starts after its own load wait, waits and arrivals are all the order there is. Three questions, three modules:
`structure` (is every task there once, as lowered, and does it fit), `order` (does every task come to run, and what must have
happened before it), `races` (are all clashing accesses ordered as in the reference order).
"""

from __future__ import annotations

from megakernel.graph import TaskGraph
from megakernel.table import TaskTable
from megakernel.verify.finding import Finding
from megakernel.verify.order import must_precede
from megakernel.verify.races import find_races
from megakernel.verify.structure import check_structure

__all__ = ["Finding", "verify"]


def verify(graph: TaskGraph, table: TaskTable, *, steps: int = 2, most: int = 20) -> list[Finding]:
    """All findings of `table` as an execution of `graph`, at most `most`; an empty list is a proof.

    `steps` consecutive steps are unrolled: two show every hazard inside a step and from one to the next.
    """
    findings = check_structure(graph, table)
    if findings:
        return findings[:most]
    knowledge, findings = must_precede(graph, table, steps)
    if knowledge is not None:
        findings = find_races(graph, table, knowledge, most)
    return findings[:most]
